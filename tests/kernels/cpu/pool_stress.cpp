// Programs of random tasks on the thread pool, with threads that are delayed at random points. Prints the counts of the
// pool, and exits with 1 if a result is wrong.
//
// The arguments are the number of programs, of calling threads, and of threads per program; and the seed.
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <thread>

#include "pool.h"

namespace {

using Values = std::vector<std::atomic<uint64_t>>;  // atomic, because late threads read what later tasks write

uint64_t mix(uint64_t x) {
  x = (x ^ x >> 31) * 0x9E3779B97F4A7C15u;
  return x ^ x >> 29;
}

// The value of item `item` of a task, from all values of the task before.
uint64_t expected(uint64_t task, uint64_t item, const std::vector<uint64_t>& before) {
  uint64_t sum = mix(task) + mix(item);
  for (uint64_t one : before) sum = mix(sum + one);
  return sum;
}

void delay(std::mt19937& random) {
  switch (random() % 400) {
    case 0: std::this_thread::sleep_for(std::chrono::microseconds(random() % 3000)); break;
    case 1: std::this_thread::yield(); break;
    default: for (unsigned spins = random() % 300; spins; spins--) __asm__ __volatile__("");
  }
}

std::mt19937& thread_random() {
  static std::atomic<unsigned> seeds{1};
  thread_local std::mt19937 random(seeds++);
  return random;
}

class MixTask final : public paged::Task {
 public:
  MixTask(uint64_t number, int items, bool repeatable, Values& from, int from_items, Values& to, std::atomic<int>& written)
      : Task(paged::linears, items, repeatable), number_(number), from_(from), from_items_(from_items), to_(to), written_(written) {}

  void run(int item, paged::Worker& worker, paged::Claim& claim) const override {
    auto* before = (uint64_t*)worker.scratch(sizeof(uint64_t) * from_items_);
    delay(thread_random());
    uint64_t sum = mix(number_) + mix(item);
    for (int i = 0; i < from_items_; i++) before[i] = from_[i].load(std::memory_order_relaxed);
    delay(thread_random());
    for (int i = 0; i < from_items_; i++) sum = mix(sum + before[i]);
    if (repeatable && !claim.commit()) return;
    to_[item].store(sum, std::memory_order_relaxed);
    written_.fetch_add(1, std::memory_order_relaxed);
  }

 private:
  uint64_t number_;
  Values& from_;
  int from_items_;
  Values& to_;
  std::atomic<int>& written_;
};

struct Buffers {
  Values one = Values(64), other = Values(64);
  std::atomic<int> written{0};
  ~Buffers() {
    for (auto& value : one) value = ~0ull;
  }
};

// Runs a program of random tasks. Returns whether each item was written once, from complete results of the task before.
bool run_one(std::mt19937& random) {
  auto buffers = std::make_shared<Buffers>();
  auto program = std::make_unique<paged::Program>();
  program->keep(buffers);
  std::vector<uint64_t> before;
  int total = 0;
  const int tasks = 1 + random() % 12;
  for (int number = 0; number < tasks; number++) {
    const int items = 1 + random() % (random() % 2 ? 64 : 4);
    Values& from = number % 2 ? buffers->other : buffers->one;
    Values& to = number % 2 ? buffers->one : buffers->other;
    program->add(std::make_unique<MixTask>(number, items, random() % 4 != 0, from, (int)before.size(), to, buffers->written));
    std::vector<uint64_t> values;
    for (int item = 0; item < items; item++) values.push_back(expected(number, item, before));
    before = values;
    total += items;
  }
  paged::run(std::move(program));
  const Values& last = tasks % 2 ? buffers->other : buffers->one;
  bool is_right = buffers->written == total;
  for (size_t i = 0; i < before.size(); i++) is_right &= last[i] == before[i];
  return is_right;
}

}  // namespace

int main(int, char** arguments) {
  const int programs = std::atoi(arguments[1]), callers = std::atoi(arguments[2]);
  paged::set_threads(std::atoi(arguments[3]));
  std::atomic<int> wrong{0};
  std::vector<std::thread> threads;
  for (int caller = 0; caller < callers; caller++)
    threads.emplace_back([&, caller] {
      std::mt19937 random(std::atoi(arguments[4]) * 100 + caller);
      for (int i = 0; i < programs; i++) wrong += !run_one(random);
    });
  for (auto& thread : threads) thread.join();
  const pid_t child = fork();  // which has none of the pool's threads
  if (child == 0) {
    std::mt19937 random(7);
    for (int i = 0; i < 10; i++) wrong += !run_one(random);
    _exit(wrong ? 1 : 0);
  }
  int status = 0;
  waitpid(child, &status, 0);
  const paged::PoolCounts counts = paged::pool_counts();
  std::printf("programs %ld repeats %ld discarded %ld wrong %d child %d\n", (long)counts.programs, (long)counts.repeats, (long)counts.discarded, wrong.load(), status);
  return wrong || status ? 1 : 0;
}
