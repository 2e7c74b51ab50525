"""Compile the grammars of structured outputs on worker threads, and cache the results.

submitting thread   cache hit: copy the guide, call back at once
                    cache miss: queue; requests of one tenant for the same structure share an entry
worker thread       compile in the sandbox process -> compile here -> cache -> call back for every request that waits
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import numpy as np
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from paged_backend.api.errors import ErrorCode, RequestError, internal_error
from paged_backend.api.guide import Guide, GuideError
from paged_backend.api.limits import InputLimits
from paged_backend.api.structures import Structure
from paged_backend.guided.sandbox import CompileCancelled, GrammarError, GrammarSandbox
from paged_backend.sampling.masks import BITS
from paged_backend.utils.lru import LruIndex

try:
    from paged_backend.guided import grammar
    from paged_backend.guided.tokenizer import llguidance_tokenizer

    HAS_LLGUIDANCE = True
except ImportError:  # llguidance is optional: only structured outputs need it
    HAS_LLGUIDANCE = False

log = logging.getLogger("paged_llm")

WORKERS = 2  # more than one: a grammar that runs into the time limit must not block the next

# An output gets a new matcher on the engine's thread, if its grammar has been compiled within this CPU time.
RENEWAL_SECONDS = 0.1

Callback = Callable[["tuple[Guide, ...] | RequestError"], None]
# (kind, text, tenant): with a cache per tenant, compile times do not reveal the structures of other tenants.
Key = tuple[str, str, str]


class GrammarGuide:
    """The guide of one output, over an llguidance matcher.

    Copies of a guide share the states of its lexer, whose masks are computed once, and the limit on their number. When
    other outputs have used them up, an output continues with states of its own.
    """

    def __init__(self, create: Callable[[], Any], field: str, vocab_size: int, tokenizer_size: int) -> None:
        """Compute the first mask. `create` returns a new matcher. `tokenizer_size` is the number of tokens of the
        tokenizer and so the number of bits that llguidance fills."""
        self.spent = False  # whether a copy has failed; later copies would fail as well
        began = time.thread_time()
        self._matcher = create()
        self._create = create if time.thread_time() - began < RENEWAL_SECONDS else None
        self._shared: GrammarGuide | None = None  # the guide whose states this one uses
        self._tokens: list[int] = []
        self._field = field
        self._vocab_size = vocab_size
        self._filled = np.zeros(-(-tokenizer_size // BITS), dtype=np.int32)
        self.num_words = -(-vocab_size // BITS)
        self._compute_mask()

    @property
    def seen(self) -> int:
        return len(self._tokens)

    def copy(self, field: str) -> GrammarGuide:
        """Return a guide for another output at the same position. Its errors name `field`."""
        other = copy(self)
        other._matcher, other._field, other._filled = self._matcher.deep_copy(), field, self._filled.copy()
        other._tokens, other._shared = self._tokens.copy(), self
        return other

    def advance(self, tokens: Sequence[int]) -> None:
        self._tokens += tokens
        self._consume(tokens)
        if self._matcher.is_error() and self._shared:
            self._shared.spent, self._shared = True, None
            if self._create:
                self._matcher = self._create()
                self._consume(self._tokens)

    def fill(self, words: np.ndarray) -> None:
        filled = self._filled
        if self._matcher.is_error():
            self._fail()
        common = min(len(words), len(filled))
        words[:common] = filled[:common]
        if used_bits := self._vocab_size % BITS:
            words.view(np.uint32)[-1] &= np.uint32((1 << used_bits) - 1)
        if not words.any():
            raise GuideError(f"{self._field}: none of the model's tokens can come next")

    def _consume(self, tokens: Sequence[int]) -> None:
        if self._matcher.consume_tokens(list(tokens)):
            self._compute_mask()

    def _compute_mask(self) -> None:
        self._matcher.unsafe_compute_mask_ptr(self._filled.ctypes.data, self._filled.nbytes)

    def _fail(self) -> NoReturn:
        raise GuideError(f"{self._field}: cannot continue: {grammar.error_reason(self._matcher)}")


@dataclass(frozen=True)
class _Waiter:
    """A request that waits for a structure to be compiled."""

    structure: Structure
    count: int
    callback: Callback
    still_wanted: Callable[[], bool]


@dataclass(frozen=True)
class _CacheEntry:
    """A cached compile result."""

    result: GrammarGuide | GrammarError
    expires_at: float  # time.monotonic()


class _ResultCache:
    """An LRU cache of compile results, bounded by their number and by the size of the structures' texts.

    The size of the texts approximates the memory of compiled grammars, which llguidance does not report.
    """

    def __init__(self, max_entries: int, max_bytes: int) -> None:
        self._max_entries = max_entries
        self._max_bytes = max_bytes
        self._entries: LruIndex[Key, _CacheEntry] = LruIndex()  # by the size of the text

    def get(self, key: Key) -> GrammarGuide | GrammarError | None:
        """Return the guide or GrammarError of a structure, or None if it is not cached, expired or spent."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        spent = isinstance(entry.result, GrammarGuide) and entry.result.spent
        if spent or time.monotonic() >= entry.expires_at:
            self._entries.remove(key)
            return None
        self._entries.touch(key)
        return entry.result

    def store(self, key: Key, result: GrammarGuide | GrammarError) -> None:
        """Cache a guide, or a GrammarError for its `cache_seconds`."""
        seconds = result.cache_seconds if isinstance(result, GrammarError) else math.inf
        if seconds:
            self._entries.put(key, _CacheEntry(result, time.monotonic() + seconds), len(key[1]))
            for oldest in self._entries.excess(self._max_bytes, self._max_entries):
                self._entries.remove(oldest)


