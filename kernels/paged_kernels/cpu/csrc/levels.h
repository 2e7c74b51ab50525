#pragma once
#include "calls.h"

namespace paged {

// Adds a level, which must exist until the process ends, under a number.
void add_level(int number, const Level& level);

// Throws std::runtime_error if no level has been added under this number.
const Level& level_of(int64_t number);

}  // namespace paged
