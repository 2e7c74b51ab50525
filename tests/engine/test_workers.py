"""Tensor parallelism: two ranks generate the same tokens as one process, and end together."""

import errno
import signal
import socket
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers as hf

from paged_backend.api.config import AUTO_BLOCK_SIZES
from paged_backend.api.errors import ConfigError
from paged_backend.engine.outputs import EngineDied
from paged_backend.execution import runner
from paged_backend.utils import child_process
from tests.support.beams import beams
from tests.support.in_process import WAIT, running, save_tiny, tiny_assembly
from tests.support.processes import listening_ports

pytestmark = pytest.mark.ranks

# A pool that a few requests fill, with a host pool.
OPTIONS = {"num_gpu_blocks_override": 24, "swap_space": 0.001, "preemption_mode": "swap"}
COMMON = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
PROMPTS = [list(range(1, 30)), [5, 6, 7], list(range(40, 57)), [8]]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """A model with biases, which only one rank may add, and with tied embeddings."""
    directory = tmp_path_factory.mktemp("shared")
    save_tiny(hf.Qwen2Config(**COMMON, tie_word_embeddings=True), directory)
    return directory


@pytest.fixture(scope="module")
def alone(directory):
    return tiny_assembly(directory, **OPTIONS)


@pytest.fixture(scope="module")
def shared(request, directory):
    """A model on two ranks, with the options of the test's parameter. A process can be rank 0 of only one model."""
    options = OPTIONS | getattr(request, "param", {})
    assembly = tiny_assembly(directory, **options | draft(directory, options), tensor_parallel_size=2)
    yield assembly
    assembly.close()
    assert assembly.workers.processes[1].returncode in (0, -signal.SIGKILL)


def draft(directory, options):
    """Make the model its own draft model if the options ask for speculation."""
    return {"speculative_model": str(directory)} if options.get("num_speculative_tokens") else {}


def both(alone, shared, run):
    """Return the results of `run` with one process and with two, without and with overlap."""
    found = []
    for assembly in (alone, shared, replace(shared, overlap=True)):
        with running(assembly) as engine:
            found.append(run(engine))
    return found


@pytest.mark.nightly
def test_embeddings_match_a_single_process(alone, shared):
    first, *others = both(
        alone, shared, lambda engine: [output.hidden for output in engine.wait(*map(engine.embed, PROMPTS))]
    )
    for found in others:
        for expected, hidden in zip(first, found, strict=True):
            torch.testing.assert_close(torch.tensor(hidden), torch.tensor(expected), rtol=1e-4, atol=1e-4)


def test_rank_holds_its_share_of_weights_and_kv_cache(alone, shared):
    assert [assembly.runner.kv.layers[0].keys.shape[1] for assembly in (alone, shared)] == [2, 1]
    assert alone.scheduler.blocks.num_pages == shared.scheduler.blocks.num_pages
    whole, part = (
        sum(p.untyped_storage().nbytes() for p in assembly.loaded.model.parameters()) for assembly in (alone, shared)
    )
    assert part < 0.52 * whole
    assert not any(type(p) is not torch.nn.Parameter for p in shared.loaded.model.parameters())


@pytest.mark.parametrize(
    "sampling",
    [
        pytest.param({}, marks=pytest.mark.nightly),
        {"temperature": 1.0, "seed": 7, "top_p": 0.9},
        {"temperature": 0.8, "seed": 1, "top_k": 20, "repetition_penalty": 1.2},
        {"beam_width": 3},
    ],
)
def test_tokens_match_a_single_process(alone, shared, sampling):
    one, two, ahead = both(alone, shared, lambda engine: engine.generate(PROMPTS, max_tokens=12, **sampling))
    assert one == two == ahead


def test_all_ranks_sleep_and_wake(alone, shared):
    def run(engine):
        mode, found = engine.engine.sleep_mode, [engine.generate(PROMPTS, max_tokens=8)]
        for _ in range(2):
            assert mode.sleep(WAIT).memory == mode.wake().memory
            found.append(engine.generate(PROMPTS, max_tokens=8))
        return found

    one, two, ahead = both(alone, shared, run)
    assert one == two == ahead == [one[0]] * 3


def test_logprobs_match_a_single_process(alone, shared):
    def run(engine):
        sampling = {"max_tokens": 6, "logprobs": 2, "prompt_logprobs": 2}
        outputs = engine.wait(*[engine.submit(prompt, **sampling) for prompt in PROMPTS])
        tokens = [entries for output in outputs for entries in (*(output.prompt_logprobs or ()), *output.logprobs)]
        return [entry for entries in tokens for entry in entries]

    one, two, ahead = both(alone, shared, run)
    assert [entry[::2] for entry in one] == [entry[::2] for entry in two] == [entry[::2] for entry in ahead]
    for others in (two, ahead):
        assert [entry.logprob for entry in others] == pytest.approx([entry.logprob for entry in one], abs=1e-4)


