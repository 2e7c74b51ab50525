// Conversions of tensors to the plain data that tasks take. The callers in Python document the arguments of operators and
// check them (`paged_kernels.ops`).
#pragma once
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "levels.h"
#include "tasks.h"

namespace paged {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;

inline Type type_of(const Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case ScalarType::Float: return Type::f32;
    case ScalarType::Half: return Type::f16;
    case ScalarType::BFloat16: return Type::bf16;
    case ScalarType::Char: return Type::int8;
    case ScalarType::Float8_e4m3fn: return Type::fp8;
    default: throw std::runtime_error("unsupported tensor type: must be float32, float16, bfloat16, int8 or float8_e4m3fn");
  }
}

inline ScalarType scalar_of(Type type) {
  return type == Type::f32 ? ScalarType::Float : type == Type::f16 ? ScalarType::Half : ScalarType::BFloat16;
}

inline Rows rows_of(const Tensor& x) {
  if (x.stride(2) != 1 && x.size(2) > 1) throw std::runtime_error("the last dimension of a tensor must be dense");
  return {x.data_ptr(), x.stride(0), x.stride(1)};
}

inline Pool pool_of(const Tensor& pool, const OptionalTensor& scales) {
  Pool made{pool.data_ptr(), pool.stride(0), pool.stride(1), pool.stride(2), nullptr, 0, 0};
  if (scales) {
    made.scales = (float*)scales->data_ptr();
    made.scale_block_stride = scales->stride(0);
    made.scale_head_stride = scales->stride(1);
  }
  return made;
}

// packed: the tensors of packed_blocks.PackedBlocks, or none.
inline Cache cache_of(const Tensor& keys, const Tensor& values, const OptionalTensor& key_scales, const OptionalTensor& value_scales, const OptionalTensor& key_channels, const std::vector<Tensor>& packed = {}) {
  for (int64_t size : {keys.size(3), values.size(3)})
    if (size > max_head_dim) throw std::runtime_error("head_dim=" + std::to_string(size) + ": must be 1.." + std::to_string(max_head_dim));
  Cache cache{type_of(keys), (int)keys.size(0), (int)keys.size(1), (int)keys.size(2), (int)keys.size(3), (int)values.size(3),
              pool_of(keys, key_scales), pool_of(values, value_scales), keys.data_ptr() == values.data_ptr(),
              key_channels ? (const float*)key_channels->data_ptr() : nullptr, {}};
  if (packed.empty()) return cache;
  if (packed.size() != PackedBlocks::num_parts || cache.type != Type::int8 || cache.block_size != packed_block || cache.head_dim % 32 || cache.value_dim % packed_group)
    throw std::runtime_error("packed blocks: must belong to a cache in int8, with blocks of " + std::to_string(packed_block) + " and heads of a multiple of 32");
  cache.packed.num_blocks = (int)packed[0].size(0);
  for (size_t i = 0; i < packed.size(); i++) {
    const int64_t bytes = packed[i].element_size();
    cache.packed.parts[i] = {(char*)packed[i].data_ptr(), packed[i].stride(0) * bytes, packed[i].stride(1) * bytes};
  }
  return cache;
}

inline const void* data_of(const OptionalTensor& tensor) { return tensor ? tensor->data_ptr() : nullptr; }

inline Tensor rows_like(const Tensor& x, int64_t width) {  // dense, of x's type
  const int64_t sizes[] = {x.size(0), width};
  return torch::stable::new_empty(x, sizes);
}

// Keeps tensors until no thread reads them.
template <class AnyTensor>
void keep(Program& program, std::vector<AnyTensor> tensors) {
  program.keep(std::make_shared<std::vector<AnyTensor>>(std::move(tensors)));
}

template <class... Tensors>
void keep(Program& program, const Tensor& first, const Tensors&... others) {
  keep(program, std::vector<OptionalTensor>{first, others...});
}

struct Weight {  // `packed_linear.PackedLinear`, and the bias of the layer
  Tensor groups;
  OptionalTensor bias;
  Format format;
  int64_t block_inputs;
  bool wide_scales, has_mins, int8_rows;
};

constexpr size_t layout_size = 5;

// The weights of several linear layers, by the elements of these lists. layouts: the numbers that `PackedLinear.layout`
// returns in Python, of one weight after the other.
inline std::vector<Weight> weights_of(const std::vector<Tensor>& groups, const std::vector<int64_t>& layouts, const std::vector<OptionalTensor>& biases) {
  const size_t count = groups.size();
  if (layouts.size() != layout_size * count || biases.size() != count)
    throw std::runtime_error("linear: " + std::to_string(count) + " weights with lists of another length");
  std::vector<Weight> weights;
  for (size_t i = 0; i < count; i++) {
    const int64_t* layout = &layouts[layout_size * i];
    if (layout[0] < 0 || layout[0] > (int64_t)Format::int6) throw std::runtime_error("linear: unknown kind of codes " + std::to_string(layout[0]));
    weights.push_back({groups[i], biases[i], (Format)layout[0], layout[1], layout[2] != 0, layout[3] != 0, layout[4] != 0});
  }
  return weights;
}

