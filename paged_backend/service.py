"""The only file that wires things together: options to a running engine, a Triton request to a stream."""

from __future__ import annotations

import functools
import gc
import itertools
import json
import logging
import random
import threading
import time
from collections.abc import Callable
from collections.abc import Sequence as Rows
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from paged_backend.config import ConfigError, EngineConfig
from paged_backend.engine import Engine, EngineDied, PoolMap, StepOutput
from paged_backend.execution import kv_cache
from paged_backend.execution.disk import DiskTier, fingerprint
from paged_backend.execution.runner import Runner
from paged_backend.frontend import wire
from paged_backend.frontend.channel import Channel, ServerChannel
from paged_backend.frontend.conversation import render
from paged_backend.frontend.detokenizer import Detokenizer
from paged_backend.frontend.embedding import parse_sampling
from paged_backend.frontend.local_listener import Listener
from paged_backend.frontend.metrics import Metrics
from paged_backend.frontend.responder import Responder, Sample, Stream
from paged_backend.frontend.sessions import SessionName, Sessions, Turn
from paged_backend.guided.grammars import Grammars
from paged_backend.loading import model_loader
from paged_backend.loading.model_loader import LoadedModel
from paged_backend.loading.warm_up import measure
from paged_backend.lora.adapters import Adapters, Listing
from paged_backend.machine import release_threads, return_memory
from paged_backend.parallel.group import Ranks, check_devices
from paged_backend.parallel.rank import ROOT, Prepared, prepare
from paged_backend.parallel.workers import ParallelRunner, Workers
from paged_backend.request import (
    MAX_LOGIT_BIASES,
    ErrorCode,
    GenerateRequest,
    Limits,
    QueueFull,
    RequestError,
    SamplingParams,
    check_prompt_length,
    invalid,
)
from paged_backend.sampling.masks import Guide
from paged_backend.scheduling.block_manager import BlockManager
from paged_backend.scheduling.scheduler import Scheduler
from paged_backend.scheduling.speculation import Guess, PromptLookup, on_device

log = logging.getLogger("paged_llm")

CPU_STEP_SECONDS = 0.1  # while sequences decode


@dataclass(frozen=True, eq=False)
class Assembly:
    """A loaded model with its pool and scheduler: everything but the threads."""

    loaded: LoadedModel
    limits: Limits
    scheduler: Scheduler
    runner: Runner | ParallelRunner
    device: torch.device
    disk: DiskTier | None = None
    overlap: bool = False
    workers: Workers | None = None
    adapters: Adapters | None = None

    def engine(self, emit: Callable[[StepOutput | PoolMap | EngineDied], None]) -> Engine:
        return_memory()
        release_threads()  # whoever calls has loaded the model, and the engine's thread computes from now on
        engine = Engine(self.scheduler, self.runner, emit, self.disk, adapters=self.adapters, overlap=self.overlap)
        if self.workers:
            self.workers.watch(engine.die)
        return engine

    def close(self) -> None:
        """Let go of recorded steps, and end the processes of the other ranks. After the engine."""
        self.runner.forget()
        if self.workers:
            self.workers.stop()


def assemble(config: EngineConfig, listing: Path | None = None) -> Assembly:
    """Load the model, prove it, size the pool. listing: of adapters. Raises ConfigError or UnsupportedModel."""
    device = model_loader.pick_device(config)
    check_devices(config, device)
    if config.tensor_parallel_size == 1:
        return _assemble(config, listing, Ranks(device), None)
    model_loader.check(config, ROOT)  # before processes are started
    workers = Workers(config, device)
    try:
        return _assemble(config, listing, workers.ranks, workers)
    except Exception as error:
        reason = workers.explain()
        workers.stop(at_once=True)
        if reason is None or str(error) in reason:  # where all ranks refuse for the same reason, it is told once
            raise
        raise ConfigError(f"{error} ({reason})") from error


