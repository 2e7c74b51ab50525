"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434) over a cache of latents.

Keys and values of all heads are linear in one latent vector per token, apart from a rotated key that all heads share.
The cache stores both once per token, in place of the keys and values of every head:

    latent, normalized (kv_lora_rank)          | shared key, rotated (qk_rope_head_dim)
    values: the first kv_lora_rank elements
    keys: all elements

transformers calls `expand_kv` of an attention module with the latents and shared keys of a step, and passes its result
to attention. Here, `expand_kv` returns latents, as the key of one KV head, and attention has two forms:

- Absorbed: the expansion of keys is applied to the queries, the expansion of values to the output. All query heads
  attend to the latents as in multi-query attention. A step reads the latents only.
- Expanded: the latents of a sequence are expanded to the keys and values of the heads, in temporary memory. That costs
  time for each token of the context, but then heads are several times smaller. It pays off for long prefill chunks.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from paged_backend.kv.cache import LayerShape
from paged_backend.models.attention import AttentionSpec, attend_pages
from paged_backend.models.overrides import Overrides
from paged_kernels.cpu import native
from paged_kernels.cpu.packed_linear import pack_linear
from paged_kernels.layer_cache import LayerCache, as_bytes, dequantize
from paged_kernels.paging import Paging

log = logging.getLogger("paged_llm")

MIN_EXPANDED_ROWS = 128  # chunks with fewer rows are always absorbed: their steps may be captured
MAX_EXPANDED_CONTEXT = 32768  # longest context that is expanded, which bounds the temporary memory
EXPANDED_HEADS = 16  # heads that are expanded at a time, which bounds it too
SIZES = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")


@dataclass(frozen=True, eq=False)
class Expanded:
    """A chunk whose sequence is expanded."""

    rows: slice  # packed rows
    blocks: Tensor  # [num_blocks] int64: the blocks of its context
    paging: Paging  # paging of one sequence, over its expanded blocks


@dataclass(frozen=True, eq=False)
class Chunks:
    """The chunks of a step, by the form of attention."""

    absorbed: Paging | None  # in it, expanded sequences are padding; None: all sequences are expanded
    expanded: tuple[Expanded, ...]


@dataclass(frozen=True)
class ChunksKey:
    """What `Chunks` depend on, besides the addresses of the step. See `paging.PlanKey`."""

    min_rows: int  # rows of a chunk from which it is expanded
    block_size: int

    def plan(self, paging: Paging) -> Chunks:
        """Choose the form of attention of each chunk of a step. Waits for the device, which has the lengths."""
        starts, context_lens = paging.query_starts.tolist(), paging.context_lens.tolist()
        lengths = [end - start for start, end in pairwise(starts)]
        is_expanded = [
            length >= self.min_rows and length <= context_len <= MAX_EXPANDED_CONTEXT
            for length, context_len in zip(lengths, context_lens, strict=True)
        ]
        expanded = tuple(
            _expanded_chunk(paging, seq, starts[seq], lengths[seq], context_lens[seq], self.block_size)
            for seq, expand in enumerate(is_expanded)
            if expand
        )
        if not expanded:
            return Chunks(paging, ())
        others = [seq for seq, expand in enumerate(is_expanded) if not expand and lengths[seq] and context_lens[seq]]
        if not others:
            return Chunks(None, expanded)
        hidden = torch.tensor(is_expanded, device=paging.context_lens.device)
        absorbed = replace(
            paging,
            context_lens=paging.context_lens.masked_fill(hidden, 0),
            max_query_len=max(lengths[seq] for seq in others),
            max_context_len=max(context_lens[seq] for seq in others),
        )
        return Chunks(absorbed, expanded)


