"""Progress of downloads and of loading weights, through the functions of the libraries that are called."""

import logging
import re

import pytest
from huggingface_hub import HfApi
from transformers.utils import logging as transformers_logging

from paged_backend.api.config import EngineConfig
from paged_backend.api.errors import ConfigError
from paged_backend.files import hub
from paged_backend.loading import model_source
from paged_backend.loading.load_progress import weights_reported


@pytest.fixture
def lines(caplog):
    caplog.set_level(logging.INFO, "paged_llm.startup")
    return lambda: [record.getMessage() for record in caplog.records if "progress" in record.getMessage()]


def test_download_reports_the_bytes_of_all_files(lines, monkeypatch, tmp_path):
    """The fake uses the bars as `snapshot_download` does: one of bytes for all files, and one that counts files."""

    def download(name, *, tqdm_class, **rest):
        transfer = tqdm_class(desc="Downloading bytes", total=0, initial=0, unit="B", unit_scale=True)
        written = tqdm_class(desc="Reconstructing", total=0, initial=0, unit="B", unit_scale=True)
        with tqdm_class(desc="Fetching 2 files", total=2) as files:
            for size in (1000, 3000):
                written.total += size
                written.refresh()
            for part in (1000, 1500, 1500):
                transfer.update(part // 2)
                written.update(part)
            files.update(2)
        return tmp_path

    monkeypatch.setattr(hub, "snapshot_download", download)
    config = EngineConfig(model="owner/model")
    assert model_source.find_files("owner/model", tmp_path, config) == tmp_path
    assert all(re.fullmatch(r"progress: downloading owner/model \d+/\d+ B", line) for line in lines())
    assert lines()[0].endswith(" 0/1000 B")
    assert lines()[-1].endswith(" 4000/4000 B")


def test_the_hub_accepts_the_bar(monkeypatch, tmp_path):
    """`snapshot_download` itself, which fails at its first request."""

    def fail(*args, **kwargs):
        raise OSError("no network")

    monkeypatch.setattr(HfApi, "repo_info", fail)
    with pytest.raises(ConfigError, match="not a directory, and not downloaded from the hub: no network"):
        model_source.find_files("owner/model", tmp_path, EngineConfig(model="owner/model", download_dir=str(tmp_path)))


def test_weights_are_counted_and_other_bars_kept(lines):
    with weights_reported():
        assert list(transformers_logging.tqdm({"a": 1, "b": 2}.items(), desc="Loading weights")) == [("a", 1), ("b", 2)]
        assert list(transformers_logging.tqdm([1], desc="Something else", disable=True)) == [1]
    assert lines()[-1] == "progress: loading weights 2/2 tensors"
    assert list(transformers_logging.tqdm([1], desc="Loading weights", disable=True)) == [1]
    assert len(lines()) == 2
