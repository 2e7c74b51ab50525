"""The sandbox process: time limits, replacement of a dead process, stopping."""

import os
import resource
import time
from pathlib import Path
from queue import SimpleQueue

from paged_backend.api.structures import read_structure
from paged_backend.guided import compiler
from paged_backend.guided.sandbox import TIMEOUT_CACHE_SECONDS
from tests.support.grammars import DEEP, SLOW, accepts, compile_guides, create_compiler, record_compilations
from tests.support.in_process import WAIT
from tests.support.processes import children


def test_compile_timeout_does_not_block_other_grammars(monkeypatch):
    grammars = create_compiler(seconds=1.5)
    slow = [SimpleQueue() for _ in range(3)]
    for answers in slow:
        grammars.compile(read_structure("json_schema", SLOW), 1, answers.put)  # equal structures are compiled once
    assert accepts(compile_guides(grammars, "regex", "a"), "a")
    assert all(answers.empty() for answers in slow)
    for answers in slow:
        error = answers.get(timeout=WAIT)
        assert str(error) == (
            "INVALID_ARGUMENT: json_schema: compiling it takes more than 1.5 s (structured_outputs_timeout)"
        )
    assert accepts(compile_guides(grammars, "regex", "b"), "b")
    grammars.stop()


def test_timed_out_grammar_is_not_retried_immediately(monkeypatch):
    grammars = create_compiler(seconds=0.3)
    compiled = record_compilations(monkeypatch, grammars)
    first, second = (str(compile_guides(grammars, "json_schema", SLOW)) for _ in range(2))
    assert "compiling it takes more than 0.3 s" in first
    assert (first, len(compiled)) == (second, 1)
    monkeypatch.setattr(compiler.time, "monotonic", lambda now=time.monotonic: now() + TIMEOUT_CACHE_SECONDS)
    assert str(compile_guides(grammars, "json_schema", SLOW)) == first
    assert len(compiled) == 2, "it is retried after a while, because the machine may have been busy"
    grammars.stop()


def test_dead_sandbox_process_is_replaced():
    grammars = create_compiler()
    assert accepts(compile_guides(grammars, "regex", "a"), "a")
    for sandbox in grammars._sandboxes:
        if sandbox._process:
            sandbox._process.kill()
            sandbox._process.wait()
    assert accepts(compile_guides(grammars, "regex", "b"), "b")
    assert "too deep" in str(compile_guides(grammars, "grammar", DEEP))
    assert accepts(compile_guides(grammars, "regex", "c"), "c")
    grammars.stop()


def test_memory_of_a_sandbox_is_limited():
    grammars = create_compiler()
    assert accepts(compile_guides(grammars, "regex", "a"), "a")
    (process,) = (sandbox._process for sandbox in grammars._sandboxes if sandbox._process)
    assert resource.prlimit(process.pid, resource.RLIMIT_AS) == (1 << 30, 1 << 30)
    grammars.stop()


def test_stop_fails_queued_compilations():
    grammars, answers = create_compiler(), SimpleQueue()
    for minimum in range(4):
        grammars.compile(read_structure("json_schema", SLOW | {"minimum": minimum}), 1, answers.put)
    grammars.stop()
    assert {str(answers.get(timeout=WAIT)) for _ in range(4)} == {"UNAVAILABLE: json_schema: the server is stopping"}


def test_sandbox_has_no_secrets_of_the_server(monkeypatch):
    """Code that a grammar made it run could not read them."""
    monkeypatch.setenv("HF_TOKEN", "a-secret-of-the-server")
    before = set(children(os.getpid()))
    grammars = create_compiler()
    assert accepts(compile_guides(grammars, "regex", "a"), "a")
    started = set(children(os.getpid())) - before
    assert started
    for process in started:
        assert b"a-secret-of-the-server" not in Path(f"/proc/{process}/environ").read_bytes()
    grammars.stop()
