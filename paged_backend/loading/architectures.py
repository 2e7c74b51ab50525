"""Reject models that are neither decoders of text nor sentence encoders, or whose heads are not supported, before
their weights are read."""

from __future__ import annotations

from pathlib import Path

from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PretrainedConfig

from paged_backend.files.model_files import CONFIG, GGUF, MODULES
from paged_backend.files.model_kinds import unsupported, unsupported_model
from paged_backend.loading.encoders import is_encoder


def check_architecture(path: Path, hf_config: PretrainedConfig) -> None:
    """Raise ConfigError for an encoder-decoder model, an unsupported head, or a model without text output.

    path: the model's directory or GGUF file.
    """
    if is_encoder(hf_config) and (path / MODULES).exists():
        return
    names = getattr(hf_config, "architectures", None)
    has_own_code = "AutoModelForCausalLM" in (getattr(hf_config, "auto_map", None) or {})
    reason = unsupported(
        names,
        is_encoder_decoder=bool(getattr(hf_config, "is_encoder_decoder", False)),
        is_encoder=is_encoder(hf_config),
        is_decoder=type(hf_config) in MODEL_FOR_CAUSAL_LM_MAPPING or has_own_code,
    )
    if reason is not None:
        file = path if path.suffix == GGUF else path / CONFIG
        raise unsupported_model(file, names, hf_config.model_type, reason)
