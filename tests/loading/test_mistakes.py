"""The verification at load finds mistakes of every kind, also in models that amplify rounding errors."""

import gc
import re
from dataclasses import replace

import pytest
import torch
import transformers as hf

from paged_backend.loading import verification
from paged_backend.loading.verification import verify_model
from paged_backend.models import fusion, linear, rope
from paged_backend.models.attention import AttentionSpec, UnsupportedModel
from paged_backend.models.rope import RotaryTable
from tests.support.families import FAMILIES, HYBRID_FAMILIES
from tests.support.outliers import add_outliers
from tests.support.real_models import DIRECTORIES


def change_spec(monkeypatch, **changes):
    """Change the parameters of attention over pages, but not of the model's own."""
    correct = AttentionSpec.of.__func__

    def wrong(cls, *args, **rest):
        spec = correct(cls, *args, **rest)
        return replace(spec, **{name: change(getattr(spec, name)) for name, change in changes.items()})

    monkeypatch.setattr(AttentionSpec, "of", classmethod(wrong))


def change_decode(monkeypatch, change):
    """Change the batch of the decode step: one row of each of two sequences."""
    correct = verification.pack

    def wrong(*args, **rest):
        batch = correct(*args, **rest)
        return change(batch) if batch.input_ids.shape[1] == 2 else batch

    monkeypatch.setattr(verification, "pack", wrong)


def wrap_result(monkeypatch, owner, name, change):
    correct = getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda *args, **rest: change(correct(*args, **rest)))


def wrap_weight(monkeypatch, change):
    correct = linear.WeightPacker.__call__
    monkeypatch.setattr(linear.WeightPacker, "__call__", lambda self, weight: correct(self, change(weight)))


def backwards(angles):
    cos, sin = angles.table.chunk(2, dim=-1)
    return RotaryTable(torch.cat((cos, -sin), dim=-1))


def without_column(weight):
    changed = weight.clone()
    changed[:, 5] = 0
    return changed


MISTAKES = {  # by name: families in which it shows, and what makes it
    "scale": (("llama", "gemma2", "gpt_oss"), lambda patch: change_spec(patch, scale=lambda value: value * 1.05)),
    "softcap": (("gemma2",), lambda patch: change_spec(patch, softcap=lambda value: None)),
    "sinks": (("gpt_oss",), lambda patch: change_spec(patch, sinks=lambda value: None)),
    "window too long": (
        ("mistral_window", "gemma3"),
        lambda patch: change_spec(patch, sliding_window=lambda value: value and value + 1),
    ),
    "window too short": (
        ("mistral_window", "gpt_oss"),
        lambda patch: change_spec(patch, sliding_window=lambda value: value and value - 1),
    ),
    "position": (
        ("llama", "gemma3"),
        lambda patch: change_decode(patch, lambda batch: replace(batch, position_ids=batch.position_ids + 1)),
    ),
    "slot": (
        ("llama", "qwen2"),
        lambda patch: change_decode(
            patch, lambda batch: replace(batch, pagings=(replace(batch.paging, slots=batch.paging.slots.flip(0)),))
        ),
    ),
    "block table": (
        ("llama", "gpt_oss"),
        lambda patch: change_decode(
            patch,
            lambda batch: replace(
                batch, pagings=(replace(batch.paging, block_tables=batch.paging.block_tables.flip(0)),)
            ),
        ),
    ),
    "rotation": (
        ("llama",),
        lambda patch: wrap_result(patch, rope, "rotary_table", backwards),
    ),
    "norm": (
        ("llama", "qwen2"),
        lambda patch: wrap_result(patch, fusion, "_norm", lambda norm: norm._replace(weight=norm.weight.roll(1))),
    ),
    "bias": (
        ("qwen2",),
        lambda patch: wrap_result(patch, fusion, "_join", lambda projection: replace(projection, bias=None)),
    ),
    "packed column": (("llama", "qwen2"), lambda patch: wrap_weight(patch, without_column)),
    "packed rows": (("llama", "qwen2"), lambda patch: wrap_weight(patch, lambda weight: weight.roll(1, 0))),
}


REAL = {"llama": "demo", "qwen2": "qwen"}  # real models of families
PAIRS = [(name, family) for name, (families, _) in MISTAKES.items() for family in families]
REAL_PAIRS = [pytest.param(name, REAL[one], marks=pytest.mark.nightly) for name, one in PAIRS if one in REAL]


def make_model(family, dtype):
    """Return a random model with outliers, or a real one."""
    dtype = getattr(torch, dtype)
    if family in DIRECTORIES:
        return hf.AutoModelForCausalLM.from_pretrained(DIRECTORIES[family](), dtype=dtype).eval()
    torch.manual_seed(0)
    return add_outliers(hf.AutoModelForCausalLM.from_config(FAMILIES[family]())).eval().to(dtype)


def variant_of(family, dtype, log):
    """Return the variant in which a model is loaded; None if it is refused."""
    gc.collect()  # models are in cycles, and two real ones fill the memory
    model = make_model(family, dtype)
    log.clear()
    try:
        verify_model(model, block_size=4, kv_dtype=model.dtype)
    except UnsupportedModel:
        return None
    return next(found[1] for record in log.records if (found := re.match(r".* runs (.*) \(its", record.message)))


@pytest.fixture(scope="module")
def correct():
    """The variants of models without a mistake, by family and data type."""
    return {}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("name", "family"), PAIRS + REAL_PAIRS)
def test_mistake_is_found(name, family, dtype, monkeypatch, caplog, correct):
    """A variant with a mistake does not run: another one does, or the model is refused."""
    caplog.set_level("INFO", "paged_llm")
    monkeypatch.setattr(linear, "MIN_ELEMENTS", 1)  # pack the weights of small models, too
    if (family, dtype) not in correct:
        correct[family, dtype] = variant_of(family, dtype, caplog)
    assert correct[family, dtype] is not None
    MISTAKES[name][1](monkeypatch)
    assert variant_of(family, dtype, caplog) != correct[family, dtype]


@pytest.mark.parametrize("change", [0, -1, 1.5])
def test_mistake_in_a_kind_of_layer_that_occurs_late_is_found(change, monkeypatch, caplog):
    """As in Nemotron Nano 9B, whose first attention layer is the fifteenth."""
    caplog.set_level("INFO", "paged_llm")
    config = HYBRID_FAMILIES["lfm2"]()
    config.num_hidden_layers, config.layer_types = 16, ["conv"] * 14 + ["full_attention", "conv"]

    def outcome():
        torch.manual_seed(0)
        caplog.clear()
        verify_model(
            hf.AutoModelForCausalLM.from_config(config).eval().bfloat16(), block_size=4, kv_dtype=torch.bfloat16
        )
        return caplog.text

    assert " runs " in outcome()
    change_spec(monkeypatch, scale=lambda value: value * change)
    with pytest.raises(UnsupportedModel, match=r"layer 14 \(.*\) in float32"):
        outcome()


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss", "demo", "qwen"])
def test_smallest_wrong_scale_that_is_found(family, dtype, monkeypatch, caplog, figures):
    """At most 5%. The test reports how small an error of the scale of attention is still found."""
    caplog.set_level("INFO", "paged_llm")
    smallest = None
    for error in (0.05, 0.02, 0.01, 0.005, 0.002, 0.001, 0.0005):
        with monkeypatch.context() as patch:
            change_spec(patch, scale=lambda value, factor=1 + error: value * factor)
            if variant_of(family, dtype, caplog) is not None:
                break
        smallest = error
    assert smallest is not None
    figures(f"scale x {1 + smallest:g}")
