// Run-time choice of target. setup.py passes the rows: FM_BUILT_ROWS and FM_OTHER_ROWS hold FM_ROW(name, vector bytes,
// machine, features), and FM_SOURCE_HASH, the hash of what the library is built from. Tested by tests/kernels/test_dispatch.py.
#include "dispatch.h"

#include "cpu_features.h"
#include "tuning.h"

#include <atomic>
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

std::string missing(const Row& row) {
  const bool left_out = !row.table && !*row.machine;
  if (!row.table && !left_out) return std::string("not in this build, it is for ") + row.machine;
  std::istringstream words(row.features);
  for (std::string feature; words >> feature;) {
    if (cpu::has_feature(feature, row.vector_bytes)) continue;
    if (feature == "sve")
      return "this CPU has no SVE of " + std::to_string(row.vector_bytes * 8) + " bits";
    if (feature == "amx_state")
      return std::string("the operating system refuses AMX tiles: ") + cpu::tiles_refused();
    return "this CPU has no " + feature;
  }
  return left_out ? "left out of this build: run make kernels for all targets" : "";
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
