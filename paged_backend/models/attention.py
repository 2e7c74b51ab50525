"""Paged attention for transformers models.

transformers models look up their attention function in a registry and pass extra keyword arguments on to it. Calling
`model(..., paged=AttentionMeta(...))` therefore reaches `attend` in every layer. It writes the step's keys and values
into their slots and attends through the block tables. Fused layers (`decoder.py`) write keys and values themselves
and call `attend_pages`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface

from paged_backend.api.errors import ConfigError
from paged_backend.kv.cache import KVCache, LayerPages
from paged_backend.models.state_rows import StateRows
from paged_kernels.layer_cache import LayerCache
from paged_kernels.ops import kv_write, paged_attention
from paged_kernels.paging import Paging

ATTENTION = "paged_llm"  # name of `attend` in the registry of transformers

# Keyword arguments that models pass to attention and that do not change its result here: rotary embeddings are applied
# to queries and keys beforehand, and only the attention output is returned.
IGNORED_ARGUMENTS = frozenset(
    {"position_ids", "cache_position", "use_cache", "output_attentions", "output_router_logits", "logits_to_keep"}
)


class UnsupportedModel(ConfigError):
    """The model needs a feature that this engine lacks. The message names both."""


@dataclass(frozen=True, eq=False)
class AttentionMeta:
    """The slots and block tables of a step's packed tokens, and the cache they refer to. For models with recurrent
    layers also the rows of the states."""

    pagings: tuple[Paging, ...]  # one for each page of a block
    kv: KVCache
    state_rows: StateRows | None = None

    def paging_of(self, layer: int) -> Paging:
        """Return the slots and block tables of the pages that hold a layer."""
        return self._paging_of[self.kv.pages[layer]]

    @cached_property
    def _paging_of(self) -> dict[LayerPages, Paging]:
        """One object for all layers in the same pages, which share its plans."""
        return {pages: self._with_packed(*pages) for pages in set(self.kv.pages)}

    def _with_packed(self, page: int, packed: int | None) -> Paging:
        paging = self.pagings[page]
        return paging if packed is None else replace(paging, packed=self.pagings[packed])


@dataclass(frozen=True, eq=False)
class AttentionSpec:
    """The attention parameters of a layer, apart from queries, keys and values."""

    scale: float
    sliding_window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None  # [num_heads]

    @classmethod
    def of(
        cls,
        module: nn.Module,
        head_dim: int,
        attention_mask: None,
        *,
        scaling: float | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        dropout: float = 0.0,
        is_causal: bool | None = None,
        **rest: Any,
    ) -> AttentionSpec:
        """Create the spec from the arguments of a transformers attention function. Raises UnsupportedModel."""
        reject_unsupported(module, rest, mask=attention_mask, dropout=dropout, is_causal=is_causal)
        return cls(scaling if scaling is not None else head_dim**-0.5, sliding_window, softcap, s_aux)


def attend(
    module: nn.Module,
    query: Tensor,  # [1, num_heads, num_tokens, head_dim]
    key: Tensor,  # [1, num_kv_heads, num_tokens, head_dim]
    value: Tensor,  # [1, num_kv_heads, num_tokens, value_dim]
    attention_mask: None,
    *,
    paged: AttentionMeta,
    **arguments: Any,
) -> tuple[Tensor, None]:  # [1, num_tokens, num_heads, value_dim]
    """Compute the attention of one layer over the paged KV cache.

    `paged` is required, so a model that does not pass it on fails with an error. A module may have an `attend_pages` of
    its own (`latent_attention.py`).
    """
    spec = AttentionSpec.of(module, query.shape[-1], attention_mask, **arguments)
    cache, paging = paged.kv.layers[module.layer_idx], paged.paging_of(module.layer_idx)
    written = None if cache.shares_memory else value[0].transpose(0, 1)
    kv_write(key[0].transpose(0, 1), written, cache, paging.slots)
    function = vars(module).get("attend_pages", attend_pages)
    return function(query[0].transpose(0, 1), cache, paging, spec)[None], None


def scale_channels(model: nn.Module, kv: KVCache) -> None:
    """Scale the channels of the model's keys in a quantized cache from now on. The cache must be empty."""
    for module in model.modules():
        channels = vars(module).get("key_channels")
        if channels is not None and (target := kv.layers[module.layer_idx].key_channels) is not None:
            target.copy_(channels)


def attend_pages(query: Tensor, cache: LayerCache, paging: Paging, spec: AttentionSpec) -> Tensor:
    """Compute the attention of packed queries [num_tokens, num_heads, head_dim].

    The step's own keys and values must already be in the cache.
    """
    return paged_attention(
        query,
        cache,
        paging,
        scale=spec.scale,
        sliding_window=spec.sliding_window,
        softcap=spec.softcap,
        sinks=spec.sinks,
    )


def reject_unsupported(
    module: nn.Module, rest: dict[str, Any], *, mask: Any, dropout: float, is_causal: bool | None
) -> None:
    """Raise UnsupportedModel for an attention argument that would change the result and is not implemented."""
    unknown = sorted(name for name in rest.keys() - IGNORED_ARGUMENTS if rest[name] is not None)
    if unknown:
        raise UnsupportedModel(f"{type(module).__name__}: passes {', '.join(unknown)} to attention")
    if mask is not None:
        raise UnsupportedModel(f"{type(module).__name__}: builds its own attention mask")
    if dropout:
        raise UnsupportedModel(f"{type(module).__name__}: dropout={dropout} at inference")
    if is_causal is False:
        raise UnsupportedModel(f"{type(module).__name__}: attends to later tokens (is_causal=False)")


AttentionInterface.register(ATTENTION, attend)
