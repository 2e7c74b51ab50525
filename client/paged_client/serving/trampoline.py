"""Prepares a process in which tritonserver will run: its shared memory is private, and it ends with its launcher.

Run as a program, before the server: `python trampoline.py LAUNCHER_PID PROGRAM ARGUMENTS`. This is not done between
fork and exec, because that is unsafe in a process with threads. It imports only the standard library, to start soon.
"""

import ctypes
import os
import platform
import resource
import select
import signal
import struct
import sys
from collections.abc import Sequence
from contextlib import suppress

_PR_SET_PDEATHSIG, _PR_SET_NO_NEW_PRIVS = 1, 38
_SECCOMP_SET_MODE_FILTER, _SPEC_ALLOW = 1, 4
_NUMBERS = {"x86_64": (91, 317), "aarch64": (52, 277)}  # numbers of the system calls fchmod and seccomp
_LOAD, _JUMP_UNLESS, _RETURN = 0x20, 0x15, 0x06
_DO_NOTHING, _ALLOW = 0x00050000, 0x7FFF0000
_NUMBER, _SECOND_ARGUMENT = 0, 24  # offsets in what a filter reads
_PUBLIC = 0o644
OPEN_FILES = 65536
ORPHAN_SECONDS = 60.0  # time for a server whose launcher has died to end by itself


def keep_files_private() -> None:
    """Give new files of this process and its children the mode 0600, also in shared memory.

    The Python backend undoes the umask for its shared memory, with which requests and responses can be read: it calls
    fchmod with 0644. A filter skips these calls. Where the kernel takes no filter, nothing is filtered.
    """
    os.umask(0o077)
    with suppress(KeyError, OSError, AttributeError):
        fchmod, seccomp = _NUMBERS[platform.machine()]
        program = [
            (_LOAD, 0, 0, _NUMBER),
            (_JUMP_UNLESS, 0, 3, fchmod),
            (_LOAD, 0, 0, _SECOND_ARGUMENT),
            (_JUMP_UNLESS, 0, 1, _PUBLIC),
            (_RETURN, 0, 0, _DO_NOTHING),
            (_RETURN, 0, 0, _ALLOW),
        ]
        code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *instruction) for instruction in program))
        described = ctypes.create_string_buffer(struct.pack("HxxxxxxQ", len(program), ctypes.addressof(code)))
        libc = ctypes.CDLL(None)
        set_filter = (seccomp, _SECCOMP_SET_MODE_FILTER, _SPEC_ALLOW, described)
        if libc.syscall(*set_filter):  # without privileges, only a process that can never gain any may set a filter
            if os.path.exists("/proc/driver/nvidia") and not os.path.exists("/dev/nvidia-uvm"):
                os.system("nvidia-modprobe -u -c 0")  # otherwise CUDA does it later, when it is no longer possible
            libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
            libc.syscall(*set_filter)


def raise_descriptor_limit() -> None:
    """Allow as many file descriptors as the hard limit does, but no more than OPEN_FILES, unless more are allowed.

    Each connection takes one, and without free ones the Python backend ends.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY:
        most = OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, OPEN_FILES)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, most), hard))


def guard(launcher: int) -> None:
    """Start a process that kills this one if it runs ORPHAN_SECONDS after its launcher has died.

    The server gets SIGTERM when its launcher dies, but open streams and connections can keep it running. The engine's
    processes end with it. Without pidfd_open, which some containers do not permit, nothing is started.
    """
    with suppress(OSError, AttributeError):
        ends = [os.pidfd_open(pid) for pid in (launcher, os.getpid())]
        if (child := os.fork()) == 0:
            try:
                if os.fork() == 0:  # no child of the server, which looks after its own
                    _watch(*ends)
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        for end in ends:
            os.close(end)


def _watch(launcher: int, server: int) -> None:
    """Kill the server if it outlives its launcher. Arguments: pidfds."""
    null = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):  # the launcher reads until every process has closed the output
        os.dup2(null, stream)
    os.setsid()
    if server not in _ended([launcher, server], None) and not _ended([server], ORPHAN_SECONDS):
        signal.pidfd_send_signal(server, signal.SIGKILL)


def _ended(processes: list[int], seconds: float | None) -> list[int]:
    """Wait at most `seconds` for one of the processes to end. Return the processes that have ended."""
    return select.select(processes, [], [], seconds)[0]


def wrapped(command: Sequence[str]) -> list[str]:
    """Return the command line that runs a program in such a process. It ends with the thread that starts it."""
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), *command]


def main() -> None:
    launcher, *command = sys.argv[1:]
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)  # also when the launcher dies of SIGKILL
    if os.getppid() != int(launcher):  # the launcher has died before
        sys.exit(1)
    guard(int(launcher))
    keep_files_private()
    raise_descriptor_limit()
    os.execv(command[0], command)


if __name__ == "__main__":
    main()
