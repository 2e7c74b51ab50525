"""best_of: the returned samples are the most likely of those that a request for all of them returns."""

import json

import pytest

from tests.support.callers import Caller, serving

SAMPLED = {"temperature": 1.5, "seed": 3, "max_tokens": 12, "ignore_eos": True}
RETURNED = ("return_cumulative_logprob", "return_logprobs", "return_finish_reason", "return_num_output_tokens",
        "return_token_ids")  # fmt: skip


@pytest.fixture(scope="module")
def service(tiny):
    with serving(tiny[0]) as running:
        yield running
        scheduler = running.service._assembly.scheduler
        scheduler.check()
        assert scheduler.blocks.num_used == 0


def inputs(returned=RETURNED, **sampling):
    asked = dict.fromkeys(returned, True)
    return {"text_input": "The sea", "sampling_parameters": json.dumps(SAMPLED | sampling), **asked}


def near(value):
    """Return the value with tolerances for its floats: the last bits of log probabilities depend on the step's size."""
    if isinstance(value, float):
        return pytest.approx(value, abs=1e-3)
    if isinstance(value, dict):
        return {key: near(one) for key, one in value.items()}
    return type(value)(near(one) for one in value) if isinstance(value, list | tuple) else value


def parsed(outputs):
    return outputs | {"logprobs": [json.loads(one) for one in outputs["logprobs"]]}


def per_sample(outputs):
    """Return the outputs of each sample, the sum of its log probabilities first."""
    ids = iter(outputs["token_ids"])
    tokens = [[next(ids) for _ in range(count)] for count in outputs["num_output_tokens"]]
    names = ("cumulative_logprob", "text_output", "finish_reason", "logprobs")
    columns = [parsed(outputs)[name] for name in names]
    return [(*one, own) for *one, own in zip(*columns, tokens, strict=True)]


@pytest.mark.parametrize("sampling", [{}, {"logprobs": 2}, {"stop": ["a", "e", "i", "o"]}], ids=str)
@pytest.mark.parametrize("n", [1, 2])
def test_best_of_returns_most_likely_samples_in_order(service, n, sampling):
    every = per_sample(service.ask(**inputs(n=6, **sampling)))
    best = per_sample(service.ask(**inputs(n=n, best_of=6, **sampling)))
    assert best == near(sorted(every, key=lambda one: one[0], reverse=True)[:n])
    assert best != every[:n]


def test_best_of_works_without_requesting_logprobs(service):
    expected = service.ask(**inputs(best_of=6))["text_output"]
    outputs = service.ask(**inputs(best_of=6, returned=()))
    assert outputs == {"text_output": expected}


def test_best_of_equal_to_n_keeps_order_and_streams(service):
    every = service.ask(**inputs(n=3))
    assert parsed(service.ask(**inputs(n=3, best_of=3))) == near(parsed(every))
    pieces = service.call(**inputs(n=3, best_of=3), stream=True, exclude_input_in_output=True).all()
    whole = [b"".join(parts) for parts in zip(*(piece["text_output"] for piece in pieces), strict=True)]
    assert [b"The sea" + one for one in whole] == every["text_output"]


def test_unsupported_best_of_is_rejected(service):
    assert (
        "best_of=3: must be n=2 when streaming"
        in service.call(**inputs(n=2, best_of=3), stream=True, exclude_input_in_output=True).rejection()
    )
    turn = Caller(**inputs(best_of=2))
    turn.correlation_id, turn.flags = lambda: 7, lambda: 1
    service.service.submit(turn)
    assert "best_of=2: must be 1 in a session" in turn.rejection()
