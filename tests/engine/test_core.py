"""The step loop: steps in flight, aborted requests and failing steps."""

import random

import pytest

from paged_backend.api.errors import ErrorCode
from tests.support.in_process import generate_with_transformers, running, tiny_assembly

MAX_TOKENS = 16

pytestmark = pytest.mark.usefixtures("async_scheduling")


@pytest.fixture(scope="module")
def prompts():
    rnd = random.Random(1)
    return [[rnd.randrange(3, 320) for _ in range(length)] for length in (1, 2, 7, 16, 17, 31, 48, 64, 90)]


@pytest.fixture(scope="module")
def alone(tiny, prompts):
    return [generate_with_transformers(tiny[1], prompt, MAX_TOKENS) for prompt in prompts]


@pytest.mark.parametrize("steps", [1, 3, 8])
def test_aborted_request_frees_its_blocks_immediately(tiny, steps):
    """While it waits, prefills (48 tokens at 16 a step) or decodes."""
    with running(tiny_assembly(tiny[0])) as engine:
        key = engine.submit([5] * 48, max_tokens=100)
        for _ in range(steps):
            engine.step()
        assert engine.history[-1].stats.blocks_used > 0 or steps == 1
        engine.engine.abort(key)
        while engine.step().stats.blocks_used or engine.history[-1].stats.running:
            pass
        assert engine.history[-1].stats.waiting == 0


def test_two_steps_are_in_flight_only_with_async_scheduling(tiny, async_scheduling):
    """One step too many is computed for a sequence whose end is not known yet, but its tokens are not returned."""
    assembly = tiny_assembly(tiny[0])
    calls = []
    for name in ("schedule", "commit"):
        inner = getattr(assembly.scheduler, name)

        def counted(*args, name=name, inner=inner):
            result = inner(*args)
            if result is not None:
                calls.append(name)
            return result

        setattr(assembly.scheduler, name, counted)
    with running(assembly) as engine:
        (tokens,) = engine.generate([[5, 6, 7]], max_tokens=4)
        expected = (
            ["schedule", *["schedule", "commit"] * 3, "commit"] if async_scheduling else ["schedule", "commit"] * 4
        )
        assert calls == expected
        calls.clear()
        (output,) = engine.wait(engine.submit([5, 6, 7], max_tokens=9, stop_token_ids=[tokens[1]]))
        assert output.tokens == tokens[:2]
    assert calls.count("schedule") == calls.count("commit") == 2 + async_scheduling


def test_failed_step_fails_its_requests_and_the_engine_continues(tiny, prompts, alone):
    """The step fails after its forward pass, which is eager or replays a CUDA graph."""
    assembly = tiny_assembly(tiny[0])
    launch, errors = assembly.runner.launch, iter([RuntimeError("device error")])

    def fail_once(batch):
        launched = launch(batch)
        if error := next(errors, None):
            raise error
        return launched

    assembly.runner.launch = fail_once
    with running(assembly) as engine:
        (output,) = engine.wait(engine.submit(prompts[0], max_tokens=4))
        assert output.error.code is ErrorCode.INTERNAL
        assert "device error" in str(output.error)
        assert engine.generate(prompts, max_tokens=MAX_TOKENS) == alone


def test_failed_module_fails_its_requests_and_the_engine_continues(tiny, prompts, alone):
    assembly = tiny_assembly(tiny[0], enforce_eager=True)  # a replayed CUDA graph would not call the hook
    embeddings = assembly.loaded.model.model.embed_tokens
    with running(assembly) as engine:

        def fail(*args):
            raise RuntimeError("device error")

        hook = embeddings.register_forward_pre_hook(fail)
        (output,) = engine.wait(engine.submit(prompts[0], max_tokens=4))
        assert output.error.code is ErrorCode.INTERNAL
        assert "device error" in str(output.error)
        hook.remove()
        assert engine.generate(prompts, max_tokens=MAX_TOKENS) == alone


def test_late_failure_also_fails_the_step_built_on_it(tiny, prompts, alone):
    """The error is raised when the tokens are read, as on a GPU."""
    assembly = tiny_assembly(tiny[0])
    launch, results = assembly.runner.launch, iter([None, None, RuntimeError("device error")])

    class LateFailure:
        replayed = False

        def __init__(self, launched):
            self.launched = launched

        def result(self):
            if error := next(results, None):
                raise error
            return self.launched.result()

    assembly.runner.launch = lambda batch: LateFailure(launch(batch))
    with running(assembly) as engine:
        (output,) = engine.wait(engine.submit(prompts[0], max_tokens=9))
        assert output.error.code is ErrorCode.INTERNAL
        assert len(output.tokens) == 2
        assert engine.generate(prompts, max_tokens=MAX_TOKENS) == alone
