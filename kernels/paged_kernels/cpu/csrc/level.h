// The kernels of a level, whose table is in level.cpp. A level is a library of its own, so that the names of two levels do
// not meet.
#pragma once
#include "calls.h"

namespace paged {

size_t scratch_bytes(const Attention&, int max_rows);
void attend(const Attention&, const Item&, const Item* next_item, void* scratch);
void write_attended(const Attention&, const Item&, const void* scratch);
void merge(const Attention&, const Merge&);
void write(const Write&, int64_t begin, int64_t end);
void pack(const Cache&, int64_t block, int64_t packed, int kv_head);
void rotate(const Rotation&, int64_t begin, int64_t end);
void norm(const Norm&, int64_t begin, int64_t end);
void swiglu(const SwiGlu&, int64_t begin, int64_t end);
void best(const Best&, int64_t begin, int64_t end);
int64_t block_rows(const Linear&);
size_t panel_bytes(const Linear&, int64_t rows);
void pack_rows(const Linear&, int64_t begin, int64_t end, void* panels);
void multiply(const Linear&, int64_t begin, int64_t end, const void* panels, int64_t group, int64_t last, int64_t groups_ahead, void* to, int64_t stride);

}  // namespace paged