def _assemble(config: EngineConfig, listing: Path | None, ranks: Ranks, workers: Workers | None) -> Assembly:
    started, on_cpu = time.monotonic(), ranks.device.type == "cpu"
    if config.disk_cache_dir and (config.swap_space == 0 or (config.swap_space is None and on_cpu)):
        raise ConfigError(
            f"disk_cache_dir={json.dumps(config.disk_cache_dir)}: goes through the host's pool; give it swap_space, too"
        )
    adapters = Listing(listing) if config.enable_lora else None
    prepared = prepare(config, ranks)
    try:
        return _put_together(config, adapters, prepared, workers, started)
    except Exception:
        prepared.runner.forget()  # before the ranks part: NCCL waits for what was recorded with it
        raise


def _put_together(
    config: EngineConfig, listing: Listing | None, prepared: Prepared, workers: Workers | None, started: float
) -> Assembly:
    device = prepared.runner.kv.device
    loaded, spec, behind = prepared.loaded, prepared.loaded.spec, prepared.num_host_blocks
    caching = config.enable_prefix_caching
    host = BlockManager(behind, config.block_size, caching=caching) if behind else None
    blocks = BlockManager(prepared.num_blocks, config.block_size, caching=caching, host=host)
    limits = Limits(
        max_model_len=spec.max_model_len,
        vocab_size=spec.vocab_size,
        num_blocks=blocks.num_blocks,
        block_size=blocks.block_size,
        max_num_seqs=config.max_num_seqs,
        embedding=spec.embedding,
    )
    slots = blocks.num_blocks * blocks.block_size
    if config.max_model_len is not None and slots < config.max_model_len:
        raise ConfigError(
            f"max_model_len={config.max_model_len}: the key/value pool holds only {slots} tokens"
            f" ({blocks.num_blocks} blocks of {blocks.block_size}); shorten it or give the pool more memory"
        )

    costs = measure(prepared.runner, prepared.seconds_per_token, behind)
    runner = ParallelRunner(prepared.runner, workers) if workers else prepared.runner
    scheduler = Scheduler(
        blocks,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        costs=costs,
        preemption=config.preemption_mode,
        session_blocks=int(blocks.num_blocks * config.session_memory),
        guess=_guess(config),
        max_guesses=config.num_speculative_tokens,
        step_seconds=_step_seconds(config, device),
        max_loras=config.max_loras if config.enable_lora else 0,
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
        blocks.num_blocks * kv_cache.bytes_per_block(loaded.layers, blocks.block_size, spec.kv_dtype) / kv_cache.GIB,
    )
    log.info(
        "a token takes %.3g ms to compute, a block %.3g ms to copy and %.3g ms to move to the host, which has room for"
        " %d",
        costs.token * 1e3,
        costs.copy * 1e3,
        costs.move * 1e3,
        behind,
    )
    overlap = config.async_scheduling if config.async_scheduling is not None else device.type != "cpu"
    disk, adapters = _disk(config, loaded, runner), _adapters(config, loaded, listing)
    return Assembly(loaded, limits, scheduler, runner, device, disk, overlap, workers, adapters)


def _step_seconds(config: EngineConfig, device: torch.device) -> float | None:
    if config.target_step_ms is None:
        return CPU_STEP_SECONDS if device.type == "cpu" else None
    return config.target_step_ms / 1e3


def _guess(config: EngineConfig) -> Guess:
    if config.speculative_model:
        return on_device
    return PromptLookup(shortest=config.prompt_lookup_min, longest=config.prompt_lookup_max)


def _adapters(config: EngineConfig, loaded: LoadedModel, listing: Listing | None) -> Adapters | None:
    if listing is None:
        return None
    assert loaded.lora
    log.info(
        "up to %d adapters of rank %d on the device, which take %.2f GiB: of %s", loaded.lora.slots, loaded.lora.rank,
        loaded.lora.nbytes / kv_cache.GIB, ", ".join(sorted({name.rpartition(".")[2] for name in loaded.lora.shapes})),
    )  # fmt: skip
    keep = config.max_cpu_loras or config.max_loras
    return Adapters(listing, loaded.lora.shapes, loaded.lora.dtype, max_rank=config.max_lora_rank, keep=keep)


