// The kernels for one instruction set. Compiled once per level, with its flags and its name in PAGED_LEVEL. Linear layers
// are those of the level PAGED_LINEAR.
#include "attention.h"
#include "layer_ops.h"
#include "names.h"

namespace paged {

void NAMED(multiply, PAGED_LINEAR)(const Linear&, int64_t begin, int64_t end, float* panels, int64_t& widened);

extern const Level NAMED(level, PAGED_LEVEL);
const Level NAMED(level, PAGED_LEVEL) = {QUOTED(PAGED_LEVEL), scratch_bytes, attend, merge, write, rotate, norm, swiglu,
                                         NAMED(multiply, PAGED_LINEAR)};

}  // namespace paged
