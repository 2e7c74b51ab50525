"""Which kinds of models are rejected by their type or the names of their classes. Needs no torch."""

from __future__ import annotations

import json
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from paged_backend.api.errors import ConfigError, closest_match

ENCODER_DECODER = "an encoder-decoder model; only decoders and sentence encoders are supported"
HEADS = {  # what the ends of unsupported classes' names stand for
    "ForTokenClassification": "token classification is not supported",
    "ForQuestionAnswering": "question answering is not supported",
    "ForMaskedLM": "predicting masked tokens is not supported",
    "ForPreTraining": "the heads of pre-training are not supported",
    "ForMultipleChoice": "multiple choice is not supported",
    "ForNextSentencePrediction": "predicting the next sentence is not supported",
}


def unsupported_head(names: Any) -> str | None:
    """Return why a model with these `architectures` is not supported, or None if it may be."""
    if names is not None and (not isinstance(names, list) or not all(isinstance(name, str) for name in names)):
        return "architectures must be a list of names"
    return next((reason for name in names or () for end, reason in HEADS.items() if name.endswith(end)), None)


def unknown_type(model_type: Any) -> str | None:
    """Return why transformers cannot read the configuration of this type, or None if it may.

    Most types have a directory of their name in transformers. Its list of all types takes a second to import.
    """
    spec = find_spec("transformers")
    if not isinstance(model_type, str) or spec is None or spec.origin is None:
        return None
    if Path(spec.origin).with_name("models").joinpath(model_type).is_dir():
        return None
    try:
        from transformers.models.auto.auto_mappings import CONFIG_MAPPING_NAMES
    except ImportError:  # in another version
        return None
    if model_type in CONFIG_MAPPING_NAMES:
        return None
    near = closest_match(model_type, CONFIG_MAPPING_NAMES)
    hint = f'did you mean "{near}"?' if near else "a newer version may have it"
    return f"transformers {version('transformers')} has no such type; {hint}"


def unsupported_model(file: Path, names: Any, model_type: Any, reason: str) -> ConfigError:
    """Return the error of a model that is not supported. file: its config.json, or GGUF file."""
    shown = f"architectures={json.dumps(names)}, " if names else ""
    return ConfigError(f"{file}: {shown}model_type={json.dumps(model_type)}: {reason}")
