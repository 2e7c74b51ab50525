"""Tensor parallelism: which models and devices allow it, and a model on two ranks."""

import pytest
import torch
import transformers as hf

from paged_backend.api.config import EngineConfig
from paged_backend.api.errors import ConfigError
from paged_backend.loading.description import check_shards, pick_device
from paged_backend.models import tensor_parallel as parallel
from tests.support.families import COMMON
from tests.support.in_process import generate_with_transformers, running, save_tiny, tiny_assembly


def config_of(size, **options):
    return EngineConfig.from_options({"model": "x", "tensor_parallel_size": size} | options)


@pytest.mark.parametrize(
    ("size", "model", "reason"),
    [
        (3, hf.Qwen2Config(**COMMON), "must divide 4, the model's num_attention_heads"),
        (4, hf.Qwen2Config(**COMMON), "must divide 2, the model's num_key_value_heads"),
        (2, hf.GPT2Config(), r"must be 1 \(transformers has no .* gpt2\)"),
    ],
    ids=["query heads", "KV heads", "no plan"],
)
def test_model_that_cannot_be_sharded_is_rejected(size, model, reason):
    with pytest.raises(ConfigError, match=f"tensor_parallel_size={size}: {reason}"):
        check_shards(config_of(size), model)
    check_shards(config_of(1), model)


def test_divisible_model_is_accepted():
    check_shards(config_of(2), hf.Qwen2Config(**COMMON))


def test_each_rank_has_its_own_gpu():
    cuda, cpu = torch.device("cuda", 0), torch.device("cpu")
    assert [parallel.pick_rank_device(cuda, rank).index for rank in range(2)] == [0, 1]
    assert parallel.pick_rank_device(cpu, 1) == cpu


def test_ranks_on_a_cpu_need_gpus_to_be_hidden(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ConfigError, match='tensor_parallel_size=2: device="cpu" requires that no GPU is visible'):
        pick_device(config_of(2, device="cpu"))
    assert pick_device(config_of(1, device="cpu")).type == "cpu"


def test_more_ranks_than_gpus_are_rejected(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ConfigError, match="tensor_parallel_size=4: must be at most 2, the number of visible GPUs"):
        pick_device(config_of(4))


def test_limit_counts_the_gpus_of_all_machines(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ConfigError, match="tensor_parallel_size=8: must be at most 2 x 2, the visible GPUs"):
        pick_device(config_of(8, nnodes=2))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    assert pick_device(config_of(8, nnodes=2)).type == "cuda"


@pytest.mark.ranks
def test_model_in_16_bits_is_verified(tmp_path):
    """The verification copies layers, in float32. The copies must not use the weights of the model."""
    model = save_tiny(hf.Qwen3Config(**COMMON, tie_word_embeddings=True), tmp_path)
    assembly = tiny_assembly(tmp_path, dtype="bfloat16", tensor_parallel_size=2)
    with running(assembly) as engine:
        assert engine.generate([[5] * 7], max_tokens=3) == [generate_with_transformers(model, [5] * 7, 3)]
    assembly.close()
