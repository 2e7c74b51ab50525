"""The adapter registry: the list of adapters, their files, and loading them while serving."""

import json
import os
import shutil
import threading

import pytest
import torch
from safetensors.torch import load_file, save_file

from paged_backend.api.errors import ConfigError, ErrorCode
from paged_backend.loading.adapters import AdapterRegistry
from paged_backend.models import peft_files
from tests.support.adapters import LORA, MAX_TOKENS, generate_and_count_hits, write_adapter_list
from tests.support.in_process import WAIT, running, tiny_assembly


def test_missing_adapter_list_stops_the_load(tiny, tmp_path):
    with pytest.raises(ConfigError, match=r"multi_lora\.json: no such file; create it with \{\} in it"):
        tiny_assembly(tiny[0], adapters=tmp_path / "multi_lora.json", **LORA)


def test_changed_adapter_list_is_read_again(tiny, tmp_path, adapter_files, lora_prompts, lora_outputs):
    write_adapter_list(tmp_path, {})
    with running(tiny_assembly(tiny[0], adapters=tmp_path / "multi_lora.json", **LORA)) as engine:
        assert error_of(engine, lora_prompts[1], "all") == ("LoRA all is not supported, we currently support []")
        write_adapter_list(tmp_path, {"all": adapter_files["all"]})
        assert generate_and_count_hits(engine, lora_prompts[1], "all") == (0, lora_outputs["all"][1])
        (tmp_path / "relative").symlink_to(adapter_files["wide"])
        write_adapter_list(tmp_path, {"all": adapter_files["all"], "wide": "relative"})
        assert generate_and_count_hits(engine, lora_prompts[1], "wide") == (0, lora_outputs["wide"][1])
        (tmp_path / "multi_lora.json").write_text('{"wide": ')
        assert (
            generate_and_count_hits(engine, lora_prompts[1], "wide")[1] == lora_outputs["wide"][1]
        )  # the last valid list stays in effect
        write_adapter_list(tmp_path, {"wide": "relative"})
        assert "we currently support ['wide']" in error_of(engine, lora_prompts[1], "all")
        (tmp_path / "multi_lora.json").unlink()
        assert "we currently support []" in error_of(engine, lora_prompts[1], "wide")


def test_adapter_of_another_model_is_named_at_the_start(tiny, tmp_path, adapter_files, lora_prompts, caplog):
    """The list in the error of an unknown name leaves it out."""
    shutil.copytree(adapter_files["all"], tmp_path / "other")
    change_tensors(
        tmp_path / "other", lambda tensors: tensors.update({name: t[:, :1].contiguous() for name, t in tensors.items()})
    )
    write_adapter_list(tmp_path, {"all": adapter_files["all"], "other": "other", "gone": "gone"})
    with running(tiny_assembly(tiny[0], adapters=tmp_path / "multi_lora.json", **LORA)) as engine:
        assert "adapter other in " in caplog.text
        assert "has shape [" in caplog.text
        assert "adapter gone in " in caplog.text
        assert "we currently support ['all']" in error_of(engine, lora_prompts[1], "nobody")


def error_of(engine, prompt, name):
    """Return the error message of a request for this adapter."""
    (output,) = engine.wait(engine.submit(prompt, max_tokens=2, lora_name=name))
    assert output.error.code is ErrorCode.INVALID_ARGUMENT
    return str(output.error)


def change_config(directory, **values):
    file = directory / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def change_tensors(directory, change):
    file = directory / "adapter_model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)


A = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


EMBEDDING = "base_model.model.model.embed_tokens.lora_embedding_A"


SLOW_PATTERN = r"((.|..)*)*[!?]"  # exponential backtracking for every layer name


