// The PyTorch operators, registered through the stable ABI, so that one build works with later versions of torch. The
// callers in Python document the arguments and check them (`paged_kernels.arguments`).
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "schedule.h"

namespace paged {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;

Type type_of(const Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case ScalarType::Float: return Type::f32;
    case ScalarType::Half: return Type::f16;
    case ScalarType::BFloat16: return Type::bf16;
    case ScalarType::Char: return Type::int8;
    case ScalarType::Float8_e4m3fn: return Type::fp8;
    default: throw std::runtime_error("unsupported tensor type: must be float32, float16, bfloat16, int8 or float8_e4m3fn");
  }
}

const Level& level_of(int64_t index) {
  if (index < 0 || index >= (int64_t)levels().size()) throw std::runtime_error("level=" + std::to_string(index) + ": must be below " + std::to_string(levels().size()));
  return *levels()[index];
}

Rows rows_of(const Tensor& x) {
  if (x.stride(2) != 1 && x.size(2) > 1) throw std::runtime_error("the last dimension of a tensor must be dense");
  return {x.data_ptr(), x.stride(0), x.stride(1)};
}

Pool pool_of(const Tensor& pool, const OptionalTensor& scales) {
  Pool made{pool.data_ptr(), pool.stride(0), pool.stride(1), pool.stride(2), nullptr, 0, 0};
  if (scales) {
    made.scales = (float*)scales->data_ptr();
    made.scale_block_stride = scales->stride(0);
    made.scale_head_stride = scales->stride(1);
  }
  return made;
}

Cache cache_of(const Tensor& keys, const Tensor& values, const OptionalTensor& key_scales, const OptionalTensor& value_scales) {
  if (keys.size(3) > max_head_dim) throw std::runtime_error("head_dim=" + std::to_string(keys.size(3)) + ": must be 1..256");
  return {type_of(keys), (int)keys.size(0), (int)keys.size(1), (int)keys.size(2), (int)keys.size(3),
          pool_of(keys, key_scales), pool_of(values, value_scales)};
}

void run_on_threads(int threads, const std::function<void()>& work) {
  if (threads < 1) return;
  torch::stable::parallel_for(0, threads, 1, [&](int64_t begin, int64_t) { if (begin < threads) work(); });
}

// Runs kernel(call, begin, end) over all tokens, with several threads if there is enough work.
template <class Call>
void for_tokens(void (*kernel)(const Call&, int64_t, int64_t), const Call& call, int64_t tokens, int64_t elements) {
  const int64_t grain = std::max<int64_t>(1, min_elements_per_thread / std::max<int64_t>(1, elements));
  if (tokens <= grain) return kernel(call, 0, tokens);
  torch::stable::parallel_for(0, tokens, grain, [&](int64_t begin, int64_t end) { kernel(call, begin, end); });
}

// Seconds that this thread has spent on each kind of operation; decoder_layer consists of several kinds. The order is
// that of native.TIMED_OPS.
enum OpKind { linears, norms, activations, rotations, attentions, num_kinds };
thread_local double seconds[num_kinds];

struct Timer {
  using Now = std::chrono::steady_clock;
  OpKind kind;
  Now::time_point began = Now::now();
  ~Timer() { seconds[kind] += std::chrono::duration<double>(Now::now() - began).count(); }
};

struct Settings {
  double scale;
  int64_t window;
  double softcap;
  OptionalTensor sinks;
};

