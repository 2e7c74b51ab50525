#include "tasks.h"

#include <atomic>
#include <cstring>
#include <stdexcept>
#include <string>
#include <utility>

namespace paged {
namespace {

// --- linear layers --------------------------------------------------------------------------------------------------

constexpr int64_t item_bytes = 1 << 16;  // of weights per item: some microseconds with few rows
constexpr int64_t min_item_groups = 4, max_item_groups = 16;

// Copies a part of a row, without a call of a function for a few cache lines.
void copy(char* to, const char* from, size_t bytes) {
  constexpr size_t step = 32;  // 16 elements of 16 bits
  for (; bytes >= step; bytes -= step, to += step, from += step) std::memcpy(to, from, step);
  if (bytes) std::memcpy(to, from, bytes);
}

size_t aligned(size_t bytes) { return ceil_div<size_t>(bytes, 64) * 64; }

// An item is a block of rows by some groups of outputs. The rows are packed by every thread that multiplies them, since
// loading what another core has packed takes longer.
class LinearTask final : public Task {
 public:
  LinearTask(const Level& level, const Linear& call) : LinearTask(level, call, level.block_rows(call), item_groups(call)) {}

  void run(int item, Worker& worker, Claim& claim) const override {
    const int64_t block = item / parts_, part = item % parts_;
    const int64_t begin = block * block_rows_, end = std::min(call_.rows, begin + block_rows_), rows = end - begin;
    const int64_t group = part * grain_, last = std::min(groups_, group + grain_);
    const int64_t first = group * linear_group, columns = std::min(outputs_, last * linear_group) - first;
    const int64_t ahead = part + threads() < parts_ ? threads() * grain_ : 0;
    const size_t element = bytes(call_.type), packed = aligned(level_.panel_bytes(call_, std::min(call_.rows, block_rows_)));
    const size_t tile = aligned(rows * columns * element);
    char* panels = (char*)worker.scratch(packed + (call_.swiglu ? 3 : 1) * tile);
    char* product = panels + packed;
    if (worker.content != first_content_ + block) {
      level_.pack_rows(call_, begin, end, panels);
      worker.content = first_content_ + block;
    }
    if (call_.swiglu) {
      char* halves = product + tile;
      level_.multiply(call_, begin, end, panels, group, last, ahead, halves, 2 * columns);
      level_.multiply(call_, begin, end, panels, groups_ + group, groups_ + last, ahead, halves + columns * element, 2 * columns);
      level_.swiglu({call_.type, halves, 2 * columns, product, columns}, 0, rows);
    } else {
      level_.multiply(call_, begin, end, panels, group, last, ahead, product, columns);
    }
    if (!claim.commit()) return;
    for (int64_t row = 0; row < rows; row++)
      copy((char*)call_.out + ((begin + row) * outputs_ + first) * element, product + row * columns * element, columns * element);
  }

 private:
  static int64_t output_groups(const Linear& call) {
    return ceil_div<int64_t>(call.out_features / (call.swiglu ? 2 : 1), linear_group);
  }

  static int64_t item_groups(const Linear& call) {
    const int64_t bytes = std::max<int64_t>(1, group_bytes(call) * (call.swiglu ? 2 : 1));
    return std::clamp(ceil_div(item_bytes / bytes, min_item_groups) * min_item_groups, min_item_groups, max_item_groups);
  }

  LinearTask(const Level& level, const Linear& call, int64_t block_rows, int64_t grain)
      : Task(linears, (int)(ceil_div(call.rows, block_rows) * ceil_div(output_groups(call), grain)), true),
        level_(level), call_(call), block_rows_(block_rows), grain_(grain), groups_(output_groups(call)), parts_(ceil_div(groups_, grain)),
        outputs_(call.out_features / (call.swiglu ? 2 : 1)) {
    static std::atomic<uint64_t> next_content{1};
    first_content_ = next_content.fetch_add(ceil_div(call.rows, block_rows));
  }

