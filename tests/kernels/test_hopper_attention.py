"""Attention of chunks with a producer, for Hopper: the algorithm, in an interpreter for Gluon, against the reference.

`test_aot` compiles the kernel.
"""

import importlib.util
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close

from paged_kernels import hopper_attention, paged_attention
from paged_kernels.attention_plan import launch_shape, prefix_tile
from paged_kernels.launch import PRODUCERS, Device, intercept_launches
from paged_kernels.launch_table import PRODUCER_TILES, Table, Tile, TuningKey, find_tile, use_table
from tests.support import gluon_interpreter
from tests.support.attention_cases import BATCHES, Case, make_inputs

KERNEL = "hopper_attention_kernel"
CASES = (
    Case("long", 2, 4, 64),
    Case("long", 1, 3, 128, block_size=32, sinks=True),
    Case("long", 1, 3, 128, block_size=256, sliding_window=70),
    Case("long", 2, 2, 64, block_size=16, softcap=5.0, sinks=True, strided=True),
    Case("padded", 1, 71, 64),  # two tiles of heads
    Case("long", 3, 1, 256, sliding_window=13),
)


@pytest.fixture(autouse=True)
def hopper(monkeypatch):
    """Plan for a Hopper with 3 multiprocessors, so that each program computes several tiles."""
    if torch.cuda.is_available():
        pytest.skip("on a GPU, kernel checks run the kernel itself")
    monkeypatch.setitem(BATCHES, "long", ((300, 300), (1, 5), (130, 517), (64, 64), (3, 200)))
    use(monkeypatch, "sm_90", 3)


def use(monkeypatch, chip, multiprocessors):
    device = Device(chip, multiprocessors, frozenset([PRODUCERS]))
    monkeypatch.setattr(paged_attention, "device_of", lambda of: device)


def attend(inputs, kernel=hopper_attention.hopper_attention_kernel, seed=0):
    """Return the attention, and the names of the kernels."""
    launched = []

    def launch(planned):
        launched.append(planned.kernel.__name__)
        if launched[-1] == KERNEL:
            gluon_interpreter.run(kernel, planned.grid, planned.arguments, seed=seed)
        else:
            planned.kernel[planned.grid](**planned.arguments)

    with intercept_launches(launch):
        found = paged_attention.paged_attention(*inputs.arrays, **inputs.settings)
    return found, launched


def check(case, **options):
    inputs = make_inputs(case, torch.float16)
    found, launched = attend(inputs, **options)
    expected = paged_attention.paged_attention_reference(*inputs.arrays, **inputs.settings)
    assert_close(found, expected, atol=4e-3, rtol=4e-3)
    return launched


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("case", CASES, ids=str)
def test_chunks_beside_other_sequences_match_reference(case, seed):
    assert check(case, seed=seed) == [KERNEL, "paged_attention_kernel"]


def test_a_sequence_alone_needs_one_launch(monkeypatch):
    monkeypatch.setitem(BATCHES, "alone", ((150, 1000),))
    assert check(Case("alone", 1, 4, 128)) == [KERNEL]


def test_a_short_chunk_alone_in_a_graph_of_longer_ones_is_computed(monkeypatch):
    use(monkeypatch, "sm_90", 1)
    monkeypatch.setitem(BATCHES, "alone", ((2, 40),))
    inputs = make_inputs(Case("alone", 1, 4, 128), torch.float16)
    query, cache, paging = inputs.arrays
    inputs = replace(inputs, arrays=(query, cache, replace(paging, max_query_len=64)))
    found, launched = attend(inputs)
    assert launched == [KERNEL]
    assert_close(found, paged_attention.paged_attention_reference(*inputs.arrays, **inputs.settings), atol=4e-3, rtol=0)


@pytest.mark.parametrize(
    "other", [Case("long", 1, 4, 80), Case("long", 1, 4, block_size=8), Case("long", 1, 4, format="fp8")], ids=str
)
def test_layers_that_cannot_be_copied_use_the_other_kernel(other):
    assert check(other) == ["paged_attention_kernel"]


def test_other_chips_have_no_producers(monkeypatch):
    use(monkeypatch, "sm_100", 3)
    assert check(CASES[0]) == ["paged_attention_kernel"]


