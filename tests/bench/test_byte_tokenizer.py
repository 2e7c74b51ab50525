"""The tokenizer of models with random weights."""

from transformers import AutoTokenizer

from paged_bench._byte_tokenizer import byte_tokenizer, byte_tokenizer_directory


def test_text_becomes_bytes_and_every_token_has_a_text():
    tokenizer = byte_tokenizer(300)
    assert len(tokenizer) == 300
    ids = tokenizer.encode("añ 299", add_special_tokens=False)
    assert len(ids) == len("añ 299".encode()) and max(ids) < 256
    assert tokenizer.decode(ids) == "añ 299"
    assert tokenizer.decode([257, 299]) == " 257 299"
    assert tokenizer.eos_token_id == 256


def test_directory_is_made_once(tmp_path, monkeypatch):
    monkeypatch.setenv("PAGED_CACHE_DIR", str(tmp_path))
    directory = byte_tokenizer_directory(300)
    made = (directory / "tokenizer.json").stat().st_mtime_ns
    assert byte_tokenizer_directory(300) == directory
    assert (directory / "tokenizer.json").stat().st_mtime_ns == made
    assert [one.name for one in directory.parent.iterdir()] == [directory.name]
    assert len(AutoTokenizer.from_pretrained(directory)) == 300
