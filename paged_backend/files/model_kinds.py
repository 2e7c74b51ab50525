"""Which kinds of models are rejected by their type or the names of their classes. Needs no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from paged_backend.api.errors import ConfigError, closest_match
from paged_backend.files import transformers_tables

ENCODER_DECODER = "an encoder-decoder model; only decoders and sentence encoders are supported"
ENCODER = "an encoder with a head; only sentence encoders are supported"
NO_DECODER = "transformers has no decoder of text for this type"
HEADS = {  # what the ends of unsupported classes' names stand for
    "ForTokenClassification": "token classification is not supported",
    "ForQuestionAnswering": "question answering is not supported",
    "ForMaskedLM": "predicting masked tokens is not supported",
    "ForPreTraining": "the heads of pre-training are not supported",
    "ForMultipleChoice": "multiple choice is not supported",
    "ForNextSentencePrediction": "predicting the next sentence is not supported",
}


def unsupported_fields(fields: Mapping[str, Any], *, has_modules: bool) -> str | None:
    """Return why the model of a config.json is not supported, or None if it may be. Only transformers can judge a model
    with code of its own.

    has_modules: whether the model has the modules of sentence-transformers, which any encoder may have.
    """
    model_type = fields.get("model_type")
    if "auto_map" in fields:
        return None
    if reason := _unknown_type(model_type):
        return reason
    is_masked = model_type in transformers_tables.masked_types()
    translates = is_masked and model_type in transformers_tables.translating_types()
    is_encoder_decoder = bool(fields.get("is_encoder_decoder", translates))
    is_encoder = is_masked and not is_encoder_decoder and not fields.get("is_decoder")
    if is_encoder and has_modules:
        return None
    decoders = transformers_tables.decoder_types()
    return unsupported(
        fields.get("architectures"),
        is_encoder_decoder=is_encoder_decoder,
        is_encoder=is_encoder,
        is_decoder=not decoders or model_type in decoders,
    )


def unsupported(names: Any, *, is_encoder_decoder: bool, is_encoder: bool, is_decoder: bool) -> str | None:
    """Return why a model with these `architectures`, which has no modules of sentence-transformers, is not supported,
    or None if it may be."""
    if is_encoder_decoder:
        return ENCODER_DECODER
    if names is not None and (not isinstance(names, list) or not all(isinstance(name, str) for name in names)):
        return "architectures must be a list of names"
    for name in names or ():
        if reason := next((reason for end, reason in HEADS.items() if name.endswith(end)), None):
            return reason
    if is_encoder:
        return None if all(name.endswith("Model") for name in names or ()) else ENCODER
    return None if is_decoder else NO_DECODER


def _unknown_type(model_type: Any) -> str | None:
    """Return why transformers cannot read the configuration of this type, or None if it may."""
    if not isinstance(model_type, str):
        return 'must be the name of a type, such as "llama"'
    known = transformers_tables.config_classes()
    if not known or model_type in known:
        return None
    near = closest_match(model_type, known)
    hint = f'did you mean "{near}"?' if near else "a newer version may have it"
    return f"transformers {version('transformers')} has no such type; {hint}"


def unsupported_model(file: Path, names: Any, model_type: Any, reason: str) -> ConfigError:
    """Return the error of a model that is not supported. file: its config.json, or GGUF file."""
    shown = f"architectures={json.dumps(names)}, " if names else ""
    return ConfigError(f"{file}: {shown}model_type={json.dumps(model_type)}: {reason}")
