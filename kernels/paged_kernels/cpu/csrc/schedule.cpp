#include "schedule.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <memory>
#include <stdexcept>
#include <string>

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace paged {

#define LEVEL(name) extern const Level level_##name;
PAGED_LEVELS
#undef LEVEL

namespace {

#if defined(__x86_64__)
bool has_amx() {
  unsigned a, b, c, d;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(d >> 22 & 1) || !(d >> 24 & 1)) return false;  // bf16, tiles
  __get_cpuid(1, &a, &b, &c, &d);
  if (!(c >> 27 & 1)) return false;  // xgetbv is not available
  unsigned low, high;
  __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  constexpr unsigned tiles = 3u << 17;  // the system saves tile configuration and data
  constexpr long ask_for_permission = 0x1023, tile_data = 18;
  return (low & tiles) == tiles && syscall(SYS_arch_prctl, ask_for_permission, tile_data) == 0;
}

bool is_supported(const std::string& level) {
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  if (level == "avx2") return avx2;
  if (level == "avx512") return avx512;
  if (level == "amx") return avx512 && __builtin_cpu_supports("avx512bf16") && has_amx();
  return true;
}
#else
bool is_supported(const std::string&) { return true; }
#endif

constexpr int max_item_rows = 192;    // maximum heads times queries that share a packed key
constexpr int min_part_keys = 256;  // per part of a split context
constexpr int parts_of_thread = 4;
constexpr int packing_rows = 8;  // cost of loading and packing a key, in rows multiplied with it

struct WorkItem {
  Item item;
  int64_t cost;
};

int64_t cost_of(const Item& item, int group) {
  return (int64_t)(item.end - item.begin) * (item.queries * group + packing_rows);
}

void check_sequence(const Attention& call, int seq) {
  const int queries = call.query_starts[seq + 1] - call.query_starts[seq], context = call.context_lens[seq];
  const std::string where = "sequence " + std::to_string(seq) + ": ";
  if (call.query_starts[seq] < 0 || queries < 0 || call.query_starts[seq + 1] > call.num_tokens)
    throw std::runtime_error(where + "its query rows are outside the batch");
  if (context == 0) return;
  if (context < queries)
    throw std::runtime_error(where + std::to_string(queries) + " queries, context of " + std::to_string(context));
  if (context > (int64_t)call.max_blocks * call.cache.block_size)
    throw std::runtime_error(where + "context of " + std::to_string(context) + ", block table of " + std::to_string(call.max_blocks));
}

// Lists items that cover every query with a context once for each KV head.
std::vector<WorkItem> list_items(const Attention& call) {
  const int group = call.num_heads / call.cache.num_kv_heads, tile = std::max(1, max_item_rows / group);
  std::vector<WorkItem> work_items;
  for (int seq = 0; seq < call.num_seqs; seq++) {
    check_sequence(call, seq);
    const int first = call.query_starts[seq], queries = call.query_starts[seq + 1] - first;
    const int context = call.context_lens[seq];
    if (context == 0 || queries == 0) continue;
    const int oldest = call.window ? std::max(0, context - queries - call.window + 1) : 0;
    const int32_t* table = call.block_tables + seq * call.table_stride;
    for (int at = oldest / call.cache.block_size; at <= (context - 1) / call.cache.block_size; at++)
      if (table[at] < 0 || table[at] >= call.cache.num_blocks)
        throw std::runtime_error("block_tables[" + std::to_string(seq) + "]: block " + std::to_string(table[at]) + " of a pool of " + std::to_string(call.cache.num_blocks));
    for (int done = 0; done < queries; done += tile) {
      const int length = std::min(tile, queries - done), position = context - queries + done;
      const int begin = call.window ? std::max(0, position - call.window + 1) : 0;
      for (int head = 0; head < call.cache.num_kv_heads; head++) {
        const Item item{seq, head, first + done, length, position, begin, position + length, nullptr};
        work_items.push_back({item, cost_of(item, group)});
      }
    }
  }
  return work_items;
}

struct Plan {
  std::vector<WorkItem> work_items;
  std::vector<Merge> merges;
  std::vector<float> partials;
};

// The number of parts depends on the shape of the batch and the number of threads only.
Plan make_plan(const Attention& call, int threads) {
  Plan plan;
  const int group = call.num_heads / call.cache.num_kv_heads;
  std::vector<WorkItem> unsplit = list_items(call);
  int64_t total = 0;
  for (const WorkItem& work_item : unsplit) total += work_item.cost;
  const int64_t target_cost = std::max<int64_t>(1, total / (threads * parts_of_thread));
  std::vector<std::pair<size_t, size_t>> places;  // per merge: its first item, and the offset of its partials
  size_t used = 0;
  for (const WorkItem& work_item : unsplit) {
    const Item& item = work_item.item;
    const int keys = item.end - item.begin;
    const int64_t wanted = std::min<int64_t>(ceil_div(work_item.cost, target_cost), keys / min_part_keys);
    if (threads == 1 || wanted < 2) {
      plan.work_items.push_back(work_item);
      continue;
    }
    const int step = ceil_div(ceil_div(keys, (int)wanted), key_tile) * key_tile, parts = ceil_div(keys, step);
    places.push_back({plan.work_items.size(), used});
    plan.merges.push_back({item, parts});
    for (int part = 0; part < parts; part++) {
      Item one = item;
      one.begin = item.begin + part * step;
      one.end = std::min(item.end, one.begin + step);
      plan.work_items.push_back({one, cost_of(one, group)});
      used += (size_t)item.queries * group * (call.cache.head_dim + 2);
    }
  }
  plan.partials.resize(used);
  for (size_t i = 0; i < plan.merges.size(); i++) {
    Merge& merge = plan.merges[i];
    merge.item.partial = plan.partials.data() + places[i].second;
    for (int part = 0; part < merge.parts; part++)
      plan.work_items[places[i].first + part].item.partial =
          merge.item.partial + (size_t)part * merge.item.queries * group * (call.cache.head_dim + 2);
  }
  std::stable_sort(plan.work_items.begin(), plan.work_items.end(), [](const WorkItem& a, const WorkItem& b) { return a.cost > b.cost; });
  return plan;
}

void* thread_scratch(size_t bytes) {  // reused and grown, since new memory would cause page faults
  struct Free {
    void operator()(void* memory) const { std::free(memory); }
  };
  thread_local std::unique_ptr<void, Free> memory;
  thread_local size_t size = 0;
  if (bytes > size) {
    size = ceil_div<size_t>(bytes, 64) * 64;
    memory.reset(std::aligned_alloc(64, size));
    if (!memory) {
      size = 0;
      throw std::bad_alloc();
    }
  }
  return memory.get();
}

}  // namespace

