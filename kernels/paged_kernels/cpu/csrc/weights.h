// The formats of weights, for linear.cpp.
//
// Weights are stored in groups of 16 outputs, so that a group is read sequentially, and a group in steps of some inputs:
//   plain     [2 inputs][16 outputs]; bf16 in pairs, [16 outputs][2 inputs]
//   int8      [16 outputs][4 inputs]
//   fp8       [2 inputs][16 outputs] codes in e4m3fn
//   int4      [16 outputs][2][4] codes of 4 bits: the first four are the even inputs of a step of 8, the others the odd
//             ones, so that a shift moves a pair of inputs to the lowest bits of both halves of 32 bits. A code
//             stands for itself minus 8.
//   fp4       the same, with codes in e2m1: 0, 0.5, 1, 1.5, 2, 3, 4, 6, and their negatives
//   int5      32 inputs: [16 outputs][4] bytes with the fifth bits, then [4][16 outputs][4] bytes with the lower four
//             bits. Byte b of an output has inputs b, 4 + b, 8 + b, ... of the step, from the lowest bits on. A code
//             stands for itself minus 16.
//   int6      16 inputs: [16 outputs][4] bytes with the upper two bits, then [2][16 outputs][4] bytes with the lower four
//             bits, in the same order. A code stands for itself minus 32.
// In a quantized weight, the codes of each block of inputs follow its scales [16 outputs], and its minima if there are any.
//
// Operands, the weights of W outputs, are fp32 for one input, or with DOT bf16 for a pair of inputs, which some
// instruction sets multiply as they are. All codes are exact in bf16. For rows that are rounded to 8 bits, operands are
// codes of 8 bits, of 4 inputs for each of W outputs.
#pragma once
#include "simd.h"

namespace paged {
namespace {

constexpr int vectors = linear_group / W;  // per group

template <class Operand>
INLINE vf add_product(Operand weights, const float* unit, vf sum) {
  if constexpr (__is_same(Operand, vu)) return dot_bf16(weights, vu{} + load<uint32_t>(unit), sum);
  else return fma(weights, splat(*unit), sum);
}

// A step of a plain weight, for W outputs.
template <Type T, bool DOT>
struct Plain {
  static constexpr bool is_quantized = false, is_int8 = false;
  static constexpr int inputs = 2, operands = DOT ? 1 : 2, bytes = inputs * linear_group * bytes_of<T>;
  static constexpr int vector_bytes = W * bytes_of<T> * (T == Type::bf16 ? 2 : 1);

  INLINE void read(const char* from) { step = from; }
  INLINE auto operand(int i) const {
    if constexpr (DOT) return load<vu>(step);
    else if constexpr (T == Type::bf16) return as_float(i ? load<vu>(step) & 0xFFFF0000u : load<vu>(step) << 16);
    else return widen<T>(step + i * linear_group * bytes_of<T>);
  }

  const char* step;
};

template <bool DOT>
struct Float8 {
  static constexpr bool is_quantized = true, is_int8 = false;
  static constexpr int inputs = 2, operands = DOT ? 1 : 2, bytes = inputs * linear_group, vector_bytes = W;

  INLINE void read(const char* from) { step = from; }
  INLINE auto operand(int i) const {
    if constexpr (DOT) return as_bits(code(0)) >> 16 | (as_bits(code(1)) & 0xFFFF0000u);
    else return code(i);
  }
  INLINE vf code(int i) const { return widen_fp8(step + i * linear_group); }

  const char* step;
};

template <bool DOT>
struct Int8 {
  static constexpr bool is_quantized = true, is_int8 = false;
  static constexpr int inputs = 4, operands = DOT ? 2 : 4, bytes = inputs * linear_group, vector_bytes = W * 4;

  INLINE void read(const char* step) { words = load<vu>(step); }
  INLINE auto operand(int i) const {
    if constexpr (DOT) return as_bits(code(2 * i)) >> 16 | (as_bits(code(2 * i + 1)) & 0xFFFF0000u);
    else return code(i);
  }
  INLINE vf code(int input) const { return __builtin_convertvector((vi)(words << (uint32_t)(24 - 8 * input)) >> 24, vf); }

  vu words;
};

template <Format F, bool DOT>  // int4 or fp4
struct FourBits {
  static constexpr bool is_quantized = true, is_int8 = false;
  static constexpr int inputs = 8, operands = DOT ? 4 : 8, bytes = inputs * linear_group / 2, vector_bytes = W * 4;