def test_what_cannot_have_a_producer_keeps_its_tuned_tile(tables):
    key, other = TuningKey(128, 2, 16, False, 4096), Tile(128, 64, 8, 3)
    use_table(Table("sm_90", {key: PRODUCER_TILES[128], key._replace(length=64): other}))
    assert find_tile("sm_90", key) == other
    assert find_tile("sm_90", key, producer=True) == PRODUCER_TILES[128]
    options = dict(chip="sm_90", head_dim=128, itemsize=2, group=4, quantized=False)
    assert not prefix_tile(**options, num_seqs=64).producer
    step = dict(num_kv_heads=8, num_tokens=8192, max_query_len=4096, multiprocessors=132)
    assert launch_shape(**options, **step).large == other
    assert launch_shape(**options, **step, producer=True).large == PRODUCER_TILES[128]


PLACES = """
import re
import triton
from paged_kernels import aot
from paged_kernels.launch import OPTIONS

planned = aot._launch(aot.Case("sm_90", aot.PRODUCER))
source = aot._source(planned.kernel, planned.arguments)
ptx = triton.compile(source, target=aot.CHIPS["sm_90"][0], options={"num_warps": 4}).asm["ptx"]
offsets = dict(re.findall(r"add\\.s32\\s+(%r\\d+), %r\\d+, (\\d+);", ptx))
copies = re.findall(r"cp\\.async\\.bulk\\.tensor\\.2d\\S+ \\[(%r\\d+)\\]", ptx)
print(*sorted({int(offsets.get(copy, 0)) for copy in copies}))
"""


def test_blocks_are_copied_where_products_read_them(compiled_environment):
    """A tile of 128 rows is in two panels of 64 columns, so the second half of a block does not follow the first."""
    done = subprocess.run([sys.executable, "-c", PLACES], capture_output=True, text=True, env=compiled_environment)
    row, panel, stage = 128, 128 * 128, 2 * 128 * 128  # bytes; there are two stages of keys and two of values
    blocks = [block * 16 * row + half * panel for block in range(8) for half in range(2)]
    found = [int(place) for place in done.stdout.split()]
    assert found == sorted(found[0] + of * 2 * stage + place for of in range(2) for place in blocks), done.stderr


FAULTS = {  # what: (source, replacement)
    "products do not wait for keys": ("    mbarrier.wait(buffers.keys_filled.index(stage), count // STAGES & 1)\n", ""),
    "products do not wait for values": (
        "    mbarrier.wait(buffers.values_filled.index(stage), count // STAGES & 1)\n    acc",
        "    acc",
    ),
    "keys are free before their product": (
        "        scores = warpgroup_mma_wait(1, deps=[pending])\n"
        "        mbarrier.arrive(buffers.keys_free.index(now % STAGES), count=1)\n",
        "        mbarrier.arrive(buffers.keys_free.index(now % STAGES), count=1)\n"
        "        scores = warpgroup_mma_wait(1, deps=[pending])\n",
    ),
    "a stage is filled before it is free": (
        "    mbarrier.wait(free.index(stage), (count // STAGES & 1) ^ 1)  # the first ones are free\n",
        "",
    ),
    "values after the context are not cleaned": ("            if used < BLOCK_N:\n", "            if used < 0:\n"),
    "values are never free": ("            mbarrier.arrive(buffers.values_free.index(last), count=1)\n", ""),
    "a consumer cleans values of the next tile first": (
        "cleaned.index(cleaned & 1), cleaned // 2",
        "cleaned.index(0), cleaned",
    ),
    "both consumers wait for the same turn": ("(count & 1) ^ (1 - WHICH)", "count & 1"),
    "the last tiles of a round are left out": (
        "for number in range(num_rounds)",
        "for number in range(num_rounds - 1)",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_interpreter_shows_faults(fault, tmp_path):
    source, replacement = FAULTS[fault]
    correct = Path(hopper_attention.__file__).read_text()
    assert source in correct
    (tmp_path / "faulty.py").write_text(correct.replace(source, replacement))
    spec = importlib.util.spec_from_file_location("faulty", tmp_path / "faulty.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    def check_often():
        for seed in range(20):
            check(Case("long", 1, 4, 128), kernel=module.hopper_attention_kernel, seed=seed)

    with pytest.raises((AssertionError, gluon_interpreter.Deadlock)):
        check_often()
