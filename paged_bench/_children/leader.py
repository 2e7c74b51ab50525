"""Runs a program as the leader of a process group that is killed when the process that started it ends, in any way.

Run as a program: `python leader.py DESCRIPTOR PROGRAM ARGUMENTS`. The starting process holds the other end of the pipe
DESCRIPTOR. A process outside of the group waits until that end is closed, and then kills the group, which may be
stopped or may never read from a pipe. This is not done between fork and exec, because that is unsafe in a process with
threads. It imports only the standard library, to start soon.
"""

import os
import signal
import sys
from contextlib import suppress


def main() -> None:
    descriptor, command = int(sys.argv[1]), sys.argv[2:]
    os.setpgrp()
    leader = os.getpid()
    if os.fork() == 0:
        _watch(descriptor, leader)
        os._exit(0)
    os.close(descriptor)
    os.execvp(command[0], command)


def _watch(descriptor: int, group: int) -> None:
    """Kill the group when the other end of the pipe is closed."""
    os.setsid()
    null = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):  # the starting process reads until every process has closed the output
        os.dup2(null, stream)
    os.read(descriptor, 1)
    with suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    main()
