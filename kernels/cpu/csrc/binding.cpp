// The operators as PyTorch knows them, through its stable ABI: one build serves later versions of torch. What the
// arguments must be is checked by the callers in Python (`kernels.arguments`), which also say what they mean.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>

#include "schedule.h"

namespace paged {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using Maybe = std::optional<Tensor>;

Type type_of(const Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case ScalarType::Float: return Type::f32;
    case ScalarType::Half: return Type::f16;
    case ScalarType::BFloat16: return Type::bf16;
    case ScalarType::Char: return Type::int8;
    case ScalarType::Float8_e4m3fn: return Type::fp8;
    default: throw std::runtime_error("a tensor is of no type that the CPU's kernels know");
  }
}

const Level& level_of(int64_t index) {
  if (index < 0 || index >= (int64_t)levels().size()) throw std::runtime_error("level=" + std::to_string(index) + ": of " + std::to_string(levels().size()));
  return *levels()[index];
}

Rows rows_of(const Tensor& x) {
  if (x.stride(2) != 1 && x.size(2) > 1) throw std::runtime_error("the last dimension of a tensor is not dense");
  return {x.data_ptr(), x.stride(0), x.stride(1)};
}

Pool pool_of(const Tensor& pool, const Maybe& scales) {
  Pool made{pool.data_ptr(), pool.stride(0), pool.stride(1), pool.stride(2), nullptr, 0, 0};
  if (scales) {
    made.scales = (float*)scales->data_ptr();
    made.scale_block_stride = scales->stride(0);
    made.scale_head_stride = scales->stride(1);
  }
  return made;
}

Cache cache_of(const Tensor& keys, const Tensor& values, const Maybe& key_scales, const Maybe& value_scales) {
  if (keys.size(3) > max_head_dim) throw std::runtime_error("head_dim=" + std::to_string(keys.size(3)) + ": must be 1..256");
  return {type_of(keys), (int)keys.size(0), (int)keys.size(1), (int)keys.size(2), (int)keys.size(3),
          pool_of(keys, key_scales), pool_of(values, value_scales)};
}

void over_threads(int threads, const std::function<void()>& work) {
  if (threads < 1) return;
  torch::stable::parallel_for(0, threads, 1, [&](int64_t begin, int64_t) { if (begin < threads) work(); });
}

// kernel(call, begin, end) over tokens, by threads where there is enough to do.
template <class Call>
void over_tokens(void (*kernel)(const Call&, int64_t, int64_t), const Call& call, int64_t tokens, int64_t elements) {
  const int64_t grain = std::max<int64_t>(1, worth_a_thread / std::max<int64_t>(1, elements));
  if (tokens <= grain) return kernel(call, 0, tokens);
  torch::stable::parallel_for(0, tokens, grain, [&](int64_t begin, int64_t end) { kernel(call, begin, end); });
}

void paged_attention(Tensor out, Tensor query, Tensor keys, Tensor values, Maybe key_scales, Maybe value_scales,
                     Tensor block_tables, Tensor context_lens, Tensor query_starts, double scale, int64_t window,
                     double softcap, Maybe sinks, int64_t level) {
  Attention call{};
  call.type = type_of(query);
  call.query = rows_of(query);
  call.out = out.data_ptr();
  call.num_heads = (int)query.size(1);
  call.num_tokens = (int)query.size(0);
  call.cache = cache_of(keys, values, key_scales, value_scales);
  call.block_tables = (const int32_t*)block_tables.data_ptr();
  call.table_stride = block_tables.stride(0);
  call.max_blocks = (int)block_tables.size(1);
  call.context_lens = (const int32_t*)context_lens.data_ptr();
  call.query_starts = (const int32_t*)query_starts.data_ptr();
  call.num_seqs = (int)context_lens.size(0);
  call.scale = (float)scale;
  call.window = (int)std::min<int64_t>(window, INT32_MAX);
  call.softcap = (float)softcap;
  call.sinks = sinks ? sinks->data_ptr() : nullptr;
  run_attention(level_of(level), call, (int)torch::stable::get_num_threads(), over_threads);
}

Write write_of(const Tensor& key, const Tensor& value, Cache cache, const Tensor& slots) {
  return {type_of(key), rows_of(key), rows_of(value), cache, (const int64_t*)slots.data_ptr()};
}

void kv_write(Tensor key, Tensor value, Tensor keys, Tensor values, Maybe key_scales, Maybe value_scales, Tensor slots,
              int64_t level) {
  const Write call = write_of(key, value, cache_of(keys, values, key_scales, value_scales), slots);
  over_tokens(level_of(level).write, call, slots.size(0), 2 * key.size(1) * key.size(2));
}

