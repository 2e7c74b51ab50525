"""An engine without a server, and tiny models with random weights for it."""

from __future__ import annotations

import os
import sys
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from queue import Queue
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from paged_backend.api.config import EngineConfig
from paged_backend.api.errors import RequestError
from paged_backend.api.guide import Guide
from paged_backend.api.request import FinishReason, GenerateRequest, HiddenState, Usage
from paged_backend.api.sampling_params import SamplingParams
from paged_backend.api.thinking import ThinkingBudget
from paged_backend.api.token_outputs import Fingerprint, Logprobs, requested_outputs
from paged_backend.engine.assembly import Assembly, assemble
from paged_backend.engine.engine import Engine
from paged_backend.engine.outputs import StepOutput
from paged_backend.server.wire.pooling import parse_pooling_sampling

WAIT = 60  # seconds after which a missing step fails the test


@dataclass
class Output:
    """The output of one request so far."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[Logprobs] = field(default_factory=list)
    prompt_logprobs: tuple[Logprobs, ...] | None = None
    fingerprints: list[Fingerprint] = field(default_factory=list)  # of the prompt, then of the tokens
    finish: FinishReason | None = None
    error: RequestError | None = None
    hidden: HiddenState | None = None
    usage: Usage | None = None


class Steps(Queue):
    """The outputs of an engine's steps. With a `maxsize`, the engine waits until the test has read them."""

    def unbound(self) -> None:
        """Let the engine run without waiting from now on."""
        with self.mutex:
            self.maxsize = sys.maxsize
            self.not_full.notify_all()


@dataclass
class EngineHarness:
    """Submits requests to a running engine and collects their outputs."""

    assembly: Assembly
    engine: Engine
    steps: Steps
    outputs: dict[int, Output] = field(default_factory=dict)
    history: list[StepOutput] = field(default_factory=list)
    next_key: int = 0

    def submit(
        self,
        prompt: Sequence[int],
        bad_words: tuple[tuple[int, ...], ...] = (),
        guides: Sequence[Guide] = (),
        session: Hashable = None,
        returns_usage: bool = False,
        marks: tuple[tuple[int, ...], tuple[int, ...]] | None = None,
        **sampling: Any,
    ) -> int:
        """Submit a generation request and return its key. bad_words: as token ids. guides: one per sample. session:
        name of the session whose blocks it continues and keeps. returns_usage: whether its output gets the usage.
        marks: tokens before and after reasoning, with `thinking_token_budget`."""
        params = SamplingParams.parse({"temperature": 0, "ignore_eos": True} | sampling, self.assembly.limits)
        key, self.next_key = self.next_key, self.next_key + 1
        eos = self.assembly.loaded.spec.eos_ids
        limits = self.assembly.limits
        thinking = ThinkingBudget(sampling["thinking_token_budget"], *marks) if marks else None
        seed = params.seed or 0
        request = GenerateRequest.from_prompt(key, list(prompt), params, seed, eos, limits, bad_words, thinking)
        self.outputs[key] = Output()
        request = replace(
            request, token_outputs=requested_outputs(["logprobs"], params), guides=tuple(guides), session=session
        )
        self.engine.submit(replace(request, returns_usage=returns_usage))
        return key

    def embed(self, prompt: Sequence[int], **sampling: Any) -> int:
        """Submit an embedding request and return its key."""
        params = parse_pooling_sampling("embedding_request", sampling, self.assembly.limits)
        key, self.next_key = self.next_key, self.next_key + 1
        request = GenerateRequest.from_prompt(key, list(prompt), params, 0, frozenset(), self.assembly.limits)
        self.outputs[key] = Output()
        self.engine.submit(replace(request, embeds=True))
        return key

    def step(self) -> StepOutput:
        """Wait for the engine's next step output, and record it."""
        output = self.steps.get(timeout=WAIT)
        assert isinstance(output, StepOutput), output
        for delta in output.deltas:
            request = self.outputs[delta.key]
            assert request.finish is None and request.error is None, "a token after the last"
            request.tokens += delta.token_ids
            request.logprobs += delta.values.get("logprobs", ())
            request.fingerprints += delta.values.get("fingerprints", ())
            if delta.prompt_values is not None:
                request.prompt_logprobs = delta.prompt_values["logprobs"]
                request.fingerprints += delta.prompt_values.get("fingerprints", ())
            request.finish, request.error, request.hidden = delta.finish, delta.error, delta.hidden
            request.usage = delta.usage or request.usage
        self.history.append(output)
        return output

    def wait(self, *keys: int) -> list[Output]:
        """Wait until these requests have ended, and return their outputs."""
        while any(self.outputs[key].finish is None and self.outputs[key].error is None for key in keys):
            self.step()
        return [self.outputs[key] for key in keys]

    def generate(self, prompts: Sequence[Sequence[int]], **sampling: Any) -> list[list[int]]:
        """Return the tokens of requests that run together."""
        return [output.tokens for output in self.wait(*[self.submit(prompt, **sampling) for prompt in prompts])]


@contextmanager
def running(assembly: Assembly, *, lead: int = 0) -> Iterator[EngineHarness]:
    """Run an engine over `assembly`. At the end every block must be free, and the scheduler's checks must hold.

    lead: steps that the engine may be ahead of the test until `steps.unbound()`; 0: any number."""
    steps = Steps(lead)
    engine = assembly.engine(steps.put)
    engine.start()
    try:
        yield EngineHarness(assembly, engine, steps)
    finally:
        steps.unbound()
        engine.stop()
    assembly.scheduler.check()
    if not assembly.scheduler.has_work:
        assert assembly.scheduler.blocks.num_used == 0


def save_tiny(config: PretrainedConfig, directory: Path) -> PreTrainedModel:
    """Save a model with random fp32 weights, so large that its logits are far apart, and a byte-level tokenizer as a
    Hugging Face directory."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    for name, parameter in model.named_parameters():
        if parameter.dim() >= 2:
            torch.nn.init.normal_(parameter, std=0.15)
        elif "sinks" in name:
            torch.nn.init.normal_(parameter)
    model.save_pretrained(directory)
    byte_tokenizer().save_pretrained(directory)
    return model


def byte_tokenizer():
    """Return a tokenizer of single bytes: 256 ids, then the end-of-sequence token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: index for index, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")


TINY = {
    "dtype": "float32",
    "device": os.environ.get("PAGED_TEST_DEVICE", "cpu"),
    "block_size": 4,
    "num_gpu_blocks_override": 64,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 16,
    "tier_read_mode": "always",  # a tiny model computes a block in less time than it takes to read it
    "first_response_ms": -1,  # no empty first responses, which a slow machine would add
}


def tiny_assembly(directory: Path, *, adapters: Path | None = None, **options: Any) -> Assembly:
    """Assemble an engine over a tiny model. adapters: the file that lists LoRA adapters."""
    return assemble(EngineConfig.from_options({"model": str(directory)} | TINY | options), adapters)


def generate_with_transformers(
    model: PreTrainedModel, prompt: Sequence[int], max_tokens: int, **options: Any
) -> list[int]:
    """Return the greedy output of transformers for one prompt, past any end-of-sequence token. options: of `generate`;
    with `num_beams` the best beam is returned."""
    model.generation_config.eos_token_id = None
    ids, fixed = torch.tensor([list(prompt)]), {"do_sample": False, "pad_token_id": 0}
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_tokens, **fixed, **options)
    return out[0, len(prompt) :].tolist()
