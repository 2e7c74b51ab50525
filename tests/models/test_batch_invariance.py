"""Conversion of weights that modules multiply by themselves, and the checks at load."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers.pytorch_utils import Conv1D

from paged_backend.loading import verification
from paged_backend.models import batch_invariance
from paged_backend.models.attention import UnsupportedModel
from paged_backend.models.batch_invariance import check_invariance, reject_products, replace_parameters
from paged_backend.models.linear import GroupedCopy, WeightPacker
from tests.support.families import DEFAULT_FAMILIES, FAMILIES
from tests.support.in_process import tiny_assembly
from tests.support.pairwise import mostly_nightly
from tests.support.tiny_family import TinyFamily


class Router(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 32, dtype=torch.bfloat16), requires_grad=False)

    def forward(self, x):
        in_type = F.linear(x, self.weight)
        return in_type, F.linear(x.float(), self.weight.float()), F.linear(x.float(), self.weight.type(torch.float32))


@pytest.mark.parametrize("rows", [1, 30])
def test_routers_multiply_by_packed_weights_in_each_type(rows):
    router, converted = Router(), []
    x = torch.randn(rows, 32, dtype=torch.bfloat16)
    expected = router(x)

    def convert(weight):
        converted.append(weight.dtype)
        return GroupedCopy(weight)

    undo = replace_parameters(router, convert)
    with reject_products(router):
        for _ in range(2):
            found = router(x)
    assert converted == [torch.bfloat16, torch.float32]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-1, rtol=2e-2)
        assert one.dtype == other.dtype and type(one) is torch.Tensor
    undo()
    assert all(torch.equal(one, other) for one, other in zip(router(x), expected, strict=True))


def test_layers_of_gpt2_multiply_by_packed_weights():
    layer, x = Conv1D(20, 32), torch.randn(5, 32)
    nn.init.normal_(layer.bias)
    with torch.inference_mode():
        expected = layer(x)
        undo = replace_parameters(layer, WeightPacker(batch_invariant=True))
        with reject_products(layer):
            torch.testing.assert_close(layer(x), expected, atol=1e-4, rtol=1e-4)
        undo()
        computed = "batch_invariant=true: PyTorch computes addmm in it"
        with pytest.raises(UnsupportedModel, match=computed), reject_products(layer):
            layer(x)


def test_logits_that_depend_on_the_number_of_rows_are_rejected():
    def run(dtype, most):
        return {(0, 5): torch.tensor([1.0 + (most == 1) * 1e-6])}

    check_invariance(nn.Module(), lambda dtype, most: {0: torch.ones(3)}, {torch.float32})
    with pytest.raises(UnsupportedModel, match="its logits depend on the number of tokens in a step"):
        check_invariance(nn.Module(), run, {torch.float32})


def test_model_that_fails_is_rejected_by_name(tmp_path, monkeypatch):
    family = TinyFamily.create("gpt2", tmp_path)
    family.assembly(dtype="bfloat16", batch_invariant=True)
    monkeypatch.setattr(batch_invariance, "Conv1D", nn.Identity)  # leaves the layers of GPT-2 to PyTorch
    with pytest.raises(UnsupportedModel, match=r"GPT2LMHeadModel cannot be served .* PyTorch computes addmm in it"):
        family.assembly(dtype="bfloat16", batch_invariant=True)


def test_without_compiled_kernels_it_is_rejected(tiny, monkeypatch):
    monkeypatch.setattr("paged_kernels.cpu.native.levels", lambda: ())
    with pytest.raises(verification.UnsupportedModel.__base__, match="batch_invariant=true: requires the CPU kernels"):
        tiny_assembly(tiny[0], batch_invariant=True)


@pytest.mark.parametrize(
    "name", mostly_nightly(sorted(FAMILIES.keys() - {"mixtral", "qwen2_moe"}), default=DEFAULT_FAMILIES)
)
def test_families_can_be_served(name, tmp_path):
    """Mixtral and Qwen2-MoE are as tiny random models too sensitive to rounding to be verified in bfloat16."""
    TinyFamily.create(name, tmp_path).assembly(dtype="bfloat16", batch_invariant=True)
