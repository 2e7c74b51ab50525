"""Random packed batches over a shuffled pool, and the grid of cases for kernel tests."""

import dataclasses
import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass, field, fields

import torch
from torch import Tensor

from paged_kernels.layer_cache import FORMATS, LayerCache, pack_full_blocks, quantize, scale_keys
from paged_kernels.packed_blocks import BLOCK_SIZE, NAN_SCALE, PackedBlocks
from paged_kernels.paging import Paging
from tests.support.pairwise import pairwise

# (query_len, context_len) of each sequence of a batch
BATCHES = {
    "decode": ((1, 1), (1, 5), (1, 64), (1, 77), (1, 130)),
    "decode_similar": tuple((1, 40 + i) for i in range(6)),
    "prefill": ((1, 1), (33, 33), (70, 70)),
    "chunks": ((16, 90), (5, 69)),
    "mixed": ((1, 90), (40, 40), (1, 1), (7, 70), (33, 100)),
    "padded": ((1, 20), (0, 0), (1, 0), (3, 9), (0, 17), (4, 0)),
    "padded_chunks": ((1, 90), (40, 70), (75, 0), (0, 0), (0, 0)),
}


@dataclass(frozen=True)
class Case:
    """One point of the grid."""

    batch: str = "mixed"
    num_kv_heads: int = 2
    group: int = 3
    head_dim: int = 64
    block_size: int = 16
    sliding_window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    strided: bool = False  # query is a slice of wider rows; each pool is half of a joint tensor
    format: str | None = None  # type of the pools; None: query's type; int4: full blocks are packed
    value_dim: int | None = None  # None: head_dim
    latent: bool = False  # values are the first elements of keys


AXES = {
    "batch": list(BATCHES),
    "num_kv_heads": [1, 2, 3],
    "group": [1, 2, 3, 4, 8],
    "head_dim": [8, 16, 32, 64, 72, 80, 96, 112, 128, 160, 192, 256],
    "block_size": [1, 2, 8, 16, 32, 64, 256],
    "sliding_window": [None, 1, 13, 64],
    "softcap": [None, 5.0],
    "sinks": [False, True],
    "strided": [False, True],
    "format": [None, *FORMATS.values()],
}
# Corner cases that a random sample could miss.
CHOSEN = (
    Case(group=8, num_kv_heads=1),
    Case("padded", group=71, num_kv_heads=1, head_dim=32),  # more heads than a tile of fp32 takes
    Case(batch="decode", group=20, head_dim=32),
    *(
        Case("chunks", head_dim=48, value_dim=32, format=name, strided=name is None)
        for name in (None, *FORMATS.values())
    ),
    Case(batch="chunks", head_dim=24, value_dim=40, sinks=True),
    Case(batch="padded", head_dim=192, value_dim=128, group=1, block_size=64),
    *(
        Case(batch, num_kv_heads=1, group=group, head_dim=576, value_dim=512, latent=True, format=name)
        for batch, group, name in (("decode", 16, None), ("chunks", 5, "int8"), ("padded", 3, "fp8"))
    ),
    Case("mixed", num_kv_heads=1, group=9, head_dim=576, value_dim=512, latent=True),
    Case("chunks", num_kv_heads=1, head_dim=48, value_dim=32, latent=True, strided=True),
    Case("mixed", num_kv_heads=2, head_dim=300, value_dim=290, latent=True, block_size=1),
    Case("decode", head_dim=320, value_dim=300, sliding_window=13),
    Case(batch="padded", sinks=True),
    Case(batch="prefill", head_dim=8, block_size=256),
    *(Case(batch, head_dim=72, sinks=True, format=name) for batch in ("padded", "chunks") for name in FORMATS.values()),
)

# Layers with packed blocks: int8 for the newest block of each sequence.
_PACKED_AXES = (
    list(BATCHES),
    [1, 2],
    [1, 3, 8],
    [32, 64, 96, 128],
    [BLOCK_SIZE],
    [None, 13, 64],
    [None, 5.0],
    [False, True],
)
PACKED = [
    *(Case(*chosen.values, format="int4") for chosen in pairwise(*_PACKED_AXES)),
    Case("mixed", head_dim=64, value_dim=32, block_size=BLOCK_SIZE, format="int4"),
    Case("chunks", head_dim=96, value_dim=192, block_size=BLOCK_SIZE, format="int4"),
]