class LatentAttention:
    """The attention of one module over latents."""

    def __init__(
        self,
        module: Any,
        expansion: Tensor,
        min_expanded_rows: int | None = None,
        *,
        batch_invariant: bool = False,
    ) -> None:
        """expansion: weight of `kv_b_proj`, [num_heads * (nope + value_dim), kv_lora_rank].

        min_expanded_rows: rows of a chunk from which it is expanded; None: as soon as that takes less arithmetic.
        batch_invariant: never expand, because the result of a row would then depend on other rows.
        """
        self.rank, self.nope, self.rope, self.value_dim = (getattr(module, name) for name in SIZES)
        heads = expansion.view(-1, self.nope + self.value_dim, self.rank)
        self._keys, self._values = heads.split([self.nope, self.value_dim], dim=1)  # [num_heads, size, kv_lora_rank]
        self._heads = heads
        self._min_rows = self._break_even() if min_expanded_rows is None else min_expanded_rows
        self._absorb: Callable[[Tensor], Tensor] = partial(torch.bmm, mat2=self._keys)
        self._restore: Callable[[Tensor], Tensor] = partial(torch.bmm, mat2=self._values.mT)
        if batch_invariant:
            self._min_rows = None
            self._absorb, self._restore = HeadProduct(self._keys.mT), HeadProduct(self._values)

    def expand_kv(self, latents: Tensor, shared_keys: Tensor) -> tuple[Tensor, Tensor]:
        """Return latents [1, 1, num_tokens, rank] with shared keys [1, 1, num_tokens, rope] as keys and values."""
        return torch.cat((latents, shared_keys), dim=-1), latents

    def __call__(self, query: Tensor, cache: LayerCache, paging: Paging, spec: AttentionSpec) -> Tensor:
        """Compute `attend_pages` for queries [num_tokens, num_heads, nope + rope].

        Returns [num_tokens, num_heads, value_dim].
        """
        if self._min_rows is None or paging.max_query_len < self._min_rows:
            return self._absorbed(query, cache, paging, spec)
        chunks = paging.plan(ChunksKey(self._min_rows, block_size=cache.keys.shape[2]))
        if chunks.absorbed is not None:
            out = self._absorbed(query, cache, chunks.absorbed, spec)
        else:
            out = query.new_zeros(*query.shape[:2], self.value_dim)
        for chunk in chunks.expanded:
            out[chunk.rows] = self._expanded(query[chunk.rows], cache, chunk, spec)
        return out

    def _absorbed(self, query: Tensor, cache: LayerCache, paging: Paging, spec: AttentionSpec) -> Tensor:
        absorbed = query.new_empty(*query.shape[:2], self.rank + self.rope)
        nope = query[..., : self.nope].transpose(0, 1)  # [num_heads, num_tokens, nope]
        absorbed[..., : self.rank] = self._absorb(nope).transpose(0, 1)
        absorbed[..., self.rank :] = query[..., self.nope :]
        attended = attend_pages(absorbed, cache, paging, spec)
        return self._restore(attended.transpose(0, 1)).transpose(0, 1)

    def _expanded(self, query: Tensor, cache: LayerCache, chunk: Expanded, spec: AttentionSpec) -> Tensor:
        stored = gather_blocks(cache, chunk.blocks, query.dtype)  # [num_blocks, block_size, rank + rope]
        latents, shared_keys = stored.split([self.rank, self.rope], dim=-1)
        out = query.new_empty(*query.shape[:2], self.value_dim)
        for first in range(0, query.shape[1], EXPANDED_HEADS):
            heads = slice(first, first + EXPANDED_HEADS)
            weight = self._heads[heads]
            expanded = F.linear(latents, weight.flatten(0, 1)).unflatten(2, weight.shape[:2])
            nope, values = expanded.split([self.nope, self.value_dim], dim=-1)
            keys = torch.cat((nope, shared_keys[:, :, None].expand(-1, -1, len(weight), -1)), dim=-1)
            pages = LayerCache(keys.transpose(1, 2), values.transpose(1, 2))
            out[:, heads] = attend_pages(query[:, heads], pages, chunk.paging, spec)
        return out

    def _break_even(self) -> int | None:
        """Return the rows of a chunk from which the expanded form takes less arithmetic; None: never.

        For each token of the context and each head, the absorbed form multiplies 2 * rank + rope elements by every row,
        the expanded form nope + rope + value_dim, after rank * (nope + value_dim) products that expand the token.
        """
        saved = 2 * self.rank - self.nope - self.value_dim
        if saved <= 0:
            return None
        return max(MIN_EXPANDED_ROWS, self.rank * (self.nope + self.value_dim) // saved + 1)


class HeadProduct:
    """Matrix products by head in the CPU kernels, which add in one order for any number of rows."""

    def __init__(self, weights: Tensor) -> None:
        """weights: [num_heads, out_features, in_features]."""
        self._multiply = native.ExpertLinear([pack_linear(weight) for weight in weights])

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply rows [num_heads, num_rows, in_features]: [num_heads, num_rows, out_features]."""
        starts = torch.arange(len(x) + 1) * x.shape[1]
        return self._multiply(x.flatten(0, 1), starts).unflatten(0, x.shape[:2])


def _expanded_chunk(
    paging: Paging, seq: int, start: int, length: int, context_len: int, block_size: int
) -> Expanded:  # fmt: skip
    device, num_blocks = paging.block_tables.device, -(-context_len // block_size)

    def int32(*values: int) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    pages = Paging(
        slots=torch.empty(0, dtype=torch.int64, device=device),
        block_tables=torch.arange(num_blocks, dtype=torch.int32, device=device)[None],
        context_lens=int32(context_len),
        query_starts=int32(0, length),
        max_query_len=length,
        max_context_len=context_len,
    )
    return Expanded(slice(start, start + length), paging.block_tables[seq, :num_blocks].long(), pages)


def gather_blocks(cache: LayerCache, blocks: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a copy of the keys of one KV head in these blocks, dequantized: [num_blocks, block_size, head_dim]."""
    codes = as_bytes(cache.keys)[blocks, 0].view(cache.keys.dtype)
    if cache.key_scales is None:
        return codes
    return dequantize(codes, cache.key_scales[blocks, 0], torch.empty_like(codes, dtype=dtype))


class LatentLayers:
    """The attention modules of a model over latents."""

    def __init__(self, modules: Sequence[Any], expansions: Sequence[Tensor]) -> None:
        self._modules, self._expansions = modules, expansions

    @property
    def shapes(self) -> tuple[LayerShape, ...]:
        """What a cache of latents stores for a token in each layer."""
        sizes = ([getattr(module, name) for name in SIZES] for module in self._modules)
        return tuple(LayerShape(1, rank + rope, rank, latent=True) for rank, _, rope, _ in sizes)

    def over_latents(self, min_expanded_rows: int | None = None, *, batch_invariant: bool = False) -> Overrides:
        """Make the modules use a cache of latents. For the options, see `LatentAttention`."""
        overrides: Overrides = {}
        for module, expansion in zip(self._modules, self._expansions, strict=True):
            attention = LatentAttention(module, expansion, min_expanded_rows, batch_invariant=batch_invariant)
            overrides[module, "expand_kv"], overrides[module, "attend_pages"] = attention.expand_kv, attention
            overrides[module.kv_b_proj, "forward"] = _not_called  # keeps its weight from being packed or quantized
        return overrides


def _not_called(*arguments: Any) -> Tensor:
    raise AssertionError("kv_b_proj is called although its weight is absorbed")


def absorbed_layers(model: nn.Module) -> Iterator[str]:
    """Yield the names of linear layers that are not called, because attention has absorbed their weights."""
    for name, module in model.named_modules():
        if isinstance(vars(module).get("attend_pages"), LatentAttention):
            yield f"{name}.kv_b_proj"


@torch.inference_mode()
def find_latent_layers(model: PreTrainedModel) -> LatentLayers | None:
    """Return the attention modules of a model, if all of them can use a cache of latents, else None."""
    modules = [module for module in model.modules() if isinstance(getattr(module, "kv_b_proj", None), nn.Module)]
    if not modules or len(modules) != model.config.get_text_config().num_hidden_layers:
        return None
    modules.sort(key=lambda module: module.layer_idx)
    expansions = []
    for module in modules:
        sizes = [getattr(module, name, None) for name in SIZES]
        if not callable(getattr(module, "expand_kv", None)) or not all(type(size) is int for size in sizes):
            log.info("%s stores expanded keys and values: it has no expand_kv", type(module).__name__)
            return None
        expansions.append(_expansion(module))
    return LatentLayers(modules, expansions)


def _expansion(module: Any) -> Tensor:
    """Return the weight of `kv_b_proj`, [out_features, kv_lora_rank]. A layer with another representation of its weight
    is called with the identity matrix."""
    projection = module.kv_b_proj
    norm = module.kv_a_layernorm.weight
    is_plain = type(projection) is nn.Linear and type(projection.weight.data) is Tensor
    if is_plain and projection.weight.dtype == norm.dtype:
        own: Tensor = projection.weight.data
        return own
    identity = torch.eye(module.kv_lora_rank, dtype=norm.dtype, device=norm.device)
    weight: Tensor = projection(identity).T.contiguous()
    return weight