def _disk(config: EngineConfig, loaded: LoadedModel, runner: Runner | ParallelRunner) -> DiskTier | None:
    if config.disk_cache_dir is None or runner.host is None:
        return None
    places = [loaded.place, *([loaded.draft.place] if loaded.draft else [])]
    name = fingerprint(config, places, loaded.spec.dtype, loaded.spec.kv_dtype)
    return DiskTier(
        Path(config.disk_cache_dir).expanduser(), name, int(config.disk_cache_gib * kv_cache.GIB), runner.host.block(0)
    )


class Service:
    """One model instance. `submit` never raises: whatever is wrong with a request goes back to its client."""

    def __init__(self, config: EngineConfig, pb_utils: Any, labels: dict[str, str], listing: Path | None = None):
        """`pb_utils` is the module that the server gives its Python models, `labels` go on every metric, `listing` is
        the file that lists adapters."""
        self._pb_utils = pb_utils
        self._assembly = assemble(config, listing)
        limits = self._assembly.limits
        metrics = Metrics(
            pb_utils,
            labels,
            max_model_len=limits.max_model_len,
            max_num_seqs=limits.max_num_seqs,
            enabled=not config.disable_log_stats,
        )
        self._tokenizer = self._assembly.loaded.tokenizer
        # No text that fits is longer, so a longer one need not be tokenized, which takes seconds for megabytes.
        self._longest_text = self._assembly.limits.max_model_len * max(map(len, self._tokenizer.get_vocab()))
        self._token_text = _token_texts(self._tokenizer)
        self._seeds = random.Random(config.seed)
        self._keys = itertools.count()
        self._max_queue_size = config.max_queue_size
        self._taking = threading.Lock()  # a tokenizer, and the order of requests, are one thread's at a time
        self._sessions = Sessions(config.session_ttl, config.max_sessions, lambda name: self._engine.unpin(name))
        self._responder = Responder(metrics, self._sessions)
        eos = self._assembly.loaded.spec.eos_ids
        self._grammars = Grammars(self._tokenizer, limits.vocab_size, eos, seconds=config.structured_outputs_timeout)
        assembly = self._assembly
        self._engine = assembly.engine(self._responder.emit)
        metrics.show(self._assembly.scheduler.stats)
        self._responder.start(self._engine)
        self._engine.start()
        self._listener = self._listen(labels["model"])
        # What loading has left lives as long as the process: the collector need not walk through it while serving.
        gc.collect()
        gc.freeze()

    @property
    def ready(self) -> bool:
        return self._engine.alive

    def _listen(self, model: str) -> Listener | None:
        """For models in front of this one."""
        try:
            return Listener(model, self.take)
        except OSError as error:
            log.warning("no other model of this server can reach this one, only clients can: %s", error)
            return None

    def stop(self) -> None:
        """End both threads, and what else was started. The server calls this once every stream of its own has ended."""
        if self._listener:
            self._listener.drain()
            self._listener.close()
        self._grammars.stop()
        self._engine.stop()
        self._responder.stop()
        self._assembly.close()

    def submit(self, pb_request: Any) -> None:
        """Take one request of the server's."""
        try:
            channel = ServerChannel(self._pb_utils, pb_request)
        except Exception:
            log.exception("a request without a way back")
            return
        self.take(channel)

    def take(self, channel: Channel) -> None:
        """Read, tokenize, check and queue one request. May be called from any thread."""
        arrived = time.monotonic()
        with self._taking:
            self._take(channel, arrived)

    def _take(self, channel: Channel, arrived: float) -> None:
        try:
            if not self.ready:
                raise RequestError(ErrorCode.UNAVAILABLE, "the engine has stopped; reload the model")
            received = channel.received()
            if question := wire.question(*received):
                self._answer(question, channel, wire.request_id(received[1], received[-1]))
                return
            call = wire.read(*received)
            stream = self._admit(call, channel, arrived)
            if stream is not None:
                self._engine.expect(stream.request.key)
                self._responder.open(stream)
                self._deliver(stream.request)
        except RequestError as error:
            _refuse(channel, error)
            self._responder.refused("queue_full" if isinstance(error, QueueFull) else "refused")
        except Exception as error:
            log.exception("a request could not be taken")
            _refuse(channel, RequestError(ErrorCode.INTERNAL, f"{type(error).__name__}: {error}"))

    def _answer(self, question: str, channel: Channel, request_id: str) -> None:
        if question == "pool_map":
            self._responder.look(channel)
            self._engine.look()
        elif question == "adapters":
            self._tell_adapters(channel)
        elif not request_id:
            raise RequestError(
                ErrorCode.INVALID_ARGUMENT, "stop_request: has no request id (`id` over HTTP); give that of the request"
            )
        else:
            self._responder.cancel(channel, request_id)

    def _deliver(self, request: GenerateRequest) -> None:
        """To the engine, after what guides its outputs has been compiled, where something does. Whoever waits for that
        can be cancelled already."""
        structure = request.sampling.structure
        if structure is None:
            self._engine.deliver(request)
            return

        def compiled(guides: tuple[Guide, ...] | RequestError) -> None:
            if isinstance(guides, RequestError):
                self._engine.refuse(request.key, guides)
            else:
                self._engine.deliver(replace(request, guides=guides))

        key = request.key
        self._grammars.compile(
            structure, request.sampling.num_samples, compiled, wanted=lambda: self._engine.expects(key)
        )

    def _admit(self, call: wire.Call, channel: Channel, arrived: float) -> Stream | None:
        """A stream of a request that may be queued; None where the request was answered here."""
        limits = self._assembly.limits
        if call.embedding:
            checked = call.embedding.checked(limits)
            call = replace(call, embedding=checked, input_ids=checked.ids)
        sampling = (parse_sampling if call.embedding else SamplingParams.parse)(call.sampling, limits)
        turn = self._turn(call, sampling) if call.sequence else None
        try:
            if call.only_ends and turn:
                outputs = wire.write(call, [wire.SampleOutput("", "stop", ())], prompt_token_ids=())
                turn.finish([], "")
                turn = None
                channel.send(outputs, final=True)
                return None
            if self._max_queue_size and (waiting := self._engine.waiting) >= self._max_queue_size:
                raise QueueFull(waiting)
            request = self._request(call, sampling, turn)
            samples = self._samples(call, request)
            offsets = self._prompt_offsets(call, request, samples[0].text)
            return Stream(request, call, channel, samples, arrived, self._encode, self._token_text, offsets, turn)
        except Exception:
            if turn:
                turn.undo()
            raise

    def _tell_adapters(self, channel: Channel) -> None:
        adapters, slots = self._assembly.adapters, self._assembly.scheduler.slots

        def tell() -> None:
            try:
                found = adapters.describe(slots.resident) if adapters else []
                channel.send(wire.write_adapters(found), final=True)
            except Exception as error:
                log.exception("the list of adapters could not be sent")
                _refuse(channel, RequestError(ErrorCode.INTERNAL, f"{type(error).__name__}: {error}"))

        adapters.run(tell) if adapters else tell()

    def _turn(self, call: wire.Call, sampling: SamplingParams) -> Turn:
        """Begin a turn of a session. Raises RequestError for what a session cannot do."""
        assert call.sequence
        name = call.sequence.id
        if not self._assembly.scheduler.blocks.caching:
            raise invalid("sequence_id", name, "sessions keep what the prefix cache finds, and it is off"
                          " (enable_prefix_caching)")  # fmt: skip
        if sampling.truncate_prompt_tokens is not None:
            raise invalid("truncate_prompt_tokens", sampling.truncate_prompt_tokens, "means nothing in a session, which"
                          " keeps what was said; leave it out")  # fmt: skip
        if sampling.num_seqs > 1:
            field = next(one for one in ("n", "best_of", "beam_width") if (getattr(sampling, one) or 1) > 1)
            raise invalid(field, getattr(sampling, field), "must be 1 in a session, which goes on from one answer")
        session = SessionName(sampling.cache_salt, name)
        return self._sessions.begin(session, start=call.sequence.start, end=call.sequence.end)

    def _request(self, call: wire.Call, sampling: SamplingParams, turn: Turn | None) -> GenerateRequest:
        _check_use(call, sampling)
        sampling = self._spread(sampling)
        seed = sampling.seed if sampling.seed is not None else self._seeds.getrandbits(63)
        eos = self._assembly.loaded.spec.eos_ids
        self._check_adapter(sampling.lora_name)
        tokens = self._tokenize(call, sampling, turn)
        limits, bad_words = self._assembly.limits, self._bad_words(sampling)
        request = GenerateRequest.admit(next(self._keys), tokens, sampling, seed, eos, limits, bad_words)
        goes_on = turn.name if turn and not turn.is_last else None
        logprobs = _wanted_logprobs(call, sampling)
        return replace(
            request,
            embeds=call.embedding is not None,
            wants_usage=call.return_receipt,
            session=goes_on,
            logprobs=logprobs,
        )

    def _spread(self, sampling: SamplingParams) -> SamplingParams:
        """With the bias of each word on all of its tokens. Raises RequestError for too many of them."""
        if not sampling.word_bias:
            return sampling
        sums = dict(sampling.logit_bias)
        for word, bias in sampling.word_bias:
            for token in self._encode(word):
                if token < self._assembly.limits.vocab_size:  # others never come
                    sums[token] = sums.get(token, 0.0) + bias
        if len(sums) > MAX_LOGIT_BIASES:
            raise invalid("word_bias", f"{len(sums)} tokens", f"must be at most {MAX_LOGIT_BIASES} tokens, those of"
                          " logit_bias among them")  # fmt: skip
        return replace(sampling, logit_bias=tuple(sorted(sums.items())))

    def _bad_words(self, sampling: SamplingParams) -> tuple[tuple[int, ...], ...]:
        """The tokens of each word as it stands after a space, and as it stands elsewhere."""
        runs: dict[tuple[int, ...], None] = {}
        for word in sampling.bad_words:
            bare = word.lstrip() or word
            found = [tuple(self._encode(text)) for text in (bare, f" {bare}")]
            if not all(found):
                raise invalid("bad_words", word, "has no tokens")
            runs |= dict.fromkeys(found)
        return tuple(run for run in runs if max(run) < self._assembly.limits.vocab_size)  # others never come

    def _check_adapter(self, name: str | None) -> None:
        if name is None:
            return
        if self._assembly.adapters is None:
            raise RequestError(ErrorCode.INVALID_ARGUMENT, "LoRA feature is not enabled.", verbatim=True)
        self._assembly.adapters.check(name)

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)

    def _tokenize(self, call: wire.Call, sampling: SamplingParams, turn: Turn | None) -> list[int]:
        """The prompt, after what the session has said before. Only its beginning gets what the tokenizer puts there."""
        before = turn.tokens_before() if turn and call.messages is None else []
        last = None if sampling.truncate_prompt_tokens is None else -sampling.truncate_prompt_tokens
        if call.input_ids is not None:
            return before + self._token_ids(call.input_ids[last:], sampling)
        messages = turn.conversation(call.messages) if turn and call.messages else call.messages
        text = call.prompt if messages is None else render(self._tokenizer, messages, call.tools)
        if len(text) > self._longest_text:
            raise RequestError(
                ErrorCode.INVALID_ARGUMENT,
                f"{call.prompt_field}: {len(text)} characters; must be at most {self._longest_text}, which no prompt"
                f" within max_model_len={self._assembly.limits.max_model_len} exceeds",
            )
        special = sampling.add_special_tokens and call.prompt is not None and not before
        return before + self._tokenizer.encode(text, add_special_tokens=special)[last:]

    def _token_ids(self, ids: np.ndarray, sampling: SamplingParams) -> list[int]:
        """Raises RequestError for too many of them, and for one that is none of the model's."""
        check_prompt_length(len(ids), sampling.max_tokens, self._assembly.limits)
        last = self._assembly.limits.vocab_size - 1
        (wrong,) = np.nonzero((ids < 0) | (ids > last))
        if len(wrong):
            raise invalid(f"input_ids[{wrong[0]}]", int(ids[wrong[0]]), f"must be 0..{last}")
        return ids.tolist()

    def _prompt_offsets(self, call: wire.Call, request: GenerateRequest, text: str) -> list[int] | None:
        """Where in the prompt's text each of its tokens begins, where both are told."""
        if not (call.return_text_offsets and _echoes(call, request.sampling)):
            return None
        texts = [self._token_text(token) for token in request.prompt_token_ids]
        if "".join(texts) == text:  # no character is cut: a tenth of the time
            return [0, *itertools.accumulate(map(len, texts[:-1]))]
        return _offsets(self._tokenizer, request.prompt_token_ids, text)

    def _samples(self, call: wire.Call, request: GenerateRequest) -> list[Sample]:
        sampling = request.sampling
        decode = _decoder(self._tokenizer, sampling.skip_special_tokens)
        echoed = _echoed(call, request, decode)

        def sample() -> Sample:
            detokenizer = Detokenizer(
                decode,
                request.prompt_token_ids,
                stop=sampling.stop,
                include_stop=sampling.include_stop_str_in_output,
                min_tokens=sampling.min_tokens,
                notes_offsets=call.return_text_offsets,
                num_before=len(echoed),
            )
            return Sample(detokenizer, sampling.include_stop_str_in_output, text=echoed)

        return [sample() for _ in range(sampling.num_samples)]


