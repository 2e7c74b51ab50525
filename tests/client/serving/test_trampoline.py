"""The program that prepares the process of tritonserver."""

import os
import select
import shutil
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

import pytest

from paged_client.serving import trampoline
from tests.support.processes import children
from tests.support.waiting import WAIT

NOBODY = 65534
# Makes a file as the Python backend makes its shared memory, and prints the mode before and after it is set again.
PROGRAM = """
import os, sys
handle = os.open(sys.argv[1], os.O_CREAT | os.O_RDWR, 0o644)
for mode in (0o644, 0o640):
    os.fchmod(handle, mode)
    print(oct(os.fstat(handle).st_mode & 0o777))
"""


def run(folder, launcher, python=sys.executable, **options):
    """Run the program in a process that is prepared."""
    copy = shutil.copy(trampoline.__file__, folder)
    command = [python, "-I", "-S", copy, str(launcher), python, "-c", PROGRAM, str(folder / "file")]
    return subprocess.run(command, capture_output=True, text=True, **options)


def test_a_program_cannot_make_its_files_public(tmp_path):
    """Only the mode 0644, which the Python backend sets, is not set."""
    result = run(tmp_path, os.getpid())
    assert result.stdout.split() == ["0o600", "0o640"], result.stderr


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_nor_can_that_of_an_unprivileged_user():
    """Of this user, if it is not root."""
    python = shutil.which("python3", path="/usr/bin:/bin")  # others may be in a folder of root
    if python is None:
        pytest.skip("no python3 that every user can run")
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o777)
        result = run(Path(folder), os.getpid(), python, user=NOBODY)
    assert result.stdout.split() == ["0o600", "0o640"], result.stderr


def test_a_program_is_not_started_without_its_launcher(tmp_path):
    assert run(tmp_path, 1).returncode == 1
    assert not (tmp_path / "file").exists()


def test_file_descriptors_are_allowed_up_to_the_hard_limit():
    """The usual soft limit is 1,024, and each connection takes one."""
    limits = 'ulimit -Sn 100; ulimit -Hn 300; exec "$0" "$@"'
    program = "import resource; print(*resource.getrlimit(resource.RLIMIT_NOFILE))"
    command = [sys.executable, "-I", "-S", trampoline.__file__, str(os.getpid()), sys.executable, "-c", program]
    result = subprocess.run(["bash", "-c", limits, *command], capture_output=True, text=True)
    assert result.stdout.split() == ["300", "300"], result.stderr


@pytest.mark.parametrize("ignores", [True, False])
def test_a_server_that_outlives_its_launcher_is_killed(tmp_path, ignores):
    """SIGTERM, which it gets first, may not end it: open streams keep tritonserver running."""
    program = Path(trampoline.__file__).read_text()
    copy = tmp_path / "trampoline.py"
    copy.write_text(program.replace("ORPHAN_SECONDS = 60.0", "ORPHAN_SECONDS = 0.5"))
    server = f"import signal, time; signal.signal(signal.SIGTERM, {'signal.SIG_IGN' if ignores else 'signal.SIG_DFL'})"
    server += "; print('ready', flush=True); time.sleep(600)"
    launcher = (
        "import os, subprocess, sys; started = subprocess.Popen([sys.executable, sys.argv[1], str(os.getpid()), "
        "sys.executable, '-c', sys.argv[2]]); print(started.pid, flush=True); started.wait()"
    )
    with subprocess.Popen([sys.executable, "-c", launcher, copy, server], stdout=subprocess.PIPE, text=True) as started:
        pid = int(started.stdout.readline())
        assert started.stdout.readline() == "ready\n"
        end = os.pidfd_open(pid)
        started.kill()
        assert select.select([end], [], [], WAIT)[0], "it still runs"
        os.close(end)


def test_the_guard_ends_with_the_server_and_is_no_child_of_it(tmp_path):
    copy = shutil.copy(trampoline.__file__, tmp_path)
    command = [sys.executable, copy, str(os.getpid()), "/bin/sh", "-c", "echo ready; exec sleep 600"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as started:
        assert started.stdout.readline() == "ready\n"
        assert not children(started.pid)
        (watching,) = processes_with(copy)
        end = os.pidfd_open(watching)
        started.kill()
        assert select.select([end], [], [], WAIT)[0], "it still runs"
        os.close(end)


def processes_with(argument):
    """Return the processes that have this argument."""
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            if str(argument).encode() in file.read_bytes().split(b"\0"):
                found.append(int(file.parent.name))
    return found