// A call of a linear layer, without rows.
inline Linear linear_of(Type type, int64_t in_features, const Weight& weight, int64_t out_features) {
  if (bytes(type) < 2) throw std::runtime_error("linear: rows must be float32, float16 or bfloat16");
  Linear call{};
  call.type = type, call.format = weight.format;
  call.in_features = in_features, call.out_features = out_features;
  call.block_inputs = weight.block_inputs, call.wide_scales = weight.wide_scales, call.has_mins = weight.has_mins, call.int8_rows = weight.int8_rows;
  const bool plain = call.format == Format::plain;
  if (plain && type_of(weight.groups) != type) throw std::runtime_error("linear: the weight and x have different types");
  if (call.int8_rows && (plain || call.format == Format::fp8))
    throw std::runtime_error("linear: int8_rows: the weight must have codes in integers or e2m1");
  const int multiple = std::max(8, step_inputs(call.format));
  if (!plain && (call.block_inputs < multiple || call.block_inputs % multiple))
    throw std::runtime_error("linear: block_inputs=" + std::to_string(call.block_inputs) + ": must be a multiple of " + std::to_string(multiple));
  const int64_t size = ceil_div<int64_t>(out_features, linear_group) * group_bytes(call);
  if (weight.groups.numel() * (int64_t)weight.groups.element_size() != size)
    throw std::runtime_error("linear: a weight of " + std::to_string(weight.groups.numel() * weight.groups.element_size()) + " bytes for " + std::to_string(in_features) + " inputs and " + std::to_string(out_features) + " outputs, which have " + std::to_string(size));
  if (const OptionalTensor& bias = weight.bias; bias && (bias->scalar_type() != scalar_of(type) || bias->numel() != out_features || !bias->is_contiguous()))
    throw std::runtime_error("linear: bias must be " + std::to_string(out_features) + " dense elements of the type of x");
  call.weight = weight.groups.data_ptr();
  call.bias = data_of(weight.bias);
  return call;
}

inline Linear with_rows(Linear call, const void* x, int64_t rows, int64_t x_stride, void* out) {
  call.x = x, call.rows = rows, call.x_stride = x_stride, call.out = out;
  return call;
}

struct Softmax {  // the parameters of an attention layer
  double scale;
  int64_t window;
  double softcap;
  OptionalTensor sinks;
};

struct Addresses {  // of a step, see paging.Paging
  Tensor slots, block_tables, context_lens, query_starts;
  OptionalTensor packed_slots, packed_tables;  // of the packed blocks of a layer that has them
};

inline Attention attention_call(void* out, Type type, const Rows& query, int64_t num_tokens, int64_t num_heads, const Cache& cache, const Addresses& addresses, const Softmax& softmax) {
  Attention call{};
  call.type = type;
  call.query = query;
  call.out = out;
  call.num_heads = (int)num_heads;
  call.num_tokens = (int)num_tokens;
  call.cache = cache;
  call.block_tables = (const int32_t*)addresses.block_tables.data_ptr();
  call.table_stride = addresses.block_tables.stride(0);
  call.max_blocks = (int)addresses.block_tables.size(1);
  if (cache.packed.num_blocks) {
    const Tensor& tables = addresses.packed_tables.value();
    call.packed_tables = (const int32_t*)tables.data_ptr();
    call.packed_stride = tables.stride(0);
    call.max_blocks = (int)std::min<int64_t>(call.max_blocks, tables.size(1) + 1);  // the newest is not packed
  }
  call.context_lens = (const int32_t*)addresses.context_lens.data_ptr();
  call.query_starts = (const int32_t*)addresses.query_starts.data_ptr();
  call.num_seqs = (int)addresses.context_lens.size(0);
  call.scale = (float)softmax.scale;
  call.window = (int)std::min<int64_t>(softmax.window, INT32_MAX);
  call.softcap = (float)softmax.softcap;
  call.sinks = data_of(softmax.sinks);
  return call;
}

inline void add_packing(Program& program, const Level& level, const Cache& cache, const Addresses& addresses) {
  if (cache.packed.num_blocks) add_packing(program, level, cache, (const int64_t*)addresses.slots.data_ptr(), (const int64_t*)addresses.packed_slots.value().data_ptr(), addresses.slots.size(0));
}

struct Angles {  // of each token, [num_tokens, head_dim]
  Type type;
  const void *cos, *sin;
  int64_t cos_stride, sin_stride;
};

// cos and sin: [num_tokens, head_dim], or [1, num_tokens, head_dim].
inline Angles angles_of(const Tensor& cos, const Tensor& sin) {
  if (type_of(sin) != type_of(cos)) throw std::runtime_error("cos and sin have different types");
  return {type_of(cos), cos.data_ptr(), sin.data_ptr(), cos.stride(cos.dim() - 2), sin.stride(sin.dim() - 2)};
}

inline Rotation rotation_call(void* out, const Rows& query, int64_t num_heads, const Write& write, const Angles& angles,
                              const OptionalTensor& query_norm, const OptionalTensor& key_norm, double eps) {
  Rotation call{};
  call.query = query;
  call.write = write;
  call.out = out;
  call.num_heads = (int)num_heads;
  call.angles = angles.type;
  call.cos = angles.cos, call.sin = angles.sin;
  call.cos_stride = angles.cos_stride, call.sin_stride = angles.sin_stride;
  call.query_weight = data_of(query_norm);
  call.key_weight = data_of(key_norm);
  call.eps = (float)eps;
  return call;
}

}  // namespace paged
