"""The log of a server: the reason of a failed load, and its file."""

import subprocess
import sys
from pathlib import Path

import pytest

from paged_client.serving.server_log import LogFile, ServerLog, load_failure


@pytest.mark.parametrize(
    "log",
    [
        "E1 x] \"failed to load 'm' version 1: Internal: ValueError: a\\nb\\n\\nAt:\\n  f\\n\"\nI1 ",
        "E1 x.cc:654] failed to load 'm' version 1: Internal: ValueError: a\\nb\\n\\nAt:\nI1 more\n",
    ],
)
def test_load_failure_is_parsed_from_the_log(log):
    assert load_failure(log) == "ValueError: a\nb"


def test_load_failure_keeps_its_quotes():
    assert (
        load_failure('E1 x] "failed to load \'m\' version 1: dtype=\\"x\\": no\\n\\nAt:\\n  f\\n"\n') == 'dtype="x": no'
    )


def test_log_without_load_failure():
    assert load_failure("I1121 all is well\n") is None


def followed(log, program):
    """Return a log after it has read all output of a Python program."""
    log.open()
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as process:
        log.follow(process)
        process.wait()
        log.join()
    return log


def test_file_has_the_whole_log(tmp_path):
    path, echoed = tmp_path / "new" / "serve.log", []
    log = followed(ServerLog(echoed.append, path), "print('one'); print('two')")
    assert path.read_text() == log.text() == "".join(echoed) == "one\ntwo\n"
    followed(ServerLog(path=path), "print('later')")
    assert path.read_text() == "later\n"


def test_only_the_user_can_read_the_file(tmp_path):
    path = tmp_path / "new" / "serve.log"
    LogFile(path).close()
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700


def test_file_is_rotated_at_its_size_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(LogFile, "MAX_BYTES", 10)
    path = tmp_path / "serve.log"
    followed(ServerLog(path=path), "for n in range(8): print('line', n)")
    assert path.with_name("serve.log.1").read_text() == "line 6\n"
    assert path.read_text() == "line 7\n"


def test_full_disk_ends_the_file_but_not_the_log():
    log = followed(ServerLog(path=Path("/dev/full")), "print('one'); print('two')")
    one, problem, two = log.text().splitlines()
    assert (one, two) == ("one", "two")
    assert problem == "W0000 /dev/full: No space left on device; the log is no longer written to this file"


def test_tail_has_the_last_messages_without_tables_and_stacks():
    lines = [
        "I1127 13:19:35.058138 20834 server.cc:674] ",
        "+-----------+---------+",
        "| Model     | Status  |",
        'I1127 13:19:35.062781 20834 http_server.cc:4713] "Started HTTPService at 0.0.0.0:8000"',
        "Signal (11) received.",
        " 0# 0x00005640F6A5852D in /opt/tritonserver/bin/tritonserver",
        "",
        "Thread 0x00007f2a6e5ab000 (most recent call first):",
        '  File "/usr/lib/python3.11/threading.py", line 331 in wait',
        "Current thread 0x00007f2b0a6d7000 (most recent call first):",
        "  <no Python frame>",
        "Extension modules: numpy.core._multiarray_umath",
    ]
    log = followed(ServerLog(), f"print({chr(10).join(lines)!r})")
    assert log.tail() == "\n".join([lines[3], lines[4]])