def sample(count: int, seed: int = 0) -> list[Case]:
    """Return `count` seeded cases in which the values of each axis are about equally frequent."""
    shuffled = random.Random(seed)
    columns = {}
    for name, values in AXES.items():
        column = list(itertools.islice(itertools.cycle(values), count))
        shuffled.shuffle(column)
        columns[name] = column
    rows = zip(*columns.values(), strict=True)
    return [*CHOSEN, *(Case(**dict(zip(columns, row, strict=True))) for row in rows)]


@dataclass(frozen=True)
class Inputs:
    """Arguments of paged_attention: `attend(*inputs.arrays, **inputs.settings)`."""

    arrays: tuple[Tensor, LayerCache, Paging]
    settings: dict[str, object]
    keys: list[Tensor] = field(default_factory=list)  # keys of each sequence [context_len, num_kv_heads, head_dim]
    values: list[Tensor] = field(default_factory=list)


def _shuffled_tables(context_lens: list[int], block_size: int, generator: torch.Generator) -> tuple[Tensor, int]:
    """Make block tables over a pool with a few spare blocks; entries past a context point to the first spare."""
    counts = [-(-n // block_size) for n in context_lens]
    num_blocks = sum(counts) + 3
    free = torch.randperm(num_blocks, generator=generator, dtype=torch.int32)
    tables = free[-1].repeat(len(counts), max(counts) + 1)
    for table, blocks in zip(tables, free.split([*counts, 3]), strict=False):
        table[: len(blocks)] = blocks
    return tables, num_blocks


def _slots(tables: Tensor, spans: tuple[tuple[int, int], ...], block_size: int) -> Iterator[Tensor]:
    for table, (query_len, context_len) in zip(tables, spans, strict=True):
        position = torch.arange(max(0, context_len - query_len), max(context_len, query_len))
        block = table.long()[(position // block_size).clamp(max=len(table) - 1)]
        slot = block * block_size + position % block_size
        yield slot if context_len else torch.full_like(slot, -1)


def make_paging(spans: tuple[tuple[int, int], ...], block_size: int, seed: int = 0) -> tuple[Paging, int]:
    """Return the addresses of a batch of (query_len, context_len), and the number of blocks of its pool."""
    generator = torch.Generator().manual_seed(seed)
    query_lens, context_lens = (list(x) for x in zip(*spans, strict=True))
    tables, num_blocks = _shuffled_tables(context_lens, block_size, generator)
    paging = Paging(
        slots=torch.cat(list(_slots(tables, spans, block_size))),
        block_tables=tables,
        context_lens=torch.tensor(context_lens, dtype=torch.int32),
        query_starts=torch.tensor([0, *itertools.accumulate(query_lens)], dtype=torch.int32),
        max_query_len=max(query_lens),
        max_context_len=max(context_lens),
    )
    return paging, num_blocks


def move_paging(paging: Paging, device: str) -> Paging:
    return Paging(**{k: v.to(device) if isinstance(v, Tensor) else v for k, v in _fields(paging).items()})


def _fields(paging: Paging) -> dict[str, object]:
    return {field.name: getattr(paging, field.name) for field in fields(Paging)}


def replace_paging(paging: Paging, **changes: object) -> Paging:
    """Return a changed copy without the cached plans of the original."""
    return Paging(**{**_fields(paging), **changes})


def make_channels(num_kv_heads: int, head_dim: int, device: torch.device, *, centered: bool) -> Tensor:
    """Make centers, powers of two and their inverses, [3, num_kv_heads, head_dim]."""
    generator = torch.Generator().manual_seed(9)
    factors = torch.exp2(torch.randint(-3, 4, (num_kv_heads, head_dim), generator=generator))
    center = torch.randn(factors.shape, generator=generator) * centered
    return torch.stack((center, factors, 1 / factors)).to(device)


def make_cache(
    pool: Tensor,
    format: str | None,
    *,
    strided: bool,
    head_dim: int | None = None,
    value_dim: int | None = None,
    latent: bool = False,
    centered: bool = True,
) -> LayerCache:
    """Make a cache from keys and values in one tensor [num_blocks, 2, num_kv_heads, block_size, size].

    head_dim, value_dim: the elements that are used of a key and a value; None: all. latent: values are views of keys.
    centered: whether the keys of a quantized cache have a center other than 0.
    """
    joint, channels = [pool], None
    for dtype in (dtype for dtype, name in FORMATS.items() if name == format):
        if not latent:
            channels = make_channels(pool.shape[2], head_dim or pool.shape[4], pool.device, centered=centered)
            pool = pool.float()
            pool[:, 0, ..., :head_dim] = scale_keys(pool[:, 0, ..., :head_dim].transpose(1, 2), channels).transpose(
                1, 2
            )
        joint = list(quantize(pool, dtype))
    parts = [half for tensor in joint for half in (tensor[:, 0], tensor[:, 1])]
    parts[:2] = parts[0][..., :head_dim], parts[1][..., :value_dim]
    parts = parts if strided else [part.contiguous() for part in parts]
    if latent:
        return LayerCache.latent(parts[0], value_dim or pool.shape[-1], *parts[2:3])
    return LayerCache(*parts, key_channels=channels) if channels is not None else LayerCache(*parts)


def pack_inputs(cache: LayerCache, paging: Paging, seed: int = 0) -> tuple[LayerCache, Paging]:
    """Pack the blocks that were full before the step, and leave NaN where no token of the step may read: in the packed
    copies of the first blocks, and in all other full blocks of the cache."""
    num_blocks, heads, size, head_dim = cache.keys.shape
    order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(seed)).to(cache.keys.device)
    made = PackedBlocks.shapes(heads, head_dim, cache.value_dim)
    tensors = [torch.full((num_blocks, *shape), NAN_SCALE, dtype=dtype, device=order.device) for shape, dtype in made]
    cache = dataclasses.replace(cache, packed=PackedBlocks(*tensors))
    tables, packed_tables = paging.block_tables.clone(), order[paging.block_tables.long()].int()
    spare = tables[0, -1].clone()
    lengths = paging.query_starts.diff().tolist()
    assert cache.key_scales is not None and cache.value_scales is not None
    for seq, (context_len, length) in enumerate(zip(paging.context_lens.tolist(), lengths, strict=True)):
        full = max(0, context_len - length) // size
        blocks = paging.block_tables[seq, :full].long()
        pack_full_blocks(cache, blocks * size + size - 1, packed_tables[seq, :full].long() * size + size - 1)
        first, later = packed_tables[seq, :1].long(), blocks[1:]
        cache.packed.key_scales[first] = cache.packed.value_scales[first] = NAN_SCALE
        cache.key_scales[later] = cache.value_scales[later] = torch.nan
        tables[seq, 1:full] = spare
    slots = torch.where(paging.slots < 0, -1, order[paging.slots.clamp(min=0) // size] * size + paging.slots % size)
    packed = replace_paging(paging, block_tables=packed_tables, slots=slots)
    return cache, replace_paging(paging, block_tables=tables, packed=packed)


def make_inputs(case: Case, dtype: torch.dtype, device: str = "cpu", seed: int = 0) -> Inputs:
    """Make the inputs of a case.

    Memory of the pool that no sequence has written is NaN, as if left by another request; in a quantized pool, its
    scale is.
    """
    generator = torch.Generator().manual_seed(seed)
    spans, heads = BATCHES[case.batch], case.num_kv_heads * case.group
    paging, num_blocks = make_paging(spans, case.block_size, seed)
    value_dim = case.value_dim or case.head_dim
    size = max(case.head_dim, value_dim)
    shape = (num_blocks, 2, case.num_kv_heads, case.block_size, size)
    pool = torch.full(shape, float("nan"))
    contexts = []
    for table, (_, context_len) in zip(paging.block_tables.long(), spans, strict=True):
        position = torch.arange(context_len)
        context = torch.randn((context_len, 2, case.num_kv_heads, size), generator=generator)
        pool[table[position // case.block_size], :, :, position % case.block_size] = context
        contexts.append(context)
    query = torch.randn((len(paging.slots), heads + 2, case.head_dim), generator=generator).to(device, dtype)
    # Sinks and soft-caps are not the same after a shift of all scores.
    centered = not case.sinks and case.softcap is None
    sizes = dict(head_dim=case.head_dim, value_dim=value_dim, latent=case.latent, centered=centered)
    stored = "int8" if case.format == "int4" else case.format
    query, cache = query[:, :heads], make_cache(pool.to(device, dtype), stored, strided=case.strided, **sizes)
    query = query if case.strided else query.contiguous()
    sinks = torch.randn(heads, generator=generator).to(device, dtype) if case.sinks else None
    paging = move_paging(paging, device)
    if case.format == "int4":
        cache, paging = pack_inputs(cache, paging, seed)
    return Inputs(
        (query, cache, paging),
        {
            "scale": case.head_dim**-0.5,
            "sliding_window": case.sliding_window,
            "softcap": case.softcap,
            "sinks": sinks,
        },
        [context[:, 0, :, : case.head_dim] for context in contexts],
        [context[:, 0 if case.latent else 1, :, :value_dim] for context in contexts],
    )
