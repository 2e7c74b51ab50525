"""Which models can be divided into the stages of a pipeline."""

from __future__ import annotations

from importlib.util import find_spec

from torch import nn
from transformers import PretrainedConfig

from paged_backend.api.config import EngineConfig
from paged_backend.api.errors import ConfigError
from paged_backend.files.start_checks import check_layers
from paged_backend.loading.classifier import is_classifier
from paged_backend.loading.model_sizes import described_model
from paged_backend.loading.shallow_copy import SHARED_LAYERS
from paged_backend.models.recurrent import recurrent_mixers

# Modules of a model that can be divided: whatever else a model has may depend on layers of other stages.
MODULES = frozenset({"model", "lm_head"})
DECODER_MODULES = frozenset({"embed_tokens", "layers", "norm", "rotary_emb", "rotary_emb_local"})


def check_model(config: EngineConfig, hf_config: PretrainedConfig) -> None:
    """Raise ConfigError if the model cannot be divided into pipeline_parallel_size stages."""
    stages = config.pipeline_parallel_size
    if stages == 1:
        return
    field, text = f"pipeline_parallel_size={stages}", hf_config.get_text_config()
    if find_spec("transformers.distributed.pipeline_parallel") is None:
        raise ConfigError(f"{field}: must be 1 with this version of transformers, which loads no stages")
    check_layers(config, getattr(text, "num_hidden_layers", None))
    if is_classifier(hf_config) or config.classifier_from_token:
        raise ConfigError(f"{field}: must be 1 for a model that classifies")
    if getattr(hf_config, "quantization_config", None) is not None:
        raise ConfigError(f"{field}: must be 1 for a model whose files hold quantized weights")
    if reason := _obstacle(config, hf_config):
        raise ConfigError(f"{field}: must be 1 for {text.model_type}, which cannot be divided: {reason}")


def _obstacle(config: EngineConfig, hf_config: PretrainedConfig) -> str | None:
    """Return why the model cannot be divided; None if it can."""
    try:
        model = described_model(hf_config, config.trust_remote_code)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    if recurrent_mixers(model):
        return f"{type(model).__name__} has recurrent layers"
    decoder = model.base_model
    for module, known in ((model, MODULES), (decoder, DECODER_MODULES)):
        if others := sorted(dict(module.named_children()).keys() - known):
            return f"{type(module).__name__} has {', '.join(others)}"
    if decoder is model or not isinstance(getattr(decoder, "layers", None), nn.ModuleList):
        return f"{type(decoder).__name__} has no list of layers"
    if getattr(hf_config.get_text_config(), SHARED_LAYERS, None):
        return f"{SHARED_LAYERS} is not 0"
    return None
