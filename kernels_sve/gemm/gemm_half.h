// Sums in FP16 for a GEMM of FP16 operands: a chunk of k is summed in FP16 accumulators, 2 VL to a vector, and the sums of
// chunks in float32. An FP16 multiply-add does twice the float32 one's work (A64FX, any SVE), the price is the accuracy of
// docs/numerics.md. Only where FM_HAS_HALF_ARITHMETIC; GemmArgs::fp16_chunk asks for it.
//
// 24 accumulators of halves and their float32 sums do not fit 32 registers together, so the micro-kernel leaves a chunk's
// sums in memory and add_chunk, a loop of its own, widens them while loading and adds them to a tile that stays in L1.
#pragma once
#include "gemm/gemm_micro.h"

namespace fm::FM_TARGET {

#ifdef FM_HAS_HALF_ARITHMETIC
struct HalfWords : VectorSums {
  using Word = f16;
  static constexpr int WIDE = 2, STEP = 1, BESIDE = 1;
  // Pairs of k, for pack_transposed_pairs.
  FM_INLINE vf along_k(const f16* p, int64_t elements) {
    return across_k(p, 0, 0, elements >= 2 * VL ? 2 * VL : static_cast<int>(elements));
  }
  FM_INLINE vf across_k(const f16* p, int64_t, int64_t, int elements) {
    if (elements == 2 * VL) return (vf)load_pairs(&p->bits);
    return (vf)load_pairs_n(&p->bits, elements);
  }
  FM_INLINE vf multiply_add(Word x, vf b, vf sum) {
    return (vf)fma_halves(broadcast_half(x), (vu)b, (vu)sum);
  }
  FM_INLINE vf sum_words(const Word* words, int lanes, vf sum) {
    return load_n(words, lanes) + sum;
  }
};

// sums (+)= chunk, n elements, both aligned; a chunk is 2 VL columns to a vector.
template <bool ADD>
static __attribute__((noinline)) void add_chunk(float* sums, const f16* chunk, int64_t n) {
#pragma GCC unroll 4
  for (int64_t i = 0; i < n; i += VL) {
    const vf wide = load(chunk + i);
    store_aligned(sums + i, ADD ? load_aligned(sums + i) + wide : wide);
  }
}

// sums (rows, WIDE * NR) = A B over `deep` steps of k, in chunks.
FM_INLINE void multiply_in_chunks(int64_t rows, int64_t deep, int64_t chunk, const f16* a,
                                  const float* b, float* sums) {
  const auto kernel = micro_kernel_for<HalfWords>(rows);
  alignas(64) float tile[MR * NR];  // of halves
  Fetches nothing;
  const f16* halves = reinterpret_cast<const f16*>(tile);
  for (int64_t k = 0; k < deep || k == 0; k += chunk) {
    kernel(min(chunk, deep - k), a + k * MR, b + k * NR, tile, NR, false, nothing);
    k ? add_chunk<true>(sums, halves, rows * 2 * NR)
      : add_chunk<false>(sums, halves, rows * 2 * NR);
  }
}
#endif

}  // namespace fm::FM_TARGET
