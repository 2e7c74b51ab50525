"""Warm-up: the memory of CUDA graphs, predicted with a fake GPU, and the kernels that are compiled."""

import itertools
import json
import os
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers as hf

from paged_backend.api.config import EngineConfig
from paged_backend.api.request import GenerateRequest
from paged_backend.api.sampling_params import SamplingParams
from paged_backend.engine import warm_up
from paged_backend.engine.warm_up import distinct_layers
from paged_backend.execution import graphs
from paged_backend.execution.batch import pack
from paged_backend.scheduling.group import Group
from paged_backend.scheduling.plan import Chunk, Plan
from paged_kernels import launch_table
from paged_kernels.launch import Device
from paged_kernels.launch_table import Tile, TuningKey
from paged_kernels.layer_cache import LayerCache
from paged_kernels.paged_attention import plan_launch
from paged_kernels.paging import Paging
from tests.support.fake_gpu import OPTIONS
from tests.support.families import COMMON
from tests.support.in_process import tiny_assembly
from tests.support.pairwise import mostly_nightly

ROOT = Path(__file__).parents[2]
ROW_BYTES, GRAPH_BYTES, WORKSPACE, CACHED = 900, 7, 32, 5000


class FakeMemory:
    """A GPU whose allocator keeps freed memory until its cache is emptied, which a graph capture does as well."""

    def __init__(self):
        self.cached, self.permanent, self.captured = CACHED, 0, 0

    def capture(self, config, loaded, runner, shapes):
        self.cached = 100  # the old cache is freed, and a little is cached anew
        self.permanent = WORKSPACE
        drafts = sum(shape.queries == 1 and not shape.shared for shape in shapes) if runner.drafter else 0
        self.captured = max(shape.rows for shape in shapes) * ROW_BYTES + GRAPH_BYTES * (len(shapes) + drafts)

    def release_graphs(self):
        self.captured = 0

    def empty(self):
        self.cached = 0

    def free(self, device):
        return 10**6 - self.cached - self.permanent - self.captured, 10**6


@pytest.mark.parametrize("shares_prefixes", [False, True])
@pytest.mark.parametrize("drafts", [False, True])
@pytest.mark.parametrize("num_drafts", [0, 4])
@pytest.mark.parametrize("max_num_seqs", [1, 2, 64, 100])
def test_graph_memory_is_predicted(monkeypatch, max_num_seqs, num_drafts, drafts, shares_prefixes):
    memory = FakeMemory()
    monkeypatch.setattr(warm_up, "capture_graphs", memory.capture)
    monkeypatch.setattr(torch.cuda, "empty_cache", memory.empty)
    monkeypatch.setattr(torch.cuda, "mem_get_info", memory.free)
    kv = SimpleNamespace(device=torch.device("cuda"), layers=())
    runner = SimpleNamespace(
        kv=kv, shares_prefixes=shares_prefixes, drafter=drafts, release_graphs=memory.release_graphs
    )
    options = {"max_num_seqs": max_num_seqs, "num_speculative_tokens": num_drafts}
    config = EngineConfig.from_options({"model": "x"} | options)
    predicted = warm_up.graph_bytes(config, None, runner)
    memory.capture(config, None, runner, warm_up.graph_shapes_of(config, runner))
    assert predicted == memory.captured
    shapes = graphs.graph_shapes(max_num_seqs, 512, queries=1 + num_drafts, shared=shares_prefixes)
    assert warm_up.graph_shapes_of(config, runner) == shapes


def compiled(paging, heads, kv_heads):
    """Yield what is compiled into the attention kernels of a step: their constants and absent arguments."""
    pool = torch.empty(1, kv_heads, 16, 128, dtype=torch.bfloat16, device="meta")
    query = torch.empty(len(paging.slots), heads, 128, dtype=torch.bfloat16, device="meta")
    options = dict(scale=1.0, sliding_window=None, softcap=None, sinks=None, device=Device("sm_90", 132))
    for planned in plan_launch(torch.empty_like(query), query, LayerCache(pool, pool), paging, **options):
        constants = {name: value for name, value in planned.arguments.items() if name.isupper() or name == "num_warps"}
        absent = {name for name, value in planned.arguments.items() if value is None}
        yield planned.kernel.__name__, frozenset(constants.items()), frozenset(absent)


