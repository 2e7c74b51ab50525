"""The grammar compiler: guides, queueing and the cache."""

import random
import threading
from queue import SimpleQueue

import pytest

from paged_backend.api.errors import ErrorCode
from paged_backend.api.guide import GuideError
from paged_backend.api.limits import InputLimits
from paged_backend.api.structures import read_structure
from paged_backend.guided import compiler, grammar
from paged_backend.guided.compiler import GrammarCompiler, GrammarGuide
from tests.support.grammars import (
    END,
    SLOW,
    accepts,
    allowed_tokens,
    compile_guides,
    create_compiler,
    record_compilations,
    token,
)
from tests.support.in_process import WAIT, byte_tokenizer


def test_each_output_has_its_own_guide(grammars):
    first, second = compile_guides(grammars, "regex", "ab", count=2)
    first.advance([token("a")])
    assert (allowed_tokens(first), allowed_tokens(second)) == ({token("b")}, {token("a")})
    first.advance([token("b")])
    assert allowed_tokens(first) == {2, END}  # only the two EOS tokens


def test_tokens_beyond_the_model_vocabulary_are_not_allowed():
    """The tokenizer has more tokens than the model has rows."""
    few = GrammarCompiler(byte_tokenizer(), 60, frozenset([2]), seconds=WAIT)
    (guide,) = compile_guides(few, "regex", r"[\x21-\x7e]+")
    assert allowed_tokens(guide) and max(allowed_tokens(guide)) < 60
    (guide,) = compile_guides(few, "regex", "z")
    with pytest.raises(GuideError, match="regex: none of the model's tokens can come next"):
        allowed_tokens(guide)
    few.stop()


def test_failure_to_create_guides_affects_only_its_request(monkeypatch):
    grammars, answers, copy_guide = create_compiler(), [SimpleQueue() for _ in range(3)], GrammarGuide.copy
    compiling, resume, compile = threading.Event(), threading.Event(), grammars._compile

    def compile_slowly(key):
        compiling.set()
        assert resume.wait(WAIT)
        return compile(key)

    fails = iter([RuntimeError("no memory"), None, None])

    def fail_once(guide, field):
        if error := next(fails):
            raise error
        return copy_guide(guide, field)

    monkeypatch.setattr(grammars, "_compile", compile_slowly)
    monkeypatch.setattr(GrammarGuide, "copy", fail_once)
    for queue in answers:
        grammars.compile(read_structure("regex", "a"), 1, queue.put)
    assert compiling.wait(WAIT)
    resume.set()
    first, *others = [queue.get(timeout=WAIT) for queue in answers]
    assert str(first) == "INTERNAL: RuntimeError: no memory"
    assert all(accepts(guides, "a") for guides in others)
    grammars.stop()


@pytest.mark.parametrize("renewed", [True, False])
def test_output_that_uses_up_the_lexer_states_fails_alone(monkeypatch, renewed):
    """They are shared by all outputs of a grammar. One that takes long to compile is not compiled again in a step."""
    monkeypatch.setattr(grammar, "LEXER_STATES", 2_000)
    if not renewed:
        monkeypatch.setattr(compiler, "RENEWAL_SECONDS", 0)
    expression, letters = r"(.*(a|b).{16}(c|d).{9})+Z", random.Random(1)
    grammars = create_compiler()
    greedy, modest = compile_guides(grammars, "regex", expression, count=2)
    modest.advance([token("x")])
    for _ in range(500):
        greedy.advance([token(letters.choice("abcdx"))])
    with pytest.raises(GuideError, match=r"regex: cannot continue: .*too many"):
        allowed_tokens(greedy)
    modest.advance([token("x")])
    if renewed:
        modest.advance([token("Z")])
        assert token("Z") in allowed_tokens(modest)
    else:
        with pytest.raises(GuideError, match="too many states"):
            allowed_tokens(modest)
    (later,) = compile_guides(grammars, "regex", expression)
    later.advance([token("x")])
    assert token("x") in allowed_tokens(later)
    grammars.stop()


def test_full_compile_queue_rejects_requests():
    grammars, answers = create_compiler(input_limits=InputLimits(max_queued_structures=2)), SimpleQueue()
    for minimum in range(2):
        grammars.compile(read_structure("json_schema", SLOW | {"minimum": minimum}), 1, answers.put)
    error = compile_guides(grammars, "regex", "a")
    assert error.code is ErrorCode.UNAVAILABLE
    assert str(error) == (
        "UNAVAILABLE: regex: the queue is full: 2 structures wait (max_queued_structures); retry later"
    )
    grammars.stop()


@pytest.mark.parametrize("limit", [{"max_remembered_structures": 3}, {"max_remembered_structure_bytes": 30}])
def test_cache_is_lru_and_bounded(monkeypatch, limit):
    grammars = create_compiler(input_limits=InputLimits(**limit))
    keys = record_compilations(monkeypatch, grammars)

    def compiled():
        return [text for _, text, _ in keys]

    first, *others = (f"[a-c]{{{index}}}xx" for index in range(1, 5))  # ten bytes each
    for expression in (first, first, others[0], others[1], first, others[2], first):
        assert compile_guides(grammars, "regex", expression)
    assert compiled() == [first, *others]  # the most recently used entry stays
    compile_guides(grammars, "regex", others[0])
    assert compiled() == [first, *others, others[0]]
    compile_guides(grammars, "regex", "(a")
    compile_guides(grammars, "regex", "(a")  # errors are cached as well
    assert compiled().count("(a") == 1
    grammars.stop()


def test_cache_is_separate_per_tenant(monkeypatch):
    """Compile times must not reveal what other tenants use, so results, errors and queue entries are per tenant."""
    grammars = create_compiler()
    compiled = record_compilations(monkeypatch, grammars)
    answers = SimpleQueue()
    for tenant in ("a", "b", "", "a", "b", ""):
        for expression in ("known", "(a"):
            grammars.compile(read_structure("regex", expression), 1, answers.put, tenant=tenant)
    for _ in range(12):
        answers.get(timeout=WAIT)
    assert sorted(compiled) == sorted(("regex", text, tenant) for text in ("known", "(a") for tenant in ("a", "b", ""))
    grammars.stop()


def test_cache_hit_calls_back_on_the_calling_thread(grammars):
    compile_guides(grammars, "regex", "known")
    threads = []
    grammars.compile(read_structure("regex", "known"), 1, lambda guides: threads.append(threading.current_thread()))
    assert threads == [threading.current_thread()]
