// The table of a level's kernels. Each file of a level is compiled with the flags of its instruction set. A level whose
// linear layers are those of another level has no linear.cpp, and PAGED_OTHER_LINEAR is defined.
#include "level.h"

namespace paged {
namespace {

#if defined(PAGED_OTHER_LINEAR)
constexpr Level level = {scratch_bytes, attend, write_attended, merge, write, pack, rotate, norm, swiglu, nullptr, nullptr, nullptr};
#else
constexpr Level level = {scratch_bytes, attend, write_attended, merge, write, pack, rotate, norm, swiglu, panel_bytes, pack_rows, multiply};
#endif

}  // namespace
}  // namespace paged

extern "C" __attribute__((visibility("default"))) const paged::Level* paged_level() { return &paged::level; }
