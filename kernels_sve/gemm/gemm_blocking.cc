// Cache sizes of this machine and the GEMM blocks that follow from them. Tested by tests/kernels/test_gemm.py.
#include <algorithm>
#include <fstream>
#include <numeric>
#include <sstream>
#include <string>

#include "table.h"
#include "tuning.h"

namespace fm {
namespace {

// Cores in a list such as "0-11,24".
int64_t count_list(const std::string& list) {
  int64_t count = 0;
  std::istringstream parts(list);
  for (std::string part; std::getline(parts, part, ',');) {
    const size_t dash = part.find('-');
    count +=
        dash == std::string::npos ? 1 : std::stoll(part.substr(dash + 1)) - std::stoll(part) + 1;
  }
  return std::max<int64_t>(count, 1);
}

std::string read_word(const std::string& path) {
  std::ifstream file(path);
  std::string word;
  file >> word;
  return word;
}

using tuning::Baseline;

CacheGeometry read_geometry() {
  CacheGeometry geometry = {};
  for (int i = 0; i < 8; ++i) {
    const std::string folder = "/sys/devices/system/cpu/cpu0/cache/index" + std::to_string(i) + "/";
    const std::string type = read_word(folder + "type"), level = read_word(folder + "level"),
                      size = read_word(folder + "size");
    if (type.empty() || type == "Instruction" || size.empty()) continue;
    const int64_t bytes = std::stoll(size) << (size.back() == 'M' ? 20 : 10);
    const int64_t share = bytes / count_list(read_word(folder + "shared_cpu_list"));
    (level == "1" ? geometry.l1 : level == "2" ? geometry.l2 : geometry.l3) = share;
    const std::string ways = read_word(folder + "ways_of_associativity");
    if (level != "1") continue;
    geometry.l1_ways = ways.empty() || ways == "0" ? Baseline::UNKNOWN_L1_WAYS : std::stoll(ways);
    geometry.l1_way = bytes / geometry.l1_ways;
  }
  if (!geometry.l1 || !geometry.l2) {
    constexpr int64_t WAYS = Baseline::UNKNOWN_L1_WAYS;
    return {Baseline::UNKNOWN_L1, Baseline::UNKNOWN_L2, 0, WAYS, Baseline::UNKNOWN_L1 / WAYS};
  }
  if (!geometry.l3) geometry.l2 = geometry.l2 * Baseline::L2_EIGHTHS / 8;
  return geometry;
}

int64_t multiple(double value, int64_t unit, int64_t min) {
  return std::max(static_cast<int64_t>(value) / unit * unit, min);
}

}  // namespace

const CacheGeometry& cache_geometry() {
  static const CacheGeometry geometry = read_geometry();
  return geometry;
}

bool rows_share_l1(int64_t rows, int64_t stride) {
  const CacheGeometry& cache = cache_geometry();
  const int64_t places = cache.l1_way / std::gcd(cache.l1_way, stride);
  return (rows + places - 1) / places <= cache.l1_ways;
}

// kc: a panel of B; mc: the block of A; nc: the block of B. The shares of the caches are tuning.h's.
GemmBlocks gemm_blocks(int mr, int nr, int step, bool adds, bool tiles) {
  constexpr int WORD = 4;
  const CacheGeometry& cache = cache_geometry();
  const double before_l3 = tiles  ? Baseline::KC_L1_SHARE_TILES
                           : adds ? Baseline::KC_L1_SHARE_ADDING_BEFORE_L3
                                  : Baseline::KC_L1_SHARE_BEFORE_L3 * step;
  const double b_panel = cache.l1 * (cache.l3 ? before_l3 : Baseline::KC_L1_SHARE * step);
  const double a_block =
      (cache.l3 ? Baseline::MC_L2_SHARE_BEFORE_L3 : Baseline::MC_L2_SHARE) * cache.l2;
  const double b_block =
      cache.l3 ? Baseline::NC_L3_SHARE * cache.l3 : Baseline::NC_L2_SHARE * cache.l2;
  GemmBlocks blocks;
  blocks.kc = multiple(b_panel / (nr * WORD), 64, 64);
  blocks.mc = multiple(a_block / (blocks.kc * WORD), mr, mr);
  blocks.nc = multiple(b_block / (blocks.kc * WORD), nr, 8 * nr);
  return blocks;
}

// Costs in multiply-adds per step of k.
GemmGrid gemm_grid(int threads, int64_t m, int64_t n, int row_unit, int col_unit, bool packed) {
  const double each_col = packed ? Baseline::STREAM_COST : Baseline::PACK_COST;
  GemmGrid best = {1, threads};
  double best_cost = -1;
  for (int parts = 1; parts <= threads; ++parts) {
    if (threads % parts) continue;
    const int others = threads / parts;
    const double rows = double((m + row_unit * parts - 1) / (row_unit * parts)) * row_unit;
    const double cols =
        double((n + int64_t(col_unit) * others - 1) / (int64_t(col_unit) * others)) * col_unit;
    const double cost = rows * cols + Baseline::PACK_COST * rows + each_col * cols;
    if (best_cost < 0 || cost < best_cost) best_cost = cost, best = {parts, others};
  }
  return best;
}

}  // namespace fm
