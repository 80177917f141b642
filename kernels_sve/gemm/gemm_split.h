// Float32 operands as three bfloat16 parts each, where the target multiplies pairs of bfloat16. Included by gemm_micro.h, inside its
// namespace.
//
// x = x0 + x1 + x2, each part the bfloat16 nearest to what those before it leave, so the sum is exact for numbers above 2^-103. Of the nine
// products of the parts of a and b six are added up, in float32: what is left out, a1 b2, a2 b1 and a2 b2, is at most 2^-24 of a b. A panel
// of A holds the parts of a block of k one after another as a2 a1 a0, one of B as b0 b1 b2. So three runs over neighbouring parts are
// the six products, the smallest first, while what they are added to is still small:
//   run 0   a2 a1 a0 by b0 b1 b2      run 1   a1 a0 by b0 b1      run 2   a0 by b0
// Infinity and NaN have no further parts, and a product of infinity and a part that is 0 is a NaN: what an infinite operand reaches is not
// finite, but need not be the infinity that float32 units compute.
#pragma once

#ifdef FM_HAS_BF16_PAIRS
FM_INLINE bool has_bf16_arithmetic() { return true; }

// To nearest, halves away from zero. A number that would become infinite is cut instead; a NaN stays one.
FM_INLINE vf nearest_bf16(vf x) {
  const vu bits = (vu)x;
  const vu up = (bits & 0x7fffffffu) < 0x7f7f8000u ? bits + 0x8000u
                : x == x                           ? bits
                                                   : bits | 0x400000u;
  return (vf)(up & 0xffff0000u);
}

// Part PART of x in the upper halves of the lanes. The last one has no more than the 8 bits of a bfloat16.
template <int PART>
FM_INLINE vf bf16_part(vf x) {
  const vf first = nearest_bf16(x);
  if (PART == 0) return first;
  vf rest = x - first;
  rest = rest == rest ? rest : vf{};
  const vf second = (vf)(((vu)rest + 0x8000u) & 0xffff0000u);
  return PART == 1 ? second : rest - second;
}

// Reads float32 as Pairs of its parts PART.
template <class Pairs, int PART>
struct PartWords : Pairs {
  static constexpr int PARTS = 3;
  FM_INLINE vf along_k(const float* p, int64_t elements) {
    const auto half = [&](int64_t from) FM_INLINE_LAMBDA {
      const int64_t left = elements - from;
      return bf16_part<PART>(left >= VL ? load(p + from)
                                        : load_n(p + from, left > 0 ? static_cast<int>(left) : 0));
    };
    return (vf)high_halves(half(0), half(VL));
  }
  FM_INLINE vf across_k(const float* p, int64_t stride, int64_t left, int lanes) {
    if (left < 1) return vf{};
    const vu low = (vu)bf16_part<PART>(load_lanes(p, lanes)) >> 16;
    if (left < 2) return (vf)low;
    return (vf)(low | ((vu)bf16_part<PART>(load_lanes(p + stride, lanes)) & 0xffff0000u));
  }
};

template <class Pairs>
struct SplitWords : Pairs {
  static constexpr int PARTS = 3;
  template <int PART>
  using Part = PartWords<Pairs, PART>;
};
#else
FM_INLINE bool has_bf16_arithmetic() { return false; }
#endif
