// The table of a level's kernels. Each file of a level is compiled with the flags of its instruction set.
#include "level.h"

namespace paged {
namespace {

constexpr Level level = {scratch_bytes, attend, write_attended, merge, write, pack, rotate, norm, swiglu, best, block_rows, panel_bytes, pack_rows, multiply};

}  // namespace
}  // namespace paged

extern "C" __attribute__((visibility("default"))) const paged::Level* paged_level() { return &paged::level; }
