// Matmuls of experts in one call: of each group of consecutive rows with a weight of its own, any number of rows each. Included by
// gemm.h, whose loops compute every part.
//
// Groups of much work are cut into a grid over C, so that a thread gets about TASKS_EACH parts, and threads take parts in order
// until none is left: a group with half of all rows keeps no thread waiting. Which thread computes a part, and how a group is cut,
// changes no sum.
#pragma once
#include "gemm/gemm_few_rows.h"

namespace fm::FM_TARGET {

// The matmul of group `index`, whose rows begin at `start`.
FM_INLINE GemmArgs group_gemm(const GroupedGemmArgs& all, int64_t index, int64_t start) {
  const int64_t in_bytes = stored_dtype(all.each.in_dtype) == DType::f32 ? 4 : 2,
                b_bytes = all.each.b_scales ? 1 : in_bytes,
                out_bytes = all.each.out_dtype == DType::f32 ? 4 : 2;
  const auto moved = [](const void* p, int64_t bytes) {
    return static_cast<const char*>(p) + bytes;
  };
  GemmArgs g = all.each;
  (all.sums ? g.k : g.m) = all.counts[index];
  g.a = moved(g.a, start * (all.sums ? g.a_col : g.a_row) * in_bytes);
  g.b = moved(g.b, (all.sums ? start * g.b_row : index * all.weight_step) * b_bytes);
  if (g.b_scales) g.b_scales.at += index * all.scale_step;
  g.c = const_cast<char*>(
      moved(g.c, (all.sums ? index * all.weight_step : start * g.c_row) * out_bytes));
  return g;
}

// Multiply-adds, and those that take as long as packing.
FM_INLINE double cost_of(const GemmArgs& g) {
  return double(g.k) * (double(g.m) * double(g.n) + Tuning::PACK_COST * double(g.m + g.n));
}

// The groups in order, as a thread walks over them to the part that it has taken.
template <class Work>
struct GroupWalk {
  const GroupedGemmArgs& all;
  double each;  // cost of a part
  int64_t index = -1, start = 0,
          first = 0;  // of the group: its number, its first row, its first part
  int parts = 0;
  GemmArgs g = {};

  // Moves on to the group of a part; false when there are no more.
  bool seek(int64_t part) {
    while (part >= first + parts) {
      if (index >= 0) start += all.counts[index];
      first += parts;
      if (++index >= all.groups) return false;
      g = group_gemm(all, index, start);
      const bool writes = all.counts[index] || (all.sums && g.overwrite);
      parts = writes ? static_cast<int>(cost_of(g) / each) + 1 : 0;
    }
    return true;
  }
};

// See GroupedGemmArgs.
static void grouped_linear_forward(const GroupedGemmArgs& all) {
  FM_LEAVE_TO_BASE(factors_of(all.each.in_dtype), grouped_linear_forward, all)
  double total = 0;
  for (int64_t index = 0, start = 0; index < all.groups; start += all.counts[index++])
    total += cost_of(group_gemm(all, index, start));
  int64_t taken = 0;
  with_gemm_threads(all.each, [&](auto words, auto element, int, int threads) {
    using Work = Gemm<decltype(words), decltype(element)>;
    using Few = FewRows<decltype(words), decltype(element)>;
    GroupWalk<Work> walk = {all,
                            threads > 1 ? total / (threads * Tuning::TASKS_EACH) + 1 : total + 1};
    for (int64_t part; walk.seek(part = __atomic_fetch_add(&taken, 1, __ATOMIC_RELAXED));) {
      const int number = static_cast<int>(part - walk.first);
      if constexpr (Few::EXISTS) {
        if (Few::takes(walk.g)) {
          Few(walk.g, fm::FM_TARGET::part(walk.g.n, Few::ROWS, number, walk.parts)).run();
          continue;
        }
      }
      Work(walk.g, Work::grid_of(walk.g, walk.parts), number).run();
    }
  });
}

}  // namespace fm::FM_TARGET
