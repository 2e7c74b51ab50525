"""Tells the user of the server which model runs, on what, and with how much memory, once it is loaded."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import fields

import torch

from paged_backend.api.block_layout import FULL
from paged_backend.api.config import NEEDED_BY, EngineConfig
from paged_backend.api.redis_address import RedisAddress
from paged_backend.api.sizes import GIB
from paged_backend.engine.model_preparation import PreparedModel
from paged_backend.loading.model_loader import LoadedModel
from paged_backend.utils.machine import cpu_name, usable_cores
from paged_backend.utils.startup import NO_CHAT, ONLY_EMBEDDINGS, ONLY_LABELS, startup_log
from paged_kernels.cpu import native
from paged_kernels.layer_cache import INT4

_SHOWN_LABELS = 8


def log_startup(config: EngineConfig, prepared: PreparedModel, seconds: float) -> None:
    """Log the summary of a model that took `seconds` to load."""
    device = prepared.runner.kv.device
    if unused := unused_options(config, device):
        startup_log.warning("no effect on a %s: %s", _device_kind(device), ", ".join(unused))
    for needed, names in without_effect(config, prepared).items():
        startup_log.warning("no effect without %s: %s", needed, ", ".join(names))
    for line in summary(config, prepared):
        startup_log.info("%s", line)
    startup_log.info("Loaded in %.1f s", seconds)


def unused_options(config: EngineConfig, device: torch.device) -> list[str]:
    """Return the options that were set although the device does not use them, as `name=value`."""
    return _changed(
        config, [spec.name for spec in fields(config) if spec.metadata["device"] not in (None, device.type)]
    )


def without_effect(config: EngineConfig, prepared: PreparedModel) -> dict[str, list[str]]:
    """Return the options that were set without the option that they need, as `name=value`, by this option."""
    found = {needed: _changed(config, names) for needed, names in NEEDED_BY.items() if not getattr(config, needed)}
    if config.preemption_mode == "swap" and not prepared.pools.num_host_pages:
        found["swap_space"] = _changed(config, ["preemption_mode"])
    return {needed: names for needed, names in found.items() if names}


def _changed(config: EngineConfig, names: Sequence[str]) -> list[str]:
    """Return which of these options differ from their defaults, as `name=value`."""
    return [
        f"{spec.name}={json.dumps(getattr(config, spec.name))}"
        for spec in fields(config)
        if spec.name in names and getattr(config, spec.name) != spec.default
    ]


def summary(config: EngineConfig, prepared: PreparedModel) -> list[str]:
    """Return the lines of the summary."""
    loaded, device = prepared.loaded, prepared.runner.kv.device
    lines = [
        f"Model: {_describe_model(config.model, loaded)}",
        f"Device: {_describe_device(config, device)}",
        f"Kernels: {_kernels(prepared)}",
        f"Data types: {_data_types(loaded)}",
        f"Context length: {_context_length(loaded)}",
    ]
    if not loaded.spec.pooling:
        lines.append(f"KV cache: {_kv_cache(config, prepared)}")
    if config.pipeline_parallel_size > 1:
        lines.append(f"Pipeline: {_stages(config, prepared)}")
    if loaded.spec.classification and not loaded.spec.generates:
        lines.append(ONLY_LABELS + _some_of(loaded.spec.classification.labels))
    elif loaded.spec.pooling and loaded.spec.embedding:
        lines.append(f"{ONLY_EMBEDDINGS}{loaded.spec.embedding.size} numbers, pooling {loaded.spec.pooling}")
    elif not loaded.tokenizer.chat_template:
        lines.append(NO_CHAT)
    if loaded.spec.states:
        layout = prepared.pools.layout
        pages = _counted(layout.blocks.kinds[-1].pages, "page")
        lines.append(f"Recurrent layers: {pages} of the KV cache, {layout.state_bytes} bytes, for each sequence")
    if config.num_speculative_tokens:
        source = _describe_model(config.speculative_model, loaded.draft) if loaded.draft else "prompt lookup"
        lines.append(f"Speculative decoding: {config.num_speculative_tokens} draft tokens per step, {source}")
    if config.batch_invariant:
        lines.append(f"Batch invariance: the same logits in every batch; {_invariance_cost(loaded, device)}")
    if loaded.lora:
        size = loaded.lora.nbytes / GIB
        lines.append(f"LoRA: {_counted(loaded.lora.slots, 'slot')} of rank {loaded.lora.rank}, {size:.2f} GiB")
    return lines


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _invariance_cost(loaded: LoadedModel, device: torch.device) -> str:
    """Return what `batch_invariant` costs, for this kind of model and device."""
    if device.type != "cpu":
        return "the cost on GPUs is not known"
    if loaded.spec.states:
        return "recurrent layers compute prompts token by token, which takes several times as long"
    if loaded.spec.dtype == torch.bfloat16 and native.level() == "amx":
        return "AMX is not used, so prompts take longer"
    return "models without experts are as fast as without it"


def _stages(config: EngineConfig, prepared: PreparedModel) -> str:
    """Return what a process of each stage holds."""
    parts, first = [], 0
    for share in prepared.shares[:: config.tensor_parallel_size]:
        last = first + share.layers - 1
        layers = f"layers {first} to {last}" if share.layers > 1 else f"layer {first}"
        parts.append(f"{layers} ({share.weight_bytes / GIB:.2f} GiB and {share.kv_bytes / GIB:.2f} GiB of KV cache)")
        first = last + 1
    return f"{len(parts)} stages: {', '.join(parts)}"


def _describe_model(name: str | None, loaded: LoadedModel) -> str:
    count = loaded.spec.num_parameters
    size = f"{count / 1e9:.2f} billion" if count >= 1e9 else f"{count / 1e6:.2f} million"
    return f"{name} ({_class_name(loaded)}, {size} parameters)"


def _class_name(loaded: LoadedModel) -> str:
    """Return the class of the whole model. A classifier is loaded as the decoder below its head."""
    names = loaded.model.config.architectures if not loaded.spec.generates else None
    return names[0] if names else type(loaded.model).__name__


def _some_of(labels: Sequence[str]) -> str:
    more = len(labels) - _SHOWN_LABELS
    return ", ".join(labels[:_SHOWN_LABELS]) + (f" and {more} more" if more > 0 else "")


def _device_kind(device: torch.device) -> str:
    return "CPU" if device.type == "cpu" else "GPU"


def _describe_device(config: EngineConfig, device: torch.device) -> str:
    ranks = config.num_ranks
    if device.type == "cpu":
        cores = usable_cores()
        name = f"CPU, {cpu_name()}, {cores} core{'s' if cores > 1 else ''}"
        return name if ranks == 1 else f"{name}, {ranks} processes"
    return (f"{ranks} x " if ranks > 1 else "") + torch.cuda.get_device_name(device)


def _kernels(prepared: PreparedModel) -> str:
    if prepared.loaded.spec.pooling:
        return "PyTorch"
    if prepared.runner.kv.device.type == "cpu":
        return f"C++, level {native.level()}" if native.levels() else "PyTorch"
    return f"Triton, {'CUDA graphs' if prepared.runner.num_graphs else 'no CUDA graphs'}"


def _data_types(loaded: LoadedModel) -> str:
    kv_dtype = loaded.spec.kv_dtype
    cache = "" if loaded.spec.pooling else f", KV cache {'int4' if kv_dtype == INT4 else _name_of(kv_dtype)}"
    return f"weights {_weights_type(loaded)}{cache}"


def _weights_type(loaded: LoadedModel) -> str:
    quantization = getattr(loaded.model.config, "quantization_config", None)
    method = quantization.get("quant_method") if isinstance(quantization, dict) else None
    method = method or getattr(quantization, "quant_method", None)
    quantized = loaded.spec.weight_format or getattr(method, "value", method)
    name = _name_of(loaded.spec.dtype)
    return f"{quantized} (activations {name})" if quantized else name


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _context_length(loaded: LoadedModel) -> str:
    length, supported = loaded.spec.max_model_len, loaded.spec.supported_len
    shorter = supported is not None and length < supported
    return f"{length} tokens" + (f" (the model supports {supported})" if shorter else "")


def _kv_cache(config: EngineConfig, prepared: PreparedModel) -> str:
    loaded, size, pools = prepared.loaded, config.block_size, prepared.pools
    layout, pages = pools.layout, pools.num_pages

    def pool(blocks: int) -> str:
        held = f"{blocks * size} tokens in {blocks} blocks"
        if layout.blocks.kinds != (FULL,):
            held = f"{blocks} pages of {layout.page_bytes} bytes"
        return f"{held}, {blocks * layout.page_bytes / GIB:.2f} GiB"

    length = loaded.spec.max_model_len
    parts = [pool(pages)]
    if layout.blocks.pages:
        count = layout.blocks.sequences(pages, length)
        parts[0] += f", for {_counted(count, 'request')} of {length} tokens"
    first = 0  # page of a block, counted over all kinds
    for kind in layout.blocks.token_kinds:
        if not kind.keeps_all:
            places = (*layout.places, *filter(None, layout.edges))
            count = sum(first <= place.page < first + kind.pages for place in places)
            parts.append(f"{count} of {len(layout.places)} layers {kind.description}")
        first += kind.pages
    if pools.num_host_pages:
        parts.append(f"host memory {pool(pools.num_host_pages)}")
    if config.disk_cache_dir and pools.num_host_pages:
        parts.append(f"disk {config.disk_cache_dir}, at most {config.disk_cache_gib:g} GiB")
    if config.remote_cache_url and pools.num_host_pages:
        parts.append(f"remote {RedisAddress.parse(config.remote_cache_url)}, at most {config.remote_cache_gib:g} GiB")
    return "; ".join(parts)
