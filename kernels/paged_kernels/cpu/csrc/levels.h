#pragma once
#include "calls.h"

namespace paged {

// Adds a level under a number, with the linear layers of `linear`. Both must exist until the process ends.
void add_level(int number, const Level& level, const Level& linear);

// Throws std::runtime_error if no level has been added under this number.
const Level& level_of(int64_t number);

}  // namespace paged