void attend(void* out, Type type, Rows query, int64_t num_tokens, int64_t num_heads, const Cache& cache, const Tensor& block_tables,
            const Tensor& context_lens, const Tensor& query_starts, const Settings& settings, int64_t level) {
  const Timer timer{attentions};
  Attention call{};
  call.type = type;
  call.query = query;
  call.out = out;
  call.num_heads = (int)num_heads;
  call.num_tokens = (int)num_tokens;
  call.cache = cache;
  call.block_tables = (const int32_t*)block_tables.data_ptr();
  call.table_stride = block_tables.stride(0);
  call.max_blocks = (int)block_tables.size(1);
  call.context_lens = (const int32_t*)context_lens.data_ptr();
  call.query_starts = (const int32_t*)query_starts.data_ptr();
  call.num_seqs = (int)context_lens.size(0);
  call.scale = (float)settings.scale;
  call.window = (int)std::min<int64_t>(settings.window, INT32_MAX);
  call.softcap = (float)settings.softcap;
  call.sinks = settings.sinks ? settings.sinks->data_ptr() : nullptr;
  std::memset(out, 0, num_tokens * num_heads * cache.head_dim * bytes(type));  // padding rows stay zero
  run_attention(level_of(level), call, (int)torch::stable::get_num_threads(), run_on_threads);
}

void paged_attention(Tensor out, Tensor query, Tensor keys, Tensor values, OptionalTensor key_scales, OptionalTensor value_scales,
                     Tensor block_tables, Tensor context_lens, Tensor query_starts, double scale, int64_t window,
                     double softcap, OptionalTensor sinks, int64_t level) {
  attend(out.data_ptr(), type_of(query), rows_of(query), query.size(0), query.size(1), cache_of(keys, values, key_scales, value_scales),
         block_tables, context_lens, query_starts, {scale, window, softcap, sinks}, level);
}

void write(const Write& call, int64_t tokens, int64_t level) {
  const Timer timer{rotations};
  for_tokens(level_of(level).write, call, tokens, 2 * call.cache.num_kv_heads * call.cache.head_dim);
}

void kv_write(Tensor key, Tensor value, Tensor keys, Tensor values, OptionalTensor key_scales, OptionalTensor value_scales, Tensor slots,
              int64_t level) {
  const Cache cache = cache_of(keys, values, key_scales, value_scales);
  write({type_of(key), rows_of(key), rows_of(value), cache, (const int64_t*)slots.data_ptr()}, slots.size(0), level);
}

struct HeadNorms {
  OptionalTensor query, key;
  double eps;
};

// cos and sin: [num_tokens, head_dim], or [1, num_tokens, head_dim].
void rotate(void* out, Rows query, int64_t num_heads, const Write& write, int64_t tokens, const Tensor& cos, const Tensor& sin,
            const HeadNorms& norms, int64_t level) {
  const Timer timer{rotations};
  if (type_of(sin) != type_of(cos)) throw std::runtime_error("cos and sin have different types");
  Rotation call{};
  call.query = query;
  call.write = write;
  call.out = out;
  call.num_heads = (int)num_heads;
  call.angles = type_of(cos);
  call.cos = cos.data_ptr(), call.sin = sin.data_ptr();
  call.cos_stride = cos.stride(cos.dim() - 2), call.sin_stride = sin.stride(sin.dim() - 2);
  call.query_weight = norms.query ? norms.query->data_ptr() : nullptr;
  call.key_weight = norms.key ? norms.key->data_ptr() : nullptr;
  call.eps = (float)norms.eps;
  for_tokens(level_of(level).rotate, call, tokens, (num_heads + 2 * write.cache.num_kv_heads) * write.cache.head_dim);
}

void rope_kv_write(Tensor out, Tensor query, Tensor key, Tensor value, Tensor cos, Tensor sin, Tensor keys,
                   Tensor values, OptionalTensor key_scales, OptionalTensor value_scales, Tensor slots, OptionalTensor query_weight,
                   OptionalTensor key_weight, double eps, int64_t level) {
  const Cache cache = cache_of(keys, values, key_scales, value_scales);
  const Write write{type_of(key), rows_of(key), rows_of(value), cache, (const int64_t*)slots.data_ptr()};
  rotate(out.data_ptr(), rows_of(query), query.size(1), write, slots.size(0), cos, sin, {query_weight, key_weight, eps}, level);
}

Tensor rows_like(const Tensor& x, int64_t width) {  // dense, of x's type
  const int64_t sizes[] = {x.size(0), width};
  return torch::stable::new_empty(x, sizes);
}

