"""Pipeline parallelism: stages generate the same tokens as one process, with steps of several requests in flight."""

import signal
from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch
import transformers as hf

from paged_backend.engine.outputs import EngineDied
from tests.support.beams import beams
from tests.support.in_process import WAIT, running, save_tiny, tiny_assembly
from tests.support.pairwise import mostly_nightly

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.skipif(
        find_spec("transformers.distributed.pipeline_parallel") is None,
        reason="this version of transformers loads no stages",
    ),
]

OPTIONS = {"num_gpu_blocks_override": 24}
COMMON = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
PROMPTS = [list(range(1, 30)), [5, 6, 7], list(range(40, 57)), [8]]
SWAP = {"swap_space": 0.001, "preemption_mode": "swap"}
# tensor_parallel_size, pipeline_parallel_size, options
SIZES = mostly_nightly([[1, 2, SWAP], [1, 3, {}], [2, 2, SWAP]], default=[[1, 2, SWAP]])


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """A model with tied embeddings, which the first and the last stage have."""
    directory = tmp_path_factory.mktemp("stages")
    save_tiny(hf.Qwen2Config(**COMMON, tie_word_embeddings=True), directory)
    return directory


@pytest.fixture(scope="module")
def alone(directory):
    return tiny_assembly(directory, **OPTIONS)


@pytest.fixture(scope="module", params=SIZES, ids=lambda param: "tp{}-pp{}".format(*param))
def staged(request, directory):
    """A model in stages. A process can be rank 0 of only one model at a time."""
    tensor, stages, options = request.param
    assembly = tiny_assembly(
        directory, **OPTIONS, **options, tensor_parallel_size=tensor, pipeline_parallel_size=stages
    )
    yield assembly
    assembly.close()
    codes = {process.returncode for process in assembly.workers.processes.values()}
    assert codes == {0} or -signal.SIGKILL in codes


def both(alone, staged, run):
    """Return the results of `run` with one process and with stages."""
    found = []
    for assembly in (alone, staged):
        with running(assembly) as engine:
            found.append(run(engine))
    return found


@pytest.mark.parametrize(
    "sampling",
    [
        pytest.param({}, marks=pytest.mark.nightly),
        {"temperature": 1.0, "seed": 7, "top_p": 0.9},
        {"temperature": 0.8, "seed": 1, "top_k": 20, "repetition_penalty": 1.2},
        {"beam_width": 3},
    ],
)
def test_tokens_match_a_single_process(alone, staged, sampling):
    one, many = both(alone, staged, lambda engine: engine.generate(PROMPTS, max_tokens=12, **sampling))
    assert one == many


def test_fingerprints_come_from_the_last_stage(alone, staged):
    prompt, sampling = PROMPTS[0], {"max_tokens": 3, "prompt_logprobs": 0, "logits_digest": True}
    one, many = both(alone, staged, lambda engine: engine.wait(engine.submit(prompt, **sampling))[0].fingerprints)
    assert len(one) == len(many) == len(prompt) + 2


def test_ranks_hold_the_layers_of_their_stage_only(alone, staged):
    whole, width = alone.shares[0], staged.runner.kv.layers[0].keys.shape[1]
    tensor = 2 // width  # of two KV heads
    stages = len(staged.shares) // tensor
    assert [share.layers for share in staged.shares] == [
        layers for layers in {2: [2, 2], 3: [1, 1, 2]}[stages] for _ in range(tensor)
    ]
    assert staged.scheduler.blocks.num_pages == alone.scheduler.blocks.num_pages
    head_dim = COMMON["hidden_size"] // COMMON["num_attention_heads"]
    angles = 4 * COMMON["max_position_embeddings"] * 2 * head_dim  # a table of fused layers
    embeddings = 4 * COMMON["vocab_size"] * COMMON["hidden_size"]  # tied: the first and the last stage have them
    layer = (whole.weight_bytes - angles - embeddings) / whole.layers
    for rank, share in enumerate(staged.shares):
        assert share.kv_bytes == whole.kv_bytes * share.layers / whole.layers / tensor
        has_embeddings = rank // tensor in (0, stages - 1)
        expected = angles * (tensor == 1) + (has_embeddings * embeddings + share.layers * layer) / tensor
        assert share.weight_bytes == pytest.approx(expected, rel=0.02)  # ranks of a stage do not divide norms


