"""Structured outputs through the engine and the service, with any kind of step."""

import json
import random
import re
from collections import defaultdict
from queue import SimpleQueue

import pytest

from paged_backend.api.config import EngineConfig
from paged_backend.api.limits import InputLimits
from paged_backend.api.request import FinishReason
from paged_backend.api.structures import read_structure
from paged_backend.guided.compiler import GrammarCompiler
from paged_backend.server.metrics.metrics import Metrics
from paged_backend.server.service import Service
from tests.support.callers import serving
from tests.support.grammars import SLOW
from tests.support.in_process import TINY, WAIT, byte_tokenizer, running, tiny_assembly
from tests.support.logprobs import Caller
from tests.support.pb_utils import PB_UTILS

sync_and_async = pytest.mark.usefixtures("async_scheduling")
EXPRESSION = r"[a-z]{3,6}(-[0-9]{2}){1,3}"
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "tags": {"type": "array", "items": {"enum": ["red", "green"]}, "minItems": 1, "maxItems": 3},
        "size": {"type": "integer", "minimum": 0, "maximum": 999},
    },
    "required": ["name", "tags", "size"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_pattern": " "},  # otherwise a random model generates much white space
}
GRAMMAR = 'root ::= sum\nsum ::= num ("+" num){1,4}\nnum ::= [1-9] [0-9]?'


def check_schema(text):
    value = json.loads(text)
    assert set(value) == {"name", "tags", "size"}
    assert len(value["name"]) <= 6
    assert 1 <= len(value["tags"]) <= 3
    assert set(value["tags"]) <= {"red", "green"}
    assert 0 <= value["size"] <= 999


CASES = {
    "regex": (EXPRESSION, lambda text: re.fullmatch(EXPRESSION, text) or pytest.fail(text)),
    "json_schema": (SCHEMA, check_schema),
    "choice": (["red", "reddish", "blue"], lambda text: ["red", "reddish", "blue"].index(text)),
    "grammar": (GRAMMAR, lambda text: re.fullmatch(r"[1-9]\d?(\+[1-9]\d?){1,4}", text) or pytest.fail(text)),
}
SAMPLED = {"temperature": 1.5, "seed": 7}


@pytest.fixture(scope="module")
def grammars():
    compiler = GrammarCompiler(byte_tokenizer(), 320, frozenset([2, 256]), seconds=WAIT)
    yield compiler
    compiler.stop()


@pytest.fixture(scope="module")
def prompts():
    rng = random.Random(5)
    return [[rng.randrange(3, 256) for _ in range(length)] for length in (1, 6, 17, 40)]


def compile_guides(grammars, name, value, count=1):
    answers = SimpleQueue()
    grammars.compile(read_structure(name, value), count, answers.put)
    return answers.get(timeout=WAIT)


def submit(engine, grammars, prompt, name, value, **sampling):
    guides = compile_guides(grammars, name, value, sampling.get("n", 1))
    return engine.submit(prompt, guides=guides, **{"max_tokens": 100, "ignore_eos": False} | sampling)


def text_of(tokens):
    """Return the text of an output that ends with an EOS token."""
    assert tokens[-1] in (2, 256)
    return byte_tokenizer().decode(tokens[:-1])