INVALID = {  # error -> what makes the adapter invalid
    "adapter_config.json: No such file": lambda directory: (directory / "adapter_config.json").unlink(),
    "adapter_config.json: not valid JSON": lambda directory: (directory / "adapter_config.json").write_text("{"),
    "adapter_config.json: must contain one JSON object": lambda directory: (
        directory / "adapter_config.json"
    ).write_text("[]"),
    'adapter_config.json: peft_type="PROMPT_TUNING": must be': lambda directory: change_config(
        directory, peft_type="PROMPT_TUNING"
    ),
    "adapter_config.json: r=9: must be 1..8 (max_lora_rank)": lambda directory: change_config(directory, r=9),
    "adapter_config.json: lora_alpha=null: must be a finite": lambda directory: change_config(
        directory, lora_alpha=None
    ),
    f"adapter_config.json: lora_alpha=1{'0' * 76}...: must be a finite number": lambda directory: change_config(
        directory, lora_alpha=10**400
    ),
    'adapter_config.json: rank_pattern="a{1000000000}": must be at most 1000 characters, without {': lambda directory: (
        change_config(directory, rank_pattern={"a{1000000000}": 4})  # compiling it would take gigabytes
    ),
    'adapter_config.json: rank_pattern="(?<=a)b": must be': lambda directory: change_config(
        directory, rank_pattern={"(?<=a)b": 4}
    ),
    "adapter_config.json or adapter_model.safetensors: RecursionError": lambda directory: change_config(
        directory, rank_pattern={"(" * 999: 4}
    ),
    'adapter_config.json: bias="all": not supported': lambda directory: change_config(directory, bias="all"),
    "adapter_config.json: use_dora=true: not supported": lambda directory: change_config(directory, use_dora=True),
    'adapter_config.json: modules_to_save=["lm_head"]: not supported': lambda directory: change_config(
        directory, modules_to_save=["lm_head"]
    ),
    'adapter_config.json: unknown={"a": 1}: not supported': lambda directory: change_config(
        directory, unknown={"a": 1}
    ),
    'adapter_config.json: init_lora_weights="pissa": changes the model': lambda directory: change_config(
        directory, init_lora_weights="pissa"
    ),
    'adapter_config.json: rank_pattern="(": not a valid regular expression': lambda directory: change_config(
        directory, rank_pattern={"(": 1}
    ),
    'adapter_config.json: rank_pattern["q"]=99: must be 1..8': lambda directory: change_config(
        directory, rank_pattern={"q": 99}
    ),
    f"adapter_config.json: {json.dumps(SLOW_PATTERN)}: takes more than": lambda directory: change_config(
        directory, rank_pattern={SLOW_PATTERN: 4}
    ),
    "adapter_model.safetensors: No such file": lambda directory: (directory / "adapter_model.safetensors").unlink(),
    "adapter_model.bin: pickle files can execute code": lambda directory: (
        directory / "adapter_model.safetensors"
    ).rename(directory / "adapter_model.bin"),
    "adapter_model.safetensors: not a regular file": lambda directory: (
        (directory / "adapter_model.safetensors").unlink(),
        os.mkfifo(directory / "adapter_model.safetensors"),
    ),
    "adapter_model.safetensors: Error while deserializing": lambda directory: (
        directory / "adapter_model.safetensors"
    ).write_bytes((directory / "adapter_model.safetensors").read_bytes()[:-1]),
    "adapter_model.safetensors: contains no tensor": lambda directory: change_tensors(directory, dict.clear),
    f"adapter_model.safetensors: {A} is missing": lambda directory: change_tensors(
        directory, lambda tensors: tensors.pop(A)
    ),
    f"adapter_model.safetensors: {A}: has shape [4, 63]; must be [4, 64]": lambda directory: change_tensors(
        directory, lambda tensors: tensors.update({A: torch.zeros(4, 63)})
    ),
    f"adapter_model.safetensors: {A}: has dtype torch.int8; must be": lambda directory: change_tensors(
        directory, lambda tensors: tensors.update({A: torch.zeros(4, 64, dtype=torch.int8)})
    ),
    "self_attn.q_proj: contains values that are not finite": lambda directory: change_tensors(
        directory, lambda tensors: tensors[A].fill_(torch.inf)
    ),
    "q_proj: contains values that are not finite in": lambda directory: change_tensors(
        directory, lambda tensors: tensors[A.replace("lora_A", "lora_B")].fill_(torch.nan)
    ),
    f"adapter_model.safetensors: {EMBEDDING}: not supported; must be lora_A": lambda directory: change_tensors(
        directory, lambda tensors: tensors.update({EMBEDDING: torch.zeros(4, 320)})
    ),
    "lm_head.lora_A.weight: the model has no linear layer lm_head that can be adapted": lambda directory: (
        change_tensors(
            directory, lambda tensors: tensors.update({"base_model.model.lm_head.lora_A.weight": torch.zeros(4, 64)})
        )
    ),
}