def test_steps_of_different_requests_are_in_flight_at_once(staged):
    stages = staged.scheduler.stages
    open_steps, most = [], [0]

    class Step:
        replayed = False

        def __init__(self, launched, keys):
            self.launched, self.keys = launched, keys
            assert not any(keys & other.keys for other in open_steps), "a request in two steps"
            open_steps.append(self)
            most[0] = max(most[0], len(open_steps))

        def result(self):
            open_steps.remove(self)
            return self.launched.result()

    class Spy:
        def __getattr__(self, name):
            return getattr(staged.runner, name)

        def move(self, plan):
            self.keys = {chunk.sequence.key for chunk in plan.chunks}
            staged.runner.move(plan)

        def launch(self, packed):
            return Step(staged.runner.launch(packed), self.keys)

    with running(replace(staged, runner=Spy())) as engine:
        engine.generate([[1], [2], [3]], max_tokens=12)
        assert most[0] == stages
        most[0] = 0
        engine.generate([[4]], max_tokens=4)
        assert most[0] == 1


def test_prompt_chunks_follow_each_other_through_the_stages(alone, staged):
    """A prompt that takes several steps, beside requests that decode."""
    one, many = both(alone, staged, lambda engine: engine.generate([[9], list(range(70)), [8]], max_tokens=10))
    assert one == many


def test_embeddings_match_a_single_process(alone, staged):
    one, many = both(
        alone, staged, lambda engine: [output.hidden for output in engine.wait(*map(engine.embed, PROMPTS))]
    )
    for expected, hidden in zip(one, many, strict=True):
        torch.testing.assert_close(torch.tensor(hidden), torch.tensor(expected), rtol=1e-4, atol=1e-4)


def test_logprobs_match_a_single_process(alone, staged):
    def run(engine):
        sampling = {"max_tokens": 6, "logprobs": 2, "prompt_logprobs": 2}
        outputs = engine.wait(*[engine.submit(prompt, **sampling) for prompt in PROMPTS])
        tokens = [entries for output in outputs for entries in (*(output.prompt_logprobs or ()), *output.logprobs)]
        return [entry for entries in tokens for entry in entries]

    one, many = both(alone, staged, run)
    assert [entry[::2] for entry in one] == [entry[::2] for entry in many]
    assert [entry.logprob for entry in many] == pytest.approx([entry.logprob for entry in one], abs=1e-4)


def test_stages_share_cache_and_copy_on_write_blocks(alone, staged):
    def run(engine):
        prompt = list(range(100, 118))  # ends inside a block
        first, _ = beams(engine, prompt, None, n=2, temperature=1.0, seed=3)
        hits = engine.assembly.scheduler.stats.cached_tokens
        again = engine.generate([[*prompt, 9]], max_tokens=6)
        assert engine.assembly.scheduler.stats.cached_tokens > hits
        return first, again

    one, many = both(alone, staged, run)
    assert one == many


def test_preempted_requests_continue(alone, staged):
    """They are recomputed, or swapped out if there is a host pool."""

    def run(engine):
        before = engine.assembly.scheduler.stats
        tokens = engine.generate([[50 + i, *range(20)] for i in range(4)], max_tokens=20)
        after = engine.assembly.scheduler.stats
        assert after.preemptions > before.preemptions
        assert (after.swapped > before.swapped) == (engine.assembly.runner.host is not None)
        return tokens

    one, many = both(alone, staged, run)
    assert one == many


def test_requests_that_end_early_free_their_blocks(alone, staged):
    """They may end while several steps with them are in flight."""

    def run(engine):
        keys = [engine.submit([key], max_tokens=60) for key in range(3)]
        for _ in range(4):
            engine.step()
        engine.engine.abort(keys[0])
        engine.engine.end(keys[1], 0)
        return engine.wait(keys[2])[0].tokens

    one, many = both(alone, staged, run)
    assert one == many


def test_stages_sleep_and_wake(alone, staged):
    def run(engine):
        mode, found = engine.engine.sleep_mode, [engine.generate(PROMPTS, max_tokens=8)]
        for _ in range(2):
            assert mode.sleep(WAIT).memory == mode.wake().memory
            found.append(engine.generate(PROMPTS, max_tokens=8))
        return found

    one, many = both(alone, staged, run)
    assert one == many == [one[0]] * 3


def test_a_dead_stage_fails_the_engine(staged):
    ranks = len(staged.shares)
    with running(staged) as engine:
        for prompt in PROMPTS:
            engine.submit(prompt, max_tokens=40)
        engine.step()
        staged.workers.processes[ranks - 1].kill()
        message = engine.steps.get(timeout=WAIT)
        while not isinstance(message, EngineDied):
            message = engine.steps.get(timeout=WAIT)
        assert f"rank {ranks - 1} of {ranks} has ended: its process ended with code -9" in message.reason
        assert not engine.engine.alive
