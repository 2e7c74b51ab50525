"""Reject models that are not decoders of text, or whose heads are not supported, before their weights are read."""

from __future__ import annotations

import json
from pathlib import Path

from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_MASKED_LM_MAPPING, PretrainedConfig

from paged_backend.api.errors import ConfigError
from paged_backend.loading.model_files import CONFIG, GGUF

ENCODER_DECODER = "an encoder-decoder model; only decoders are supported"
ENCODER = "an encoder; only decoders are supported"
HEADS = {  # what the ends of unsupported classes' names stand for
    "ForTokenClassification": "token classification is not supported",
    "ForQuestionAnswering": "question answering is not supported",
    "ForMaskedLM": "predicting masked tokens is not supported",
    "ForMultipleChoice": "multiple choice is not supported",
    "ForNextSentencePrediction": "predicting the next sentence is not supported",
}


def check_architecture(path: Path, hf_config: PretrainedConfig) -> None:
    """Raise ConfigError for an encoder, an encoder-decoder model, an unsupported head, or a model without text output.

    path: the model's directory or GGUF file.
    """
    reason = _unsupported(hf_config)
    if reason is not None:
        file = path if path.suffix == GGUF else path / CONFIG
        names = getattr(hf_config, "architectures", None)
        shown = f"architectures={json.dumps(names)}, " if names else ""
        raise ConfigError(f"{file}: {shown}model_type={json.dumps(hf_config.model_type)}: {reason}")


def _unsupported(hf_config: PretrainedConfig) -> str | None:
    """Return why the model is not supported, or None if it may be."""
    if getattr(hf_config, "is_encoder_decoder", False):
        return ENCODER_DECODER
    if type(hf_config) in MODEL_FOR_MASKED_LM_MAPPING and not getattr(hf_config, "is_decoder", False):
        return ENCODER
    names = getattr(hf_config, "architectures", None) or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        return "architectures must be a list of names"
    for name in names:
        for end, reason in HEADS.items():
            if name.endswith(end):
                return reason
    has_own_code = "AutoModelForCausalLM" in (getattr(hf_config, "auto_map", None) or {})
    if type(hf_config) not in MODEL_FOR_CAUSAL_LM_MAPPING and not has_own_code:
        return "transformers has no decoder of text for this type"
    return None
