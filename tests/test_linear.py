"""Linear layers on a CPU: every way gives the same, the fastest is chosen, copies leave room; weights of 8 bits."""

import logging

import pytest
import torch
import torch.nn.functional as F
from transformers import LlamaConfig

from paged_backend import linear
from paged_backend.attention import UnsupportedModel
from paged_backend.config import ConfigError, EngineConfig
from paged_backend.linear import ROWS, Int8, Linear, project
from paged_backend.model_loader import check_quantization
from tests.in_process import generate_alone, running, save_tiny, tiny_assembly
from tests.test_families import FAMILIES

PROMPTS = [[5] * length for length in (1, 2, 3, 5, 7, 11)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("way", ["plain", "packed", "widened"])
@pytest.mark.parametrize("biased", [False, True])
def test_every_way_gives_the_product(way, dtype, biased, monkeypatch):
    monkeypatch.setattr(linear, "PIECE", 1000)  # several, the last one smaller
    torch.manual_seed(0)
    weight, bias = torch.randn(70, 48).to(dtype), torch.randn(70).to(dtype) if biased else None
    one = Linear(weight, linear.pack(weight), (way,) * len(ROWS))
    with torch.inference_mode():
        for shape in ((1, 48), (1, 3, 48), (300, 48)):
            x = torch.randn(shape).to(dtype)
            found = project(x, one, bias)
            assert found.dtype == dtype
            torch.testing.assert_close(found, F.linear(x, weight, bias))


@pytest.mark.parametrize(
    ("rows", "index"), [(1, 0), (2, 1), (7, 1), (8, 2), (31, 2), (32, 3), (127, 3), (128, 4), (5000, 4)]
)
def test_a_number_of_rows_goes_as_the_nearest_that_was_measured(rows, index, monkeypatch):
    monkeypatch.setattr(linear, "multiply_packed", lambda *arguments: "packed")
    ways = tuple("packed" if one == index else "plain" for one in range(len(ROWS)))
    assert Linear(torch.ones(2, 2), None, ways)(torch.ones(1, rows, 2), None) == "packed"


def test_another_way_has_to_be_clearly_faster_than_the_plain_one():
    times = [{"plain": 1.0, "packed": 0.9, "widened": 0.8}, {"plain": 1.0, "packed": 0.99, "widened": 2.0}]
    assert linear.choose(times) == ("widened", "plain")
    assert linear.choose([{"plain": 1.0, "packed": 0.5, "widened": 0.8}], without="packed") == ("widened",)


def test_the_ways_that_a_type_has_are_measured_once():
    found = linear.measure((64, 64), torch.float32, 1)
    assert [set(one) for one in found] == [{"plain", "packed"}] * len(ROWS)
    assert all(seconds > 0 for one in found for seconds in one.values())
    assert linear.measure((64, 64), torch.float32, 1) is found
    assert {"plain", "widened"} <= set(linear.measure((64, 64), torch.bfloat16, 1)[0])


@pytest.fixture
def faster(monkeypatch):
    """A machine on which packed weights are faster, for up to 15 rows, in tiny models, too."""
    times = [{"plain": 1.0, "packed": 0.5 if rows < 16 else 1.0} for rows in ROWS]
    monkeypatch.setattr(linear, "SMALLEST", 0)
    monkeypatch.setattr(linear, "measure", lambda *arguments: times)


@pytest.fixture
def lines(caplog):
    caplog.set_level(logging.INFO, "paged_llm")
    return caplog


@pytest.mark.parametrize(("family", "form"), [("qwen2", "fused"), ("olmo2", "as it comes")])
def test_a_model_of_packed_weights_gives_the_tokens_of_generate(family, form, tmp_path, faster, lines):
    model = save_tiny(FAMILIES[family](), tmp_path)
    assembly = tiny_assembly(tmp_path)
    served = assembly.loaded.model
    assert f"runs {form}, its weights packed" in lines.text
    layer = vars(served.model.layers[0]).get("forward")
    inner = (layer.before + layer.after) if layer else [served.model.layers[0].mlp.up_proj.forward.keywords["weight"]]
    assert sum(isinstance(one, Linear) for one in inner) == (4 if layer else 1)
    assert isinstance(served.lm_head.forward.keywords["weight"], Linear)
    expected = [generate_alone(model, prompt, 12) for prompt in PROMPTS]
    with running(assembly) as engine:
        assert engine.generate(PROMPTS, max_tokens=12) == expected
        assert [engine.generate([prompt], max_tokens=12)[0] for prompt in PROMPTS] == expected


@pytest.mark.parametrize("family", ["llama", "olmo2"])
def test_packed_weights_that_fail_the_proof_are_not_used(family, tmp_path, faster, monkeypatch, lines):
    right = linear.multiply_packed
    monkeypatch.setattr(linear, "multiply_packed", lambda *arguments: right(*arguments) * 1.5)
    model = save_tiny(FAMILIES[family](), tmp_path)
    assembly = tiny_assembly(tmp_path)
    assert "its weights packed: logits at position" in lines.text
    with running(assembly) as engine:
        assert engine.generate(PROMPTS[:1], max_tokens=12) == [generate_alone(model, PROMPTS[0], 12)]


def test_copies_that_the_memory_has_no_room_for_are_not_made(tiny, faster, monkeypatch, lines):
    head = 320 * 64 * 4
    monkeypatch.setattr(linear, "available_memory", lambda: 4 * head - 4)
    model = tiny_assembly(tiny[0]).loaded.model
    assert "a weight of [320, 64] stays as it is: a packed copy" in lines.text
    assert "forward" not in vars(model.lm_head) or not isinstance(model.lm_head.forward.keywords["weight"], Linear)
    layer = model.model.layers[0].forward
    assert any(isinstance(one, Linear) for one in layer.before)
    copies = [one.packed for layer in model.model.layers for one in (*layer.forward.before, *layer.forward.after)
              if isinstance(one, Linear)]  # fmt: skip
    assert 0 < sum(copy.numel() * 4 for copy in copies) < head


vnni = pytest.mark.skipif(not torch.cpu._is_vnni_supported(), reason="needs AVX512-VNNI")


@vnni
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("biased", [False, True])
def test_a_product_in_8_bits_is_that_of_what_was_rounded_and_no_row_depends_on_others(dtype, biased):
    torch.manual_seed(0)
    weight, bias = torch.randn(70, 48).to(dtype), torch.randn(70).to(dtype) if biased else None
    x = torch.randn(1, 300, 48).to(dtype) * torch.logspace(-3, 3, 300)[:, None].to(dtype)
    x[0, 7] = 0
    one = Int8(weight)
    found = project(x, one, bias)

    def rounded(rows):
        scales = rows.float().abs().amax(-1, keepdim=True).clamp_min(1e-30) / 127
        return (rows.float() / scales).round() * scales

    expected = F.linear(rounded(x), rounded(weight), None if bias is None else bias.float())
    assert found.dtype == dtype
    assert (found - expected).abs().amax(-1).le(torch.finfo(dtype).eps * 8 * expected.abs().amax(-1)).all()
    for count in (1, 3, 64):
        assert torch.equal(project(x[:, :count], one, bias), found[:, :count])


@vnni
@pytest.mark.parametrize(("family", "form"), [("qwen2", "fused"), ("olmo2", "as it comes")])
def test_a_model_in_8_bits_serves_without_its_own_weights(family, form, tmp_path, monkeypatch, lines):
    monkeypatch.setattr(linear, "SMALLEST", 0)
    model = save_tiny(FAMILIES[family](), tmp_path)
    assembly = tiny_assembly(tmp_path, quantization="int8")
    assert f"runs {form}, its weights in 8 bits" in lines.text
    served = assembly.loaded.model
    sizes = {name: one.numel() for name, one in served.named_parameters() if "_proj.weight" in name}
    assert len(sizes) == 7 * len(served.model.layers)
    assert not any(sizes.values())
    assert torch.equal(served.model.embed_tokens.weight, model.model.embed_tokens.weight)
    assert torch.equal(served.lm_head.weight, model.lm_head.weight)  # the head is not rounded
    with running(assembly) as engine:
        together = engine.generate(PROMPTS, max_tokens=8)
        assert [engine.generate([prompt], max_tokens=8)[0] for prompt in PROMPTS] == together
    for prompt, tokens in zip(PROMPTS, together, strict=True):
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
        assert (logits > logits.gather(1, torch.tensor(tokens)[:, None])).sum(1).max() < 32  # of 320


@vnni
def test_a_model_that_8_bits_spoil_is_refused_by_name(tiny, monkeypatch):
    monkeypatch.setattr(linear, "SMALLEST", 0)
    right = linear._rounded
    monkeypatch.setattr(linear, "_rounded", lambda rows: (right(rows)[0], 3 * right(rows)[1]))
    with pytest.raises(UnsupportedModel, match=r"LlamaForCausalLM .* logits at position"):
        tiny_assembly(tiny[0], quantization="int8")


def test_8_bits_are_refused_where_they_cannot_be_had(tiny, tmp_path, monkeypatch):
    config = EngineConfig.from_options({"model": str(tiny[0]), "quantization": "int8"})
    plain, cpu = LlamaConfig(), torch.device("cpu")

    def refused(reason, hf_config=plain, device=cpu):
        with pytest.raises(ConfigError, match=f'quantization="int8": {reason}'):
            check_quantization(config, hf_config, tmp_path, device)

    monkeypatch.setattr(torch.cpu, "_is_vnni_supported", lambda: True)
    check_quantization(config, plain, tmp_path, cpu)
    refused("is for a CPU only", device=torch.device("cuda", 0))
    refused("the model's weights are quantized already", LlamaConfig(quantization_config={"quant_method": "awq"}))
    check_quantization(config, LlamaConfig(quantization_config={"quant_method": "fp8"}), tmp_path, cpu)  # widened
    monkeypatch.setattr(torch.cpu, "_is_vnni_supported", lambda: False)
    refused("needs a CPU with AVX512-VNNI")
    with pytest.raises(ConfigError, match='quantization="int8": needs a CPU'):
        tiny_assembly(tiny[0], quantization="int8", device="cpu")
