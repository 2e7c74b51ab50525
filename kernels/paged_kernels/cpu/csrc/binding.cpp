// The PyTorch operators, registered through the stable ABI, so that one build works with later versions of torch.
#include <torch/csrc/stable/library.h>

#include <tuple>

#include "decoder.h"
#include "experts.h"
#include "tensors.h"

namespace paged {
namespace {

void paged_attention(Tensor out, Tensor query, Tensor keys, Tensor values, OptionalTensor key_scales, OptionalTensor value_scales, OptionalTensor key_channels,
                     std::vector<Tensor> packed, Tensor slots, Tensor block_tables, Tensor context_lens, Tensor query_starts, OptionalTensor packed_slots,
                     OptionalTensor packed_tables, double scale, int64_t window, double softcap, OptionalTensor sinks, int64_t level) {
  const Addresses addresses{slots, block_tables, context_lens, query_starts, packed_slots, packed_tables};
  const Attention call = attention_call(out.data_ptr(), type_of(query), rows_of(query), query.size(0), query.size(1),
                                        cache_of(keys, values, key_scales, value_scales, key_channels, packed), addresses, {scale, window, softcap, sinks});
  std::memset(call.out, 0, out.numel() * bytes(call.type));  // padding rows stay zero
  auto program = std::make_unique<Program>();
  add_packing(*program, level_of(level), call.cache, addresses);
  add_attention(*program, level_of(level), call, plan_attention(call));
  keep(*program, query, keys, values, key_scales, value_scales, key_channels, block_tables, context_lens, query_starts, packed_tables, sinks);
  keep(*program, std::move(packed));
  run(std::move(program));
}

int64_t written_elements(const Cache& cache) { return (int64_t)cache.num_kv_heads * (cache.head_dim + (cache.shared ? 0 : cache.value_dim)); }

void kv_write(Tensor key, OptionalTensor value, Tensor keys, Tensor values, OptionalTensor key_scales, OptionalTensor value_scales, OptionalTensor key_channels, Tensor slots,
              int64_t level) {
  const Cache cache = cache_of(keys, values, key_scales, value_scales, key_channels);
  if (!value && !cache.shared) throw std::runtime_error("kv_write: no values for a cache that stores them");
  const Write call{type_of(key), rows_of(key), value ? rows_of(*value) : Rows{}, cache, (const int64_t*)slots.data_ptr()};
  run(token_task(rotations, level_of(level).write, call, slots.size(0), written_elements(cache)));
}

void rope_kv_write(Tensor out, Tensor query, Tensor key, Tensor value, Tensor cos, Tensor sin, Tensor keys,
                   Tensor values, OptionalTensor key_scales, OptionalTensor value_scales, OptionalTensor key_channels, Tensor slots, OptionalTensor query_weight,
                   OptionalTensor key_weight, double eps, int64_t level) {
  const Cache cache = cache_of(keys, values, key_scales, value_scales, key_channels);
  const Write write{type_of(key), rows_of(key), rows_of(value), cache, (const int64_t*)slots.data_ptr()};
  const Rotation call = rotation_call(out.data_ptr(), rows_of(query), query.size(1), write, angles_of(cos, sin), query_weight, key_weight, eps);
  run(token_task(rotations, level_of(level).rotate, call, slots.size(0), query.size(1) * cache.head_dim + written_elements(cache)));
}

std::tuple<Tensor, Tensor> add_rms_norm(Tensor x, OptionalTensor residual, Tensor weight, double eps, int64_t level) {
  Tensor normed = rows_like(x, x.size(1)), total = residual ? rows_like(x, x.size(1)) : x;
  Norm call{};
  call.type = type_of(x);
  call.x = x.data_ptr(), call.x_stride = x.stride(0);
  if (residual) call.residual = residual->data_ptr(), call.residual_stride = residual->stride(0), call.total = total.data_ptr();
  call.weight = weight.data_ptr();
  call.normed = normed.data_ptr();
  call.width = x.size(1);
  call.eps = (float)eps;
  run(token_task(norms, level_of(level).norm, call, x.size(0), x.size(1)));
  return {normed, total};
}

Tensor swiglu(Tensor gate_up, int64_t level) {
  Tensor out = rows_like(gate_up, gate_up.size(1) / 2);
  const SwiGlu call{type_of(out), gate_up.data_ptr(), gate_up.stride(0), out.data_ptr(), out.size(1)};
  run(token_task(activations, level_of(level).swiglu, call, out.size(0), gate_up.size(1)));
  return out;
}

void best_tokens(Tensor logits, Tensor out, int64_t level) {
  const Best call{type_of(logits), logits.data_ptr(), logits.stride(0), logits.size(1), (int64_t*)out.data_ptr()};
  run(token_task(samplings, level_of(level).best, call, logits.size(0), logits.size(1)));
}

Tensor linear(Tensor x, Tensor groups, std::vector<int64_t> layout, OptionalTensor bias, int64_t out_features, int64_t level) {
  const Weight weight = std::move(weights_of({groups}, layout, {bias})[0]);
  const int64_t in_features = x.size(x.dim() - 1);
  std::vector<int64_t> sizes(x.sizes().begin(), x.sizes().end());
  sizes.back() = out_features;
  Tensor out = torch::stable::new_empty(x, sizes);
  const int64_t rows = out_features ? out.numel() / out_features : 0;
  const Linear call = with_rows(linear_of(type_of(x), in_features, weight, out_features), x.data_ptr(), rows, x.dim() == 2 ? x.stride(0) : in_features, out.data_ptr());
  auto program = std::make_unique<Program>();
  program->add(linear_task(level_of(level), call));
  keep(*program, x, groups, bias);
  run(std::move(program));
  return out;
}

}  // namespace
}  // namespace paged

