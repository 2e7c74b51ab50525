// The thread pool of the kernels.
//
// A program is a list of tasks that run one after the other; a task is a number of items that run in any order. The
// caller and the pool's threads claim items one at a time. The thread that completes the last item of a task starts the
// next task. So a task never waits for a thread that has no item.
//
// A thread may be preempted while it computes an item. Then a thread without work computes the item again. The first
// result is kept, and the second is discarded. Therefore an item computes into memory of its thread, and calls
// Claim::commit before it writes.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace paged {

// The kinds of operations whose time is counted, in the order of native.TIMED_OPS.
enum Kind : int { linears, norms, activations, rotations, attentions, samplings, num_kinds };

// A thread that runs items, and its memory.
class Worker {
 public:
  // Returns `bytes` of memory, aligned to 64, which keeps its content until more is requested.
  void* scratch(size_t bytes);

  // What the start of the scratch memory holds, for tasks that keep something there between items; 0: nothing.
  uint64_t content = 0;

 private:
  struct Free {
    void operator()(void* memory) const;
  };
  std::unique_ptr<void, Free> memory_;
  size_t size_ = 0;
};

// The right to write the result of an item.
class Claim {
 public:
  Claim(std::atomic<uint32_t>* state, uint32_t task) : state_(state), task_(task) {}

  // Returns whether the result may be written. It must be, then, and without delay: other threads wait for it.
  bool commit();
  bool committed() const { return committed_; }

 private:
  std::atomic<uint32_t>* state_;  // null: no other thread computes the item
  uint32_t task_;
  bool committed_ = false;
};

class Task {
 public:
  Task(Kind kind, int items, bool repeatable) : kind(kind), items(items), repeatable(repeatable) {}
  virtual ~Task() = default;

  // Computes an item, and writes its result if claim.commit() returns true. Must not throw.
  //
  // Several threads may compute the same item at the same time. A late thread may still compute it while later tasks
  // overwrite its inputs; its result is discarded, but it must not access invalid memory. A task that is not repeatable
  // is computed once: it may write at once, and need not call commit.
  virtual void run(int item, Worker& worker, Claim& claim) const = 0;

  const Kind kind;
  const int items;  // at least 1
  const bool repeatable;
};

class Program {
 public:
  // Adds a task that starts when all earlier ones have ended. A task without items is dropped.
  void add(std::unique_ptr<Task> task) {
    if (task->items > 0) tasks_.push_back(std::move(task));
  }

  // Keeps an object until no thread runs an item of this program.
  void keep(std::shared_ptr<const void> object) { kept_.push_back(std::move(object)); }

  const std::vector<std::unique_ptr<Task>>& tasks() const { return tasks_; }

 private:
  std::vector<std::unique_ptr<Task>> tasks_;
  std::vector<std::shared_ptr<const void>> kept_;
};

// Runs a program on the calling thread and up to threads() - 1 others. If another thread is running a program, the
// calling thread works alone.
void run(std::unique_ptr<Program> program);

void run(std::unique_ptr<Task> task);

// The number of threads that programs run on, at least 1. The result of a program does not depend on it.
void set_threads(int threads);
int threads();

// Seconds that the calling thread has spent in programs, by kind.
const double* kind_seconds();

// Counts of the process, for tests and metrics.
struct PoolCounts {
  int64_t programs, repeats, discarded;  // repeats: items computed again; discarded: results that came too late
};
PoolCounts pool_counts();

}  // namespace paged
