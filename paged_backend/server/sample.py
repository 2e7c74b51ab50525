"""One sample of a request: from the tokens that the engine generates to the text that is sent."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

from paged_backend.api.request import FinishReason, Logprobs, TokenDelta
from paged_backend.server.wire.write import SampleOutput
from paged_backend.text.detokenizer import Detokenizer
from paged_backend.text.stop_tokens import StopTokens, stop_word_reason


@dataclass(eq=False, slots=True)
class Sample:
    """One sample of a request.

    Tokens are decoded only when a response is sent, unless a stop string may end the output.

    tokens | in `text_pieces`, sent | in `text` | not decoded yet |
                                                ^ num_decoded
    """

    detokenizer: Detokenizer
    include_stop: bool  # whether the token that ends the sample is part of its text
    stop_tokens: StopTokens = field(default_factory=StopTokens)
    text: str = ""  # text not sent yet
    unsent: list[int] = field(default_factory=list)  # tokens not sent yet, including the one that ends the sample
    num_tokens: int = 0
    finish: FinishReason | None = None
    stop_reason: str | None = None  # the stop string, or the token id or the stop word's token ids as JSON
    tokens: list[int] = field(default_factory=list)  # tokens whose text is part of the output
    num_decoded: int = 0  # number of `tokens` that were decoded
    text_pieces: list[str] = field(default_factory=list)  # all text so far
    logprobs: list[Logprobs] = field(default_factory=list)  # logprobs of the unsent tokens
    cumulative_logprob: float = 0.0  # sum over all tokens so far
    digest: hashlib._Hash | None = None  # of the logits of its tokens and of the prompt, if it is requested
    last_token: float | None = None  # time.monotonic() of its newest token

    @property
    def all_text(self) -> str:
        return "".join(self.text_pieces)

    def take(self, delta: TokenDelta) -> None:
        """Add the tokens of one step. A stop string or stop word may end the sample before the engine does."""
        tokens, finish, include_last = delta.token_ids, delta.finish, self.include_stop
        if self.stop_tokens.words and (found := self.stop_tokens.find(self.tokens, tokens)):
            tokens, finish, include_last = tokens[: found[0]], FinishReason.STOP, True
            self.stop_reason = stop_word_reason(found[1])
        elif finish is FinishReason.STOP and tokens:
            self.stop_reason = self.stop_tokens.reason(tokens[-1])
        count = len(tokens)
        # The token that ends the output is counted, but its text is not output.
        self.tokens += tokens[:-1] if finish is FinishReason.STOP and not include_last else tokens
        if self.detokenizer.has_stop:
            self.detokenize()
            if self.detokenizer.stopped:
                del self.tokens[self.detokenizer.num_tokens :]
                count = len(self.tokens) - self.num_tokens
                self.finish = FinishReason.STOP
                self.stop_reason = self.detokenizer.matched_stop
        self.num_tokens += count
        self.unsent += tokens[:count]
        if delta.logprobs:
            counted = delta.logprobs[:count]
            self.logprobs += counted
            self.cumulative_logprob += sum(chosen.logprob for chosen, *_ in counted)
        if self.digest:
            self.digest.update(b"".join(delta.fingerprints[:count]))
        if finish and not self.finish:
            self.end(finish)

    def detokenize(self) -> None:
        """Decode the tokens that have not been decoded."""
        if self.num_decoded < len(self.tokens):
            new = self.tokens[self.num_decoded :] if self.num_decoded else self.tokens
            self.num_decoded = len(self.tokens)
            self._append(self.detokenizer.push(new))

    def end(self, finish: FinishReason) -> None:
        """Decode the rest, including text held back as a possible stop string, and set why the sample ended."""
        self.detokenize()
        self._append(self.detokenizer.flush())
        self.finish = finish
        if self.detokenizer.stopped:
            self.finish, self.stop_reason = FinishReason.STOP, self.detokenizer.matched_stop

    def take_output(self, *, offsets: bool, logprobs: bool) -> SampleOutput:
        """Return everything that has not been sent, and mark it as sent."""
        output = SampleOutput(
            self.text,
            self.finish.value if self.finish else None,
            self.unsent,
            self._unsent_offsets() if offsets else (),
            self.logprobs if logprobs else None,
            self.cumulative_logprob,
            self.stop_reason,
        )
        self.text, self.unsent, self.logprobs = "", [], []
        return output

    def _unsent_offsets(self) -> list[int]:
        found = self.detokenizer.offsets[self.num_tokens - len(self.unsent) : self.num_tokens]
        # A token that ended the sample and has no text in the output begins where the text ends.
        return found + [self.detokenizer.num_chars] * (len(self.unsent) - len(found))

    def _append(self, text: str) -> None:
        if text:
            self.text += text
            self.text_pieces.append(text)
