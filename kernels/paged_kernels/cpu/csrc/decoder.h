// Decoder layers (`paged_kernels.cpu.native.DecoderLayer`) as one program of the thread pool.
#pragma once
#include "tensors.h"

namespace paged {

// Returns a number for the layer, which holds its weights until free_layer. The weights are those of the projections to
// query, key and value, from attention, to gate and up, and down.
int64_t make_layer(Tensor norm, double eps, int64_t num_heads, bool rotates, OptionalTensor query_norm, OptionalTensor key_norm, double head_eps,
                   double scale, int64_t window, double softcap, OptionalTensor sinks, Tensor post_norm, double post_eps, int64_t inner_features,
                   std::vector<Tensor> groups, std::vector<OptionalTensor> scales, std::vector<OptionalTensor> mins, std::vector<OptionalTensor> biases,
                   std::vector<int64_t> block_inputs, std::vector<int64_t> int8_rows, int64_t level);
void free_layer(int64_t layer);

// Returns the residual stream after these layers. keys, values and scales are those of each layer; the scales are empty
// if the cache is not quantized. All tensors of the step must be dense.
Tensor decoder_layers(std::vector<int64_t> layers, Tensor stream, Tensor cos, Tensor sin, std::vector<Tensor> keys, std::vector<Tensor> values,
                      std::vector<Tensor> key_scales, std::vector<Tensor> value_scales, Tensor slots, Tensor block_tables, Tensor context_lens,
                      Tensor query_starts);

}  // namespace paged
