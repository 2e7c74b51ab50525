"""`block_size=auto`: which size is chosen, why, and that the engine then runs as with this number."""

import json
import logging
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from paged_backend.api.config import AUTO_BLOCK_SIZES, EngineConfig
from paged_backend.api.errors import ConfigError
from paged_backend.api.request import GenerateRequest
from paged_backend.api.sampling_params import SamplingParams
from paged_backend.engine import block_size
from paged_backend.engine.block_size import CURVES, Curve, choose_block_size, resolve_block_size, waste
from paged_backend.engine.sizing import Device, plan, table
from paged_backend.files.start_checks import check_start
from paged_backend.kv.blocks import BlockManager
from paged_backend.kv.cache import CacheLayout, CacheSpec, LayerShape, StateShape, TensorShape
from paged_backend.scheduling.scheduler import Scheduler
from paged_backend.server import service
from tests.support.families import FAMILIES, HYBRID_FAMILIES
from tests.support.in_process import running, save_tiny, tiny_assembly
from tests.support.scheduler_steps import step

ROOT = Path(__file__).resolve().parents[2]
FULL, WINDOWED = LayerShape(8, 128), LayerShape(8, 128, window=512)
LATENT = LayerShape(1, 576, 512, latent=True)
STATE = StateShape(TensorShape((8192, 4), torch.bfloat16), TensorShape((32, 128, 128), torch.float32))
CONFIG = EngineConfig(model="m")
EVEN = dict.fromkeys(AUTO_BLOCK_SIZES, 1e10)
FAST = {size: 1e10 * size for size in AUTO_BLOCK_SIZES}
NO_TIME = dict.fromkeys(AUTO_BLOCK_SIZES, 0.0)


@pytest.fixture
def curve(monkeypatch):
    """Return a function that replaces what a CPU has measured."""

    def replaced(**changes):
        made = replace(Curve("a CPU", 1e10, EVEN, EVEN, NO_TIME), **changes)
        monkeypatch.setattr(block_size, "CURVES", {"cpu": made})

    return replaced


def cache(*layers, states=(), max_model_len=1 << 16):
    return CacheSpec(layers, states, torch.bfloat16, max_model_len)


# --- the choice -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "of", "weights", "expected"),
    [
        ({}, cache(FULL, max_model_len=100), 0.0, 8),  # all sizes take as long, so the one with the least waste
        ({}, cache(FULL), 0.0, 16),  # 8 has 0.8% less waste, which is not enough to leave the default
        ({"heads": FAST}, cache(FULL), 0.0, 128),
        ({"heads": FAST}, cache(FULL), 1e12, 16),  # attention takes little of the step
        ({"heads": FAST}, cache(LATENT), 0.0, 16),
        ({"latents": FAST}, cache(LATENT), 0.0, 128),
        ({"bookkeeping": {size: 1.0 / size for size in AUTO_BLOCK_SIZES}}, cache(FULL), 0.0, 128),
        ({"heads": FAST}, cache(FULL, max_model_len=20), 1e9, 8),  # larger blocks are nearly empty
    ],
)
def test_the_least_cost_is_chosen(curve, changes, of, weights, expected):
    curve(**changes)
    assert choose_block_size(CONFIG, of, weights, "cpu").block_size == expected


def test_reasons_have_all_candidates(curve):
    curve(heads=FAST)
    choice = choose_block_size(CONFIG, cache(FULL), 0.0, "cpu")
    step_ms = 16 * 2048 * 4096 / 1e10 * 1e3
    assert f"(8: {step_ms / 8:.4g} ms, 0.7% waste, cost " in choice.reasons
    assert f"; 128: {step_ms / 128:.4g} ms, 13.3% waste, cost 1.000; times of a CPU)" in choice.reasons
    assert all(f"{size}: " in choice.reasons for size in AUTO_BLOCK_SIZES)


def test_a_device_without_measurements_and_a_model_without_tokens_have_the_default(curve):
    curve(heads=FAST)
    unmeasured = choose_block_size(CONFIG, cache(FULL), 0.0, "cuda")
    assert unmeasured == (16, "the default, because attention is not measured on this device (cuda)")
    for kept in (None, cache(states=(STATE,))):
        choice = choose_block_size(CONFIG, kept, 0.0, "cpu")
        assert choice.block_size == 16 and "the default, because the model keeps nothing" in choice.reasons


def test_the_table_is_what_was_measured():
    report = json.loads((ROOT / "docs/results/block_size.json").read_text())
    measured, curve = {record["name"]: record["value"] for record in report["records"]}, CURVES["cpu"]
    assert report["run"]["date"][:10] in curve.measured and report["run"]["gpu"] is None
    assert curve.read == pytest.approx(1e9 * measured["linear layer, weights"], rel=0.005)
    tables = (("decode, heads", curve.heads, 1e9), ("decode, latents", curve.latents, 1e9))
    for name, by_size, unit in (*tables, ("bookkeeping", curve.bookkeeping, 1e-6)):
        expected = {size: unit * measured[f"{name}, block_size={size}"] for size in AUTO_BLOCK_SIZES}
        assert by_size == pytest.approx(expected, rel=0.005)


def test_choices_that_the_guide_names():
    """Most models keep the default; short windows make larger blocks waste more."""
    windowed = [LayerShape(8, 64)] * 12 + [LayerShape(8, 64, window=128)] * 12
    chosen = [choose_block_size(CONFIG, cache(*layers), 14e9, "cpu") for layers in ([FULL] * 32, windowed)]
    assert [choice.block_size for choice in chosen] == [16, 8]


