// Decoder layers (`paged_kernels.cpu.native.DecoderLayer`) as one program of the thread pool.
#pragma once
#include <map>
#include <tuple>

#include "registry.h"
#include "tensors.h"

namespace paged {
namespace {

struct Layer {
  Tensor norm;
  double eps;
  Weight qkv;
  int64_t num_heads;
  bool rotates;
  OptionalTensor query_norm, key_norm;
  double head_eps;
  Softmax softmax;
  Weight o;
  Tensor post_norm;
  double post_eps;
  Weight gate_up;
  int64_t inner_features;
  Weight down;
  const Level& level;
};

Registry<Layer> made_layers("layer");

// The tensors of a step that all layers share, and the memory for what they compute.
struct Step {
  Tensor cos, sin;
  Tensor projected, rotated, attended, inner, middle;
};

// Adds a layer. plan: of all layers with the same window and addresses; null for the first of them, which makes it.
void add_layer(Program& program, const Layer& layer, const Cache& cache, const Step& step, const Addresses& addresses, std::shared_ptr<const AttentionPlan>& plan,
               const Tensor& input, const Tensor& output) {
  const Level& level = layer.level;
  const int64_t tokens = input.size(0), hidden = input.size(1), head_dim = cache.head_dim;
  const int64_t num_heads = layer.num_heads, num_kv_heads = cache.num_kv_heads, attention_width = num_heads * head_dim;
  const Type type = type_of(input);
  const size_t element = bytes(type);

  const int64_t width = (num_heads + 2 * num_kv_heads) * head_dim;
  Linear qkv = linear_call(type, input.data_ptr(), tokens, hidden, hidden, layer.qkv, step.projected.data_ptr(), width);
  qkv.norm = layer.norm.data_ptr(), qkv.eps = (float)layer.eps;
  program.add(linear_task(level, qkv));

  const auto heads_from = [&](int64_t head) { return Rows{(const char*)qkv.out + head * head_dim * element, width, head_dim}; };
  const Write write{type, heads_from(num_heads), heads_from(num_heads + num_kv_heads), cache, (const int64_t*)addresses.slots.data_ptr()};
  Rows query = heads_from(0);
  if (layer.rotates) {
    const Rotation rotation = rotation_call(step.rotated.data_ptr(), query, num_heads, write, step.cos, step.sin, layer.query_norm, layer.key_norm, layer.head_eps);
    program.add(token_task(rotations, level.rotate, rotation, addresses.slots.size(0), width));
    query = {step.rotated.data_ptr(), attention_width, head_dim};
  } else {
    program.add(token_task(rotations, level.write, write, addresses.slots.size(0), 2 * num_kv_heads * head_dim));
  }

  const Attention attention = attention_call(step.attended.data_ptr(), type, query, tokens, num_heads, cache, addresses, layer.softmax);
  add_packing(program, level, cache, addresses);
  if (!plan) plan = plan_attention(attention);
  add_attention(program, level, attention, plan);

  Linear o = linear_call(type, attention.out, tokens, attention_width, attention_width, layer.o, step.middle.data_ptr(), hidden);
  o.residual = input.data_ptr();
  program.add(linear_task(level, o));

  Linear gate_up = linear_call(type, o.out, tokens, hidden, hidden, layer.gate_up, step.inner.data_ptr(), 2 * layer.inner_features);
  gate_up.norm = layer.post_norm.data_ptr(), gate_up.eps = (float)layer.post_eps;
  gate_up.swiglu = true;
  program.add(linear_task(level, gate_up));

  Linear down = linear_call(type, gate_up.out, tokens, layer.inner_features, layer.inner_features, layer.down, output.data_ptr(), hidden);
  down.residual = o.out;
  program.add(linear_task(level, down));
}

// Returns a number for the layer, which holds its weights until free_layer. The weights are those of the projections to
// query, key and value, from attention, to gate and up, and down.
int64_t make_layer(Tensor norm, double eps, int64_t num_heads, bool rotates, OptionalTensor query_norm, OptionalTensor key_norm, double head_eps,
                   double scale, int64_t window, double softcap, OptionalTensor sinks, Tensor post_norm, double post_eps, int64_t inner_features,
                   std::vector<Tensor> groups, std::vector<int64_t> layouts, std::vector<OptionalTensor> biases, int64_t level) {
  if (inner_features % linear_group) throw std::runtime_error("inner_features=" + std::to_string(inner_features) + ": must be a multiple of " + std::to_string(linear_group));
  const std::vector<Weight> weights = weights_of(groups, layouts, biases);
  if (weights.size() != 4) throw std::runtime_error("make_layer: must have 4 weights");
  return made_layers.add(std::make_shared<const Layer>(Layer{norm, eps, weights[0], num_heads, rotates, query_norm, key_norm, head_eps,
      {scale, window, softcap, sinks}, weights[1], post_norm, post_eps, weights[2], inner_features, weights[3], level_of(level)}));
}

void free_layer(int64_t layer) { made_layers.remove(layer); }

// Returns the residual stream after these layers. keys, values, scales and channels: of each layer. slots, block_tables,
// context_lens, query_starts: of each paging. pagings, packed_pagings: the numbers of each layer's pagings, -1 for a layer
// without packed blocks. packed: the tensors of the layers with packed blocks, one after the other. All tensors of the
// step must be dense.
Tensor decoder_layers(std::vector<int64_t> layers, Tensor stream, Tensor cos, Tensor sin, std::vector<Tensor> keys, std::vector<Tensor> values,
                      std::vector<OptionalTensor> key_scales, std::vector<OptionalTensor> value_scales, std::vector<OptionalTensor> key_channels, std::vector<Tensor> packed,
                      std::vector<Tensor> slots, std::vector<Tensor> block_tables, std::vector<Tensor> context_lens, std::vector<Tensor> query_starts,
                      std::vector<int64_t> pagings, std::vector<int64_t> packed_pagings) {
  for (size_t size : {values.size(), key_scales.size(), value_scales.size(), key_channels.size(), pagings.size(), packed_pagings.size()})
    if (size != keys.size()) throw std::runtime_error("decoder_layers: " + std::to_string(keys.size()) + " keys with " + std::to_string(size) + " other arguments");
  if (keys.size() != layers.size())
    throw std::runtime_error("decoder_layers: " + std::to_string(layers.size()) + " layers with " + std::to_string(keys.size()) + " caches");
  auto program = std::make_unique<Program>();
  Step step{cos, sin, stream, stream, stream, stream, stream};
  int64_t projected = 0, attended = 0, inner = 0;
  std::vector<std::shared_ptr<const Layer>> used;
  for (size_t i = 0; i < layers.size(); i++) {
    const Layer& layer = *used.emplace_back(made_layers.find(layers[i]));
    const int64_t head_dim = keys[i].size(3);
    projected = std::max(projected, (layer.num_heads + 2 * keys[i].size(1)) * head_dim);
    attended = std::max(attended, layer.num_heads * head_dim);
    inner = std::max(inner, layer.inner_features);
  }
  step.projected = rows_like(stream, projected), step.rotated = rows_like(stream, attended), step.attended = rows_like(stream, attended);
  step.inner = rows_like(stream, inner), step.middle = rows_like(stream, stream.size(1));
  std::memset(step.attended.data_ptr(), 0, step.attended.numel() * bytes(type_of(stream)));  // padding rows stay zero
  // Not in place: an item may be computed again while another thread has written its result.
  Tensor input = stream, outputs[] = {rows_like(stream, stream.size(1)), rows_like(stream, stream.size(1))};
  std::map<std::tuple<int64_t, int64_t, int64_t>, std::shared_ptr<const AttentionPlan>> plans;  // by window and pagings
  auto next_packed = packed.begin();
  for (size_t i = 0; i < layers.size(); i++) {
    const int64_t paging = pagings[i], of_packed = packed_pagings[i];
    Addresses addresses{slots.at(paging), block_tables.at(paging), context_lens.at(paging), query_starts.at(paging), {}, {}};
    std::vector<Tensor> of_layer;
    if (of_packed >= 0) {
      addresses.packed_slots = slots.at(of_packed), addresses.packed_tables = block_tables.at(of_packed);
      for (int part = 0; part < PackedBlocks::num_parts; part++) of_layer.push_back(*next_packed++);
    }
    const Cache cache = cache_of(keys[i], values[i], key_scales[i], value_scales[i], key_channels[i], of_layer);
    if (cache.value_dim != cache.head_dim) throw std::runtime_error("decoder_layers: keys of " + std::to_string(cache.head_dim) + " elements, values of " + std::to_string(cache.value_dim));
    add_layer(*program, *used[i], cache, step, addresses, plans[{used[i]->softmax.window, paging, of_packed}], input, outputs[i % 2]);
    input = outputs[i % 2];
  }
  keep(*program, stream, outputs[0], outputs[1], step.projected, step.rotated, step.attended, step.inner, step.middle, cos, sin);
  for (auto* tensors : {&keys, &values, &packed, &slots, &block_tables, &context_lens, &query_starts}) keep(*program, std::move(*tensors));
  for (auto* tensors : {&key_scales, &value_scales, &key_channels}) keep(*program, std::move(*tensors));
  program->keep(std::make_shared<std::vector<std::shared_ptr<const Layer>>>(std::move(used)));
  run(std::move(program));
  return input;
}

}  // namespace
}  // namespace paged