const std::vector<const Level*>& levels() {
  static const std::vector<const Level*> found = [] {
    std::vector<const Level*> supported;
#define LEVEL(name) \
  if (is_supported(#name)) supported.push_back(&level_##name);
    PAGED_LEVELS
#undef LEVEL
    return supported;
  }();
  return found;
}

void run_attention(const Level& level, const Attention& call, int threads, const ThreadPool& pool) {
  const Plan plan = make_plan(call, threads);
  const int group = call.num_heads / call.cache.num_kv_heads;
  int rows = 0;
  for (const WorkItem& work_item : plan.work_items) rows = std::max(rows, work_item.item.queries * group);
  const size_t bytes = level.scratch(call, rows);
  std::atomic<size_t> next{0};
  pool(std::min<size_t>(threads, plan.work_items.size()), [&] {
    void* scratch = thread_scratch(bytes);
    for (size_t i = next++, next_index; i < plan.work_items.size(); i = next_index) {
      next_index = next++;
      level.attend(call, plan.work_items[i].item, next_index < plan.work_items.size() ? &plan.work_items[next_index].item : nullptr, scratch);
    }
  });
  for (const Merge& merge : plan.merges) level.merge(call, merge);
}

void run_linear(const Level& level, const Linear& call, int threads, const ThreadPool& pool) {
  const int64_t inputs = padded_to_pairs(call.in_features), rows = std::min<int64_t>(call.rows, linear_rows);
  const int64_t products = ceil_div<int64_t>(call.rows, linear_rows) * ceil_div<int64_t>(call.out_features, linear_group);
  std::atomic<int64_t> next{0};
  pool((int)std::min<int64_t>(threads, products), [&] {
    float* panels = (float*)thread_scratch((rows * inputs + linear_group) * sizeof(float));
    int64_t widened = -1;
    for (int64_t begin = next; begin < products;) {  // large parts first, small ones at the end, for balance
      const int64_t end = begin + std::max<int64_t>(1, (products - begin) / (2 * threads));
      if (!next.compare_exchange_weak(begin, end)) continue;
      level.multiply(call, begin, end, panels, widened);
      begin = next;
    }
  });
}

}  // namespace paged