def warmed_variants(config, heads, kv_heads):
    found = set()
    for step in warm_up.warm_up_steps(config, 16384, 320):
        with step.forced():
            for sharing in (None, heads // kv_heads):
                found.update(compiled(pack(step.plan, block_size=16, gqa_group=sharing).paging, heads, kv_heads))
    return found


def captured(shape, max_context_len):
    """Return the addresses of a captured step, without values."""
    lens = torch.empty(shape.seqs, dtype=torch.int32)
    starts, slots = torch.empty(shape.seqs + 1, dtype=torch.int32), torch.empty(shape.rows, dtype=torch.int64)
    shared = replace(graphs.NO_SHARED_PREFIXES, lens=lens, members=lens, max_len=max_context_len)
    return Paging(
        slots, lens[:, None], lens, starts, shape.queries, max_context_len, shared if shape.shared else None
    )  # fmt: skip


def tile_table(*lengths):
    """Return a table whose tiles differ from each other, for attention in 16 bits with heads of 128."""
    entries = [
        (TuningKey(128, 2, 16, False, length), Tile(block_m, block_n, warps, stages))
        for length, (block_m, block_n, warps, stages) in lengths
    ]
    return launch_table.Table("sm_90", dict(entries))


# As the tuner may write them: the tiles of an H100 in GPU tests, and tiles that grow with the length.
TABLES = {
    "committed": None,
    "large tiles for short chunks": tile_table((64, (128, 64, 4, 4)), (131072, (128, 64, 8, 3))),
    "a tile for each length": tile_table(
        (64, (64, 32, 4, 3)),
        (128, (64, 64, 4, 3)),
        (256, (128, 32, 4, 3)),
        (512, (128, 64, 4, 3)),
        (4096, (128, 64, 8, 3)),
    ),
}


HEADS = [(32, 8), (16, 8), (9, 3), (14, 2)]


@pytest.mark.parametrize(
    ("sizes", "table"),
    mostly_nightly(itertools.product(HEADS, TABLES), default=zip(HEADS, itertools.cycle(TABLES), strict=False)),
    ids=str,
)
def test_warm_up_compiles_every_attention_variant(sizes, table, monkeypatch):
    heads, kv_heads = sizes
    monkeypatch.setattr(launch_table, "_tables", {})
    if TABLES[table]:
        launch_table.use_table(TABLES[table])
    config = EngineConfig.from_options({"model": "x", "max_num_seqs": 64, "max_num_batched_tokens": 2048})
    group = heads // kv_heads
    warmed = warmed_variants(config, heads, kv_heads)
    rnd = random.Random(0)
    for _ in range(40):
        chunks, left, own = [], 2048, 1
        usual = rnd.choice((None, None, 20, 60, 100, 128, 250, 500))
        sharing_rows = rnd.choice((0, 0, 4, 20, 50))  # decode rows that share a prefix
        for row in range(sharing_rows + rnd.choice((1, 2, 5, 14, 30) if sharing_rows < 30 else (0, 1, 14))):
            length = min(left, usual or rnd.choice((1, 1, 1, 3, 20, 100, 700, 2000)))
            start = rnd.choice((0, 10, 300, 3000, 14000))
            if row < sharing_rows:
                length, start = 1, rnd.choice((4000, 14000))
            if not length:
                break
            left -= length
            tokens = (0,) * (start + length)
            sequence = Group(GenerateRequest(0, tokens, SamplingParams(), 0, frozenset())).leader
            shared = 200 if row < sharing_rows else rnd.randrange(2) * 200  # blocks
            sequence.tables = [[0] * shared + list(range(own, own + 1100))]
            own += 1100
            chunks.append(Chunk(sequence, start, length, (sequence,)))
        paging = pack(Plan(tuple(chunks)), block_size=16, gqa_group=rnd.choice((None, group))).paging
        assert warmed.issuperset(compiled(paging, heads, kv_heads))
    for shape in graphs.graph_shapes(64, 2048, shared=True):
        assert warmed.issuperset(compiled(captured(shape, max_context_len=16384), heads, kv_heads))


@pytest.mark.parametrize(("heads", "kv_heads"), [(32, 8), (16, 8), (9, 3), (8, 8)])
def test_warm_up_compiles_every_tile_of_shared_prefixes(heads, kv_heads):
    config = EngineConfig.from_options({"model": "x", "max_num_seqs": 512, "max_num_batched_tokens": 2048})
    group = heads // kv_heads

    def variants(plan):
        paging = pack(plan, block_size=16, gqa_group=group).paging
        return {one for one in compiled(paging, heads, kv_heads) if one[0] == "prefix_attention_kernel"}

    warmed = warmed_variants(config, heads, kv_heads)
    sequence = Group(GenerateRequest(0, (0,) * 3000, SamplingParams(), 0, frozenset())).leader
    sequence.tables = [list(range(200))]
    found = set()
    for count in (*range(2, 70), 127, 128, 129, 255, 256, 257, 500, 512):
        found |= variants(Plan((Chunk(sequence, 2999, 1, (sequence,)),) * count))
    assert len(found) > 1
    assert found <= warmed


@pytest.mark.parametrize("max_num_seqs", [3, 40, 256])
def test_warm_up_compiles_every_row_tile(max_num_seqs, monkeypatch):
    """Every entry of the table differs, so that each is compiled by itself."""
    monkeypatch.setattr(launch_table, "_tables", {})
    warps = zip(launch_table.ROW_BUCKETS, (1, 2, 4), strict=True)
    entries = [
        (launch_table.RowTuningKey(kind, 4096, rows), launch_table.RowTile(1024, n))
        for rows, n in warps
        for kind in launch_table.DEFAULT_ROW_TILES
    ]
    launch_table.use_table(launch_table.Table("sm_91", dict(entries)))

    def warps_for(kind, rows):
        return launch_table.row_tile("sm_91", kind, width=4096, rows=rows).num_warps

    options = {"model": "x", "max_num_seqs": max_num_seqs, "max_num_batched_tokens": 2048}
    plans = [step.plan for step in warm_up.warm_up_steps(EngineConfig.from_options(options), 16384, 320)]
    for kind in launch_table.DEFAULT_ROW_TILES:
        assert {warps_for(kind, plan.num_tokens) for plan in plans} >= {
            warps_for(kind, rows) for rows in range(1, 2049)
        }
    drawn = {}
    for plan in plans:
        if plan.chunks[0].scored:
            continue
        drawn.setdefault(plan.chunks[0].sampled_sequences[0].request.sampling, set()).add(
            warps_for("sampling", len(plan.chunks))
        )
    assert len(drawn) == len(warm_up.SAMPLINGS)
    for found in drawn.values():
        assert found >= {warps_for("sampling", rows) for rows in range(1, max_num_seqs + 1)}


SERVED = [
    ("llama", {"dtype": "float32"}),
    ("llama", {"dtype": "float16", "kv_cache_dtype": "fp8", "max_num_seqs": 300}),
    ("qwen3", {"dtype": "bfloat16"}),
    ("qwen3", {"dtype": "bfloat16", "num_speculative_tokens": 3, "block_size": 32}),
    ("qwen3", {"dtype": "bfloat16", "batch_invariant": True}),
]


@pytest.mark.nightly
def test_serving_with_new_features_compiles_no_kernel(monkeypatch):
    monkeypatch.setenv("PAGED_GPU_FEATURES", "dependent_launches,producers")
    assert "hopper_attention_kernel" in check_serving("qwen3", {"dtype": "bfloat16"})


@pytest.mark.parametrize(("family", "options"), mostly_nightly(SERVED, default=SERVED[2:3]), ids=str)
def test_serving_compiles_no_kernel(family, options):
    check_serving(family, options)


def check_serving(family, options):
    """Check Triton's own choice of variants, for random requests: every one is compiled before the model is ready.

    Return the names of the kernels.
    """
    command = [sys.executable, "-m", "tests.support.fake_gpu", family, json.dumps(options)]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    variants = json.loads(done.stdout.splitlines()[-1])
    served = set(variants["served"])
    is_invariant = "batch_invariant" in options
    attention = "invariant_attention_kernel" if is_invariant else "paged_attention_kernel"
    kernels = {attention, "best_kernel", "filter_kernel"}
    if is_invariant:
        kernels |= {"add_partitions_kernel", "invariant_linear_kernel"}
    elif family == "qwen3" and "num_speculative_tokens" not in options:  # a step with draft tokens shares no prefixes
        kernels.add("prefix_attention_kernel")
    found = {one.split()[0] for one in served}
    assert found >= kernels
    assert not is_invariant or found.isdisjoint({"paged_attention_kernel", "few_rows_linear_kernel"})
    # Of the model's four layers the warm-up runs two, with and without shared prefixes.
    config = EngineConfig.from_options({"model": "x"} | OPTIONS | options)
    steps = sum(1 for _ in warm_up.warm_up_steps(config, 16384, 331))
    for kernel in {attention, "rope_kv_write_kernel"} - ({attention} if "hopper_attention_kernel" in found else set()):
        launches = sum(count for one, count in variants["warmed"].items() if one.split()[0] == kernel)
        assert launches == (1 if is_invariant else 2) * 2 * steps
    assert served - set(variants["warmed"]) == set()
    return found


def test_every_warm_up_plan_can_run(tiny):
    """All plans use block 0 only."""
    assembly = tiny_assembly(tiny[0])
    size = assembly.scheduler.blocks.block_size
    options = {"model": "x", "max_num_seqs": 8, "max_num_batched_tokens": 64, "block_size": size}
    returned = set()
    for step in warm_up.warm_up_steps(EngineConfig.from_options(options), 256, 320):
        plan = step.plan
        with step.forced():
            result = assembly.runner.launch(pack(plan, block_size=size)).result()
        assert len(result.tokens) == len(plan.chunks)
        assert sum(map(len, result.prompt_values.get("logprobs", {}).values())) == sum(
            len(chunk.scored) for chunk in plan.chunks
        )
        returned |= {name for name, value in vars(result).items() if value}
    assert returned == {"tokens", "values", "prompt_values"}


def test_time_of_a_decode_step_is_measured(tiny):
    made = tiny_assembly(tiny[0])
    config = EngineConfig.from_options({"model": "x", "block_size": made.scheduler.blocks.block_size})
    assert 0 < warm_up.measure_decode(config, made.loaded, made.runner) < 60


def test_a_cpu_loads_with_more_sequences_than_the_tokens_of_its_warm_up(tiny, monkeypatch):
    monkeypatch.setattr(warm_up, "MOST_CPU_TOKENS", 4)
    assert tiny_assembly(tiny[0], max_num_seqs=8).scheduler.max_num_seqs == 8


DEEP = COMMON | {"num_hidden_layers": 8}
SLIDING = {"layer_types": ["sliding_attention", "sliding_attention", "full_attention", *["sliding_attention"] * 5]}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (hf.LlamaConfig(**DEEP), 2),
        (hf.Qwen3Config(**DEEP, head_dim=16), 2),
        (hf.Gemma3TextConfig(**DEEP, **SLIDING, head_dim=16, sliding_window=8), 3),
        (hf.GPT2Config(vocab_size=32, n_embd=32, n_layer=4, n_head=2), 2),
    ],
    ids=lambda value: type(value).__name__,
)
def test_one_layer_of_each_kind_runs(config, expected):
    model = hf.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    layers = next(module for module in model.modules() if isinstance(module, torch.nn.ModuleList))
    runs = []
    for layer in layers:
        layer.register_forward_hook(lambda layer, *_: runs.append(layer))
    tokens = torch.zeros(1, 4, dtype=torch.int64)
    with torch.no_grad():
        with distinct_layers(model) as count:
            model(tokens, use_cache=False)
        assert (count, runs) == (expected, list(layers)[:expected])
        runs.clear()
        model(tokens, use_cache=False)
        assert runs == list(layers)


def test_layers_are_restored_after_an_error():
    model = hf.AutoModelForCausalLM.from_config(hf.LlamaConfig(**DEEP), dtype=torch.float32)
    with pytest.raises(RuntimeError), distinct_layers(model):
        raise RuntimeError
    assert len(model.model.layers) == 8
