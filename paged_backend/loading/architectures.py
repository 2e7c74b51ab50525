"""Reject models that are neither decoders of text nor sentence encoders, or whose heads are not supported, before
their weights are read."""

from __future__ import annotations

from pathlib import Path

from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PretrainedConfig

from paged_backend.files.model_files import CONFIG, GGUF, MODULES
from paged_backend.files.model_kinds import ENCODER_DECODER, unsupported_head, unsupported_model
from paged_backend.loading.encoders import is_encoder

ENCODER = "an encoder with a head; only sentence encoders are supported"


def check_architecture(path: Path, hf_config: PretrainedConfig) -> None:
    """Raise ConfigError for an encoder-decoder model, an unsupported head, or a model without text output.

    path: the model's directory or GGUF file.
    """
    is_sentence_encoder = is_encoder(hf_config) and (path / MODULES).exists()
    reason = None if is_sentence_encoder else _unsupported(hf_config)
    if reason is not None:
        file = path if path.suffix == GGUF else path / CONFIG
        raise unsupported_model(file, getattr(hf_config, "architectures", None), hf_config.model_type, reason)


def _unsupported(hf_config: PretrainedConfig) -> str | None:
    """Return why the model is not supported, or None if it may be."""
    if getattr(hf_config, "is_encoder_decoder", False):
        return ENCODER_DECODER
    names = getattr(hf_config, "architectures", None) or []
    if reason := unsupported_head(names):
        return reason
    if is_encoder(hf_config):
        return None if all(name.endswith("Model") for name in names) else ENCODER
    has_own_code = "AutoModelForCausalLM" in (getattr(hf_config, "auto_map", None) or {})
    if type(hf_config) not in MODEL_FOR_CAUSAL_LM_MAPPING and not has_own_code:
        return "transformers has no decoder of text for this type"
    return None
