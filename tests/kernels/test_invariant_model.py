"""A whole model over the batch-invariant kernels of a GPU: bits of its logits in different steps."""

import pytest
import torch
import transformers as hf

from paged_backend.api.request import GenerateRequest
from paged_backend.api.sampling_params import SamplingParams
from paged_backend.execution.batch import pack
from paged_backend.execution.runner import paged_logits
from paged_backend.execution.upload import DeviceUpload
from paged_backend.kv.cache import CacheLayout, KVCache, LayerShape
from paged_backend.models import fusion
from paged_backend.models.attention import ATTENTION, AttentionSpec
from paged_backend.models.batch_invariance import convert_on_gpu
from paged_backend.models.overrides import use
from paged_backend.scheduling.group import Group
from paged_backend.scheduling.plan import Chunk, Plan
from paged_kernels import invariant_attention, ops
from tests.support.families import COMMON
from tests.support.fixed_order_dot import create_dot

BLOCK_SIZE, LAYERS = 4, 2
PROMPT, OTHER = list(range(5, 50)), list(range(50, 70))


@pytest.fixture
def model(device, monkeypatch):
    """A fused model in float16, over the kernels of a GPU."""
    if device == "cpu":
        import triton.runtime.interpreter as interpreter

        monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)
        monkeypatch.setattr(
            ops, "_dispatch", lambda tensor, name, module=None: ops._implementation(module or name, name, False)
        )
    monkeypatch.setattr(invariant_attention, "PARTITION", 32)
    torch.manual_seed(0)
    config = hf.Qwen3Config(**COMMON | {"num_hidden_layers": LAYERS, "head_dim": 16})
    model = hf.AutoModelForCausalLM.from_config(config, dtype=torch.float16).eval().to(device)
    model.set_attn_implementation(ATTENTION)
    use(model, convert_on_gpu(model, fusion.fuse(model, [AttentionSpec(scale=0.25)] * LAYERS, {})))
    return model


class Steps:
    """Steps over a cache with room for two sequences."""

    def __init__(self, model, kv_dtype):
        shape = LayerShape(COMMON["num_key_value_heads"], 16, batch_invariant=True)
        self.model = model
        self.kv = KVCache.allocate(CacheLayout.of([shape] * LAYERS, BLOCK_SIZE, kv_dtype), 30, model.device)
        self.sequences = [
            Group(GenerateRequest(key, tuple(ids), SamplingParams(), 0, frozenset())).leader
            for key, ids in enumerate((PROMPT, OTHER))
        ]
        for sequence, first in zip(self.sequences, (29, 14), strict=True):
            sequence.tables = [list(range(first, first - 14, -1))]
        self._upload = DeviceUpload(model.device)

    def run(self, *lengths):
        """Compute that many tokens of each sequence. Returns the logits of the last token of the first."""
        pairs = [(one, count) for one, count in zip(self.sequences, lengths, strict=False) if count]
        chunks = tuple(Chunk(one, one.computed, count, sampled_sequences=(one,)) for one, count in pairs)
        logits = paged_logits(self.model, self._upload(pack(Plan(chunks), block_size=BLOCK_SIZE)), self.kv)
        for one, count in pairs:
            one.computed += count
        return logits[0]


@pytest.mark.nightly
def test_logits_do_not_depend_on_the_steps(model):
    length, kv_dtype = len(PROMPT), torch.int8
    whole = Steps(model, kv_dtype).run(length)
    for steps in ([(length, 20)], [(40, 3), (4, 1), (1, 1)], [(1, 20), (43,), (1,)]):
        batches = Steps(model, kv_dtype)
        logits = [batches.run(*lengths) for lengths in steps][-1]
        assert torch.equal(logits.view(torch.int16), whole.view(torch.int16)), steps