def test_tokens_sampled_by_rank_0_are_used(alone, shared, monkeypatch):
    """They are used even if the next step is launched before the host has read them."""
    plain = runner.sample
    monkeypatch.setattr(
        runner, "sample", lambda logits, batch, *, out: out.copy_((plain(logits, batch, out=out) + 1) % 320)
    )
    one, two, ahead = both(alone, shared, lambda engine: engine.generate(PROMPTS, max_tokens=12))
    assert one == two == ahead


def test_all_ranks_share_cache_and_copy_on_write_blocks(alone, shared):
    def run(engine):
        prompt = list(range(100, 118))  # ends inside a block
        first, _ = beams(engine, prompt, None, n=2, temperature=1.0, seed=3)
        hits = engine.assembly.scheduler.stats.cached_tokens
        again = engine.generate([[*prompt, 9]], max_tokens=6)
        assert engine.assembly.scheduler.stats.cached_tokens > hits
        return first, again

    one, two, ahead = both(alone, shared, run)
    assert one == two == ahead


def test_all_ranks_swap_preempted_requests(alone, shared):
    def run(engine):
        before = engine.assembly.scheduler.stats
        tokens = engine.generate([[50 + i, *range(20)] for i in range(4)], max_tokens=20)
        after = engine.assembly.scheduler.stats
        assert after.preemptions > before.preemptions
        assert after.swapped > before.swapped
        return tokens

    one, two, ahead = both(alone, shared, run)
    assert one == two == ahead


def test_ranks_that_have_met_accept_nobody_else(shared):
    """A stranger could read and fill the store of the ranks, and use up their file descriptors."""
    assert len(set(shared.workers._secret)) > 8  # random bytes, which only the ranks of this start know
    rank = shared.workers.processes[1].pid
    variables = dict(item.split("=", 1) for item in Path(f"/proc/{rank}/environ").read_text().split("\0") if item)
    ports = {int(variables["MASTER_PORT"]), *listening_ports(rank)}  # not all of this process: it has other tests
    assert len(ports) > 1
    for port in ports:
        with socket.socket() as stranger:
            stranger.settimeout(0.1)
            assert stranger.connect_ex(("127.0.0.1", port)) == errno.EAGAIN, port  # no answer within this time


@pytest.mark.parametrize(
    "shared", [{"load_format": "dummy", "num_speculative_tokens": 3, "block_size": "auto"}], indirect=True
)
def test_dummy_weights_and_drafts_are_shared_and_a_dead_rank_fails_the_engine(directory, shared):
    with running(tiny_assembly(directory, **OPTIONS, load_format="dummy")) as engine:
        expected = engine.generate(PROMPTS, max_tokens=8)
    assert shared.scheduler.blocks.block_size in AUTO_BLOCK_SIZES  # which rank 1 has as well
    with running(shared) as engine:
        assert engine.generate(PROMPTS, max_tokens=8) == expected
        assert engine.history[-1].stats.accepted_tokens > 0
        shared.workers.processes[1].kill()
        message = engine.steps.get(timeout=WAIT)
        while not isinstance(message, EngineDied):
            message = engine.steps.get(timeout=WAIT)
        assert "rank 1 of 2 has ended: its process ended with code -9" in message.reason
        assert not engine.engine.alive


def test_rank_that_does_not_start_is_named(directory, monkeypatch):
    monkeypatch.setattr(child_process, "find_python", lambda: "/bin/false")
    with pytest.raises(ConfigError, match="tensor_parallel_size: rank 1 did not start: its process ended with code 1"):
        tiny_assembly(directory, tensor_parallel_size=2)


def test_indivisible_model_is_rejected(directory, tmp_path):
    with pytest.raises(ConfigError, match="tensor_parallel_size=3: must divide 4, the model's num_attention_heads"):
        tiny_assembly(directory, tensor_parallel_size=3)
    with pytest.raises(ConfigError, match="tensor_parallel_size=4: must divide 2, the model's num_key_value_heads"):
        tiny_assembly(directory, tensor_parallel_size=4)
    save_tiny(hf.GPT2Config(n_embd=32, n_head=2, n_layer=1, vocab_size=320, n_positions=64), tmp_path)
    with pytest.raises(ConfigError, match=r"tensor_parallel_size=2: must be 1 \(transformers has no .* gpt2\)"):
        tiny_assembly(tmp_path, tensor_parallel_size=2)


def test_disk_cache_with_tensor_parallelism_is_rejected(directory, tmp_path):
    with pytest.raises(ConfigError, match=r"disk_cache_dir=.*tensor_parallel_size=2"):
        tiny_assembly(directory, tensor_parallel_size=2, swap_space=0.001, disk_cache_dir=str(tmp_path))
