// The levels that Python has loaded.
#include "levels.h"

#include <array>
#include <atomic>
#include <stdexcept>
#include <string>

namespace paged {
namespace {

constexpr int max_levels = 16;
std::array<std::atomic<const Level*>, max_levels> added;

}  // namespace

void add_level(int number, const Level& level) { added.at(number) = &level; }

const Level& level_of(int64_t number) {
  const Level* level = number >= 0 && number < max_levels ? added[number].load() : nullptr;
  if (!level) throw std::runtime_error("level=" + std::to_string(number) + ": has not been loaded");
  return *level;
}

}  // namespace paged
