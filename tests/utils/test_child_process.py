"""Processes that end with the one that started them."""

import signal
import subprocess

from paged_backend.utils.child_process import end_process, start_module
from tests.support.waiting import WAIT


def start(monkeypatch, tmp_path, code):
    (tmp_path / "child.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    return start_module("child", "argument", first=b"secret\n", environment={"NAME": "value"}, stdout=subprocess.PIPE)


def test_process_finds_modules_and_ends_with_its_input(monkeypatch, tmp_path):
    code = "import os, sys; print(sys.argv[1], os.environ['NAME'], sys.stdin.readline(), end='', flush=True)"
    code += "; sys.stdin.read()"
    process = start(monkeypatch, tmp_path, code)
    assert process.stdout.readline() == b"argument value secret\n"
    process.stdin.close()
    end_process(process, WAIT)
    assert process.returncode == 0 and process.stdout.closed


def test_process_that_does_not_end_is_killed(monkeypatch, tmp_path):
    process = start(monkeypatch, tmp_path, "import time; print(1, flush=True); time.sleep(10**6)")
    process.stdout.readline()
    end_process(process, 0)
    assert process.returncode == -signal.SIGKILL