#define EXPORTED extern "C" __attribute__((visibility("default")))

EXPORTED void paged_add_level(int number, const paged::Level* level) { paged::add_level(number, *level); }
EXPORTED void paged_seconds(double* to) { std::copy_n(paged::kind_seconds(), (int)paged::num_kinds, to); }
EXPORTED void paged_set_threads(int threads) { paged::set_threads(threads); }
EXPORTED int paged_threads() { return paged::threads(); }
EXPORTED void paged_pool_counts(int64_t* to) {
  const paged::PoolCounts counts = paged::pool_counts();
  to[0] = counts.programs, to[1] = counts.repeats, to[2] = counts.discarded;
}

STABLE_TORCH_LIBRARY(paged_cpu, m) {
  m.def(
      "paged_attention(Tensor(a!) out, Tensor query, Tensor keys, Tensor values, Tensor? key_scales, "
      "Tensor? value_scales, Tensor? key_channels, Tensor(b!)[] packed, Tensor slots, Tensor block_tables, Tensor context_lens, "
      "Tensor query_starts, Tensor? packed_slots, Tensor? packed_tables, float scale, int window, float softcap, Tensor? sinks, "
      "int level) -> ()");
  m.def(
      "kv_write(Tensor key, Tensor? value, Tensor(a!) keys, Tensor(b!) values, Tensor(c!)? key_scales, "
      "Tensor(d!)? value_scales, Tensor? key_channels, Tensor slots, int level) -> ()");
  m.def(
      "rope_kv_write(Tensor(a!) out, Tensor query, Tensor key, Tensor value, Tensor cos, Tensor sin, Tensor(b!) keys, "
      "Tensor(c!) values, Tensor(d!)? key_scales, Tensor(e!)? value_scales, Tensor? key_channels, Tensor slots, Tensor? query_weight, "
      "Tensor? key_weight, float eps, int level) -> ()");
  m.def("add_rms_norm(Tensor x, Tensor? residual, Tensor weight, float eps, int level) -> (Tensor, Tensor)");
  m.def("swiglu(Tensor gate_up, int level) -> Tensor");
  m.def("best_tokens(Tensor logits, Tensor(a!) out, int level) -> ()");
  m.def(
      "linear(Tensor x, Tensor groups, int[] layout, Tensor? bias, int out_features, int level) -> Tensor");
  m.def(
      "make_layer(Tensor norm, float eps, int num_heads, bool rotates, Tensor? query_norm, Tensor? key_norm, float head_eps, "
      "float scale, int window, float softcap, Tensor? sinks, Tensor post_norm, float post_eps, int inner_features, "
      "Tensor[] groups, int[] layouts, Tensor?[] biases, Tensor keys, Tensor values, Tensor? key_scales, Tensor? value_scales, "
      "Tensor? key_channels, Tensor[] packed, int page, int packed_page, int level) -> int");
  m.def("free_layer(int layer) -> ()");
  m.def(
      "decoder_layers(int[] layers, Tensor stream, Tensor cos, Tensor sin, Tensor[] slots, Tensor[] block_tables, "
      "Tensor context_lens, Tensor query_starts) -> Tensor");
  m.def(
      "make_model(int[] layers, Tensor embedding, Tensor angles, Tensor norm, float eps, Tensor head, int[] layout, Tensor? bias, "
      "int out_features) -> int");
  m.def("free_model(int model) -> ()");
  m.def(
      "model_logits(int model, Tensor input_ids, Tensor positions, Tensor rows, Tensor[] slots, Tensor[] block_tables, "
      "Tensor context_lens, Tensor query_starts) -> Tensor");
  m.def(
      "make_experts(Tensor[] groups, int[] layouts, Tensor?[] biases, int in_features, int out_features, int level) -> int");
  m.def("free_experts(int experts) -> ()");
  m.def("expert_linear(int experts, Tensor x, Tensor starts, bool swiglu) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(paged_cpu, CompositeExplicitAutograd, m) {
  m.impl("make_layer", TORCH_BOX(&paged::make_layer));
  m.impl("free_layer", TORCH_BOX(&paged::free_layer));
  m.impl("make_model", TORCH_BOX(&paged::make_model));
  m.impl("free_model", TORCH_BOX(&paged::free_model));
  m.impl("make_experts", TORCH_BOX(&paged::make_experts));
  m.impl("free_experts", TORCH_BOX(&paged::free_experts));
}

STABLE_TORCH_LIBRARY_IMPL(paged_cpu, CPU, m) {
  m.impl("paged_attention", TORCH_BOX(&paged::paged_attention));
  m.impl("kv_write", TORCH_BOX(&paged::kv_write));
  m.impl("rope_kv_write", TORCH_BOX(&paged::rope_kv_write));
  m.impl("add_rms_norm", TORCH_BOX(&paged::add_rms_norm));
  m.impl("swiglu", TORCH_BOX(&paged::swiglu));
  m.impl("best_tokens", TORCH_BOX(&paged::best_tokens));
  m.impl("linear", TORCH_BOX(&paged::linear));
  m.impl("decoder_layers", TORCH_BOX(&paged::decoder_layers));
  m.impl("model_logits", TORCH_BOX(&paged::model_logits));
  m.impl("expert_linear", TORCH_BOX(&paged::expert_linear));
}