  INLINE void read(const char* step) { words = load<vu>(step); }
  INLINE auto operand(int i) const {
    if constexpr (DOT) {
#if defined(__AVX512BW__)
      typedef uint16_t halves __attribute__((vector_size(64)));  // of every value of the lowest 5 bits; the fifth is ignored
      const halves integers = {0xC100, 0xC0E0, 0xC0C0, 0xC0A0, 0xC080, 0xC040, 0xC000, 0xBF80, 0x0000, 0x3F80, 0x4000,
                               0x4040, 0x4080, 0x40A0, 0x40C0, 0x40E0, 0xC100, 0xC0E0, 0xC0C0, 0xC0A0, 0xC080, 0xC040,
                               0xC000, 0xBF80, 0x0000, 0x3F80, 0x4000, 0x4040, 0x4080, 0x40A0, 0x40C0, 0x40E0};
      const halves floats = {0x0000, 0x3F00, 0x3F80, 0x3FC0, 0x4000, 0x4040, 0x4080, 0x40C0, 0x8000, 0xBF00, 0xBF80,
                             0xBFC0, 0xC000, 0xC040, 0xC080, 0xC0C0, 0x0000, 0x3F00, 0x3F80, 0x3FC0, 0x4000, 0x4040,
                             0x4080, 0x40C0, 0x8000, 0xBF00, 0xBF80, 0xBFC0, 0xC000, 0xC040, 0xC080, 0xC0C0};
      const halves& numbers = F == Format::int4 ? integers : floats;
      return (vu)_mm512_permutexvar_epi16((__m512i)((halves)words >> (uint16_t)(4 * i)), (__m512i)numbers);
#else
      return as_bits(code(2 * i)) >> 16 | (as_bits(code(2 * i + 1)) & 0xFFFF0000u);
#endif
    } else {
      return code(i);
    }
  }
  INLINE vf code(int input) const {
    const vu shifted = words >> (uint32_t)(input / 2 * 4 + input % 2 * 16);
#if defined(__AVX512F__)
    const vf integers = {-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7};  // the permutation ignores higher bits
    const vf floats = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -0.5f, -1, -1.5f, -2, -3, -4, -6};
    return (vf)_mm512_permutexvar_ps((__m512i)shifted, (__m512)(F == Format::int4 ? integers : floats));
#else
    if constexpr (F == Format::int4) return __builtin_convertvector((vi)(shifted & 15u) - 8, vf);
    const vu magnitude = shifted & 7u;
    const vf number = as_float((magnitude << 22) + (126u << 23));
    const vf small = __builtin_convertvector((vi)magnitude, vf) * 0.5f;
    return as_float(as_bits(select((vi)(magnitude < 2u), small, number)) | (shifted & 8u) << 28);
#endif
  }

  vu words;
};

// The codes of 4 inputs of int5 or int6, as unsigned bytes. step: of W outputs.
template <int BITS>
INLINE vu plane_codes(const char* step, int four) {
  const vu high = load<vu>(step), low = load<vu>(step + 64 * (1 + four / 2)) >> (uint32_t)(four % 2 * 4) & 0x0F0F0F0Fu;
  const int shift = 4 - four * (BITS - 4);
  const vu moved = shift > 0 ? high << (uint32_t)max_int(shift, 0) : high >> (uint32_t)max_int(-shift, 0);
  return low | (moved & (BITS == 5 ? 0x10101010u : 0x30303030u));
}

template <int BITS, bool DOT>
struct Planes {
  static constexpr bool is_quantized = true, is_int8 = false;
  static constexpr int inputs = BITS == 5 ? 32 : 16, operands = DOT ? inputs / 2 : inputs, bytes = inputs * linear_group * BITS / 8, vector_bytes = W * 4;

  INLINE void read(const char* from) { step = from; }
  INLINE auto operand(int i) const {
    if constexpr (DOT) return as_bits(code(2 * i)) >> 16 | (as_bits(code(2 * i + 1)) & 0xFFFF0000u);
    else return code(i);
  }
  INLINE vf code(int input) const {
    const vu codes = plane_codes<BITS>(step, input / 4) >> (uint32_t)(input % 4 * 8) & 0xFFu;
    return __builtin_convertvector((vi)codes - (1 << (BITS - 1)), vf);
  }

  const char* step;
};

// The codes as bytes that dot_bytes multiplies: factor * code + zero, at most `largest`; or signed ones.
template <int STEPS = 1>
struct Int8Codes {
  static constexpr bool is_quantized = true, is_int8 = true;
  static constexpr int inputs = 4 * STEPS, operands = STEPS, bytes = inputs * linear_group, vector_bytes = W * 4;
  static constexpr int largest = has_byte_dot ? 255 : signed_bytes;

  INLINE void read(const char* from) { step = from; }
  INLINE vu operand(int i) const {
    const vu codes = load<vu>(step + i * 64);
    return has_byte_dot ? codes ^ 0x80808080u : codes;
  }

  const char* step;
};

template <Format F, int STEPS = 1>  // int4 or fp4; STEPS: number of steps that are summed together
struct FourBitCodes {
  static constexpr bool is_quantized = true, is_int8 = true;
  static constexpr int inputs = 8 * STEPS, operands = 2 * STEPS, bytes = inputs * linear_group / 2, vector_bytes = W * 4;
  static constexpr int largest = F == Format::int4 ? 15 : 24;

  INLINE void read(const char* from) { step = from; }
  INLINE vu operand(int i) const {
    const vu codes = load<vu>(step + i / 2 * 64) >> (uint32_t)(i % 2 * 4) & 0x0F0F0F0Fu;
    if constexpr (F == Format::int4) return codes;
    const bytes16 twice = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};
    return look_up(codes, twice);
  }

  const char* step;
};

template <int BITS>
struct PlaneCodes {
  static constexpr bool is_quantized = true, is_int8 = true;
  static constexpr int inputs = BITS == 5 ? 32 : 16, operands = inputs / 4, bytes = inputs * linear_group * BITS / 8, vector_bytes = W * 4;
  static constexpr int largest = (1 << BITS) - 1;

  INLINE void read(const char* from) { step = from; }
  INLINE vu operand(int i) const { return plane_codes<BITS>(step, i); }

  const char* step;
};

}  // namespace
}  // namespace paged
