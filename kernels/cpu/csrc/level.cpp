// The kernels for one instruction set: compiled once for each, with its flags and its name in PAGED_LEVEL.
#include "attention.h"
#include "between.h"

#define NAMED(name) NAMED_(name)
#define NAMED_(name) level_##name
#define QUOTED(name) QUOTED_(name)
#define QUOTED_(name) #name

namespace paged {

extern const Level NAMED(PAGED_LEVEL);
const Level NAMED(PAGED_LEVEL) = {QUOTED(PAGED_LEVEL), scratch_bytes, attend, merge, write, rotate, norm, swiglu};

}  // namespace paged
