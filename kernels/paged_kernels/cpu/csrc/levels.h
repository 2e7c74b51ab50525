#pragma once
#include <vector>

#include "calls.h"

namespace paged {

// Returns the levels that were built and that this machine supports, the best one first.
const std::vector<const Level*>& levels();

}  // namespace paged