class GrammarCompiler:
    """Compiles the grammars of one tokenizer. `compile` may be called from any thread."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        vocab_size: int,
        eos_ids: frozenset[int],
        *,
        seconds: float,
        any_whitespace: bool = True,
        input_limits: InputLimits = InputLimits(),
    ) -> None:
        """Start the worker threads; sandbox processes start with the first grammar.

        Args:
            vocab_size: rows of the model's output layer, which may be more or fewer than the tokenizer's tokens.
            seconds: time limit for compiling one grammar.
            any_whitespace: whether JSON may contain white space between its tokens if the schema does not say.
            input_limits: limits on queued and cached structures.
        """
        self._source = tokenizer
        self._vocab_size = vocab_size
        self._eos_ids = sorted(token for token in eos_ids if token < vocab_size)
        self._tokenizer: Any = None  # the LLTokenizer, created when first needed
        self._tokenizer_lock = threading.Lock()
        self._lock = threading.Lock()  # guards the attributes below
        self._any_whitespace = any_whitespace
        self._max_queued = input_limits.max_queued_structures
        self._cache = _ResultCache(input_limits.max_remembered_structures, input_limits.max_remembered_structure_bytes)
        self._queued: dict[Key, list[_Waiter]] = {}
        self._sandboxes = [GrammarSandbox(seconds, self._settings) for _ in range(WORKERS)]
        self._idle = list(self._sandboxes)
        self._pool = ThreadPoolExecutor(WORKERS, "grammars")

    def compile(
        self,
        structure: Structure,
        count: int,
        callback: Callback,
        *,
        tenant: str = "",
        still_wanted: Callable[[], bool] = lambda: True,
    ) -> None:
        """Call `callback` with `count` guides, each at the beginning of an output, or with a RequestError.

        On a cache hit the callback runs at once on the calling thread, otherwise later on a worker thread.
        `still_wanted` is polled in the meantime: compilation ends as soon as no request waits for it, so cancelled
        requests do not delay others.
        """
        key, waiter = (*structure.key, tenant), _Waiter(structure, count, callback, still_wanted)
        with self._lock:
            cached = self._cache.get(key)
            if cached is not None:
                pass
            elif key in self._queued:
                self._queued[key].append(waiter)
                return
            elif len(self._queued) < self._max_queued:
                self._queued[key] = [waiter]
                self._pool.submit(self._work, key)
                return
        if cached is None:
            reason = f"the queue is full: {self._max_queued} structures wait (max_queued_structures); retry later"
            callback(RequestError(ErrorCode.UNAVAILABLE, f"{structure.field}: {reason}"))
        else:
            self._respond(waiter, cached)

    def stop(self) -> None:
        """Stop compiling. The requests that wait get an error."""
        for sandbox in self._sandboxes:
            sandbox.stop()
        self._pool.shutdown()

    def _work(self, key: Key) -> None:
        result = self._compile_safely(key)
        with self._lock:
            if isinstance(result, CompileCancelled) and self._still_wanted(key):  # true if a request joined since
                self._pool.submit(self._work, key)
                return
            self._cache.store(key, result)
            waiters = self._queued.pop(key)
        for waiter in waiters:
            try:
                self._respond(waiter, result)
            except Exception as error:  # fails only this request
                log.exception("could not create the guides of a request")
                waiter.callback(internal_error(error))

    def _compile_safely(self, key: Key) -> GrammarGuide | GrammarError:
        """Return a guide at the beginning of an output, or a GrammarError for any failure."""
        try:
            return self._compile(key)
        except GrammarError as error:
            return error
        except BaseException as error:  # includes panics in llguidance; requests wait for a result
            log.exception("could not compile a grammar")
            return GrammarError(f"{type(error).__name__}: {error}", ErrorCode.INTERNAL, cache_seconds=0)

    def _compile(self, key: Key) -> GrammarGuide:
        tokenizer = self._get_tokenizer()
        with self._lock:
            sandbox = self._idle.pop()
        try:
            text = sandbox.compile(*key[:2], still_wanted=lambda: self._still_wanted(key))
        finally:
            with self._lock:
                self._idle.append(sandbox)
        try:
            create = partial(grammar.create_matcher, tokenizer, text)
            return GrammarGuide(create, "", self._vocab_size, tokenizer.vocab_size)
        except ValueError as error:
            raise GrammarError(str(error)) from error

    def _still_wanted(self, key: Key) -> bool:
        return any(waiter.still_wanted() for waiter in tuple(self._queued[key]))

    def _respond(self, waiter: _Waiter, result: GrammarGuide | GrammarError) -> None:
        field = waiter.structure.field
        if isinstance(result, GrammarError):
            waiter.callback(RequestError(result.code, f"{field}: {result}"))
            return
        waiter.callback(tuple(result.copy(field) for _ in range(waiter.count)))

    def _settings(self) -> grammar.GrammarSettings:
        tokenizer = self._get_tokenizer()
        added = sorted(token for token in self._source.get_added_vocab().values() if token < tokenizer.vocab_size)
        special = [tokenizer.decode_bytes([token]) for token in added if tokenizer.is_special_token(token)]
        texts = tuple(text.decode(errors="replace") for text in special)
        return grammar.GrammarSettings(tokenizer.vocab_size, texts, self._any_whitespace)

    def _get_tokenizer(self) -> Any:
        """Return the LLTokenizer, created on the first call. Raises GrammarError if the tokenizer is unsupported."""
        with self._tokenizer_lock:
            if self._tokenizer is None:
                self._tokenizer = _create_tokenizer(self._source, self._vocab_size, self._eos_ids)
            return self._tokenizer


def _create_tokenizer(tokenizer: PreTrainedTokenizerBase, vocab_size: int, eos_ids: Sequence[int]) -> Any:
    if not HAS_LLGUIDANCE:
        raise GrammarError("not available: the package llguidance is not installed")
    if not eos_ids:
        raise GrammarError("not available: this model has no end-of-sequence token")
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise GrammarError(f"not available: this model's tokenizer, {type(tokenizer).__name__}, has no tokenizer.json")
    try:
        return llguidance_tokenizer(tokenizer, max(vocab_size, len(tokenizer)), eos_ids)
    except Exception as error:  # raised for a kind of tokenizer that llguidance does not support
        raise GrammarError(f"not available with this model's tokenizer: {error}") from error
