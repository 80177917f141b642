// Run-time choice of target. setup.py passes the rows: FM_BUILT_ROWS and FM_OTHER_ROWS hold FM_ROW(name, vector bytes,
// machine, features), and FM_SOURCE_HASH, the hash of what the library is built from. Tested by tests/kernels/test_dispatch.py.
#include "dispatch.h"

#include "tuning.h"

#include <sys/auxv.h>
#include <sys/prctl.h>
#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <sstream>
#include <stdexcept>

namespace fm {

#define FM_ROW(name, bytes, machine, features) \
  namespace name {                             \
  extern const KernelTable kernel_table;       \
  }
FM_BUILT_ROWS
#undef FM_ROW
namespace reference {
extern const KernelTable kernel_table;
}

namespace {

struct Row {
  const char* name;
  int vector_bytes;
  const char* machine;
  const char* features;
  int gemm_rows, gemm_vectors;  // tile
  int fetch_steps;
  const KernelTable* table;  // null when this build has no such target
};

// clang-format off
const Row rows[] = {
    {"reference", 4, "any", "", 1, 1, 1, &reference::kernel_table},
#define FM_TILE(name) tuning::name::GEMM_MR, tuning::name::GEMM_NR_VECTORS, tuning::name::FETCH_STEPS
#define FM_ROW(name, bytes, machine, features) {#name, bytes, machine, features, FM_TILE(name), &name::kernel_table},
    FM_BUILT_ROWS
#undef FM_ROW
#define FM_ROW(name, bytes, machine, features) {#name, bytes, machine, features, FM_TILE(name), nullptr},
    FM_OTHER_ROWS
#undef FM_ROW
};
// clang-format on

std::atomic<const Row*> current{&rows[0]};

// setup.py searches the library for this text (hash_in).
__attribute__((used)) const char source_hash[] = "fugaku_megatron kernel sources " FM_SOURCE_HASH;

#if defined(__x86_64__)
// CPUID leaf 7, register EDX.
bool has_amx(unsigned bit) {
  unsigned a, b, c, d = 0;
  return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d >> bit & 1);
}

// Tiles are a state that the system must save (XCR0 bits 17 and 18) and whose use a process must ask for, once for all its threads.
// Why it may not use them; empty when it may.
std::string ask_for_tiles() {
  constexpr unsigned OSXSAVE_BIT = 27, TILE_STATES = 3u << 17;
  constexpr long ARCH_REQ_XCOMP_PERM_CODE = 0x1023, XFEATURE_XTILEDATA_NUMBER = 18;
  unsigned a, b, c = 0, d, low, high;
  if (!__get_cpuid(1, &a, &b, &c, &d) || !(c >> OSXSAVE_BIT & 1))
    return "it does not save extended registers";
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  if ((low & TILE_STATES) != TILE_STATES) return "it does not save tiles (XCR0)";
  if (syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM_CODE, XFEATURE_XTILEDATA_NUMBER) == 0) return "";
  return std::string("arch_prctl(ARCH_REQ_XCOMP_PERM): ") + std::strerror(errno);
}
const std::string& tiles_refused() {
  static const std::string reason = ask_for_tiles();
  return reason;
}

bool has_feature(const std::string& feature, int) {
  if (feature == "amx_tile") return has_amx(24);
  if (feature == "amx_bf16") return has_amx(22);
  if (feature == "amx_state") return tiles_refused().empty();
#define FM_CPU(name) (feature == #name && __builtin_cpu_supports(#name))
  return FM_CPU(avx2) || FM_CPU(fma) || FM_CPU(f16c) || FM_CPU(avx512f) || FM_CPU(avx512bw) ||
         FM_CPU(avx512dq) || FM_CPU(avx512vl) || FM_CPU(avx512bf16);
#undef FM_CPU
}
#elif defined(__aarch64__)
// Code built for N-bit vectors gives wrong numbers without a sign of it on any other length, so the kernel is asked for
// the real one. prctl and not the RDVL instruction: this file is compiled for the baseline, which has no SVE.
const char* tiles_refused() { return ""; }
bool has_feature(const std::string& feature, int vector_bytes) {
  constexpr unsigned long HWCAP_SVE_BIT = 1UL << 22;
  constexpr int PR_SVE_GET_VL_CODE = 51, PR_SVE_VL_LENGTH = 0xffff;
  constexpr unsigned long HWCAP2_SVEBF16_BIT = 1UL << 12, HWCAP2_BF16_BIT = 1UL << 14;
  if (feature == "svebf16") return getauxval(AT_HWCAP2) & HWCAP2_SVEBF16_BIT;
  if (feature == "bf16") return getauxval(AT_HWCAP2) & HWCAP2_BF16_BIT;
  if (feature != "sve" || !(getauxval(AT_HWCAP) & HWCAP_SVE_BIT)) return false;
  return (prctl(PR_SVE_GET_VL_CODE) & PR_SVE_VL_LENGTH) == vector_bytes;
}
#else
const char* tiles_refused() { return ""; }
bool has_feature(const std::string&, int) { return false; }
#endif

std::string missing(const Row& row) {
  if (!row.table && !*row.machine)
    return "left out of this build: run make kernels for all targets";
  if (!row.table) return std::string("not in this build, it is for ") + row.machine;
  std::istringstream words(row.features);
  for (std::string feature; words >> feature;) {
    if (has_feature(feature, row.vector_bytes)) continue;
    if (feature == "sve")
      return "this CPU has no SVE of " + std::to_string(row.vector_bytes * 8) + " bits";
    if (feature == "amx_state")
      return std::string("the operating system refuses AMX tiles: ") + tiles_refused();
    return "this CPU has no " + feature;
  }
  return "";
}

}  // namespace

const KernelTable& kernels() { return *current.load(std::memory_order_relaxed)->table; }
const char* active() { return current.load()->name; }

std::vector<TargetInfo> targets() {
  std::vector<TargetInfo> infos;
  for (const Row& row : rows) {
    const std::string reason = missing(row);
    infos.push_back({row.name, row.vector_bytes, row.gemm_rows, row.gemm_vectors, row.fetch_steps,
                     row.table != nullptr, reason.empty(), reason});
  }
  return infos;
}

void use(const std::string& name) {
  std::string known;
  for (const Row& row : rows) {
    known += (known.empty() ? "" : ", ") + std::string(row.name);
    if (name != row.name) continue;
    const std::string reason = missing(row);
    if (!reason.empty())
      throw std::runtime_error("kernel target " + name + " cannot run here: " + reason);
    current.store(&row);
    return;
  }
  throw std::invalid_argument("unknown kernel target '" + name + "'; known: " + known);
}

void use_default() {
  const char* name = std::getenv("FUGAKU_MEGATRON_TARGET");
  if (name && *name) return use(name);
  for (const Row& row : rows) {
    const bool for_tests =
        row.table == &reference::kernel_table || std::strstr(row.name, "_emulated");
    if (!for_tests && missing(row).empty()) current.store(&row);
  }
}

}  // namespace fm
