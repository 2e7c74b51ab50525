"""Stop strings and stop words of beam search. The engine checks them, because an ended beam makes room for another."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from paged_backend.api.sampling_params import SamplingParams
from paged_backend.text.detokenizer import CONTEXT, Detokenizer
from paged_backend.text.stop_tokens import StopTokens
from paged_backend.text.tokenizing import DecodeError

SLACK = 16  # tokens to decode in addition to one per byte of a stop string: some tokens have no text


def build_stop_check(
    sampling: SamplingParams, prompt: Sequence[int], decode: Callable[[list[int]], str]
) -> Callable[[Sequence[int]], bool] | None:
    """Return a function that returns whether the last token of an output completes a stop string or stop word.

    The function assumes that no earlier token completes one. It decodes only the end of the output, which takes a few
    microseconds on the engine's thread. Returns None if the request has neither stop strings nor stop words.
    """
    words = StopTokens.of(sampling, frozenset())
    if not (sampling.stop or words.words):
        return None
    max_tokens = max((len(stop.encode()) for stop in sampling.stop), default=0) + SLACK

    def ends(tokens: Sequence[int]) -> bool:
        if words.find(tokens[:-1], tokens[-1:]):
            return True
        skipped = max(0, len(tokens) - max_tokens)
        before = [*prompt[-CONTEXT:], *tokens[max(0, skipped - CONTEXT) : skipped]]
        tail = list(tokens[skipped:])
        try:
            text = decode([*before, *tail])
            if not any(stop in text for stop in sampling.stop):
                return False
            min_tokens = max(0, sampling.min_tokens - skipped)
            output = Detokenizer(decode, before, stop=sampling.stop, min_tokens=min_tokens)
            output.push(tail)
        except DecodeError:  # continues the search; sending this output fails with the error
            return False
        return output.stopped

    return ends
