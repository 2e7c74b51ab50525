"""Compiles what requests ask of their outputs' looks, beside the threads that must not wait, and remembers it.

submit thread     known: a copy at once ......................... engine
                  unknown: queue, once for all who ask the same
one of two        trial process -> compile -> remember .......... engine
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from paged_backend.api.errors import ErrorCode, RequestError, internal_error
from paged_backend.api.guide import Guide, GuideError
from paged_backend.api.limits import InputLimits
from paged_backend.api.structures import Structure
from paged_backend.guided.sandbox import CompileCancelled, GrammarError, GrammarSandbox
from paged_backend.sampling.masks import BITS

try:
    from paged_backend.guided import grammar, spelling
except ImportError:  # all else is served without
    spelling = None  # type: ignore[assignment]

log = logging.getLogger("paged_llm")

WORKERS = 2  # so that one grammar that takes its whole time does not hold up the next

Done = Callable[["tuple[Guide, ...] | RequestError"], None]
Key = tuple[str, str, str]  # kind and text of a structure, and whose: how soon it is there must not tell another tenant


class GrammarGuide:
    """The guide of one output."""

    seen = 0

    def __init__(self, matcher: Any, field: str, vocab_size: int, known: int):
        """known: tokens of the tokenizer, and so bits of what the library fills."""
        self._matcher = matcher
        self._field = field
        self._vocab_size = vocab_size
        self._filled = np.zeros(-(-known // BITS), dtype=np.int32)
        self.num_words = -(-vocab_size // BITS)

    def advance(self, tokens: Sequence[int]) -> None:
        self.seen += len(tokens)
        if not self._matcher.consume_tokens(list(tokens)):
            self._fail()

    def fill(self, words: np.ndarray) -> None:
        filled = self._filled
        self._matcher.unsafe_compute_mask_ptr(filled.ctypes.data, filled.nbytes)
        if self._matcher.is_error():
            self._fail()
        both = min(len(words), len(filled))
        words[:both] = filled[:both]
        if left := self._vocab_size % BITS:
            words.view(np.uint32)[-1] &= np.uint32((1 << left) - 1)
        if not words.any():
            raise GuideError(f"{self._field}: none of the model's tokens can come next")

    def _fail(self) -> None:
        raise GuideError(f"{self._field}: cannot go on: {grammar.reason(self._matcher)}")


@dataclass(frozen=True)
class _Waiting:
    structure: Structure
    count: int
    done: Done
    still_wanted: Callable[[], bool]


@dataclass(frozen=True)
class _Known:
    found: Any  # a matcher, or a GrammarError
    until: float  # by time.monotonic()


class GrammarCompiler:
    """For one tokenizer. `compile` may be called from any thread."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        vocab_size: int,
        eos_ids: frozenset[int],
        *,
        seconds: float,
        any_whitespace: bool = True,
        input_limits: InputLimits = InputLimits(),
    ):
        """vocab_size: of the model, whose head may have more rows than the tokenizer has tokens, or fewer. seconds:
        that a grammar may take to compile. any_whitespace: whether JSON may have it between its tokens, where a schema
        says nothing of it. caps: how many may wait, and how many are remembered, by their texts' size as well: the
        library does not tell what it holds for them."""
        self._source = tokenizer
        self._vocab_size = vocab_size
        self._eos_ids = sorted(one for one in eos_ids if one < vocab_size)
        self._tokenizer: Any = None  # the library's; made when first needed
        self._making = threading.Lock()
        self._lock = threading.Lock()  # of what follows
        self._any_whitespace = any_whitespace
        self._caps = input_limits
        self._known: OrderedDict[Key, _Known] = OrderedDict()  # the latest used last
        self._nbytes = 0  # of the texts of those
        self._queued: dict[Key, list[_Waiting]] = {}
        self._trials = [GrammarSandbox(seconds, self._setup) for _ in range(WORKERS)]
        self._idle = list(self._trials)
        self._pool = ThreadPoolExecutor(WORKERS, "grammars")

    def compile(
        self,
        structure: Structure,
        count: int,
        done: Done,
        *,
        tenant: str = "",
        still_wanted: Callable[[], bool] = lambda: True,
    ) -> None:
        """Call `done` with `count` guides, each at the beginning of an output, or with what is wrong: at once where
        the tenant has asked for it before, else later and from another thread. wanted: asked meanwhile; what nobody
        waits for any more is not compiled, so that who leaves keeps nobody else waiting."""
        key, waiting = (*structure.key, tenant), _Waiting(structure, count, done, still_wanted)
        with self._lock:
            found = self._recall(key)
            if found is not None:
                pass
            elif key in self._queued:
                self._queued[key].append(waiting)
                return
            elif len(self._queued) < self._caps.max_queued_structures:
                self._queued[key] = [waiting]
                self._pool.submit(self._work, key)
                return
        if found is None:
            most = self._caps.max_queued_structures
            reason = f"{structure.field}: {most} others are to be compiled before, which is max_queued_structures"
            done(RequestError(ErrorCode.UNAVAILABLE, f"{reason}; try again later"))
        else:
            self._answer(waiting, found)

    def stop(self) -> None:
        """End what is being compiled; whoever waits for it gets an error."""
        for trial in self._trials:
            trial.stop()
        self._pool.shutdown()

    def _work(self, key: Key) -> None:
        found = self._found(key)
        with self._lock:
            if isinstance(found, CompileCancelled) and self._wanted(key):  # by somebody who has come since
                self._pool.submit(self._work, key)
                return
            self._remember(key, found)
            waiting = self._queued.pop(key)
        for one in waiting:
            try:
                self._answer(one, found)
            except Exception as error:  # which is not the others'
                log.exception("a grammar could not be handed out")
                one.done(internal_error(error))

    def _found(self, key: Key) -> Any:
        """A matcher or a GrammarError."""
        try:
            return self._compiled(key)
        except GrammarError as error:
            return error
        except BaseException as error:  # what the library panics of is no Exception, and somebody waits for an answer
            log.exception("a grammar could not be compiled")
            return GrammarError(f"{type(error).__name__}: {error}", ErrorCode.INTERNAL, lasts=0)

    def _compiled(self, key: Key) -> Any:
        tokenizer = self._made()
        with self._lock:
            trial = self._idle.pop()
        try:
            tried = trial(*key[:2], still_wanted=lambda: self._wanted(key))
        finally:
            with self._lock:
                self._idle.append(trial)
        try:
            return grammar.matcher(tokenizer, tried)
        except ValueError as error:
            raise GrammarError(str(error)) from error

    def _wanted(self, key: Key) -> bool:
        return any(one.still_wanted() for one in tuple(self._queued[key]))

    def _recall(self, key: Key) -> Any:
        known = self._known.get(key)
        if known is None:
            return None
        if time.monotonic() >= known.until:
            self._forget(key)
            return None
        self._known.move_to_end(key)
        return known.found

    def _remember(self, key: Key, found: Any) -> None:
        lasts = found.lasts if isinstance(found, GrammarError) else math.inf
        if not lasts:
            return
        self._known[key] = _Known(found, time.monotonic() + lasts)
        self._nbytes += len(key[1])
        input_limits = self._caps
        while (
            len(self._known) > input_limits.max_remembered_structures
            or self._nbytes > input_limits.max_remembered_structure_bytes
        ):
            self._forget(next(iter(self._known)))

    def _forget(self, key: Key) -> None:
        del self._known[key]
        self._nbytes -= len(key[1])

    def _answer(self, waiting: _Waiting, found: Any) -> None:
        field = waiting.structure.field
        if isinstance(found, GrammarError):
            waiting.done(RequestError(found.code, f"{field}: {found}"))
            return
        known = self._tokenizer.vocab_size
        waiting.done(
            tuple(GrammarGuide(found.deep_copy(), field, self._vocab_size, known) for _ in range(waiting.count))
        )

    def _setup(self) -> grammar.GrammarSettings:
        tokenizer = self._made()
        added = sorted(one for one in self._source.get_added_vocab().values() if one < tokenizer.vocab_size)
        special = [tokenizer.decode_bytes([one]) for one in added if tokenizer.is_special_token(one)]
        texts = tuple(text.decode(errors="replace") for text in special)
        return grammar.GrammarSettings(tokenizer.vocab_size, texts, self._any_whitespace)

    def _made(self) -> Any:
        """The library's tokenizer. Raises GrammarError where it cannot read this one."""
        with self._making:
            if self._tokenizer is None:
                self._tokenizer = _library_tokenizer(self._source, self._vocab_size, self._eos_ids)
            return self._tokenizer


def _library_tokenizer(tokenizer: PreTrainedTokenizerBase, vocab_size: int, eos_ids: Sequence[int]) -> Any:
    if spelling is None:
        raise GrammarError("cannot be had, since the package llguidance is not installed")
    if not eos_ids:
        raise GrammarError("cannot be had, since this model has no end-of-sequence token")
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise GrammarError(
            f"cannot be had, since this model's tokenizer, {type(tokenizer).__name__}, has no tokenizer.json"
        )
    try:
        return spelling.llguidance_tokenizer(tokenizer, max(vocab_size, len(tokenizer)), eos_ids)
    except Exception as error:  # kinds of tokenizers that the library does not know
        raise GrammarError(f"cannot be had with this model's tokenizer: {error}") from error
