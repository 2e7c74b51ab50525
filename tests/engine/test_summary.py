"""The summary of a loaded model. That of a real server is tested in tests/e2e/test_start_output.py."""

import logging
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from paged_backend.api.config import EngineConfig
from paged_backend.distributed.process_group import ProcessGroup
from paged_backend.engine.model_preparation import prepare_model
from paged_backend.engine.summary import _invariance_cost, log_startup, summary, unused_options, without_effect
from paged_backend.utils.startup import NO_CHAT
from tests.support.classifiers import save_classifier
from tests.support.families import HYBRID_FAMILIES
from tests.support.in_process import save_tiny

CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.fixture(scope="module")
def config(tiny):
    return EngineConfig(model=str(tiny[0]), dtype="float32", max_model_len=32, num_gpu_blocks_override=8, swap_space=1)


@pytest.fixture(scope="module")
def prepared(config):
    return prepare_model(config, ProcessGroup(CPU))


def test_options_of_the_other_device_are_reported():
    config = EngineConfig(model="m", enforce_eager=True, gpu_memory_utilization=0.5, max_num_seqs=3)
    assert unused_options(config, CPU) == ["enforce_eager=true", "gpu_memory_utilization=0.5"]
    assert unused_options(config, GPU) == []
    assert unused_options(replace(config, enforce_eager=False, gpu_memory_utilization=0.9), CPU) == []


def test_options_without_the_option_that_they_need_are_reported(config, prepared):
    assert without_effect(config, prepared) == {}
    own = replace(config, max_loras=4, prompt_lookup_max=3, disk_cache_gib=5, preemption_mode="swap")
    assert without_effect(own, prepared) == {
        "enable_lora": ["max_loras=4"],
        "num_speculative_tokens": ["prompt_lookup_max=3"],
        "disk_cache_dir": ["disk_cache_gib=5"],
    }
    assert without_effect(replace(own, enable_lora=True, num_speculative_tokens=2, disk_cache_dir="d"), prepared) == {}
    alone = replace(prepared, pools=prepared.pools._replace(num_host_pages=0))
    assert without_effect(replace(config, preemption_mode="swap"), alone) == {"swap_space": ['preemption_mode="swap"']}


def test_lines(config, prepared):
    lines = dict(line.split(": ", 1) for line in summary(config, prepared))
    assert lines["Model"].startswith(f"{config.model} (LlamaForCausalLM, 0.")
    assert lines["Device"].startswith("CPU, ")
    assert lines["Kernels"].startswith(("C++, level ", "PyTorch"))
    assert lines["Data types"] == "weights float32, KV cache float32"
    assert lines["Context length"].startswith("32 tokens (the model supports ")
    assert lines["KV cache"].startswith("128 tokens in 8 blocks, 0.00 GiB, for 4 requests of 32 tokens; host memory ")
    assert lines["Chat template"] == "none, so the model completes prompts and rejects conversations"
    assert lines.keys() == {"Model", "Device", "Kernels", "Data types", "Context length", "KV cache", "Chat template"}


def test_a_model_with_a_chat_template_has_no_line_about_it(config, prepared, monkeypatch):
    monkeypatch.setattr(prepared.loaded.tokenizer, "chat_template", "{{ messages }}")
    assert NO_CHAT not in summary(config, prepared)


@pytest.mark.parametrize(("count", "listed"), [(3, "l0, l1, l2"), (9, "l0, l1, l2, l3, l4, l5, l6, l7 and 1 more")])
def test_lines_of_a_classifier(config, tmp_path, count, listed):
    save_classifier(tmp_path, labels={index: f"l{index}" for index in range(count)})
    own = replace(config, model=str(tmp_path))
    lines = summary(own, prepare_model(own, ProcessGroup(CPU)))
    assert lines[0].startswith(f"Model: {tmp_path} (Qwen3ForSequenceClassification, ")
    assert f"Output: scores of labels, no text: {listed}" in lines


def test_lines_of_further_parts(config, prepared):
    more = replace(config, num_speculative_tokens=3, disk_cache_dir="/cache", disk_cache_gib=2)
    lora = SimpleNamespace(slots=4, rank=8, nbytes=1 << 29)
    loaded = replace(prepared.loaded, lora=lora, spec=replace(prepared.loaded.spec, weight_format="int8"))
    lines = dict(line.split(": ", 1) for line in summary(more, replace(prepared, loaded=loaded)))
    assert lines["Speculative decoding"] == "3 draft tokens per step, prompt lookup"
    assert lines["Data types"].startswith("weights int8 (activations float32), ")
    assert lines["LoRA"] == "4 slots of rank 8, 0.50 GiB"
    assert lines["KV cache"].endswith("; disk /cache, at most 2 GiB")
    single = replace(prepared, loaded=replace(loaded, lora=SimpleNamespace(slots=1, rank=8, nbytes=0)))
    single = replace(single, pools=single.pools._replace(num_pages=2))
    lines = dict(line.split(": ", 1) for line in summary(config, single))
    assert lines["LoRA"].startswith("1 slot of rank 8") and ", for 1 request of 32 tokens" in lines["KV cache"]
    remote = replace(more, remote_cache_url="rediss://user:secret@host/1", remote_cache_gib=3)
    lines = dict(line.split(": ", 1) for line in summary(remote, prepared))
    assert lines["KV cache"].endswith("; remote rediss://host:6379/1, at most 3 GiB")
    named = replace(more, speculative_model="small")
    lines = summary(named, replace(prepared, loaded=replace(loaded, draft=prepared.loaded)))
    assert any(line.startswith("Speculative decoding: 3 draft tokens per step, small (Llama") for line in lines)


def test_line_of_batch_invariance(config, prepared):
    own = replace(config, batch_invariant=True)
    lines = dict(line.split(": ", 1) for line in summary(own, prepared))
    assert lines["Batch invariance"].startswith("the same logits in every batch; ")
    recurrent = replace(prepared, loaded=replace(prepared.loaded, spec=replace(prepared.loaded.spec, states=(None,))))
    assert _invariance_cost(recurrent.loaded, CPU).startswith("recurrent layers compute prompts token by token")
    assert _invariance_cost(prepared.loaded, GPU) == "the cost on GPUs is not known"


def test_line_of_recurrent_layers(tmp_path):
    save_tiny(HYBRID_FAMILIES["lfm2"](), tmp_path)
    config = EngineConfig(
        model=str(tmp_path),
        dtype="float32",
        max_num_seqs=4,
        max_num_batched_tokens=16,
        swap_space=0.01,
        max_model_len=32,
    )
    lines = dict(line.split(": ", 1) for line in summary(config, prepare_model(config, ProcessGroup(CPU))))
    assert lines["Recurrent layers"] == "1 page of the KV cache, 4096 bytes, for each sequence"


def test_messages_are_for_the_user(config, prepared, caplog):
    caplog.set_level(logging.INFO)
    log_startup(replace(config, enforce_eager=True), prepared, 1.25)
    assert {record.name for record in caplog.records} == {"paged_llm.startup"}
    assert caplog.messages[0] == "no effect on a CPU: enforce_eager=true"
    assert caplog.messages[-1] == "Loaded in 1.2 s"
