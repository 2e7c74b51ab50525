"""Random quantized weights for the tests of CPU kernels."""

import torch

from paged_kernels.cpu.packed_linear import E2M1, pack_quantized


def make_quantized(out_features, in_features, bits, block_inputs, has_mins, kind="int", scale_dtype=torch.float16):
    """Return a random quantized weight, packed, and as float64. kind: "int" or "float" codes."""
    packed, values, minima = make_parts(out_features, in_features, bits, block_inputs, has_mins, kind, scale_dtype)
    return packed, values + minima


def make_parts(out_features, in_features, bits, block_inputs, has_mins, kind="int", scale_dtype=torch.float16):
    """Return a random quantized weight, packed, and as float64 without its minima and the minima of its elements."""
    blocks, shape = -(-in_features // block_inputs), (out_features, in_features)
    if kind == "float" and bits == 4:
        codes = torch.randint(16, shape, dtype=torch.uint8)
        values = E2M1.double()[codes.long()]
    elif kind == "float":
        codes = torch.randint(256, shape, dtype=torch.uint8).view(torch.float8_e4m3fn)
        codes = torch.where(codes.float().isnan(), 0, codes.float()).to(torch.float8_e4m3fn)
        values = codes.double()
    else:
        codes = torch.randint(-(2 ** (bits - 1)), 2 ** (bits - 1), shape, dtype=torch.int8)
        values = codes.double()
    scales = (torch.rand(out_features, blocks) / 2**bits).to(scale_dtype)
    mins = torch.randn(out_features, blocks).to(scale_dtype) if has_mins else None
    spread = torch.arange(in_features) // block_inputs
    minima = mins.double()[:, spread] if has_mins else torch.zeros(shape).double()
    return pack_quantized(codes, scales, mins, block_inputs, bits), values * scales.double()[:, spread], minima
