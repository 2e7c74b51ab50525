"""Identifies what the tokens of a model depend on, so that one instance of it can continue a request of another."""

from __future__ import annotations

import json
from hashlib import blake2b

from paged_backend.api.config import EngineConfig
from paged_backend.api.limits import EngineLimits
from paged_backend.api.token_outputs import TOKEN_OUTPUTS
from paged_backend.engine.request_frames import FRAMES_VERSION
from paged_backend.kv.stores.block_file import BlockSource
from paged_backend.loading.model_loader import LoadedModel


def fingerprint(config: EngineConfig, loaded: LoadedModel, limits: EngineLimits) -> str:
    """Return a digest of the content of the model's files, data types, quantization, device and vocabulary.

    A draft model is not part of it: it does not change tokens.
    """
    spec = loaded.spec
    source = BlockSource(config, limits.layout, [loaded.path], spec.dtype, spec.kv_dtype, loaded.model.device)
    facts = {
        "source": source.fingerprint,
        "vocabulary": [spec.vocab_size, len(loaded.tokenizer), sorted(spec.eos_ids)],
        "tokenizer": config.tokenizer,
        "frames": FRAMES_VERSION,
        "outputs": sorted(TOKEN_OUTPUTS),
    }
    return blake2b(json.dumps(facts).encode(), digest_size=16).hexdigest()
