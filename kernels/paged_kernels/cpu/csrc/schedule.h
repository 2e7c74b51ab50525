// The division of an operation into calls of a level's kernels, over the threads of the caller's pool.
#pragma once
#include <functional>
#include <vector>

#include "calls.h"

namespace paged {

inline constexpr int64_t min_elements_per_thread = 1 << 15;  // for kernels that read each element once

template <class Number>
Number ceil_div(Number a, Number b) {
  return (a + b - 1) / b;
}

// Returns the levels that were built and that this machine supports, the best one first.
const std::vector<const Level*>& levels();

// Calls the function `threads` times, in parallel where possible.
using ThreadPool = std::function<void(int threads, const std::function<void()>&)>;

// Throws std::runtime_error for blocks outside the pool and for sequences with more queries than context.
void run_attention(const Level&, const Attention&, int threads, const ThreadPool&);

void run_linear(const Level&, const Linear&, int threads, const ThreadPool&);

}  // namespace paged
