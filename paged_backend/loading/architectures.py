"""Reject models that are neither decoders of text nor sentence encoders, or whose heads are not supported, before
their weights are read."""

from __future__ import annotations

import json
from pathlib import Path

from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PretrainedConfig

from paged_backend.api.errors import ConfigError
from paged_backend.files.model_files import CONFIG, GGUF
from paged_backend.loading.encoders import MODULES, is_encoder

ENCODER_DECODER = "an encoder-decoder model; only decoders and sentence encoders are supported"
ENCODER = "an encoder with a head; only sentence encoders are supported"
HEADS = {  # what the ends of unsupported classes' names stand for
    "ForTokenClassification": "token classification is not supported",
    "ForQuestionAnswering": "question answering is not supported",
    "ForMaskedLM": "predicting masked tokens is not supported",
    "ForPreTraining": "the heads of pre-training are not supported",
    "ForMultipleChoice": "multiple choice is not supported",
    "ForNextSentencePrediction": "predicting the next sentence is not supported",
}


def check_architecture(path: Path, hf_config: PretrainedConfig) -> None:
    """Raise ConfigError for an encoder-decoder model, an unsupported head, or a model without text output.

    path: the model's directory or GGUF file.
    """
    is_sentence_encoder = is_encoder(hf_config) and (path / MODULES).exists()
    reason = None if is_sentence_encoder else _unsupported(hf_config)
    if reason is not None:
        file = path if path.suffix == GGUF else path / CONFIG
        names = getattr(hf_config, "architectures", None)
        shown = f"architectures={json.dumps(names)}, " if names else ""
        raise ConfigError(f"{file}: {shown}model_type={json.dumps(hf_config.model_type)}: {reason}")


def _unsupported(hf_config: PretrainedConfig) -> str | None:
    """Return why the model is not supported, or None if it may be."""
    if getattr(hf_config, "is_encoder_decoder", False):
        return ENCODER_DECODER
    names = getattr(hf_config, "architectures", None) or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        return "architectures must be a list of names"
    for name in names:
        for end, reason in HEADS.items():
            if name.endswith(end):
                return reason
    if is_encoder(hf_config):
        return None if all(name.endswith("Model") for name in names) else ENCODER
    has_own_code = "AutoModelForCausalLM" in (getattr(hf_config, "auto_map", None) or {})
    if type(hf_config) not in MODEL_FOR_CAUSAL_LM_MAPPING and not has_own_code:
        return "transformers has no decoder of text for this type"
    return None
