"""The program that prepares the process of tritonserver."""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from paged_client.serving import trampoline

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
