// The linear layers of a mixture of experts (`paged_kernels.cpu.native.ExpertLinear`).
#pragma once
#include "tensors.h"

namespace paged {

// Returns a number for the linear layers of all experts, which holds their weights until free_experts. The lists have
// one element for each expert.
int64_t make_experts(std::vector<Tensor> groups, std::vector<OptionalTensor> scales, std::vector<OptionalTensor> mins, std::vector<OptionalTensor> biases,
                     std::vector<int64_t> block_inputs, std::vector<int64_t> int8_rows, int64_t in_features, int64_t out_features, int64_t level);
void free_experts(int64_t experts);

// Returns [rows, out_features], or with swiglu half of it. The rows [starts[i], starts[i + 1]) of x belong to expert i.
// starts: [experts + 1] int64.
Tensor expert_linear(int64_t experts, Tensor x, Tensor starts, bool swiglu);

}  // namespace paged
