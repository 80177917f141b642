// Vectors of FM_VECTOR_BYTES as GNU vector types, which GCC and Clang keep in SVE, zmm, ymm or NEON registers.
// Arithmetic, comparison and a ? b : c on them are the language's own (a * b + c becomes one FMA under
// -ffp-contract=fast). What the language cannot say is a hook in simd_<isa>.h; this file picks it and is the only one
// that asks for the instruction set. Kernels never name one.
//
// Hooks, all of them on vf (float lanes), vi (int32 lanes), vu (uint32 lanes); n is the number of lanes from the first,
// 0 <= n <= VL:
//   load_n(p, n) store_n(p, v, n)           float, never touches memory beyond lane n; the other lanes load as 0
//   load_u16 load_u16_n store_u16 store_u16_n   16-bit words to and from the low half of 32-bit lanes
//   load_i8(p) load_i8_n(p, n) store_i8_n(p, v, n)   int8 to and from 32-bit lanes; values within int8
//   half_to_float(vu) float_to_half(vf)     IEEE binary16 bits, to nearest even
//   hsum(v) hmax(v)                         over lanes, as a tree; once per row, not per vector (50 cycles on A64FX)
//   reciprocal(v) rsqrt(v) sqrt(v)          within 2 ulp for normal numbers; SVE: estimate and Newton steps, since the
//                                           divide and square root instructions take 98 cycles each on A64FX
//   exp(v)                                  within 2 ulp; 0 below -87.3 (never a denormal), inf above 88.7, NaN stays
//   dot_pairs(sum, a, b) to_pairs(low, high) to_row(low, high)   only where FM_HAS_BF16_PAIRS: sum + each lane's pair of bfloat16
//                                           products; pairs from two float vectors; all of low as bfloat16, then all of high
//   store_result(p, v) store_result_n(p, v, n)   only where FM_HAS_BF16_RESULTS: bfloat16 in one instruction, denormals as 0
//   high_halves(a, b)                       only where FM_HAS_BF16_PAIRS: the upper halves of a's lanes, then of b's
//   multiply_quads(sum, a, b) broadcast_quads(p) even_doublewords(a, b) odd_doublewords(a, b)   only where
//                                           FM_HAS_BF16_QUADS: sum + a b^T of the 2 x 4 matrices in every 128 bits; 128
//                                           bits from memory in all of them; every second doubleword of a, then of b
//   fma_halves(a, b, sum) broadcast_half(h)   only where FM_HAS_HALF_ARITHMETIC: a b + sum on the two binary16 numbers in each
//                                           lane of vu, rounded once to binary16; h in all of them
//   to_int(v)                               to the nearest integer, halves to even; any value beyond int32 and of a NaN
//   bytes_of(a, b, c, d) shorts_of(a, b)    the lanes of all in order as int8, or as int16, of lanes within their range
//   dot_bytes(sum, a, b)                    only where FM_HAS_BYTE_DOTS: sum + each lane's four products of int8 numbers; those of a
//                                           have BYTE_OFFSET added, which is 128 where the instruction takes them as unsigned
//   dot_shorts(sum, a, b)                   the same of two int16
//   multiply_byte_quads(sum, a, b)          only where FM_HAS_BYTE_QUADS: sum + a b^T of the 2 x 8 matrices of int8 in every 128 bits
//   exp2_each(v[N]) reciprocal_each(v[N]) sqrt_each(v[N])   2^v for v <= 127 (0 below -127, NaN stays), reciprocal and root, in
//                                           place; N chains side by side, written stage by stage: GCC keeps the order of the
//                                           source on A64FX, whose window is too short to find the next chain
//   fast_max(a, b) fast_min(a, b)           one instruction; a NaN in b is returned, of one in a that is open
//   store_part<N>(p, v, q)                  lanes [q N, q N + N)
//   mul_high(v, m)                          upper 32 bits of the 64-bit products
#pragma once
#include <cstdint>

#include "parallel.h"
#include "table.h"
#include "tuning.h"

#define FM_INLINE static inline __attribute__((always_inline))
#define FM_ONCE          \
  static __attribute__(( \
      noinline))  // compiled once for all kernels that call it for each block of rows
#define FM_INLINE_LAMBDA \
  __attribute__((always_inline))  // after a lambda's parameters: a long one that is called twice

#if defined(__ARM_FEATURE_SVE_BITS) && __ARM_FEATURE_SVE_BITS == FM_VECTOR_BYTES * 8 && \
    FM_VECTOR_BYTES > 16
#include <arm_sve.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#elif defined(__AVX2__)
#include <immintrin.h>
#elif defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace fm::FM_TARGET {

constexpr int VL = FM_VECTOR_BYTES / 4;
using Tuning = tuning::FM_TARGET;
constexpr int CHAINS = Tuning::CHAINS;