# --- waste ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [8, 32, 128])
@pytest.mark.parametrize("layers", [(FULL,), (FULL, WINDOWED, WINDOWED), (WINDOWED,)], ids=["full", "both", "window"])
def test_pages_held_are_those_of_a_sequence_in_the_pool(layers, size):
    layout = CacheLayout.of(layers, size, torch.bfloat16, max_model_len=4096, max_pending=1000).blocks
    blocks = BlockManager(layout.pages_for([740], [740], 0), layout)
    scheduler = Scheduler(blocks, max_num_seqs=1, max_num_batched_tokens=500)
    scheduler.add(GenerateRequest(0, (0,) * 600, SamplingParams(max_tokens=140), 0, frozenset()))
    found = []
    for _ in range(140):
        step(scheduler)
        if scheduler.has_work and scheduler.running[0].leader.generated:
            found.append((blocks.num_used, layout.held(scheduler.running[0].leader.computed)))
    assert len(found) > 130
    assert [used for used, _ in found] == [held for _, held in found]


def test_waste_is_about_half_a_block_of_each_sequence():
    mean = sum(block_size.LENGTHS) / len(block_size.LENGTHS)
    for size in AUTO_BLOCK_SIZES:
        assert waste(CONFIG, cache(FULL), size) == pytest.approx((size - 1) / 2 / mean, rel=0.12)
    assert waste(CONFIG, cache(FULL, WINDOWED), 16) > waste(CONFIG, cache(FULL), 16)
    assert 0 < waste(CONFIG, cache(FULL, states=(STATE,) * 20), 16) < waste(CONFIG, cache(FULL), 16) / 10
    assert waste(CONFIG, cache(FULL, max_model_len=24), 32) > 1


# --- the engine -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "gemma3", "deepseek_v2", "falcon_h1"])
def test_the_choice_for_a_model_is_always_the_same_and_logged(family, tmp_path, caplog):
    (FAMILIES | HYBRID_FAMILIES)[family]().save_pretrained(tmp_path)
    options = {"model": str(tmp_path), "load_format": "dummy", "device": "cpu", "max_model_len": 56}
    config = EngineConfig.from_options(options | {"block_size": "auto"})
    caplog.set_level(logging.INFO, "paged_llm.startup")
    resolved = resolve_block_size(config)
    assert resolved == resolve_block_size(config) == resolve_block_size(resolved)
    assert resolved == replace(config, block_size=resolved.block_size) and resolved.block_size in AUTO_BLOCK_SIZES
    lines = {record.getMessage() for record in caplog.records if record.getMessage().startswith("Block size: ")}
    (line,) = lines  # both times the same
    assert line.startswith(f"Block size: {resolved.block_size} tokens, ")
    planned = plan(config, Device("cpu", 10**9))
    assert (planned.block_size, line in table(planned)) == (resolved.block_size, True)
    assert "Block size" not in table(plan(resolved, Device("cpu", 10**9)))


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_tokens_are_those_of_the_number(family, tmp_path, curve):
    curve(heads=FAST, bookkeeping={size: 1.0 / size for size in AUTO_BLOCK_SIZES})
    save_tiny(FAMILIES[family](), tmp_path)
    prompts, found = [[5, 6, 7], list(range(40, 80))], []
    for size in ("auto", 128, 4):
        assembly = tiny_assembly(tmp_path, block_size=size)
        found.append(assembly.scheduler.blocks.block_size)
        with running(assembly) as engine:
            found.append(engine.generate(prompts, max_tokens=20))
    assert found[::2] == [128, 128, 4]
    assert found[1] == found[3] == found[5]


def test_replicas_get_the_number(tiny, monkeypatch):
    """They, and the choice between them by hashes of blocks, start before the model is loaded."""
    started = []

    def start(config, labels, listing):
        started.append(config.block_size)
        raise ConfigError("enough")

    monkeypatch.setattr(service, "Replicas", start)
    config = EngineConfig.from_options({"model": str(tiny[0]), "block_size": "auto", "data_parallel_size": 2})
    with pytest.raises(ConfigError, match="enough"):
        service.Service(config, None, {"model": "m"})
    assert started and started[0] in AUTO_BLOCK_SIZES


def test_the_pool_is_checked_before_the_choice(tiny):
    """A start is rejected only if no candidate can have enough memory."""
    least = {"model": str(tiny[0]), "device": "cpu", "dtype": "float32", "block_size": "auto"}
    block = 8 * 3 * 2 * 2 * 16 * 4  # tokens, layers, keys and values, heads, elements, bytes
    check_start(EngineConfig.from_options(least | {"kv_cache_memory_bytes": block}))
    with pytest.raises(ConfigError, match=f"kv_cache_memory_bytes={block - 1}: one block of 8 tokens takes at least"):
        check_start(EngineConfig.from_options(least | {"kv_cache_memory_bytes": block - 1}))
    check_start(EngineConfig.from_options(least | {"num_gpu_blocks_override": 2, "max_model_len": 256}))
    with pytest.raises(ConfigError, match="max_model_len=256: the KV cache holds at most 128 tokens"):
        check_start(EngineConfig.from_options(least | {"num_gpu_blocks_override": 1, "max_model_len": 256}))
