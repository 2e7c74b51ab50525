"""The only file that wires things together: options to a running engine, a Triton request to a stream."""

from __future__ import annotations

import itertools
import logging
import random
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from paged_backend import kv_cache, model_loader, wire
from paged_backend.batch import pack
from paged_backend.block_manager import BlockManager
from paged_backend.channel import Channel
from paged_backend.config import ConfigError, EngineConfig
from paged_backend.detokenizer import Detokenizer
from paged_backend.engine import Engine
from paged_backend.kv_cache import KVCache
from paged_backend.metrics import Metrics
from paged_backend.model_loader import LoadedModel
from paged_backend.request import ErrorCode, GenerateRequest, Limits, RequestError, SamplingParams
from paged_backend.responder import Responder, Sample, Stream
from paged_backend.runner import Runner
from paged_backend.scheduler import Scheduler

log = logging.getLogger("paged_llm")

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True, eq=False)
class Assembly:
    """A loaded model with its pool and scheduler: everything but the threads."""

    loaded: LoadedModel
    limits: Limits
    scheduler: Scheduler
    runner: Runner
    device: torch.device


def assemble(config: EngineConfig) -> Assembly:
    """Load the model, prove it, size the pool. Raises ConfigError or UnsupportedModel."""
    started = time.monotonic()
    device = model_loader.pick_device(config)
    loaded = model_loader.load(config, ROOT, device)
    spec = loaded.spec
    _warm_up(config, loaded, device)
    blocks = BlockManager(
        kv_cache.num_blocks(config, spec.layers, spec.kv_dtype, device),
        config.block_size,
        caching=config.enable_prefix_caching,
    )
    limits = Limits(
        max_model_len=spec.max_model_len,
        vocab_size=spec.vocab_size,
        num_blocks=blocks.num_blocks,
        block_size=blocks.block_size,
        max_num_seqs=config.max_num_seqs,
    )
    slots = blocks.num_blocks * blocks.block_size
    if config.max_model_len is not None and slots < config.max_model_len:
        raise ConfigError(
            f"max_model_len={config.max_model_len}: the key/value pool holds only {slots} tokens"
            f" ({blocks.num_blocks} blocks of {blocks.block_size}); shorten it or give the pool more memory"
        )
    kv = KVCache.allocate(
        spec.layers, num_blocks=blocks.num_blocks, block_size=blocks.block_size, dtype=spec.kv_dtype, device=device
    )
    scheduler = Scheduler(
        blocks, max_num_seqs=config.max_num_seqs, max_num_batched_tokens=config.max_num_batched_tokens
    )
    log.info(
        "%s in %s on %s, ready in %.1f s: %d layers, proven through pages; pool of %d blocks of %d tokens (%.2f GiB)",
        type(loaded.model).__name__,
        spec.dtype,
        device,
        time.monotonic() - started,
        len(spec.layers),
        blocks.num_blocks,
        blocks.block_size,
        blocks.num_blocks * kv_cache.bytes_per_block(spec.layers, blocks.block_size, spec.kv_dtype) / kv_cache.GIB,
    )
    return Assembly(loaded, limits, scheduler, Runner(loaded.model, kv), device)