  const Level& level_;
  const Linear call_;
  const int64_t block_rows_, grain_, groups_, parts_, outputs_;  // rows and groups per item; groups, items and outputs of a block of rows
  uint64_t first_content_;
};

// --- attention ------------------------------------------------------------------------------------------------------

constexpr int max_item_rows = 192;    // maximum heads times queries that share a packed key
constexpr int few_rows = 24;
constexpr int packing_rows = 8;  // cost of loading and packing a key, in rows multiplied with it

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

void check_block(const char* name, int seq, int block, int num_blocks) {
  if (block < 0 || block >= num_blocks)
    throw std::runtime_error(std::string(name) + "[" + std::to_string(seq) + "]: block " + std::to_string(block) + " of a pool of " + std::to_string(num_blocks));
}

// Checks the entries of a sequence's block tables that its queries read.
void check_blocks(const Attention& call, int seq, int first_query, int last_query, int oldest_key) {
  const int size = call.cache.block_size;
  const int32_t *table = call.block_tables + seq * call.table_stride, *packed = call.packed_tables + seq * call.packed_stride;
  for (int at = oldest_key / size; at <= last_query / size; at++) {
    if (!call.packed_tables || !is_packed(at * size, first_query)) check_block("block_tables", seq, table[at], call.cache.num_blocks);
    if (call.packed_tables && is_packed(at * size, last_query)) check_block("packed block_tables", seq, packed[at], call.cache.packed.num_blocks);
  }
}

// Lists items that cover every query with a context once for each KV head. With packed blocks, the queries of an item are
// in the same block.
std::vector<Item> list_items(const Attention& call) {
  const int group = call.num_heads / call.cache.num_kv_heads, tile = std::max(1, max_item_rows / group);
  std::vector<Item> items;
  for (int seq = 0; seq < call.num_seqs; seq++) {
    check_sequence(call, seq);
    const int first = call.query_starts[seq], queries = call.query_starts[seq + 1] - first;
    const int context = call.context_lens[seq];
    if (context == 0 || queries == 0) continue;
    const int oldest = call.window ? std::max(0, context - queries - call.window + 1) : 0;
    check_blocks(call, seq, context - queries, context - 1, oldest);
    for (int done = 0, length; done < queries; done += length) {
      const int position = context - queries + done;
      length = std::min(tile, queries - done);
      if (call.packed_tables) length = std::min(length, packed_block - position % packed_block);
      const int begin = call.window ? std::max(0, position - call.window + 1) : 0;
      for (int head = 0; head < call.cache.num_kv_heads; head++) {
        items.push_back({seq, head, first + done, length, position, begin, position + length});
      }
    }
  }
  return items;
}

// Compares two items by the blocks that they read, then by KV head. Both must be the same whole part.
int compare_blocks(const Attention& call, const Item& a, const Item& b) {
  const int size = call.cache.block_size, begin = a.begin / size, end = ceil_div(a.end, size);
  const auto compare = [&](const int32_t* tables, int64_t stride, int from, int to) {
    return from < to ? std::memcmp(tables + a.seq * stride + from, tables + b.seq * stride + from, (to - from) * sizeof(int32_t)) : 0;
  };
  const int packed = call.packed_tables ? std::max(begin, 1) : end;  // number of the first packed block
  if (const int order = compare(call.block_tables, call.table_stride, begin, packed)) return order;
  if (const int order = compare(call.packed_tables, call.packed_stride, packed, end)) return order;
  return a.kv_head - b.kv_head;  // last: the heads of a block are adjacent in memory
}

using Parts = std::vector<Item>;  // of a context, by position

// Adds an item for the same part of several contexts, whose keys are then read once; or several items, of max_item_rows each.
void add_shared(const Attention& call, const Parts* begin, const Parts* end, size_t part, AttentionPlan& plan) {
  const int group = call.num_heads / call.cache.num_kv_heads;
  const size_t of_query = group * partial_floats(call.cache.value_dim);
  while (begin < end) {
    Item all = (*begin)[part];
    std::vector<SharedQuery>& queries = plan.of_items.emplace_back();
    for (; begin < end; begin++) {
      const Item& item = (*begin)[part];
      if (!queries.empty() && ((int)queries.size() + item.queries) * group > max_item_rows) break;
      for (int q = 0; q < item.queries; q++) queries.push_back({item.first_query + q, item.offset + q * of_query});
      all.position = std::min(all.position, item.position);
    }
    all.queries = (int)queries.size(), all.shared = queries.data();
    plan.max_rows = std::max(plan.max_rows, all.queries * group);
    plan.items.push_back(all);
  }
}

// Adds the parts of contexts from number `part` on. All earlier parts of these contexts must be in the same blocks. Contexts
// that differ in a part share no later one.
void add_parts(const Attention& call, Parts* begin, Parts* end, size_t part, AttentionPlan& plan) {
  begin = std::partition(begin, end, [&](const Parts& one) { return one.size() <= part; });
  std::sort(begin, end, [&](const Parts& a, const Parts& b) { return compare_blocks(call, a[part], b[part]) < 0; });
  for (Parts* last; begin < end; begin = last) {
    last = std::find_if(begin + 1, end, [&](const Parts& one) { return compare_blocks(call, (*begin)[part], one[part]); });
    if (last - begin == 1) {
      plan.items.insert(plan.items.end(), begin->begin() + part, begin->end());
      continue;
    }
    add_shared(call, begin, last, part, plan);
    add_parts(call, begin, last, part + 1, plan);
  }
}

class PackTask final : public Task {
 public:
  struct Full {
    int64_t block, packed;
  };

  PackTask(const Level& level, const Cache& cache, std::vector<Full> blocks)
      : Task(attentions, (int)blocks.size() * cache.num_kv_heads, false), level_(level), cache_(cache), blocks_(std::move(blocks)) {}

  void run(int item, Worker&, Claim&) const override {
    const Full& full = blocks_[item / cache_.num_kv_heads];
    level_.pack(cache_, full.block, full.packed, item % cache_.num_kv_heads);
  }

