"""Models that run one layer of each kind."""

import pytest
import torch
import transformers as hf

from paged_backend.models.distinct_layers import distinct_layers
from tests.support.families import COMMON

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
