"""`paged plan`: the arithmetic, compared with a model that is loaded."""

import json
from dataclasses import replace

import pytest
import torch

from paged_backend.api.config import EngineConfig
from paged_backend.api.errors import ConfigError
from paged_backend.distributed.process_group import ProcessGroup
from paged_backend.engine import sizing
from paged_backend.engine.model_preparation import prepare_model
from paged_backend.engine.sizing import Device, plan, table
from paged_backend.files.start_checks import FULL_ATTENTION, check_start
from paged_backend.loading import model_loader
from paged_backend.loading.attention_probe import probe_layers
from paged_backend.loading.model_sizes import described_model
from tests.support.families import FAMILIES, HYBRID_FAMILIES

OPTIONS = {"dtype": "float32", "block_size": 4, "max_num_seqs": 3}


def test_plan_is_that_of_the_loaded_model(tiny):
    config = EngineConfig.from_options({"model": str(tiny[0]), "kv_cache_memory_bytes": 200_000} | OPTIONS)
    planned = plan(config, Device("cpu", 10**9), [8, 200])
    prepared = prepare_model(config, ProcessGroup(torch.device("cpu")))
    spec, layout = prepared.loaded.spec, prepared.pools.layout.blocks
    assert planned.parameters == spec.num_parameters
    assert planned.weight_bytes == 4 * spec.num_parameters
    assert [row.requests for row in planned.rows] == [
        prepared.pools.num_pages // layout.pages_for([length], [length], 0) for length in (8, 200)
    ]
    assert [row.batch for row in planned.rows] == [3, min(3, planned.rows[1].requests)]
    assert "requests that fit" in table(planned)


def test_times_follow_from_bandwidth_and_arithmetic(tiny):
    config = EngineConfig.from_options({"model": str(tiny[0])} | OPTIONS)
    slow, fast = (plan(config, Device("cpu", 10**9, rate, 1e30), [64]).rows[0] for rate in (1e6, 2e6))
    assert slow.step_ms == pytest.approx(2 * fast.step_ms)
    one, two = (plan(config, Device("cpu", 10**9, 1e30, 1e9), [length]).rows[0].prefill_ms for length in (64, 128))
    assert two == pytest.approx(2 * one)
    assert plan(config, Device("cpu", 10**9), [64]).rows[0].step_ms is None


def test_plan_reads_no_weights_and_says_what_does_not_fit(tiny, monkeypatch, capsys):
    monkeypatch.setattr(model_loader, "load_weights", None)
    values = {"options": {"model": str(tiny[0])} | OPTIONS, "contexts": [], "json": True}
    assert sizing.main(values | {"device": {"kind": "cuda", "memory": 10_000}}) == 0
    assert json.loads(capsys.readouterr().out)["pool_bytes"] == 0
    with pytest.raises(ConfigError, match=r"^context=257: must be at most 256"):
        plan(EngineConfig.from_options(values["options"]), Device("cpu", 10**9), [257])


@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
@pytest.mark.parametrize("family", FULL_ATTENTION)
def test_a_start_knows_the_least_kv_cache_without_layers(family, kv_dtype, tmp_path):
    FAMILIES[family]().save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"model": {}}')
    options = {"model": str(tmp_path), "load_format": "dummy", "device": "cpu", "kv_cache_dtype": kv_dtype} | OPTIONS
    config = EngineConfig.from_options(options)
    block = config.block_size * plan(config, Device("cpu", 10**9)).kv_bytes_per_token
    check_start(replace(config, kv_cache_memory_bytes=block))
    with pytest.raises(ConfigError, match=f"^kv_cache_memory_bytes={block - 1}: .* takes at least {block} bytes"):
        check_start(replace(config, kv_cache_memory_bytes=block - 1))


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt_oss", "qwen3_moe", "lfm2", "falcon_h1", "qwen3_next"])
def test_layers_are_known_without_weights(family):
    """Their shapes and windows, and the states of recurrent layers, are those of the model with weights."""
    from transformers import AutoModelForCausalLM

    make = (FAMILIES | HYBRID_FAMILIES)[family]
    real = AutoModelForCausalLM.from_config(make(), dtype=torch.bfloat16).eval()
    expected, found = probe_layers(real), probe_layers(described_model(make(), False).to(torch.bfloat16).eval())
    assert found.layers == expected.layers
    assert found.states == expected.states
