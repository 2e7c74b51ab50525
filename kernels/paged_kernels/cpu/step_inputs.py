"""Completion of a captured step's inputs on a CPU, where tests replay steps without CUDA graphs."""

from torch import Tensor


def step_inputs(
    tokens: Tensor,
    previous: Tensor,
    tables: Tensor,
    packed_tables: Tensor,
    table_width: Tensor,
    context_lens: Tensor,
    *,
    block_size: int,
) -> Tensor:
    """Compute `paged_kernels.step_inputs.step_inputs`."""
    width = int(table_width)
    for seq, context_len in enumerate(context_lens.tolist()):
        used = -(-context_len // block_size)
        tables[seq, :used] = packed_tables[seq * width : seq * width + used]
    return tokens.where(tokens >= 0, previous[(-1 - tokens).clamp(min=0)].clamp(min=0))
