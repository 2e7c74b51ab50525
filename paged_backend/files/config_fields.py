"""What a config.json says: which kinds of models are rejected, and values that no model can have. Needs no torch."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
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
SIZES = ("hidden_size", "intermediate_size", "vocab_size", "num_attention_heads", "num_key_value_heads", "head_dim")
ACTIVATIONS = ("hidden_act", "hidden_activation")  # fields that name functions
MAX_LAYERS = 1024  # limit without weight files, which imply a limit otherwise
MAX_POSITIONS = 2**31 - 1
_DTYPE = re.compile(r"(torch\.)?((b?float|u?int|complex)\d*(_\w+)?|half|double|bool|auto)")  # names in torch


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


def check_values(file: Path, fields: Mapping[str, Any]) -> None:
    """Raise ConfigError for a size or a data type that no model has. fields: the fields of the text decoder."""
    check_counts(file, fields.get, max_layers=MAX_LAYERS)
    check_layer_sizes(file, fields.get, MAX_POSITIONS)
    for name in ("dtype", "torch_dtype"):
        if (value := fields.get(name)) is not None and not (isinstance(value, str) and _DTYPE.fullmatch(value)):
            shown = json.dumps(value)
            raise ConfigError(f'{file}: {name}={shown}: must be the name of a data type of torch, such as "bfloat16"')
    for name in ACTIVATIONS:
        value, known = fields.get(name), transformers_tables.activations()
        if isinstance(value, str) and known and value not in known:
            raise ConfigError(f"{file}: {name}={json.dumps(value)}: must be one of {', '.join(sorted(known))}")


def llama_shapes(fields: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the weights that a model like Llama has in each layer, by the ends of their names.

    A shape is left out if one of its fields is not in config.json.
    """
    hidden, vocabulary, inner = (_size(fields, name) for name in ("hidden_size", "vocab_size", "intermediate_size"))
    heads, kv_heads = (_size(fields, name) for name in ("num_attention_heads", "num_key_value_heads"))
    head = _size(fields, "head_dim") or (hidden // heads if heads and fields.get("head_dim") is None else 0)
    shapes = {
        "embed_tokens.weight": (vocabulary, hidden),
        "q_proj.weight": (heads * head, hidden),
        "k_proj.weight": (kv_heads * head, hidden),
        "v_proj.weight": (kv_heads * head, hidden),
        "o_proj.weight": (hidden, heads * head),
        "gate_proj.weight": (inner, hidden),
        "down_proj.weight": (hidden, inner),
    }
    return {name: shape for name, shape in shapes.items() if all(shape)}


def _size(fields: Mapping[str, Any], name: str) -> int:
    """Return a field's value; 0 if it is missing or not an integer."""
    value = fields.get(name)
    return value if isinstance(value, int) else 0


def check_counts(file: Path, value_of: Callable[[str], Any], *, max_layers: int) -> None:
    """Raise ConfigError for a wrong number of layers or positions. value_of: returns a field, or None."""
    _check_number(file, value_of, "num_hidden_layers", max_layers)
    _check_number(file, value_of, "max_position_embeddings", MAX_POSITIONS, minimum=2)  # one prompt, one output token


def check_layer_sizes(file: Path, value_of: Callable[[str], Any], maximum: int) -> None:
    """Raise ConfigError for a size of a layer that is not 1 to `maximum`."""
    for field in SIZES:
        _check_number(file, value_of, field, maximum)


def _check_number(file: Path, value_of: Callable[[str], Any], field: str, maximum: int, *, minimum: int = 1) -> None:
    values = value_of(field)
    for value in values if isinstance(values, list) else [values]:  # some models have one value per layer
        if isinstance(value, int) and not minimum <= value <= maximum:
            raise ConfigError(f"{file}: {field}={value}: must be {minimum}..{maximum}")
