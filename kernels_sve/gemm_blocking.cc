// Cache sizes of this machine and the GEMM blocks that follow from them. Tested by tests/kernels/test_gemm.py.
#include <algorithm>
#include <fstream>
#include <sstream>
#include <string>

#include "table.h"

namespace fm {
namespace {

// Cores in a list such as "0-11,24".
int64_t count_list(const std::string& list) {
  int64_t count = 0;
  std::istringstream parts(list);
  for (std::string part; std::getline(parts, part, ',');) {
    const size_t dash = part.find('-');
    count += dash == std::string::npos ? 1 : std::stoll(part.substr(dash + 1)) - std::stoll(part) + 1;
  }
  return std::max<int64_t>(count, 1);
}

std::string read_word(const std::string& path) {
  std::ifstream file(path);
  std::string word;
  file >> word;
  return word;
}

// A64FX, whose kernel need not describe its caches: 64 KiB L1; 8 MiB L2 for 12 cores, of which 7 MiB are left when
// assistant cores hold ways (A64FX Microarchitecture Manual 1.8.1). Elsewhere the smallest caches of this decade.
#if defined(__aarch64__)
constexpr CacheGeometry UNKNOWN = {64 << 10, (7 << 20) / 12, 0};
#else
constexpr CacheGeometry UNKNOWN = {32 << 10, 256 << 10, 0};
#endif

CacheGeometry read_geometry() {
  CacheGeometry geometry = {0, 0, 0};
  for (int i = 0; i < 8; ++i) {
    const std::string folder = "/sys/devices/system/cpu/cpu0/cache/index" + std::to_string(i) + "/";
    const std::string type = read_word(folder + "type"), level = read_word(folder + "level"),
                      size = read_word(folder + "size");
    if (type.empty() || type == "Instruction" || size.empty()) continue;
    const int64_t bytes = std::stoll(size) << (size.back() == 'M' ? 20 : 10);
    const int64_t share = bytes / count_list(read_word(folder + "shared_cpu_list"));
    (level == "1" ? geometry.l1 : level == "2" ? geometry.l2 : geometry.l3) = share;
  }
  if (!geometry.l1 || !geometry.l2) return UNKNOWN;
#if defined(__aarch64__)
  if (!geometry.l3) geometry.l2 = geometry.l2 * 7 / 8;
#endif
  return geometry;
}

int64_t multiple(double value, int64_t unit, int64_t least) {
  return std::max(static_cast<int64_t>(value) / unit * unit, least);
}

}  // namespace

const CacheGeometry& cache_geometry() {
  static const CacheGeometry geometry = read_geometry();
  return geometry;
}

// kc: a panel of B fills half of L1. mc: the block of A fills most of L2, or half of it where the streams of B and C
// come from memory through the same cache. nc: the block of B fills a quarter of L3, or what several L2 hold.
GemmBlocks gemm_blocks(int mr, int nr, int stretch) {
  constexpr int WORD = 4;
  const CacheGeometry& cache = cache_geometry();
  GemmBlocks blocks;
  blocks.kc = stretch * multiple(0.5 * cache.l1 / (nr * WORD), 64, 64);
  blocks.mc = multiple((cache.l3 ? 0.8 : 0.5) * cache.l2 / (blocks.kc * WORD), mr, mr);
  blocks.nc = multiple((cache.l3 ? 0.25 * cache.l3 : 4.0 * cache.l2) / (blocks.kc * WORD), nr, 8 * nr);
  return blocks;
}

// Costs in multiply-adds per step of k. Packing an element takes about as long as PACK of them in a full tile; reading
// a packed weight from a shared cache about STREAM.
GemmGrid gemm_grid(int threads, int64_t m, int64_t n, int row_unit, int col_unit, bool packed) {
  constexpr double PACK = 16, STREAM = 3;
  GemmGrid best = {1, threads};
  double least = -1;
  for (int parts = 1; parts <= threads; ++parts) {
    if (threads % parts) continue;
    const int others = threads / parts;
    const double rows = double((m + row_unit * parts - 1) / (row_unit * parts)) * row_unit;
    const double cols = double((n + int64_t(col_unit) * others - 1) / (int64_t(col_unit) * others)) * col_unit;
    const double cost = rows * cols + PACK * rows + (packed ? STREAM : PACK) * cols;
    if (least < 0 || cost < least) least = cost, best = {parts, others};
  }
  return best;
}

}  // namespace fm
