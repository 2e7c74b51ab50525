"""Real checkpoints: the demo model (Llama) and Qwen2.5-Coder-0.5B load in their fastest variants and answer right."""

import logging

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from paged_backend.api.config import EngineConfig
from paged_backend.engine.assembly import assemble
from paged_kernels.cpu import native
from tests.support import real_models
from tests.support.adapters import LORA, generate_with, make_adapter, write_adapter_list
from tests.support.in_process import generate_with_transformers, running

QUESTIONS = (
    "What is the capital of France?",
    "Write a Python function that returns the sum of a list of numbers.",
    "How many days are in a week?",
)
MAX_TOKENS = 24
# Options, and the least share of tokens that are the most likely ones of transformers in float32.
SETTINGS = {
    "bfloat16": ({"dtype": "bfloat16"}, 0.9),
    "float16": ({"dtype": "float16"}, 0.95),
    "bfloat16, int8 cache": ({"dtype": "bfloat16", "kv_cache_dtype": "int8"}, 0.8),
    "bfloat16, fp8 cache": ({"dtype": "bfloat16", "kv_cache_dtype": "fp8"}, 0.7),
    "bfloat16, int8 weights": ({"dtype": "bfloat16", "quantization": "int8"}, 0.85),
    "float32, int4 weights": ({"dtype": "float32", "quantization": "int4"}, 0.5),
    "bfloat16, bit-identical": ({"dtype": "bfloat16", "batch_invariant": True}, 0.9),
}
OPTIONS = {"block_size": 16, "num_gpu_blocks_override": 512, "max_num_seqs": 32, "max_model_len": 512, "device": "cpu"}

compiled = pytest.mark.skipif(not native.levels(), reason="needs the compiled kernels")


def chat_prompt(tokenizer, question):
    messages = [{"role": "user", "content": question}]
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)


class Reference:
    """A checkpoint in transformers, in float32."""

    def __init__(self, name):
        self.directory = real_models.DIRECTORIES[name]()
        self.tokenizer = AutoTokenizer.from_pretrained(self.directory)
        self.model = AutoModelForCausalLM.from_pretrained(self.directory, dtype=torch.float32).eval()
        self.prompts = [self.prompt(question) for question in QUESTIONS]

    def prompt(self, question):
        return chat_prompt(self.tokenizer, question)

    @torch.inference_mode()
    def share(self, prompts, outputs):
        """Return the share of tokens that are the most likely ones after those before them."""
        hits = []
        for prompt, output in zip(prompts, outputs, strict=True):
            logits = self.model(torch.tensor([[*prompt, *output]]), use_cache=False).logits[0]
            best = logits[len(prompt) - 1 : -1].argmax(-1).tolist()
            hits += [token == other for token, other in zip(output, best, strict=True)]
        return sum(hits) / len(hits)


@pytest.fixture(scope="module", params=["demo", "qwen"])
def reference(request):
    return Reference(request.param)


def serve(model, *, adapters=None, **options):
    return assemble(EngineConfig.from_options({"model": str(model)} | OPTIONS | options), adapters)


def is_fastest(log):
    """Return whether the log has a variant with fused layers and packed or quantized weights, and no slower one."""
    return "runs fused, with" in log.text and "instead of a faster variant" not in log.text


@compiled
def test_demo_model_loads_in_its_fastest_variant(caplog):
    caplog.set_level(logging.INFO, "paged_llm")
    assembly = serve(real_models.DIRECTORIES["demo"](), dtype="bfloat16")
    assert is_fastest(caplog)
    with running(assembly) as engine:
        prompt = assembly.loaded.tokenizer("The capital of France is")["input_ids"]
        assert "Paris" in assembly.loaded.tokenizer.decode(engine.generate([prompt], max_tokens=4)[0])


@pytest.mark.nightly
@compiled
def test_float32_matches_transformers(reference, caplog):
    caplog.set_level(logging.INFO, "paged_llm")
    assembly = serve(reference.directory, dtype="float32")
    assert is_fastest(caplog)
    prompts = [reference.prompt(f"{question} Answer {number}.") for number in range(11) for question in QUESTIONS][:32]
    with running(assembly) as engine:
        expected = [generate_with_transformers(reference.model, prompt, MAX_TOKENS) for prompt in prompts[:4]]
        assert engine.generate(prompts, max_tokens=MAX_TOKENS)[:4] == expected, "32 requests at once"


@pytest.mark.nightly
@compiled
@pytest.mark.parametrize("name", SETTINGS)
def test_low_precision_agrees(reference, name, caplog, figures):
    caplog.set_level(logging.INFO, "paged_llm")
    options, least = SETTINGS[name]
    assembly = serve(reference.directory, **options)
    assert is_fastest(caplog)
    with running(assembly) as engine:
        outputs = engine.generate(reference.prompts, max_tokens=MAX_TOKENS)
    share = reference.share(reference.prompts, outputs)
    figures(f"{share:.3f} of the tokens are the most likely ones in float32")
    assert share >= least
    assert "Paris" in reference.tokenizer.decode(outputs[0])


@pytest.mark.nightly
@compiled
def test_speculation_does_not_change_tokens(reference):
    with running(serve(reference.directory, dtype="float32", num_speculative_tokens=3)) as engine:
        outputs = engine.generate(reference.prompts, max_tokens=MAX_TOKENS)
    assert outputs == [generate_with_transformers(reference.model, one, MAX_TOKENS) for one in reference.prompts]


@pytest.mark.nightly
@compiled
def test_adapters_match_peft(reference, tmp_path):
    adapter = make_adapter(reference.model, tmp_path / "one", seed=1, r=8, target_modules=["q_proj", "down_proj"])
    listed = write_adapter_list(tmp_path, {"one": adapter})
    with running(serve(reference.directory, dtype="float32", adapters=listed, **LORA)) as engine:
        keys = [engine.submit(prompt, max_tokens=8, lora_name="one") for prompt in reference.prompts]
        outputs = [output.tokens for output in engine.wait(*keys)]
    assert outputs == [generate_with(reference.model, adapter, prompt, 8) for prompt in reference.prompts]


@pytest.mark.nightly
@compiled
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gguf_file_answers_right(dtype, caplog):
    caplog.set_level(logging.INFO, "paged_llm")
    assembly = serve(real_models.qwen_gguf(), dtype=dtype)
    assert is_fastest(caplog)
    tokenizer = assembly.loaded.tokenizer
    with running(assembly) as engine:
        (tokens,) = engine.generate([chat_prompt(tokenizer, QUESTIONS[0])], max_tokens=8)
    assert "Paris" in tokenizer.decode(tokens)