def test_invalid_adapter_fails_only_its_own_requests(
    tiny, tmp_path, adapter_files, lora_prompts, lora_outputs, caplog, monkeypatch
):
    monkeypatch.setattr(peft_files, "PATTERN_SECONDS", 0.05)
    directories = {}
    for index, (reason, invalidate) in enumerate(INVALID.items()):
        directories[reason] = tmp_path / str(index)
        shutil.copytree(adapter_files["all"], directories[reason])
        invalidate(directories[reason])
    names = {str(index): directory for index, directory in enumerate(directories.values())}
    names |= {"missing": tmp_path / "missing", "all": adapter_files["all"]}
    with running(tiny_assembly(tiny[0], adapters=write_adapter_list(tmp_path, names), **LORA)) as engine:
        assert f"adapter missing in {tmp_path}/missing cannot be used: its directory: No such" in caplog.text
        good = [engine.submit(lora_prompts[1], max_tokens=MAX_TOKENS, lora_name=name) for name in ("all", None)]
        for index, reason in enumerate(INVALID):
            error = error_of(engine, lora_prompts[1], str(index))
            assert error.startswith(f'INVALID_ARGUMENT: lora_name="{index}": cannot be used: adapter_')
            assert reason in error
        assert [output.tokens for output in engine.wait(*good)] == [lora_outputs["all"][1], lora_outputs[None][1]]
        for directory in directories.values():  # repaired, it serves
            shutil.rmtree(directory)
            shutil.copytree(adapter_files["all"], directory)
        assert engine.generate([lora_prompts[1]], max_tokens=MAX_TOKENS, lora_name="3") == [lora_outputs["all"][1]]


@pytest.mark.parametrize(
    ("text", "reason"), [("{", "Expecting"), ("[]", "must contain a JSON"), ('{"a": 1}', "must contain a JSON")]
)
def test_invalid_adapter_list_fails_the_load(tiny, tmp_path, text, reason):
    (tmp_path / "multi_lora.json").write_text(text)
    with pytest.raises(ConfigError, match=rf"multi_lora\.json: {reason}"):
        tiny_assembly(tiny[0], adapters=tmp_path / "multi_lora.json", **LORA)


def test_adapter_list_reports_rank_and_residency(tiny, tmp_path, adapter_files, lora_prompts):
    names = {"all": adapter_files["all"], "wide": adapter_files["wide"], "bad": tmp_path}
    with running(
        tiny_assembly(tiny[0], adapters=write_adapter_list(tmp_path, names), **LORA | {"max_loras": 1})
    ) as engine:
        adapters, slots = engine.assembly.adapters, engine.assembly.scheduler.slots

        def described():
            return {entry["name"]: (entry["rank"], entry["resident"]) for entry in adapters.describe(slots.resident)}

        assert described() == {"all": (4, False), "wide": (8, False), "bad": (None, False)}
        engine.generate([lora_prompts[0]], max_tokens=2, lora_name="all")
        assert described()["all"] == (4, True)
        engine.generate([lora_prompts[0]], max_tokens=2, lora_name="wide")
        assert described() == {"all": (4, False), "wide": (8, True), "bad": (None, False)}


def test_aborted_request_does_not_run_after_adapter_load(tiny, adapter_list, lora_prompts, monkeypatch):
    reading, resume = threading.Event(), threading.Event()
    inner = AdapterRegistry.get

    def get(self, name):
        reading.set()
        resume.wait(WAIT)
        return inner(self, name)

    monkeypatch.setattr(AdapterRegistry, "get", get)
    with running(tiny_assembly(tiny[0], adapters=adapter_list, **LORA)) as engine:
        key = engine.submit(lora_prompts[1], max_tokens=4, lora_name="all")
        reading.wait(WAIT)
        engine.engine.abort(key)
        assert all(engine.generate([lora_prompts[1]], max_tokens=4))  # other requests do not wait for it
        resume.set()
        engine.generate([lora_prompts[1]], max_tokens=4, lora_name="wide")
        assert engine.outputs[key].tokens == []


def test_incompatible_options_are_rejected(tiny):
    for options, reason in (
        ({"max_loras": 0}, "max_loras=0: must be"),
        ({"max_lora_rank": 513}, "max_lora_rank=513: must be"),
        ({"max_loras": 4, "max_cpu_loras": 3}, "max_cpu_loras=3: must be at least max_loras=4"),
        ({"tensor_parallel_size": 2}, "enable_lora=true: not supported with tensor_parallel_size=2"),
    ):
        with pytest.raises(ConfigError, match=reason):
            tiny_assembly(tiny[0], **LORA | options)
