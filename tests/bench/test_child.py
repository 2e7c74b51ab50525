"""Contestants in other processes."""

import os
import select
import subprocess
import sys
import time

import pytest

from paged_bench._child import CHILDREN, Child, ChildError
from paged_bench._workload import Job

FAKE = """
import os, sys
sys.path.insert(0, {children!r})
from protocol import Clock, serve

def load(first):
    print("a library that prints")
    return {{"first": first, "pid": os.getpid(), "group": os.getpgrp()}}

def run(jobs):
    clock = Clock(jobs)
    for key, job in enumerate(jobs):
        if not job["prompt"]:
            os._exit(3)
        for at in range(job["output"]):
            for sample in range(job["n"]):
                clock.tokens(key, sample, [job["prompt"][at]], job["arrival"] + at)
    return clock.result()

serve({{"load": load, "run": run}})
"""


@pytest.fixture
def fake(tmp_path):
    script = tmp_path / "fake_child.py"
    script.write_text(FAKE.format(children=str(CHILDREN)))
    child = Child([sys.executable, script], tmp_path / "log")
    yield child
    child.close()


def test_child_runs_jobs_and_returns_its_settings(fake, tmp_path):
    assert fake.load(first=7)["first"] == 7
    run = fake([Job([5, 6, 7], 2, arrival=9.0), Job([8, 9], 1, n=2)])
    assert run.outputs == [[5, 6], [8]]
    assert run.stamps == [[0, 1], [0], [0]]
    assert run.seconds > 0
    assert "a library that prints" in (tmp_path / "log").read_text()


def test_child_errors_name_the_log(fake, tmp_path):
    with pytest.raises(ChildError, match=r"load: TypeError: .*unexpected keyword"):
        fake.load(second=7)
    with pytest.raises(ChildError, match="run: IndexError"):
        fake([Job([5], 2)])
    with pytest.raises(ChildError, match=f"run: it exited with 3; its log is {tmp_path / 'log'}"):
        fake([Job([], 1)])
    with pytest.raises(ChildError, match="run: "):
        fake([Job([5], 1)])


def test_child_process_group_is_stopped_between_commands(fake):
    about = fake.load(first=1)
    assert about["group"] == about["pid"]
    deadline = time.monotonic() + 60
    while not os.waitpid(about["pid"], os.WUNTRACED | os.WNOHANG)[0]:
        assert time.monotonic() < deadline
    assert fake([Job([5], 1)]).outputs == [[5]]


def test_closed_child_exits_by_itself(tmp_path):
    script, end = tmp_path / "fake_child.py", tmp_path / "end"
    after = f"open({str(end)!r}, 'w').close()"
    script.write_text(FAKE.format(children=str(CHILDREN)) + after)
    child = Child([sys.executable, script], tmp_path / "log")
    child.load(first=1)
    child.close()
    assert end.exists()


def test_child_exits_with_its_parent(tmp_path):
    script = tmp_path / "fake_child.py"
    script.write_text(FAKE.format(children=str(CHILDREN)))
    parent = (
        "import os, sys; from pathlib import Path; from paged_bench._child import Child;"
        f"child = Child([sys.executable, {str(script)!r}], Path({str(tmp_path / 'log')!r}));"
        "pid = child.load(first=1)['pid']; os.waitpid(pid, os.WUNTRACED); print(pid, flush=True);"
        "sys.stdin.readline(); os._exit(1)"
    )
    with subprocess.Popen([sys.executable, "-c", parent], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as started:
        watched = os.pidfd_open(int(started.stdout.readline()))
    ended, _, _ = select.select([watched], [], [], 60)
    os.close(watched)
    assert ended