def _warm_up(config: EngineConfig, loaded: LoadedModel, device: torch.device) -> None:
    """One step as large as steps get, over a pool just large enough: afterwards the peak of activation memory is
    known, which the real pool must leave room for, and the first request pays for no initialisation."""
    spec = loaded.spec
    length = min(config.max_num_batched_tokens, spec.max_model_len - 1)
    count = min(config.max_num_seqs, -(-config.max_num_batched_tokens // length))
    blocks = BlockManager(count * -(-length // config.block_size), config.block_size)
    scheduler = Scheduler(blocks, max_num_seqs=config.max_num_seqs, max_num_batched_tokens=count * length)
    for key in range(count):
        scheduler.add(GenerateRequest(key, (0,) * length, SamplingParams(max_tokens=1), 0, frozenset()))
    kv = KVCache.allocate(
        spec.layers, num_blocks=blocks.num_blocks, block_size=blocks.block_size, dtype=spec.kv_dtype, device=device
    )
    plan = scheduler.schedule()
    assert plan is not None
    Runner(loaded.model, kv).run(pack(plan, block_size=blocks.block_size, device=device))


class Service:
    """One model instance. `submit` never raises: whatever is wrong with a request goes back to its client."""

    def __init__(self, config: EngineConfig, pb_utils: Any, labels: dict[str, str]):
        """`pb_utils` is the module that the server gives its Python models, `labels` go on every metric."""
        self._pb_utils = pb_utils
        self._assembly = assemble(config)
        metrics = Metrics(pb_utils, labels)
        self._tokenizer = self._assembly.loaded.tokenizer
        # No text that fits is longer, so a longer one need not be tokenized, which takes seconds for megabytes.
        self._longest_text = self._assembly.limits.max_model_len * max(map(len, self._tokenizer.get_vocab()))
        self._seeds = random.Random(config.seed)
        self._keys = itertools.count()
        self._responder = Responder(metrics)
        self._engine = Engine(
            self._assembly.scheduler, self._assembly.runner, self._assembly.device, self._responder.emit
        )
        metrics.show(self._assembly.scheduler.stats)
        self._responder.start(self._engine)
        self._engine.start()

    @property
    def ready(self) -> bool:
        return self._engine.alive

    def stop(self) -> None:
        """End both threads. The server calls this once every stream has ended."""
        self._engine.stop()
        self._responder.stop()

    def submit(self, pb_request: Any) -> None:
        """Read, tokenize, check and queue one request of the server's."""
        arrived = time.monotonic()
        channel = Channel(self._pb_utils, pb_request)
        try:
            if not self.ready:
                raise RequestError(ErrorCode.UNAVAILABLE, "the engine has stopped; reload the model")
            call = wire.read(*channel.received())
            request = self._admit(call)
            self._responder.open(Stream(request, call, channel, self._samples(request), arrived))
            self._engine.submit(request)
        except RequestError as error:
            channel.fail(error)
            self._responder.refused()
        except Exception as error:
            log.exception("a request could not be taken")
            channel.fail(RequestError(ErrorCode.INTERNAL, f"{type(error).__name__}: {error}"))

    def _admit(self, call: wire.Call) -> GenerateRequest:
        limits = self._assembly.limits
        sampling = SamplingParams.parse(call.sampling, limits)
        seed = sampling.seed if sampling.seed is not None else self._seeds.getrandbits(63)
        eos = self._assembly.loaded.spec.eos_ids
        request = GenerateRequest.admit(next(self._keys), self._tokenize(call), sampling, seed, eos, limits)
        return replace(request, wants_usage=call.return_receipt)

    def _tokenize(self, call: wire.Call) -> list[int]:
        text = call.prompt if call.prompt is not None else self._conversation(call.messages)
        if len(text) > self._longest_text:
            name = "text_input" if call.prompt is not None else "messages"
            raise RequestError(
                ErrorCode.INVALID_ARGUMENT,
                f"{name}: {len(text)} characters; must be at most {self._longest_text}, which no prompt within"
                f" max_model_len={self._assembly.limits.max_model_len} exceeds",
            )
        return self._tokenizer.encode(text, add_special_tokens=call.prompt is not None)

    def _conversation(self, messages: list[dict[str, Any]] | None) -> str:
        if not self._tokenizer.chat_template:
            raise RequestError(ErrorCode.INVALID_ARGUMENT, "messages: this model has no chat template; use text_input")
        try:
            return self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except Exception as error:  # templates refuse, for example, two user turns in a row, or trip over odd values
            reason = str(error) if isinstance(error, TemplateError) else f"{type(error).__name__}: {error}"
            raise RequestError(
                ErrorCode.INVALID_ARGUMENT, f"messages: the chat template refuses them: {reason}"
            ) from error

    def _samples(self, request: GenerateRequest) -> list[Sample]:
        sampling = request.sampling
        return [
            Sample(
                Detokenizer(
                    _decoder(self._tokenizer, sampling.skip_special_tokens),
                    request.prompt_token_ids,
                    stop=sampling.stop,
                    include_stop=sampling.include_stop_str_in_output,
                    min_tokens=sampling.min_tokens,
                ),
                include_stop=sampling.include_stop_str_in_output,
            )
            for _ in range(sampling.n)
        ]


def _decoder(tokenizer: PreTrainedTokenizerBase, skip_special_tokens: bool):  # type: ignore[no-untyped-def]
    return lambda ids: tokenizer.decode(
        ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
    )
