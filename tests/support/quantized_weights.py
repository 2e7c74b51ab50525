"""Random quantized weights for the tests of CPU kernels."""

import torch

from paged_kernels.cpu.packed_linear import pack_quantized


def make_quantized(out_features, in_features, bits, block_inputs, has_mins):
    """Return a random quantized weight, packed, and as float64."""
    blocks = -(-in_features // block_inputs)
    codes = torch.randint(-8, 8, (out_features, in_features), dtype=torch.int8)
    if bits == 8:
        codes = torch.randint(-127, 128, (out_features, in_features), dtype=torch.int8)
    scales = (torch.rand(out_features, blocks) / 2**bits).half()
    mins = torch.randn(out_features, blocks).half() if has_mins else None
    spread = torch.arange(in_features) // block_inputs
    plain = codes * scales.double()[:, spread] + (mins.double()[:, spread] if has_mins else 0)
    return pack_quantized(codes, scales, mins, block_inputs, bits), plain
