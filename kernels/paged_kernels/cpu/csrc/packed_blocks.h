// The packing of full blocks into four bits, like `packed_blocks.PackedBlocks.write`, with the same bits.
#pragma once
#include "simd.h"

namespace paged {
namespace {

constexpr uint32_t scale_bias = 109 << 3;  // packed_blocks.EXPONENT_BIAS
constexpr uint32_t nan_scale = 255;

INLINE vf packed_scales(vu bytes) { return as_float((vi)(bytes == nan_scale) ? vu{} + 0x7FC00000u : (bytes + scale_bias) << 20); }

INLINE vu bytes_of_scales(vf scales) {  // the nearest ones, ties up
  const vu bits = as_bits(scales) & 0x7FFFFFFFu, rounded = ((bits >> 19) + 1) >> 1;
  const vu bytes = rounded < scale_bias ? vu{} : rounded - scale_bias;
  return bytes < nan_scale ? bytes : vu{} + nan_scale;
}

INLINE vu nearest_codes(vf x) {  // ties to even; 0 for NaN
  const vf inside = x >= 0.0f ? x < 15.0f ? x : splat(15.0f) : vf{};
  return (vu)__builtin_convertvector((inside + 12582912.0f) - 12582912.0f, vi);  // 1.5 * 2**23 rounds to an integer
}

INLINE void store_bytes(void* to, vu x) { store(to, __builtin_convertvector(x, vu8)); }

struct Int8Rows {  // the rows of one head in a block
  const int8_t* codes;
  int64_t stride;
  const float* scales;

  INLINE Int8Rows(const Pool& pool, int64_t block, int kv_head)
      : codes((const int8_t*)pool.data + block * pool.block_stride + kv_head * pool.head_stride), stride(pool.slot_stride),
        scales(pool.scales + block * pool.scale_block_stride + kv_head * pool.scale_head_stride) {}

  INLINE vf at(int n, int d) const { return widen<Type::int8>(codes + n * stride + d) * scales[n]; }
};

// Packs W channels of keys from channel d on.
INLINE void pack_channels(const Int8Rows& rows, int d, vu (&codes)[packed_block], uint8_t* scales, uint16_t* zeros) {
  vf low = rows.at(0, d), high = low;
  vi unordered = {};
  for (int n = 0; n < packed_block; n++) {
    const vf x = rows.at(n, d);
    unordered |= x != x;
    low = x < low ? x : low;
    high = max_lanes(x, high);
  }
  const vu16 zero = narrow_f16(select(unordered, splat(__builtin_nanf("")), low));
  const vf start = widen_f16(&zero);
  const vi finite = as_float(as_bits(start) & 0x7FFFFFFFu) < infinity;
  const vu bytes = finite ? bytes_of_scales((high - low) / 15.0f) : vu{} + nan_scale;
  const vf scale = packed_scales(bytes);
  for (int n = 0; n < packed_block; n++) codes[n] = nearest_codes((rows.at(n, d) - start) / scale);
  store_bytes(scales + d, bytes);
  store(zeros + d, zero);
}

INLINE uint8_t byte_of_group(const Int8Rows& rows, int n, int d) {  // of the scale of a value's channels
  vf top = {};
  vi unordered = {};
  for (int i = 0; i < packed_group; i += W) {
    const vf x = rows.at(n, d + i);
    unordered |= x != x;
    top = max_lanes(as_float(as_bits(x) & 0x7FFFFFFFu), top);
  }
  return reduce_add(unordered) ? nan_scale : bytes_of_scales(splat(reduce_max(top)) / 7.5f)[0];
}

INLINE void pack_block(const Cache& cache, int64_t block, int64_t packed, int kv_head) {
  const auto part = [&](PackedBlocks::Part part) { return (uint8_t*)cache.packed.at(part, packed, kv_head); };
  const Int8Rows keys(cache.keys, block, kv_head), values(cache.values, block, kv_head);
  const int half = cache.head_dim / 2, value_half = cache.value_dim / 2, groups = cache.value_dim / packed_group;
  for (int d = 0; d < half; d += W) {
    vu low[packed_block], high[packed_block];
    uint8_t* scales = part(PackedBlocks::key_scales);
    uint16_t* zeros = (uint16_t*)part(PackedBlocks::key_zeros);
    pack_channels(keys, d, low, scales, zeros);
    pack_channels(keys, half + d, high, scales, zeros);
    for (int n = 0; n < packed_block; n++) store_bytes(part(PackedBlocks::key_codes) + n * half + d, low[n] | high[n] << 4);
  }
  for (int n = 0; n < packed_block; n++) {
    uint8_t* scales = part(PackedBlocks::value_scales) + n * groups;
    for (int group = 0; group < groups; group++) scales[group] = byte_of_group(values, n, group * packed_group);
    const auto codes = [&](int d) {
      return nearest_codes(values.at(n, d) / packed_scales(vu{} + scales[d / packed_group]) + 7.5f);
    };
    for (int d = 0; d < value_half; d += W)
      store_bytes(part(PackedBlocks::value_codes) + n * value_half + d, codes(d) | codes(value_half + d) << 4);
  }
}

}  // namespace
}  // namespace paged