std::tuple<Tensor, Tensor> add_rms_norm(Tensor x, OptionalTensor residual, Tensor weight, double eps, int64_t level) {
  const Timer timer{norms};
  Tensor normed = rows_like(x, x.size(1)), total = residual ? rows_like(x, x.size(1)) : x;
  Norm call{};
  call.type = type_of(x);
  call.x = x.data_ptr(), call.x_stride = x.stride(0);
  if (residual) call.residual = residual->data_ptr(), call.residual_stride = residual->stride(0), call.total = total.data_ptr();
  call.weight = weight.data_ptr();
  call.normed = normed.data_ptr();
  call.width = x.size(1);
  call.eps = (float)eps;
  for_tokens(level_of(level).norm, call, x.size(0), x.size(1));
  return {normed, total};
}

Tensor swiglu(Tensor gate_up, int64_t level) {
  const Timer timer{activations};
  Tensor out = rows_like(gate_up, gate_up.size(1) / 2);
  const SwiGlu call{type_of(out), gate_up.data_ptr(), gate_up.stride(0), out.data_ptr(), out.size(1)};
  for_tokens(level_of(level).swiglu, call, out.size(0), gate_up.size(1));
  return out;
}

void check_outputs(const char* what, const OptionalTensor& values, Type type, int64_t outputs) {
  if (values && (type_of(*values) != type || values->numel() != outputs || (outputs > 1 && values->stride(0) != 1)))
    throw std::runtime_error(std::string("linear: ") + what + " must be " + std::to_string(outputs) + " dense elements of the right type");
}

Tensor linear(Tensor x, Tensor weight, OptionalTensor scales, OptionalTensor bias, int64_t out_features, int64_t level) {
  const Timer timer{linears};
  const int64_t in_features = x.size(x.dim() - 1);
  std::vector<int64_t> sizes(x.sizes().begin(), x.sizes().end());
  sizes.back() = out_features;
  Tensor out = torch::stable::new_empty(x, sizes);
  Linear call{};
  call.type = type_of(x);
  call.x = x.data_ptr(), call.x_stride = x.dim() == 2 ? x.stride(0) : in_features;
  call.weight = weight.data_ptr();
  call.scales = scales ? (const float*)scales->data_ptr() : nullptr;
  call.bias = bias ? bias->data_ptr() : nullptr;
  call.out = out.data_ptr();
  call.rows = out_features ? out.numel() / out_features : 0, call.in_features = in_features, call.out_features = out_features;
  if (bytes(call.type) < 2) throw std::runtime_error("linear: rows must be float32, float16 or bfloat16");
  if (type_of(weight) != (scales ? Type::int8 : call.type)) throw std::runtime_error("linear: the weight and x have different types");
  check_outputs("scales", scales, Type::f32, out_features);
  check_outputs("bias", bias, call.type, out_features);
  if (weight.numel() != ceil_div<int64_t>(out_features, linear_group) * linear_group * padded_to_pairs(in_features))
    throw std::runtime_error("linear: a weight of " + std::to_string(weight.numel()) + " elements for " + std::to_string(in_features) + " inputs and " + std::to_string(out_features) + " outputs");
  run_linear(level_of(level), call, (int)torch::stable::get_num_threads(), run_on_threads);
  return out;
}

