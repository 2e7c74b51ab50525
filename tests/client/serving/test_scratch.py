"""The temporary files of servers."""

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from paged_client.serving.scratch import Scratch

KILLED = """
import os, pathlib, signal, sys, tempfile
from paged_client.serving.scratch import Scratch

made = Scratch()
made.create()
(made.path / "file").touch()
pathlib.Path("/dev/shm", made.shm_prefix + "region").touch()
print(made.path, made.shm_prefix, flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path


def test_what_a_killed_process_has_left_is_removed_by_the_next(temporary):
    process = subprocess.Popen([sys.executable, "-c", KILLED], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    path, prefix = process.stdout.readline().split()
    foreign = [temporary / "paged-server-other", temporary / "paged-server-1_0123456"]
    for folder in foreign:
        folder.mkdir()
    with_process, after = Scratch(), Scratch()
    with_process.create()
    assert Path(path, "file").exists(), "the process lives"
    process.send_signal(signal.SIGKILL)
    process.communicate()
    after.create()
    assert not Path(path).exists()
    assert not list(Path("/dev/shm").glob(f"{prefix}*"))
    assert with_process.path.exists()
    for made in (with_process, after):
        made.remove()
    assert sorted(temporary.iterdir()) == sorted(foreign)


def test_only_the_user_can_read_the_folder(temporary):
    before = os.umask(0)
    try:
        made = Scratch()
        made.create()
        assert made.path.stat().st_mode & 0o777 == 0o700
        made.remove()
        made.remove()
    finally:
        os.umask(before)
