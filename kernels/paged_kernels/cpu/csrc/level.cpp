// The kernels for one instruction set. Compiled once per level, with its flags and its name in PAGED_LEVEL. Linear layers
// are those of the level PAGED_LINEAR.
#include "attention.h"
#include "layer_ops.h"
#include "names.h"

namespace paged {

size_t NAMED(panel_bytes, PAGED_LINEAR)(const Linear&, int64_t rows);
void NAMED(pack_rows, PAGED_LINEAR)(const Linear&, int64_t begin, int64_t end, void* panels);
void NAMED(multiply, PAGED_LINEAR)(const Linear&, int64_t begin, int64_t end, const void* panels, int64_t group, int64_t last, int64_t groups_ahead, void* to, int64_t stride);

extern const Level NAMED(level, PAGED_LEVEL);
const Level NAMED(level, PAGED_LEVEL) = {
    QUOTED(PAGED_LEVEL), scratch_bytes, attend, write_attended, merge, write, rotate, norm, swiglu,
    NAMED(panel_bytes, PAGED_LINEAR), NAMED(pack_rows, PAGED_LINEAR), NAMED(multiply, PAGED_LINEAR)};

}  // namespace paged