// A whole decoder layer (`paged_kernels.cpu.native.DecoderLayer`): a dozen calls from Python would cost more than its norms.
std::tuple<Tensor, Tensor> decoder_layer(
    Tensor output, OptionalTensor residual, Tensor cos, Tensor sin, Tensor keys, Tensor values, OptionalTensor key_scales, OptionalTensor value_scales,
    Tensor slots, Tensor block_tables, Tensor context_lens, Tensor query_starts,  // arguments of the step
    Tensor norm, double eps, Tensor qkv, OptionalTensor qkv_scales, OptionalTensor qkv_bias, int64_t num_heads, bool rotates, OptionalTensor query_norm,
    OptionalTensor key_norm, double head_eps, double scale, int64_t window, double softcap, Tensor o, OptionalTensor o_scales, OptionalTensor o_bias,
    Tensor post_norm, double post_eps, Tensor gate_up, OptionalTensor gate_up_scales, OptionalTensor gate_up_bias, int64_t gate_up_features,
    Tensor down, OptionalTensor down_scales, OptionalTensor down_bias, int64_t level) {  // arguments of the layer
  const Cache cache = cache_of(keys, values, key_scales, value_scales);
  const int64_t hidden = output.size(1), tokens = output.size(0), head_dim = cache.head_dim;
  auto [normed, stream] = add_rms_norm(output, residual, norm, eps, level);
  const Tensor projected = linear(normed, qkv, qkv_scales, qkv_bias, (num_heads + 2 * cache.num_kv_heads) * head_dim, level);
  const Type type = type_of(projected);
  const auto heads_from = [&](int64_t head) {
    return Rows{(const char*)projected.data_ptr() + head * head_dim * bytes(type), projected.stride(0), head_dim};
  };
  Rows query = heads_from(0);
  const Write call{type, heads_from(num_heads), heads_from(num_heads + cache.num_kv_heads), cache, (const int64_t*)slots.data_ptr()};
  Tensor rotated = rows_like(projected, num_heads * head_dim), attended = rows_like(projected, num_heads * head_dim);
  if (rotates) {
    rotate(rotated.data_ptr(), query, num_heads, call, slots.size(0), cos, sin, {query_norm, key_norm, head_eps}, level);
    query = {rotated.data_ptr(), num_heads * head_dim, head_dim};
  } else {
    write(call, slots.size(0), level);
  }
  attend(attended.data_ptr(), type, query, tokens, num_heads, cache, block_tables, context_lens, query_starts,
         {scale, window, softcap, {}}, level);
  auto [again, total] = add_rms_norm(linear(attended, o, o_scales, o_bias, hidden, level), stream, post_norm, post_eps, level);
  const Tensor inner = swiglu(linear(again, gate_up, gate_up_scales, gate_up_bias, gate_up_features, level), level);
  return {linear(inner, down, down_scales, down_bias, hidden, level), total};
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

extern "C" __attribute__((visibility("default"))) void paged_seconds(double* to) {
  std::copy_n(paged::seconds, (int)paged::num_kinds, to);
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
  m.def("add_rms_norm(Tensor x, Tensor? residual, Tensor weight, float eps, int level) -> (Tensor, Tensor)");
  m.def("swiglu(Tensor gate_up, int level) -> Tensor");
  m.def("linear(Tensor x, Tensor weight, Tensor? scales, Tensor? bias, int out_features, int level) -> Tensor");
  m.def(
      "decoder_layer(Tensor output, Tensor? residual, Tensor cos, Tensor sin, Tensor(a!) keys, Tensor(b!) values, "
      "Tensor(c!)? key_scales, Tensor(d!)? value_scales, Tensor slots, Tensor block_tables, Tensor context_lens, "
      "Tensor query_starts, Tensor norm, float eps, Tensor qkv, Tensor? qkv_scales, Tensor? qkv_bias, int num_heads, "
      "bool rotates, Tensor? query_norm, Tensor? key_norm, float head_eps, float scale, int window, float softcap, "
      "Tensor o, Tensor? o_scales, Tensor? o_bias, Tensor post_norm, float post_eps, Tensor gate_up, "
      "Tensor? gate_up_scales, Tensor? gate_up_bias, int gate_up_features, Tensor down, Tensor? down_scales, "
      "Tensor? down_bias, int level) -> (Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(paged_cpu, CPU, m) {
  m.impl("paged_attention", TORCH_BOX(&paged::paged_attention));
  m.impl("kv_write", TORCH_BOX(&paged::kv_write));
  m.impl("rope_kv_write", TORCH_BOX(&paged::rope_kv_write));
  m.impl("add_rms_norm", TORCH_BOX(&paged::add_rms_norm));
  m.impl("swiglu", TORCH_BOX(&paged::swiglu));
  m.impl("linear", TORCH_BOX(&paged::linear));
  m.impl("decoder_layer", TORCH_BOX(&paged::decoder_layer));
}
