#include "pool.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <deque>
#include <mutex>
#include <new>
#include <thread>

namespace paged {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::microseconds;

// How long a thread without a program waits before it sleeps. Python needs less than this between two operators.
constexpr auto spin_time = microseconds(60);
// How long a thread without an item waits for others before it lets other processes run.
constexpr auto yield_time = microseconds(100);
// How long it waits at least before it computes the item of another thread again.
constexpr auto min_patience = microseconds(5);
// The same for a thread that had no item of the task, and does not know how long one takes.
constexpr auto default_patience = microseconds(20);

void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ __volatile__("yield");
#endif
}

std::atomic<int64_t> programs{0}, repeats{0}, discarded{0};

// A program that is being run. Runs are reused and never freed, so that a thread may touch one that has ended.
struct Run {
  std::unique_ptr<Program> program;
  std::atomic<uint64_t> head{0};  // number of the task in the upper half, number of the next item in the lower half
  std::atomic<int> done{0};       // items of the task that are complete
  std::atomic<int> users{0};      // threads of the pool that may touch this object
  int threads = 1;
  std::vector<std::atomic<uint32_t>> states;  // per item: 1 + number of the last task whose item was committed
  Clock::time_point task_began;               // written by the thread that starts a task
  double seconds[num_kinds] = {};

  bool ended(uint32_t task) const { return task >= program->tasks().size(); }

  void prepare(std::unique_ptr<Program> next, int number_of_threads) {
    program = std::move(next);
    threads = number_of_threads;
    size_t items = 0;
    for (const auto& task : program->tasks()) items = std::max<size_t>(items, task->items);
    if (states.size() < items) states = std::vector<std::atomic<uint32_t>>(items);
    for (auto& state : states) state.store(0, std::memory_order_relaxed);
    std::fill_n(seconds, (int)num_kinds, 0.0);
    done.store(0, std::memory_order_relaxed);
    task_began = Clock::now();
    head.store(0, std::memory_order_release);
  }

  void run_item(uint32_t number, uint32_t item, Worker& worker) {
    const Task& task = *program->tasks()[number];
    Claim claim(&states[item], number);
    if (!task.repeatable && !claim.commit()) return;
    task.run((int)item, worker, claim);
    if (!claim.committed()) {
      discarded.fetch_add(1, std::memory_order_relaxed);
      return;
    }
    if (done.fetch_add(1, std::memory_order_acq_rel) + 1 < task.items) return;
    const auto now = Clock::now();
    seconds[task.kind] += std::chrono::duration<double>(now - task_began).count();
    task_began = now;
    done.store(0, std::memory_order_relaxed);
    head.store((uint64_t)(number + 1) << 32, std::memory_order_release);
  }

  // Returns an item of the task that no thread has committed, or -1.
  int find_uncommitted(uint32_t number, int from) const {
    const Task& task = *program->tasks()[number];
    for (int i = 0; i < task.items; i++) {
      const int item = (from + i) % task.items;
      if (states[item].load(std::memory_order_relaxed) <= number) return item;
    }
    return -1;
  }

  // Runs items until the program has ended.
  void work(Worker& worker) {
    uint32_t number = ~0u;                // of the task that the following describe
    int ran = 0;                          // items of the task that this thread ran
    Clock::time_point began, out_of_work;  // when it ran the first of them, and when it found no more
    bool is_waiting = false;
    const auto enter = [&](uint64_t at) {
      if ((uint32_t)(at >> 32) != number) number = at >> 32, ran = 0, is_waiting = false, began = Clock::now();
    };
    for (int spins = 0;;) {
      uint64_t at = head.load(std::memory_order_acquire);
      if (ended(at >> 32)) return;
      enter(at);
      if ((uint32_t)at < (uint32_t)program->tasks()[number]->items) {
        at = head.fetch_add(1, std::memory_order_acq_rel);
        if (ended(at >> 32)) return;
        enter(at);
        if ((uint32_t)at < (uint32_t)program->tasks()[number]->items) {
          run_item(number, (uint32_t)at, worker);
          ran++;
          continue;
        }
      }
      if (!is_waiting) is_waiting = true, out_of_work = Clock::now(), spins = 0;
      pause();
      if (++spins % 16) continue;
      const auto waited = Clock::now() - out_of_work;
      const auto patience = ran ? std::max<Clock::duration>(min_patience, 2 * (out_of_work - began) / ran) : default_patience;
      if (waited > patience) {
        const int item = find_uncommitted(number, ran);
        if (item >= 0 && (uint32_t)(head.load(std::memory_order_acquire) >> 32) == number) {
          repeats.fetch_add(1, std::memory_order_relaxed);
          run_item(number, (uint32_t)item, worker);
          ran++;
          continue;
        }
      }
      if (waited > yield_time) sched_yield();
    }
  }
};