@sync_and_async
@pytest.mark.parametrize("sampling", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_outputs_match_their_structure_and_others_are_unchanged(tiny, grammars, prompts, sampling):
    with running(tiny_assembly(tiny[0])) as engine:
        plain = {"max_tokens": 16, **sampling}
        (expected,) = engine.generate([prompts[1]], **plain)
        keys = [
            submit(engine, grammars, prompt, name, value, **sampling)
            for prompt, (name, (value, _)) in zip(prompts, CASES.items(), strict=True)
        ]
        *outputs, beside = engine.wait(*keys, engine.submit(prompts[1], **plain))
    assert beside.tokens == expected
    for output, (_, check) in zip(outputs, CASES.values(), strict=True):
        assert output.finish is FinishReason.STOP
        check(text_of(output.tokens))


@sync_and_async
@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_preemption_does_not_change_guided_outputs(tiny, grammars, mode):
    rng = random.Random(1)
    prompts = [[rng.randrange(3, 256) for _ in range(length)] for length in (17, 31, 48, 64, 90)]
    request = {"name": "json_schema", "value": SCHEMA, "max_tokens": 60}
    small = {"max_num_batched_tokens": 64, "swap_space": 0.01, "preemption_mode": mode}

    def run(blocks):
        with running(tiny_assembly(tiny[0], **small, num_gpu_blocks_override=blocks)) as engine:
            outputs = engine.wait(*[submit(engine, grammars, prompt, **request, **SAMPLED) for prompt in prompts])
            return [output.tokens for output in outputs], engine.history[-1].stats.preemptions

    expected, no_preemptions = run(400)
    tokens, preemptions = run(45)
    assert (no_preemptions, preemptions > 0) == (0, True)
    assert tokens == expected
    assert all(check_schema(text_of(output)) is None for output in tokens if output[-1] in (2, 256))


@sync_and_async
def test_every_sample_matches_its_structure(tiny, grammars, prompts):
    with running(tiny_assembly(tiny[0])) as engine:
        submit(engine, grammars, prompts[2], "regex", EXPRESSION, n=3, logprobs=1, max_tokens=40, **SAMPLED)
        tokens, logprobs, remaining = defaultdict(list), defaultdict(list), 3
        while remaining:
            for delta in engine.steps.get(timeout=WAIT).deltas:
                tokens[delta.sample] += delta.token_ids
                logprobs[delta.sample] += delta.values.get("logprobs", ())
                remaining -= delta.last
    texts = {text_of(tokens[sample]) for sample in range(3)}
    assert len(texts) > 1
    assert all(re.fullmatch(EXPRESSION, text) for text in texts)
    assert all([sampled.token for sampled, *_ in logprobs[sample]] == tokens[sample] for sample in range(3))


@sync_and_async
def test_max_tokens_truncates_incomplete_output(tiny, grammars, prompts):
    with running(tiny_assembly(tiny[0])) as engine:
        (output,) = engine.wait(submit(engine, grammars, prompts[1], "regex", "[a-c]{50}", max_tokens=7))
    assert (output.finish, len(output.tokens)) == (FinishReason.LENGTH, 7)
    assert re.fullmatch("[a-c]{7}", byte_tokenizer().decode(output.tokens))


@sync_and_async
def test_min_tokens_applies_while_the_grammar_can_continue(tiny, grammars, prompts):
    with running(tiny_assembly(tiny[0])) as engine:
        keys = [
            submit(engine, grammars, prompts[1], "regex", pattern, min_tokens=9)
            for pattern in ("[ab]{1,20}", "[ab]{1,4}")
        ]
        long, short = engine.wait(*keys)
    assert len(text_of(long.tokens)) >= 9
    assert (len(text_of(short.tokens)), short.finish) == (4, FinishReason.STOP)


def test_prefix_cache_hit_does_not_change_structured_output(tiny, grammars, prompts):
    with running(tiny_assembly(tiny[0])) as engine:
        found = [engine.wait(submit(engine, grammars, prompts[3], "json_schema", SCHEMA))[0].tokens for _ in range(2)]
        assert engine.history[-1].stats.cached_tokens > 0
    assert found[0] == found[1]


def test_speculation_does_not_change_structured_outputs(tiny, grammars, prompts):
    with running(tiny_assembly(tiny[0], num_speculative_tokens=3, prompt_lookup_min=1)) as engine:
        keys = [submit(engine, grammars, prompts[2], "grammar", GRAMMAR), engine.submit([5, 6] * 9, max_tokens=20)]
        guided, _ = engine.wait(*keys)
        assert engine.history[-1].stats.draft_tokens > 0
    CASES["grammar"][1](text_of(guided.tokens))


@pytest.fixture
def service(tiny):
    options = TINY | {"model": str(tiny[0]), "structured_outputs_timeout": WAIT}
    service = Service(EngineConfig.from_options(options), PB_UTILS, {"model": "tiny"})
    yield service
    service.stop()


def request(**sampling):
    return Caller(text_input="The sea", sampling_parameters=json.dumps({"max_tokens": 40} | sampling))


def test_compiling_request_can_be_cancelled_while_others_run(service):
    slow, cancelled = request(json_schema=SLOW), request(json_schema=SLOW)
    service.submit(slow)
    service.submit(cancelled)
    cancelled.is_cancelled = lambda: True
    assert cancelled.get(timeout=WAIT)  # receives an error
    for sampling in ({}, {"regex": "[ab]{3}"}):
        other = request(**sampling)
        service.submit(other)
        assert not other.get(timeout=WAIT)
    assert slow.empty()
    slow.is_cancelled = lambda: True
    assert slow.get(timeout=WAIT)


def test_compiling_request_counts_as_waiting(service, monkeypatch):
    shown, record = SimpleQueue(), Metrics.record
    monkeypatch.setattr(Metrics, "record", lambda self, stats: (record(self, stats), shown.put(stats.waiting)))
    slow = request(json_schema=SLOW)
    service.submit(slow)
    while shown.get(timeout=WAIT) != 1:
        pass
    slow.is_cancelled = lambda: True
    while shown.get(timeout=WAIT) != 0:
        pass


def test_cancelled_grammars_are_not_compiled(service):
    """Many cancelled requests do not delay a later one."""
    schemas = [
        {"type": "object", "properties": {str(index): SLOW}} for index in range(InputLimits.max_queued_structures - 1)
    ]
    callers = [request(json_schema=schema) for schema in schemas]
    for caller in callers:
        service.submit(caller)
    for caller in callers:
        caller.is_cancelled = lambda: True
    for caller in callers:
        assert caller.get(timeout=WAIT)
    other = request(regex="[ab]{3}")
    service.submit(other)
    assert not other.get(timeout=WAIT)


def test_timeout_ends_a_compiling_request(service):
    slow = request(json_schema=SLOW)
    slow.timeout = lambda: 100_000
    service.submit(slow)
    assert not slow.get(timeout=WAIT)  # the output so far, which is empty
    other = request(choice=["a"])
    service.submit(other)
    assert not other.get(timeout=WAIT)


def test_error_names_the_constraints_that_exclude_all_tokens(tiny):
    cases = {
        "regex and bad_words": {"regex": "a+", "bad_words": ["a"]},
        "regex and bad_words_token_ids": {"regex": "a+", "bad_words_token_ids": [[64]]},
        "structured_outputs.choice and allowed_token_ids": {
            "structured_outputs": {"choice": ["a"]},
            "allowed_token_ids": [65],
        },
    }
    with serving(tiny[0]) as service:
        calls = [service.call(text_input="x", sampling_parameters=json.dumps(case)) for case in cases.values()]
        for names, call in zip(cases, calls, strict=True):
            assert f"no token is left: {names} exclude every possible next token" in call.rejection()


@pytest.mark.parametrize("sampling", [{"choice": ["<|end|>x"]}, {"regex": r"<\|end\|>x"}], ids=["choice", "regex"])
def test_text_that_looks_like_eos_does_not_end_the_output(tiny, sampling):
    with serving(tiny[0]) as service:
        inputs = {"sampling_parameters": json.dumps({"max_tokens": 40} | sampling), "return_finish_reason": True}
        answer = service.ask(text_input="x", **inputs)
    assert answer["text_output"] == [b"x<|end|>x"]  # prompt and output
    assert answer["finish_reason"] == [b"stop"]


def test_compile_error_is_returned(service):
    invalid = request(regex="(")
    service.submit(invalid)
    assert invalid.get(timeout=WAIT)
