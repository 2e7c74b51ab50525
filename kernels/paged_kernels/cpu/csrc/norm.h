// The RMSNorm of a row, for the operator and for linear layers that normalize their input.
#pragma once
#include "simd.h"

namespace paged {
namespace {

template <Type T>
INLINE void norm_row(const void* x, const void* weight, int64_t width, float eps, void* normed) {
  vf squares = {};
  for (int64_t d = 0; d < width; d += W) {
    vf value = widen<T>(at<T>(x, d), width - d < W ? (int)(width - d) : W);
    squares += value * value;
  }
  const float factor = 1.0f / __builtin_sqrtf(reduce_add(squares) / width + eps);
  for (int64_t d = 0; d < width; d += W) {
    const int count = width - d < W ? (int)(width - d) : W;
    vf value = rounded<T>(widen<T>(at<T>(x, d), count) * factor);
    narrow<T>(at<T>(normed, d), value * widen<T>(at<T>(weight, d), count), count);
  }
}

}  // namespace
}  // namespace paged