class Pool {
 public:
  // Returns whether the program was run: not if another thread is running one.
  bool run(std::unique_ptr<Program>& program, int threads, Worker& worker, double* seconds) {
    if (busy_.test_and_set(std::memory_order_acquire)) return false;
    start_threads(threads - 1);
    if (used_.exchange(threads - 1) != threads - 1) used_.notify_all();
    Run& mine = unused_run();
    mine.prepare(std::move(program), threads);
    current_.store(&mine);
    published_.fetch_add(1);
    published_.notify_all();
    mine.work(worker);
    current_.store(nullptr);
    for (int kind = 0; kind < num_kinds; kind++) seconds[kind] += mine.seconds[kind];
    if (mine.users.load() == 0) mine.program.reset();  // else a late thread still reads its objects
    busy_.clear(std::memory_order_release);
    return true;
  }

 private:
  Run& unused_run() {
    Run* found = nullptr;
    for (Run& one : runs_)
      if (one.users.load() == 0) {
        one.program.reset();
        found = &one;
      }
    return found ? *found : runs_.emplace_back();
  }

  void start_threads(int wanted) {
    while (started_ < wanted) {
      sigset_t all, before;
      sigfillset(&all);
      pthread_sigmask(SIG_SETMASK, &all, &before);  // signals are for the threads of the program
      try {
        std::thread([this, index = started_] { loop(index); }).detach();
      } catch (const std::system_error&) {  // the limit of threads is reached: the caller works without it
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
        return;
      }
      pthread_sigmask(SIG_SETMASK, &before, nullptr);
      started_++;
    }
  }

  void loop(int index) {
    pthread_setname_np(pthread_self(), "paged_cpu");
    Worker worker;
    for (;;) {
      for (int used; index >= (used = used_.load());) used_.wait(used);  // programs do not wake a thread without work
      const uint32_t seen = published_.load();
      if (Run* run = current_.load()) {
        run->users.fetch_add(1);
        if (current_.load() == run && index + 1 < run->threads) run->work(worker);
        run->users.fetch_sub(1);
      }
      const auto began = Clock::now();
      for (int spins = 1; published_.load(std::memory_order_relaxed) == seen; spins++) {
        pause();
        if (spins % 16 == 0 && Clock::now() - began > spin_time) published_.wait(seen);
      }
    }
  }

  std::atomic_flag busy_;
  std::atomic<Run*> current_{nullptr};
  std::atomic<uint32_t> published_{0};  // number of programs so far
  std::deque<Run> runs_;                // only of the caller that has set busy_
  int started_ = 0;
  std::atomic<int> used_{0};  // threads of the pool that programs run on, those with the lowest indices
};

// Never destroyed, since its threads run until the process ends. A child process gets a pool of its own.
std::atomic<Pool*> pool{nullptr};
std::atomic<int> number_of_threads{1};

Pool& the_pool() {
  static std::once_flag once;
  std::call_once(once, [] {
    pool = new Pool;
    pthread_atfork(nullptr, nullptr, [] { pool = new Pool; });
  });
  return *pool;
}

thread_local Worker caller;
thread_local double seconds[num_kinds];

void run_alone(const Program& program) {
  for (const auto& task : program.tasks()) {
    const auto began = Clock::now();
    for (int item = 0; item < task->items; item++) {
      Claim claim(nullptr, 0);
      task->run(item, caller, claim);
    }
    seconds[task->kind] += std::chrono::duration<double>(Clock::now() - began).count();
  }
}

}  // namespace

void Worker::Free::operator()(void* memory) const { std::free(memory); }

void* Worker::scratch(size_t bytes) {  // new memory for each item would cause page faults
  if (bytes > size_) {
    const size_t size = (bytes + 4095) / 4096 * 4096;
    memory_.reset();
    size_ = 0, content = 0;
    memory_.reset(std::aligned_alloc(64, size));
    if (!memory_) std::abort();  // an item cannot fail; the memory is a few megabytes
    size_ = size;
  }
  return memory_.get();
}

bool Claim::commit() {
  if (state_) {
    uint32_t state = state_->load(std::memory_order_relaxed);
    do {
      if (state > task_) return false;
    } while (!state_->compare_exchange_weak(state, task_ + 1, std::memory_order_acq_rel));
  }
  return committed_ = true;
}

void run(std::unique_ptr<Program> program) {
  programs.fetch_add(1, std::memory_order_relaxed);
  const int wanted = threads();
  if (program->tasks().empty()) return;
  const bool is_single = program->tasks().size() == 1 && program->tasks()[0]->items == 1;
  if (wanted > 1 && !is_single && the_pool().run(program, wanted, caller, seconds)) return;
  run_alone(*program);
}

void run(std::unique_ptr<Task> task) {
  auto program = std::make_unique<Program>();
  program->add(std::move(task));
  run(std::move(program));
}

void set_threads(int threads) { number_of_threads = threads; }
int threads() { return number_of_threads; }
const double* kind_seconds() { return seconds; }
PoolCounts pool_counts() { return {programs, repeats, discarded}; }

}  // namespace paged
