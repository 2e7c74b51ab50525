// Decoder layers (`paged_kernels.cpu.native.DecoderLayer`) as one program of the thread pool.
#pragma once
#include <map>
#include <tuple>

#include "registry.h"
#include "tensors.h"

namespace paged {
namespace {

// A layer and its cache. The calls of linear layers have no rows yet.
struct Layer {
  Type type;
  int64_t hidden, num_heads;
  Linear qkv, o, gate_up, down;
  bool rotates;
  Tensor norm, post_norm;
  OptionalTensor query_norm, key_norm;
  double head_eps;
  Softmax softmax;
  std::vector<Weight> weights;
  Tensor keys, values;  // of `paged_kernels.layer_cache.LayerCache`, like the following
  OptionalTensor key_scales, value_scales, key_channels;
  std::vector<Tensor> packed;
  int64_t page, packed_page;  // indices of the addresses in its cache and its packed blocks; -1: it has no packed blocks
  const Level& level;
  Cache made_cache = cache_of(keys, values, key_scales, value_scales, key_channels, packed);

  // A cache moves as a whole when its memory is allocated again.
  Cache cache() const {
    const bool is_there = keys.data_ptr() == made_cache.keys.data && values.data_ptr() == made_cache.values.data;
    return is_there ? made_cache : cache_of(keys, values, key_scales, value_scales, key_channels, packed);
  }
};

Registry<Layer> made_layers("layer");

// The tensors of a step that all layers share, and the memory for what they compute.
struct Step {
  Angles angles;
  Tensor projected, rotated, attended, inner, middle;
};

// Adds a layer. plan: of all layers with the same window and addresses; null for the first of them, which makes it.
void add_layer(Program& program, const Layer& layer, const Step& step, const Addresses& addresses, std::shared_ptr<const AttentionPlan>& plan, const Tensor& input, const Tensor& output) {
  const Level& level = layer.level;
  const Cache cache = layer.cache();
  const int64_t tokens = input.size(0), num_heads = layer.num_heads, head_dim = cache.head_dim, attention_width = layer.o.in_features;
  const size_t element = bytes(layer.type);

  const Linear qkv = with_rows(layer.qkv, input.data_ptr(), tokens, layer.hidden, step.projected.data_ptr());
  program.add(linear_task(level, qkv));

  const auto heads_from = [&](int64_t head) { return Rows{(const char*)qkv.out + head * head_dim * element, qkv.out_features, head_dim}; };
  const Write write{layer.type, heads_from(num_heads), heads_from(num_heads + cache.num_kv_heads), cache, (const int64_t*)addresses.slots.data_ptr()};
  Rows query = heads_from(0);
  if (layer.rotates) {
    const Rotation rotation = rotation_call(step.rotated.data_ptr(), query, num_heads, write, step.angles, layer.query_norm, layer.key_norm, layer.head_eps);
    program.add(token_task(rotations, level.rotate, rotation, addresses.slots.size(0), qkv.out_features));
    query = {step.rotated.data_ptr(), attention_width, head_dim};
  } else {
    program.add(token_task(rotations, level.write, write, addresses.slots.size(0), 2 * cache.num_kv_heads * head_dim));
  }

  const Attention attention = attention_call(step.attended.data_ptr(), layer.type, query, tokens, num_heads, cache, addresses, layer.softmax);
  add_packing(program, level, cache, addresses);
  if (!plan) plan = plan_attention(attention);
  add_attention(program, level, attention, plan);

  Linear o = with_rows(layer.o, attention.out, tokens, attention_width, step.middle.data_ptr());
  o.residual = input.data_ptr();
  program.add(linear_task(level, o));

  const Linear gate_up = with_rows(layer.gate_up, o.out, tokens, layer.hidden, step.inner.data_ptr());
  program.add(linear_task(level, gate_up));

  Linear down = with_rows(layer.down, gate_up.out, tokens, layer.down.in_features, output.data_ptr());
  down.residual = o.out;
  program.add(linear_task(level, down));
}

// Makes a layer, which keeps its weights and its cache in memory until free_layer. Returns its number. groups to biases:
// of the projections to query, key and value, from attention, to gate and up, and down. keys to packed: as in
// `layer_cache.LayerCache`. page, packed_page: indices of the addresses in `decoder_layers`.
int64_t make_layer(Tensor norm, double eps, int64_t num_heads, bool rotates, OptionalTensor query_norm, OptionalTensor key_norm, double head_eps,
                   double scale, int64_t window, double softcap, OptionalTensor sinks, Tensor post_norm, double post_eps, int64_t inner_features,
                   std::vector<Tensor> groups, std::vector<int64_t> layouts, std::vector<OptionalTensor> biases, Tensor keys, Tensor values, OptionalTensor key_scales,
                   OptionalTensor value_scales, OptionalTensor key_channels, std::vector<Tensor> packed, int64_t page, int64_t packed_page, int64_t level) {
  if (inner_features % linear_group) throw std::runtime_error("inner_features=" + std::to_string(inner_features) + ": must be a multiple of " + std::to_string(linear_group));
  const std::vector<Weight> weights = weights_of(groups, layouts, biases);
  if (weights.size() != 4) throw std::runtime_error("make_layer: must have 4 weights");
  const Type type = type_of(norm);
  const int64_t hidden = norm.numel(), head_dim = keys.size(3), attention_width = num_heads * head_dim;
  if (values.size(3) != head_dim) throw std::runtime_error("make_layer: keys of " + std::to_string(head_dim) + " elements, values of " + std::to_string(values.size(3)));
  Layer layer{type, hidden, num_heads,
              linear_of(type, hidden, weights[0], attention_width + 2 * keys.size(1) * head_dim), linear_of(type, attention_width, weights[1], hidden),
              linear_of(type, hidden, weights[2], 2 * inner_features), linear_of(type, inner_features, weights[3], hidden),
              rotates, norm, post_norm, query_norm, key_norm, head_eps, {scale, window, softcap, sinks}, weights,
              keys, values, key_scales, value_scales, key_channels, std::move(packed), page, packed_page, level_of(level)};
  layer.qkv.norm = norm.data_ptr(), layer.qkv.eps = (float)eps;
  layer.gate_up.norm = post_norm.data_ptr(), layer.gate_up.eps = (float)post_eps;
  layer.gate_up.swiglu = true;
  return made_layers.add(std::make_shared<const Layer>(std::move(layer)));
}

void free_layer(int64_t layer) { made_layers.remove(layer); }

using Layers = std::vector<std::shared_ptr<const Layer>>;

Layers find_layers(const std::vector<int64_t>& numbers) {
  Layers found;
  for (int64_t number : numbers) found.push_back(made_layers.find(number));
  return found;
}

// The addresses of a step in each page, and its sequences.
struct StepAddresses {
  std::vector<Tensor> slots, block_tables;
  Tensor context_lens, query_starts;
};

// Adds layers to a program, and returns the residual stream after them. stream: [num_tokens, hidden].
Tensor add_layers(Program& program, const Layers& layers, const Tensor& stream, const Angles& angles, const StepAddresses& of_pages) {
  int64_t projected = 0, attended = 0, inner = 0;
  for (const auto& layer : layers) {
    if (layer->hidden != stream.size(1) || layer->type != type_of(stream)) throw std::runtime_error("decoder_layers: the stream has another size or type than the norm");
    projected = std::max(projected, layer->qkv.out_features), attended = std::max(attended, layer->o.in_features), inner = std::max(inner, layer->down.in_features);
  }
  const Step step{angles, rows_like(stream, projected), rows_like(stream, attended), rows_like(stream, attended), rows_like(stream, inner), rows_like(stream, stream.size(1))};
  std::memset(step.attended.data_ptr(), 0, step.attended.numel() * bytes(type_of(stream)));  // padding rows stay zero
  // Not in place: an item may be computed again while another thread has written its result.
  Tensor input = stream, outputs[] = {rows_like(stream, stream.size(1)), rows_like(stream, stream.size(1))};
  std::map<std::tuple<int64_t, int64_t, int64_t>, std::shared_ptr<const AttentionPlan>> plans;  // by window and pages
  for (size_t i = 0; i < layers.size(); i++) {
    const Layer& layer = *layers[i];
    Addresses addresses{of_pages.slots.at(layer.page), of_pages.block_tables.at(layer.page), of_pages.context_lens, of_pages.query_starts, {}, {}};
    if (layer.packed_page >= 0) addresses.packed_slots = of_pages.slots.at(layer.packed_page), addresses.packed_tables = of_pages.block_tables.at(layer.packed_page);
    add_layer(program, layer, step, addresses, plans[{layer.softmax.window, layer.page, layer.packed_page}], input, outputs[i % 2]);
    input = outputs[i % 2];
  }
  keep(program, stream, outputs[0], outputs[1], step.projected, step.rotated, step.attended, step.inner, step.middle);
  program.keep(std::make_shared<StepAddresses>(of_pages));
  program.keep(std::make_shared<Layers>(layers));
  return input;
}

// Returns the residual stream after these layers. slots, block_tables: of each page. All tensors must be dense.
Tensor decoder_layers(std::vector<int64_t> layers, Tensor stream, Tensor cos, Tensor sin, std::vector<Tensor> slots, std::vector<Tensor> block_tables, Tensor context_lens, Tensor query_starts) {
  auto program = std::make_unique<Program>();
  Tensor output = add_layers(*program, find_layers(layers), stream, angles_of(cos, sin), {std::move(slots), std::move(block_tables), context_lens, query_starts});
  keep(*program, cos, sin);
  run(std::move(program));
  return output;
}

// A whole model: embeddings, a table of angles [positions, 2 * head_dim], layers, a norm and the output layer.
struct Model {
  Layers layers;
  Tensor embedding, angles, norm;
  Weight weight;
  Linear head;
};

Registry<Model> made_models("model");

// Returns a number for the model, which holds its tensors until free_model.
int64_t make_model(std::vector<int64_t> layers, Tensor embedding, Tensor angles, Tensor norm, double eps, Tensor head, std::vector<int64_t> layout, OptionalTensor bias, int64_t out_features) {
  if (layers.empty() || embedding.dim() != 2 || embedding.size(1) != norm.numel() || embedding.scalar_type() != norm.scalar_type() || !embedding.is_contiguous() || angles.dim() != 2 || !angles.is_contiguous())
    throw std::runtime_error("make_model: the embeddings must be dense rows of the size and type of the norm, and the angles dense rows");
  Model model{find_layers(layers), embedding, angles, norm, std::move(weights_of({head}, layout, {bias})[0]), {}};
  model.head = linear_of(type_of(norm), norm.numel(), model.weight, out_features);
  model.head.norm = norm.data_ptr(), model.head.eps = (float)eps;
  return made_models.add(std::make_shared<const Model>(std::move(model)));
}

void free_model(int64_t model) { made_models.remove(model); }

// Copies rows of a dense matrix: to[i] = from[rows[i]].
struct Gather {
  const char* from;
  const int64_t* rows;
  char* to;
  int64_t row_bytes;
};

void gather(const Gather& call, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; i++) std::memcpy(call.to + i * call.row_bytes, call.from + call.rows[i] * call.row_bytes, call.row_bytes);
}

// Makes the call that copies these rows of a matrix to a new one. name: of a row, for the error if it does not exist.
Gather gather_call(const char* name, const Tensor& from, const Tensor& rows, Tensor& to) {
  const int64_t *at = (const int64_t*)rows.data_ptr(), count = rows.numel(), limit = from.size(0);
  for (int64_t i = 0; i < count; i++)
    if (at[i] < 0 || at[i] >= limit) throw std::runtime_error(std::string(name) + " " + std::to_string(at[i]) + ": must be 0.." + std::to_string(limit - 1));
  const int64_t sizes[] = {count, from.size(1)};
  to = torch::stable::new_empty(from, sizes);
  return {(const char*)from.data_ptr(), at, (char*)to.data_ptr(), from.size(1) * (int64_t)from.element_size()};
}

Tensor gather_rows(const char* name, const Tensor& from, const Tensor& rows) {
  Tensor to = from;
  gather(gather_call(name, from, rows, to), 0, rows.numel());
  return to;
}

// Returns the logits [num_rows, out_features] of some rows. input_ids, positions: [1, num_tokens] int64. rows: int64.
Tensor model_logits(int64_t number, Tensor input_ids, Tensor positions, Tensor rows, std::vector<Tensor> slots, std::vector<Tensor> block_tables, Tensor context_lens, Tensor query_starts) {
  const auto model = made_models.find(number);
  auto program = std::make_unique<Program>();
  const Tensor stream = gather_rows("token", model->embedding, input_ids), angles = gather_rows("position", model->angles, positions);
  const int64_t width = angles.size(1), half = width / 2, count = rows.numel(), hidden = stream.size(1);
  const Type type = type_of(angles);
  Tensor output = add_layers(*program, model->layers, stream, {type, angles.data_ptr(), (const char*)angles.data_ptr() + half * bytes(type), width, width},
                             {std::move(slots), std::move(block_tables), context_lens, query_starts});
  Tensor kept = output;
  program->add(token_task(norms, gather, gather_call("row", output, rows, kept), count, hidden));
  const Tensor logits = rows_like(kept, model->head.out_features);
  program->add(linear_task(model->layers[0]->level, with_rows(model->head, kept.data_ptr(), count, hidden, logits.data_ptr())));
  keep(*program, angles, rows, kept, logits);
  program->keep(model);
  run(std::move(program));
  return logits;
}

}  // namespace
}  // namespace paged
