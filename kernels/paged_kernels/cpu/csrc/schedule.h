// Which calls of a level's kernels make up an operation, over the threads of the caller's pool.
#pragma once
#include <functional>
#include <vector>

#include "calls.h"

namespace paged {

inline constexpr int64_t worth_a_thread = 1 << 15;  // elements of rows that pass once

template <class Number>
Number ceil_div(Number a, Number b) {
  return (a + b - 1) / b;
}

// The levels that were built and that this machine runs, the best one first.
const std::vector<const Level*>& levels();

// Calls the function once for each of so many threads, some of them at the same time.
using Pool_of_threads = std::function<void(int threads, const std::function<void()>&)>;

// Raises std::runtime_error for addresses outside of the pool and for more queries than context.
void run_attention(const Level&, const Attention&, int threads, const Pool_of_threads&);

void run_linear(const Level&, const Linear&, int threads, const Pool_of_threads&);

}  // namespace paged