 private:
  const Level& level_;
  const Cache cache_;
  const std::vector<Full> blocks_;
};

class AttentionTask final : public Task {
 public:
  AttentionTask(const Level& level, const Attention& call, std::shared_ptr<const AttentionPlan> plan, std::shared_ptr<float[]> partials)
      : Task(attentions, (int)plan->items.size(), true), level_(level), call_(call), plan_(std::move(plan)), partials_(std::move(partials)),
        bytes_(level.scratch(call, plan_->max_rows)) {}

  void run(int item, Worker& worker, Claim& claim) const override {
    void* scratch = worker.scratch(bytes_);
    worker.content = 0;
    Item one = plan_->items[item];
    one.partials = partials_.get();
    const size_t next = item + threads();
    level_.attend(call_, one, next < plan_->items.size() ? &plan_->items[next] : nullptr, scratch);
    if (claim.commit()) level_.write_attended(call_, one, scratch);
  }

 private:
  const Level& level_;
  const Attention call_;
  const std::shared_ptr<const AttentionPlan> plan_;
  const std::shared_ptr<float[]> partials_;
  const size_t bytes_;
};

class MergeTask final : public Task {
 public:
  MergeTask(const Level& level, const Attention& call, std::shared_ptr<const AttentionPlan> plan, std::shared_ptr<float[]> partials)
      : Task(attentions, (int)plan->merges.size(), false), level_(level), call_(call), plan_(std::move(plan)), partials_(std::move(partials)) {}

  void run(int item, Worker&, Claim&) const override {
    Merge merge = plan_->merges[item];
    merge.item.partials = partials_.get();
    level_.merge(call_, merge);
  }

 private:
  const Level& level_;
  const Attention call_;
  const std::shared_ptr<const AttentionPlan> plan_;
  const std::shared_ptr<float[]> partials_;
};

}  // namespace

std::unique_ptr<Task> linear_task(const Level& level, const Linear& call) { return std::make_unique<LinearTask>(level, call); }

// Splits long contexts at fixed positions, so that the result of a sequence does not depend on the rest of the batch.
// Parts of several sequences that have the same blocks become one item, which reads their keys once.
std::shared_ptr<const AttentionPlan> plan_attention(const Attention& call) {
  auto plan = std::make_shared<AttentionPlan>();
  const int group = call.num_heads / call.cache.num_kv_heads;
  std::vector<Parts> may_share;  // by context, the parts that other contexts may have, too
  for (const Item& item : list_items(call)) {
    const int rows = item.queries * group, size = rows <= few_rows ? part_keys : span_keys;
    const int first = item.begin / size, parts = ceil_div(item.end, size) - first;
    const int whole = size == part_keys && !call.window ? item.position / size : 0;  // parts whose keys are all before the queries
    plan->max_rows = std::max(plan->max_rows, rows);
    if (parts < 2) {
      plan->items.push_back(item);
      continue;
    }
    Merge merge{item, parts, size, first};
    merge.item.offset = plan->partials;
    plan->merges.push_back(merge);
    Parts whole_parts;
    for (int part = 0; part < parts; part++) {
      Item one = item;
      one.begin = std::max(item.begin, (first + part) * size);
      one.end = std::min(item.end, (first + part + 1) * size);
      one.is_part = true;
      one.offset = plan->partials;
      plan->partials += rows * partial_floats(call.cache.value_dim);
      (part < whole ? whole_parts : plan->items).push_back(one);
    }
    if (whole) may_share.push_back(std::move(whole_parts));
  }
  add_parts(call, may_share.data(), may_share.data() + may_share.size(), 0, *plan);
  std::stable_sort(plan->items.begin(), plan->items.end(), [&](const Item& a, const Item& b) { return cost_of(a, group) > cost_of(b, group); });
  return plan;
}

void add_packing(Program& program, const Level& level, const Cache& cache, const int64_t* slots, const int64_t* packed_slots, int64_t tokens) {
  std::vector<PackTask::Full> blocks;
  for (int64_t token = 0; token < tokens; token++) {
    if (slots[token] < 0 || slots[token] % packed_block < packed_block - 1) continue;
    const PackTask::Full full{slots[token] / packed_block, packed_slots[token] / packed_block};
    if (full.block >= cache.num_blocks || packed_slots[token] < 0 || full.packed >= cache.packed.num_blocks)
      throw std::runtime_error("slots " + std::to_string(slots[token]) + " and " + std::to_string(packed_slots[token]) + " of pools of " + std::to_string(cache.num_blocks) + " and " + std::to_string(cache.packed.num_blocks) + " blocks");
    blocks.push_back(full);
  }
  program.add(std::make_unique<PackTask>(level, cache, std::move(blocks)));
}

void add_attention(Program& program, const Level& level, const Attention& call, std::shared_ptr<const AttentionPlan> plan) {
  if (plan->items.empty()) return;
  const std::shared_ptr<float[]> partials(plan->partials ? new float[plan->partials] : nullptr);
  program.add(std::make_unique<AttentionTask>(level, call, plan, partials));
  if (!plan->merges.empty()) program.add(std::make_unique<MergeTask>(level, call, plan, partials));
}

}  // namespace paged