void rope_kv_write(Tensor out, Tensor query, Tensor key, Tensor value, Tensor cos, Tensor sin, Tensor keys,
                   Tensor values, Maybe key_scales, Maybe value_scales, Tensor slots, Maybe query_weight,
                   Maybe key_weight, double eps, int64_t level) {
  Rotation call{};
  call.query = rows_of(query);
  call.write = write_of(key, value, cache_of(keys, values, key_scales, value_scales), slots);
  call.out = out.data_ptr();
  call.num_heads = (int)query.size(1);
  call.angles = type_of(cos);
  call.cos = cos.data_ptr(), call.sin = sin.data_ptr();
  call.cos_stride = cos.stride(0), call.sin_stride = sin.stride(0);
  call.query_weight = query_weight ? query_weight->data_ptr() : nullptr;
  call.key_weight = key_weight ? key_weight->data_ptr() : nullptr;
  call.eps = (float)eps;
  over_tokens(level_of(level).rotate, call, slots.size(0), (query.size(1) + 2 * key.size(1)) * key.size(2));
}

void add_rms_norm(Tensor normed, Maybe total, Tensor x, Maybe residual, Tensor weight, double eps, int64_t level) {
  Norm call{};
  call.type = type_of(x);
  call.x = x.data_ptr(), call.x_stride = x.stride(0);
  if (residual) call.residual = residual->data_ptr(), call.residual_stride = residual->stride(0);
  call.weight = weight.data_ptr();
  call.normed = normed.data_ptr();
  call.total = total ? total->data_ptr() : nullptr;
  call.width = x.size(1);
  call.eps = (float)eps;
  over_tokens(level_of(level).norm, call, x.size(0), x.size(1));
}

void swiglu(Tensor out, Tensor gate_up, int64_t level) {
  const SwiGlu call{type_of(out), gate_up.data_ptr(), gate_up.stride(0), out.data_ptr(), out.size(1)};
  over_tokens(level_of(level).swiglu, call, out.size(0), gate_up.size(1));
}

Tensor linear(Tensor x, Tensor weight, Maybe scales, Maybe bias, int64_t out_features, int64_t level) {
  std::vector<int64_t> sizes(x.sizes().begin(), x.sizes().end());
  Linear call{};
  call.type = type_of(x);
  call.in_features = sizes.back(), call.out_features = out_features;
  call.rows = call.in_features ? x.numel() / call.in_features : 0;
  sizes.back() = out_features;
  Tensor out = torch::stable::new_empty(x, sizes);
  call.x = x.data_ptr(), call.x_stride = x.dim() == 2 ? x.stride(0) : call.in_features;
  call.weight = weight.data_ptr();
  call.scales = scales ? (const float*)scales->data_ptr() : nullptr;
  call.bias = bias ? bias->data_ptr() : nullptr;
  call.out = out.data_ptr();
  if (type_of(weight) != (scales ? Type::int8 : call.type)) throw std::runtime_error("linear: the weight is of another type than x");
  if (weight.numel() != ceil_div<int64_t>(out_features, linear_group) * linear_group * ceil_div<int64_t>(call.in_features, 2) * 2)
    throw std::runtime_error("linear: a weight of " + std::to_string(weight.numel()) + " elements for " + std::to_string(call.in_features) + " inputs and " + std::to_string(out_features) + " outputs");
  run_linear(level_of(level), call, (int)torch::stable::get_num_threads(), over_threads);
  return out;
}

}  // namespace
}  // namespace paged

extern "C" __attribute__((visibility("default"))) const char* paged_levels() {
  static const std::string names = [] {
    std::string all;
    for (const paged::Level* level : paged::levels()) all += (all.empty() ? "" : " ") + std::string(level->name);
    return all;
  }();
  return names.c_str();
}

STABLE_TORCH_LIBRARY(paged_cpu, m) {
  m.def(
      "paged_attention(Tensor(a!) out, Tensor query, Tensor keys, Tensor values, Tensor? key_scales, "
      "Tensor? value_scales, Tensor block_tables, Tensor context_lens, Tensor query_starts, float scale, int window, "
      "float softcap, Tensor? sinks, int level) -> ()");
  m.def(
      "kv_write(Tensor key, Tensor value, Tensor(a!) keys, Tensor(b!) values, Tensor(c!)? key_scales, "
      "Tensor(d!)? value_scales, Tensor slots, int level) -> ()");
  m.def(
      "rope_kv_write(Tensor(a!) out, Tensor query, Tensor key, Tensor value, Tensor cos, Tensor sin, Tensor(b!) keys, "
      "Tensor(c!) values, Tensor(d!)? key_scales, Tensor(e!)? value_scales, Tensor slots, Tensor? query_weight, "
      "Tensor? key_weight, float eps, int level) -> ()");
  m.def(
      "add_rms_norm(Tensor(a!) normed, Tensor(b!)? total, Tensor x, Tensor? residual, Tensor weight, float eps, "
      "int level) -> ()");
  m.def("swiglu(Tensor(a!) out, Tensor gate_up, int level) -> ()");
  m.def("linear(Tensor x, Tensor weight, Tensor? scales, Tensor? bias, int out_features, int level) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(paged_cpu, CPU, m) {
  m.impl("paged_attention", TORCH_BOX(&paged::paged_attention));
  m.impl("kv_write", TORCH_BOX(&paged::kv_write));
  m.impl("rope_kv_write", TORCH_BOX(&paged::rope_kv_write));
  m.impl("add_rms_norm", TORCH_BOX(&paged::add_rms_norm));
  m.impl("swiglu", TORCH_BOX(&paged::swiglu));
  m.impl("linear", TORCH_BOX(&paged::linear));
}