def _check_use(call: wire.Call, sampling: SamplingParams) -> None:
    """Raises RequestError for parameters that this kind of call cannot have."""
    if call.stream and sampling.picks:
        raise invalid("best_of", sampling.best_of, f"must be n={sampling.n} when streaming: the best are known at the"
                      " end only")  # fmt: skip
    if call.messages is not None and sampling.echo:
        raise invalid("echo", True, "has no meaning with messages; leave it out")


def _wanted_logprobs(call: wire.Call, sampling: SamplingParams) -> int | None:
    """What of log probabilities is worth computing: nothing that is neither sent nor compared."""
    if call.return_logprobs and sampling.logprobs is not None:
        return sampling.logprobs
    return 0 if call.return_cumulative_logprob or sampling.picks else None


def _echoes(call: wire.Call, sampling: SamplingParams) -> bool:
    """Whether the prompt's text is part of the output."""
    return call.echo or sampling.echo


def _echoed(call: wire.Call, request: GenerateRequest, decode: Callable[[list[int]], str]) -> str:
    """What comes before the output: the text as it was sent, or that of the tokens that were, or that are left."""
    if not _echoes(call, request.sampling):
        return ""
    if request.sampling.truncate_prompt_tokens is not None:
        return decode(list(request.prompt_token_ids))
    return call.prompt or "" if call.input_ids is None else decode(call.input_ids.tolist())


