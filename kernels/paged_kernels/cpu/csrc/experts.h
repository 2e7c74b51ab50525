// The linear layers of a mixture of experts (`paged_kernels.cpu.native.ExpertLinear`).
#pragma once
#include "registry.h"
#include "tensors.h"

namespace paged {
namespace {

struct Experts {
  std::vector<Weight> weights;
  int64_t in_features, out_features;
  const Level& level;
};

Registry<Experts> made_experts("experts");

void check_starts(const Tensor& starts, size_t experts, int64_t rows) {
  if (starts.scalar_type() != ScalarType::Long || !starts.is_contiguous() || starts.numel() != (int64_t)experts + 1)
    throw std::runtime_error("expert_linear: starts must be " + std::to_string(experts + 1) + " dense elements of int64");
  const int64_t* at = (const int64_t*)starts.data_ptr();
  if (at[0] != 0 || !std::is_sorted(at, at + experts + 1) || at[experts] != rows)
    throw std::runtime_error("expert_linear: starts must increase from 0 to the number of rows, " + std::to_string(rows));
}

// Returns a number for the linear layers of all experts, which holds their weights until free_experts. groups, layouts and
// biases: as for `weights_of`.
int64_t make_experts(std::vector<Tensor> groups, std::vector<int64_t> layouts, std::vector<OptionalTensor> biases, int64_t in_features, int64_t out_features, int64_t level) {
  std::vector<Weight> weights = weights_of(groups, layouts, biases);
  if (weights.empty()) throw std::runtime_error("make_experts: no experts");
  return made_experts.add(std::make_shared<const Experts>(Experts{std::move(weights), in_features, out_features, level_of(level)}));
}

void free_experts(int64_t experts) { made_experts.remove(experts); }

// Returns [rows, out_features], or with swiglu half of it. The rows [starts[i], starts[i + 1]) of x belong to expert i.
// starts: [experts + 1] int64.
Tensor expert_linear(int64_t number, Tensor x, Tensor starts, bool swiglu) {
  const auto experts = made_experts.find(number);
  const int64_t inputs = experts->in_features, outputs = experts->out_features, width = swiglu ? outputs / 2 : outputs;
  if (x.dim() != 2 || x.size(1) != inputs || !x.is_contiguous()) throw std::runtime_error("expert_linear: x must be dense rows of " + std::to_string(inputs));
  if (swiglu && outputs % (2 * linear_group)) throw std::runtime_error("expert_linear: with swiglu, out_features=" + std::to_string(outputs) + " must be a multiple of " + std::to_string(2 * linear_group));
  check_starts(starts, experts->weights.size(), x.size(0));
  const Tensor out = rows_like(x, width);
  const Type type = type_of(x);
  const int64_t* at = (const int64_t*)starts.data_ptr();
  std::vector<std::unique_ptr<Task>> tasks;
  for (size_t i = 0; i < experts->weights.size(); i++) {
    if (at[i] == at[i + 1]) continue;
    const auto row_of = [&](const Tensor& rows, int64_t columns) { return (char*)rows.data_ptr() + at[i] * columns * bytes(type); };
    Linear call = with_rows(linear_of(type, inputs, experts->weights[i], outputs), row_of(x, inputs), at[i + 1] - at[i], inputs, row_of(out, width));
    call.swiglu = swiglu;
    tasks.push_back(linear_task(experts->level, call));
  }
  auto program = std::make_unique<Program>();
  program->add(std::make_unique<JoinedTask>(std::move(tasks)));
  keep(*program, x, out);
  program->keep(experts);
  run(std::move(program));
  return out;
}

}  // namespace
}  // namespace paged