typedef float vf __attribute__((vector_size(FM_VECTOR_BYTES)));
typedef int32_t vi __attribute__((vector_size(FM_VECTOR_BYTES)));
typedef uint32_t vu __attribute__((vector_size(FM_VECTOR_BYTES)));
typedef float vf_unaligned __attribute__((vector_size(FM_VECTOR_BYTES), aligned(4), may_alias));
typedef uint32_t vu_unaligned __attribute__((vector_size(FM_VECTOR_BYTES), aligned(4), may_alias));

FM_INLINE vf load(const float* p) { return *reinterpret_cast<const vf_unaligned*>(p); }
FM_INLINE vf load_aligned(const float* p) { return *reinterpret_cast<const vf*>(p); }
FM_INLINE void store(float* p, vf v) { *reinterpret_cast<vf_unaligned*>(p) = v; }
FM_INLINE void store_aligned(float* p, vf v) { *reinterpret_cast<vf*>(p) = v; }
FM_INLINE vu load(const uint32_t* p) { return *reinterpret_cast<const vu_unaligned*>(p); }
FM_INLINE void store(uint32_t* p, vu v) { *reinterpret_cast<vu_unaligned*>(p) = v; }

// x in every lane. x - 0 and not 0 + x, so that -0 stays -0 and no compiler needs to add.
FM_INLINE vf broadcast(float x) { return x - vf{}; }
FM_INLINE vu broadcast(uint32_t x) { return x - vu{}; }
FM_INLINE vi broadcast(int32_t x) { return x - vi{}; }

FM_INLINE vu lane_index() {
  vu v;
#pragma GCC unroll 32
  for (int i = 0; i < VL; ++i) v[i] = i;
  return v;
}

FM_INLINE int64_t min(int64_t a, int64_t b) { return a < b ? a : b; }
FM_INLINE int64_t max(int64_t a, int64_t b) { return a > b ? a : b; }
FM_INLINE vf select(vi mask, vf yes, vf no) { return mask ? yes : no; }
FM_INLINE vu select(vi mask, vu yes, vu no) { return mask ? yes : no; }
FM_INLINE vf fma(vf a, vf b, vf c) { return a * b + c; }
// A NaN in b is returned by both; in a it is dropped.
FM_INLINE vf max(vf a, vf b) { return a > b ? a : b; }
FM_INLINE vf min(vf a, vf b) { return a < b ? a : b; }
FM_INLINE vf abs(vf v) { return (vf)((vu)v & 0x7fffffffu); }
// Of values below 2^23.
FM_INLINE vf to_float(vu v) { return __builtin_convertvector((vi)v, vf); }
// 2^r for |r| <= 1/2: Cephes' polynomial of exp2f (S. Moshier), for exp2_each.
FM_INLINE vf exp2_of_rest(vf r) {
  vf p = r * 1.535336188319500e-4f + 1.339887440266574e-3f;
  p = p * r + 9.618437357674640e-3f;
  p = p * r + 5.550332471162809e-2f;
  p = p * r + 2.402264791363012e-1f;
  p = p * r + 6.931472028550421e-1f;
  return p * r + 1.0f;
}
FM_INLINE void prefetch(const void* p) { __builtin_prefetch(p); }
FM_INLINE void prefetch_l2(const void* p) { __builtin_prefetch(p, 0, 2); }
FM_INLINE void prefetch_write(void* p) { __builtin_prefetch(p, 1); }

// Between the two FP16 arithmetic keeps its denormals, which begin at 6.1e-5, also in a thread that flushes those of float
// (FPCR.FZ16). A pair of calls and no object: a destructor would bring exception tables, and with them weak symbols.
#ifdef __ARM_FEATURE_FP16_VECTOR_ARITHMETIC
FM_INLINE uint64_t keep_half_denormals() {
  uint64_t before;
  __asm__ volatile("mrs %0, fpcr" : "=r"(before)::"memory");
  __asm__ volatile("msr fpcr, %0" ::"r"(before & ~(UINT64_C(1) << 19)) : "memory");
  return before;
}
FM_INLINE void restore_denormals(uint64_t before) {
  __asm__ volatile("msr fpcr, %0" ::"r"(before) : "memory");
}
#else
FM_INLINE uint64_t keep_half_denormals() { return 0; }
FM_INLINE void restore_denormals(uint64_t) {}
#endif

}  // namespace fm::FM_TARGET

#if defined(__ARM_FEATURE_SVE_BITS) && __ARM_FEATURE_SVE_BITS == FM_VECTOR_BYTES * 8 && \
    FM_VECTOR_BYTES > 16
#include "simd/simd_sve.h"
#elif defined(__AVX512F__)
#include "simd/simd_avx512.h"
#elif defined(__AVX2__)
#include "simd/simd_avx2.h"
#else
#include "simd/simd_generic.h"
#endif
#ifndef FM_NARROW_LANES
#define FM_NARROW_LANES FM_INLINE
#endif
#include "simd/simd_math.h"
#include "simd/simd_types.h"