def _offsets(tokenizer: PreTrainedTokenizerBase, tokens: Rows[int], text: str) -> list[int]:
    """Where in `text`, which is that of the last tokens with or without special ones among them, each begins; those
    before them at its start."""
    for skip in (True, False):
        detokenizer = Detokenizer(_decoder(tokenizer, skip), (), notes_offsets=True)
        said = detokenizer.push(tokens) + detokenizer.flush()
        if said.endswith(text):
            break
    before = len(said) - len(text)
    return [min(max(0, offset - before), len(text)) for offset in detokenizer.offsets]


def _refuse(channel: Channel, error: RequestError) -> None:
    """Whatever is in the way: what the server's `execute` raises ends other requests, too."""
    try:
        channel.fail(error)
    except Exception:
        log.exception("a request could not be answered with %s", error)


def _token_texts(tokenizer: PreTrainedTokenizerBase) -> Callable[[int], str]:
    """The text of a token by itself, remembered: the same ones come again and again."""
    decode = _decoder(tokenizer, skip_special_tokens=False)
    return functools.cache(lambda token: decode([token]))


def _decoder(tokenizer: PreTrainedTokenizerBase, skip_special_tokens: bool) -> Callable[[list[int]], str]:
    kind = type(tokenizer)
    own = (PreTrainedTokenizerFast.decode, PreTrainedTokenizerFast._decode)
    if isinstance(tokenizer, PreTrainedTokenizerFast) and (kind.decode, kind._decode) == own:
        decode = tokenizer.backend_tokenizer.decode  # all that those two come to, in a fifth of the time
        return lambda ids: decode(ids, skip_special_tokens)
    return lambda ids: tokenizer.decode(
        ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
    )
