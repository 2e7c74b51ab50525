// The instruction sets that were built and that this machine supports.
#include "levels.h"

#include <string>

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace paged {

#define LEVEL(name) extern const Level level_##name;
PAGED_LEVELS
#undef LEVEL

namespace {

#if defined(__x86_64__)
bool has_amx() {
  unsigned a, b, c, d;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(d >> 22 & 1) || !(d >> 24 & 1)) return false;  // bf16, tiles
  __get_cpuid(1, &a, &b, &c, &d);
  if (!(c >> 27 & 1)) return false;  // xgetbv is not available
  unsigned low, high;
  __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  constexpr unsigned tiles = 3u << 17;  // the system saves tile configuration and data
  constexpr long ask_for_permission = 0x1023, tile_data = 18;
  return (low & tiles) == tiles && syscall(SYS_arch_prctl, ask_for_permission, tile_data) == 0;
}

bool is_supported(const std::string& level) {
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  if (level == "avx2") return avx2;
  if (level == "avx512") return avx512;
  const bool vnni = avx512 && __builtin_cpu_supports("avx512vnni");
  if (level == "avx512_vnni") return vnni;
  if (level == "avx512_bf16") return vnni && __builtin_cpu_supports("avx512bf16");
  if (level == "amx") return vnni && __builtin_cpu_supports("avx512bf16") && has_amx();
  return true;
}
#else
bool is_supported(const std::string&) { return true; }
#endif

}  // namespace

const std::vector<const Level*>& levels() {
  static const std::vector<const Level*> found = [] {
    std::vector<const Level*> supported;
#define LEVEL(name) \
  if (is_supported(#name)) supported.push_back(&level_##name);
    PAGED_LEVELS
#undef LEVEL
    return supported;
  }();
  return found;
}

}  // namespace paged
