"""The digests of the files of models."""

from paged_backend.files import content


def test_pieces_of_large_files_are_hashed(tmp_path, monkeypatch):
    monkeypatch.setattr(content, "PIECE", 4)
    hashes = set()
    for text in ("abcdefgh", "abcdefg", "abcdefgx", "efghabcd", "", "abcd"):
        (tmp_path / "file").write_text(text)
        hashes.add(content.hash_of(tmp_path / "file"))
    assert len(hashes) == 6
