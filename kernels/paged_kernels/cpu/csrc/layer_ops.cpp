// The operations beside linear layers and attention: cache writes, rotary embedding, RMSNorm, SwiGLU, and the largest logit. Sums, normalized rows and
// silu are rounded to the model's type. Nothing is fused that the references do not fuse: the bits of a block must not
// depend on which implementation wrote it.
#include "level.h"
#include "norm.h"
#include "packed_blocks.h"

namespace paged {
namespace {

INLINE float largest_code(Type format) { return format == Type::int8 ? 127.0f : 448.0f; }

INLINE vu8 code_fp8(vf x) {  // to the nearest e4m3, ties to even
  vu bits = as_bits(x), magnitude = bits & 0x7FFFFFFFu;
  vu number = ((magnitude + 0x7FFFFu + (magnitude >> 20 & 1u)) >> 20) - (120u << 3);
  vu small = as_bits(as_float(magnitude) + 16384.0f) - 0x46800000u;  // subnormal: steps of 2**-9 are the last bits below 2**15
  vu code = as_float(magnitude) < 0.015625f ? small : number;
  return __builtin_convertvector(code | (bits >> 24 & 0x80u), vu8);
}

INLINE vu8 code_int8(vf x) {  // adding 1.5 * 2**23 rounds to an integer
  return (vu8)__builtin_convertvector(__builtin_convertvector((x + 12582912.0f) - 12582912.0f, vi), vi8);
}

// Quantizes a row of fp32, padded with zeros to a multiple of W, into the pool like `layer_cache.quantize`.
INLINE void write_codes(const float* row, int head_dim, Type format, char* to, float* scale) {
  vf top = {};
  vi unordered = {};
  for (int d = 0; d < head_dim; d += W) {
    vf magnitude = as_float(as_bits(load<vf>(row + d)) & 0x7FFFFFFFu);
    unordered |= !(magnitude < infinity);
    top = max_lanes(magnitude, top);
  }
  bool finite = true;
  for (int i = 0; i < W; i++) finite &= !unordered[i];
  const float top_value = reduce_max(top), divisor = (top_value > 0x1p-100f ? top_value : 0x1p-100f) / largest_code(format);
  *scale = finite ? divisor : __builtin_nanf("");
  for (int d = 0; d < head_dim; d += W) {
    vf x = finite ? load<vf>(row + d) / divisor : vf{};
    vu8 codes = format == Type::int8 ? code_int8(x) : code_fp8(x);
    __builtin_memcpy(to + d, &codes, min_int(W, head_dim - d));
  }
}

template <Type T>
INLINE void write_row(const float* row, int size, const Cache& cache, const Pool& pool, int64_t slot, int head) {
  const int64_t block = slot / cache.block_size, offset = slot % cache.block_size;
  const int64_t place = block * pool.block_stride + head * pool.head_stride + offset * pool.slot_stride;
  if (pool.scales) {
    write_codes(row, size, cache.type, (char*)pool.data + place,
                pool.scales + block * pool.scale_block_stride + head * pool.scale_head_stride + offset);
    return;
  }
  for (int d = 0; d < size; d += W)
    narrow<T>(at<T>(pool.data, place + d), load<vf>(row + d), size - d);
}

// Scales the channels of a key, padded with zeros to a multiple of W, like `layer_cache.scale_keys`.
INLINE void scale_key(float* row, const Cache& cache, int head) {
  const float* center = cache.key_channels + (int64_t)head * cache.head_dim;
  const float* factor = center + (int64_t)cache.num_kv_heads * cache.head_dim;
  for (int d = 0; d < cache.head_dim; d++) row[d] = (row[d] - center[d]) * factor[d];
}

template <Type T>
INLINE void read_row(const Rows& rows, int64_t token, int head, int head_dim, float* row) {
  const int64_t place = token * rows.token_stride + head * rows.head_stride;
  for (int d = 0; d < head_dim; d += W) store(row + d, widen<T>(at<T>(rows.data, place + d), head_dim - d));
}

template <Type T>
INLINE void copy_row(const Rows& rows, int64_t token, int head, int size, const Cache& cache, const Pool& pool, int64_t slot) {
  const int64_t from = token * rows.token_stride + head * rows.head_stride;
  const int64_t to = slot / cache.block_size * pool.block_stride + head * pool.head_stride + slot % cache.block_size * pool.slot_stride;
  __builtin_memcpy(at<T>(pool.data, to), at<T>(rows.data, from), (size_t)size * bytes_of<T>);
}

template <Type T>
INLINE void write_head(const Rows& rows, int64_t token, int head, int size, const Cache& cache, const Pool& pool, int64_t slot, bool scaled = false) {
  if (!pool.scales) return copy_row<T>(rows, token, head, size, cache, pool, slot);
  alignas(64) float row[max_head_dim + W];
  read_row<T>(rows, token, head, size, row);
  if (scaled) scale_key(row, cache, head);
  write_row<T>(row, size, cache, pool, slot, head);
}

// Normalizes row [head_dim], padded with zeros to a multiple of W, rounds, multiplies by the weight, and rounds again.
template <Type T>
INLINE void normalize(float* row, int head_dim, const void* weight, float eps) {
  vf squares = {};
  for (int d = 0; d < head_dim; d += W) squares += load<vf>(row + d) * load<vf>(row + d);
  const float factor = 1.0f / __builtin_sqrtf(reduce_add(squares) / head_dim + eps);
  for (int d = 0; d < head_dim; d += W) {
    vf x = rounded<T>(load<vf>(row + d) * factor) * widen<T>(at<T>(weight, d), head_dim - d);
    store(row + d, rounded<T>(x));
  }
}

// Rotates row [head_dim], and rounds it to the model's type.
template <Type T>
INLINE void rotate_row(float* row, int head_dim, const float* cos, const float* sin) {
  const int half = head_dim / 2;
  if (head_dim % (2 * W) == 0) {
    for (int d = 0; d < half; d += W) {
      const vf first = load<vf>(row + d), second = load<vf>(row + d + half);
      store(row + d, rounded<T>(first * load<vf>(cos + d) + -second * load<vf>(sin + d)));
      store(row + d + half, rounded<T>(second * load<vf>(cos + d + half) + first * load<vf>(sin + d + half)));
    }
    return;
  }
  alignas(64) float swapped[max_head_dim + W] = {};
  for (int d = 0; d < half; d++) swapped[d] = -row[d + half], swapped[d + half] = row[d];
  for (int d = 0; d < head_dim; d += W)
    store(row + d, rounded<T>(load<vf>(row + d) * load<vf>(cos + d) + load<vf>(swapped + d) * load<vf>(sin + d)));
}

// Reads the vector at `d` of a row of at least one element. Lanes past its end repeat its last element.
template <Type T>
INLINE vf read_repeated(const void* row, int64_t d, int64_t width) {
  if (width - d >= W) return widen<T>(at<T>(row, d));
  alignas(64) float values[W];
  store(values, widen<T>(at<T>(row, d), (int)(width - d)));
  for (int64_t lane = width - d; lane < W; lane++) values[lane] = values[width - d - 1];
  return load<vf>(values);
}

// Returns the index of the first largest element, or -1 if it or any other is not a finite number or -infinity.
template <Type T>
INLINE int64_t find_best(const void* row, int64_t width) {
  if (!width) return -1;
  vf top = splat(-infinity);
  vi number = {};  // of the vector that is read
  vi first = {};   // number of the vector with the first largest element, for each lane
  vi wrong = {};   // whether a lane had an element that is NaN or infinity
  for (int64_t d = 0; d < width; d += W) {
    const vf x = read_repeated<T>(row, d, width);
    wrong |= !(x < infinity);
    first = x > top ? number : first;
    top = max_lanes(x, top);
    number += 1;
  }
  const float largest = reduce_max(top);
  int64_t found = largest > -infinity ? width : -1;
  for (int lane = 0; lane < W; lane++) {
    if (wrong[lane]) return -1;
    if (top[lane] == largest && first[lane] * (int64_t)W + lane < found) found = first[lane] * (int64_t)W + lane;
  }
  return found;
}

}  // namespace

void write(const Write& call, int64_t begin, int64_t end) {
  DISPATCH_FLOAT(call.type, T, {
    for (int64_t token = begin; token < end; token++) {
      if (call.slots[token] < 0) continue;
      for (int head = 0; head < call.cache.num_kv_heads; head++) {
        write_head<T>(call.key, token, head, call.cache.head_dim, call.cache, call.cache.keys, call.slots[token], call.cache.key_channels);
        if (!call.cache.shared) write_head<T>(call.value, token, head, call.cache.value_dim, call.cache, call.cache.values, call.slots[token]);
      }
    }
  });
}

void pack(const Cache& cache, int64_t block, int64_t packed, int kv_head) { pack_block(cache, block, packed, kv_head); }

void rotate(const Rotation& call, int64_t begin, int64_t end) {
  const Write& write = call.write;
  const int head_dim = write.cache.head_dim;
  DISPATCH_FLOAT(write.type, T, {
    alignas(64) float row[max_head_dim + W], cos[max_head_dim + W], sin[max_head_dim + W];
    for (int64_t token = begin; token < end; token++) {
      DISPATCH_FLOAT(call.angles, A, {
        read_row<A>({call.cos, call.cos_stride, 0}, token, 0, head_dim, cos);
        read_row<A>({call.sin, call.sin_stride, 0}, token, 0, head_dim, sin);
      });
      for (int head = 0; head < call.num_heads; head++) {
        read_row<T>(call.query, token, head, head_dim, row);
        if (call.query_weight) normalize<T>(row, head_dim, call.query_weight, call.eps);
        rotate_row<T>(row, head_dim, cos, sin);
        void* out = at<T>(call.out, (token * call.num_heads + head) * head_dim);
        for (int d = 0; d < head_dim; d += W) narrow<T>(at<T>(out, d), load<vf>(row + d), head_dim - d);
      }
      if (write.slots[token] < 0) continue;
      for (int head = 0; head < write.cache.num_kv_heads; head++) {
        read_row<T>(write.key, token, head, head_dim, row);
        if (call.key_weight) normalize<T>(row, head_dim, call.key_weight, call.eps);
        rotate_row<T>(row, head_dim, cos, sin);
        if (write.cache.key_channels) scale_key(row, write.cache, head);
        write_row<T>(row, head_dim, write.cache, write.cache.keys, write.slots[token], head);
        write_head<T>(write.value, token, head, write.cache.value_dim, write.cache, write.cache.values, write.slots[token]);
      }
    }
  });
}

void norm(const Norm& call, int64_t begin, int64_t end) {
  DISPATCH_FLOAT(call.type, T, {
    for (int64_t token = begin; token < end; token++) {
      const void* total = at<T>(call.x, token * call.x_stride);
      if (call.residual) {
        const void *x = total, *residual = at<T>(call.residual, token * call.residual_stride);
        void* sum = at<T>(call.total, token * call.width);
        for (int64_t d = 0; d < call.width; d += W) {
          const int count = call.width - d < W ? (int)(call.width - d) : W;
          narrow<T>(at<T>(sum, d), widen<T>(at<T>(x, d), count) + widen<T>(at<T>(residual, d), count), count);
        }
        total = sum;
      }
      norm_row<T>(total, call.weight, call.width, call.eps, at<T>(call.normed, token * call.width));
    }
  });
}

void swiglu(const SwiGlu& call, int64_t begin, int64_t end) {
  DISPATCH_FLOAT(call.type, T, {
    for (int64_t token = begin; token < end; token++) {
      const void* gate = at<T>(call.gate_up, token * call.stride);
      const void* up = at<T>(gate, call.width);
      void* out = at<T>(call.out, token * call.width);
      for (int64_t d = 0; d < call.width; d += W) {
        const int count = call.width - d < W ? (int)(call.width - d) : W;
        vf x = widen<T>(at<T>(gate, d), count);
        vf power = x * -log2e;
        vf silu = divide(x, 1.0f + exp2(power > 125.0f ? splat(125.0f) : power));
        narrow<T>(at<T>(out, d), rounded<T>(silu) * widen<T>(at<T>(up, d), count), count);
      }
    }
  });
}

void best(const Best& call, int64_t begin, int64_t end) {
  DISPATCH_FLOAT(call.type, T, {
    for (int64_t row = begin; row < end; row++) call.tokens[row] = find_best<T>(at<T>(call.logits, row * call.stride), call.width);
  });
}

}  // namespace paged
