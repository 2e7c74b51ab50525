"""Prompts for a tokenizer of single bytes, without an engine."""

from paged_backend.api.block_layout import BlockLayout
from paged_backend.api.limits import EngineLimits
from paged_backend.api.sampling_params import SamplingParams
from paged_backend.server.prompts.encoder import EncodedPrompt, PromptEncoder
from paged_backend.server.streams.stream import Arrival
from tests.support.in_process import WAIT
from tests.support.streams import TOKENIZER

LIMITS = EngineLimits(max_model_len=64, vocab_size=320, num_pages=256, layout=BlockLayout(4), max_num_seqs=8)


def encoder(limits=LIMITS, max_chars=None, tokenizer=None, **options):
    tokenizer = TOKENIZER if tokenizer is None else tokenizer  # which tests replace
    return PromptEncoder(tokenizer, limits, max_chars=max_chars, template_timeout=WAIT, **options)


def ids(text):
    return TOKENIZER.encode(text, add_special_tokens=False)


def arrival(call, **sampling):
    """Return the request of a call, as it is before tokenization."""
    return Arrival(1, call, None, 0.0, SamplingParams(**sampling), None)


def tokens_of(made, given):
    """Return the token ids that an encoder makes of an arrival's prompt."""
    return made.encode(given.prompt()).tokens


def encoded(string):
    """Return the prompt that a text is encoded to."""
    return EncodedPrompt(ids(string))
