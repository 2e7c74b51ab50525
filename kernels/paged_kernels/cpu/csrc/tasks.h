// The division of operations into items of the thread pool. The division, and so the result, does not depend on the
// number of threads.
#pragma once
#include <algorithm>
#include <deque>
#include <memory>
#include <vector>

#include "calls.h"
#include "pool.h"

namespace paged {

template <class Number>
Number ceil_div(Number a, Number b) {
  return (a + b - 1) / b;
}

std::unique_ptr<Task> linear_task(const Level&, const Linear&);

// The items of several repeatable tasks of one kind, in any order.
class JoinedTask final : public Task {
 public:
  explicit JoinedTask(std::vector<std::unique_ptr<Task>> tasks) : JoinedTask(std::move(tasks), {}) {}

  void run(int item, Worker& worker, Claim& claim) const override {
    const size_t index = std::upper_bound(ends_.begin(), ends_.end(), item) - ends_.begin();
    tasks_[index]->run(index ? item - ends_[index - 1] : item, worker, claim);
  }

 private:
  JoinedTask(std::vector<std::unique_ptr<Task>> tasks, std::vector<int> ends)
      : Task(tasks.empty() ? linears : tasks[0]->kind, count(tasks, ends), true), tasks_(std::move(tasks)), ends_(std::move(ends)) {}

  static int count(const std::vector<std::unique_ptr<Task>>& tasks, std::vector<int>& ends) {
    int items = 0;
    for (const auto& task : tasks) ends.push_back(items += task->items);
    return items;
  }

  std::vector<std::unique_ptr<Task>> tasks_;
  std::vector<int> ends_;  // by task, the number of items up to its last
};

// The items of an attention call and of all others over the same sequences with the same window.
struct AttentionPlan {
  std::vector<Item> items;                        // the expensive ones first
  std::vector<Merge> merges;                      // of the items whose context is split
  std::deque<std::vector<SharedQuery>> of_items;  // the queries of items for several sequences
  size_t partials = 0;                            // floats
  int max_rows = 0;                               // query rows of an item
};

// Throws std::runtime_error for blocks outside the pool and for sequences with more queries than context.
std::shared_ptr<const AttentionPlan> plan_attention(const Attention&);

// Packs the blocks of a cache whose last tokens a step has written. Throws std::runtime_error for blocks outside the pool.
void add_packing(Program&, const Level&, const Cache&, const int64_t* slots, const int64_t* packed_slots, int64_t tokens);

void add_attention(Program&, const Level&, const Attention&, std::shared_ptr<const AttentionPlan>);

// A kernel that reads each element of some tokens once and writes in place.
template <class Call>
class TokenTask final : public Task {
 public:
  using Kernel = void (*)(const Call&, int64_t begin, int64_t end);

  TokenTask(Kind kind, Kernel kernel, const Call& call, int64_t tokens, int64_t elements)
      : Task(kind, (int)ceil_div(tokens, grain_of(elements)), false), kernel_(kernel), call_(call), tokens_(tokens), grain_(grain_of(elements)) {}

  void run(int item, Worker&, Claim&) const override {
    kernel_(call_, item * grain_, std::min(tokens_, (item + 1) * grain_));
  }

 private:
  static constexpr int64_t elements_per_item = 1 << 14;

  static int64_t grain_of(int64_t elements) { return std::max<int64_t>(1, elements_per_item / std::max<int64_t>(1, elements)); }

  Kernel kernel_;
  Call call_;
  int64_t tokens_, grain_;
};

template <class Call>
std::unique_ptr<Task> token_task(Kind kind, void (*kernel)(const Call&, int64_t, int64_t), const Call& call, int64_t tokens, int64_t elements) {
  return std::make_unique<TokenTask<Call>>(kind, kernel, call, tokens, elements);
}

}  // namespace paged
