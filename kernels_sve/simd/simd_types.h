// load, store and scalar conversion of float, bf16 and f16 elements as float lanes, so that a kernel is a template over
// its element type:
//
//   with_dtype(dtype, [&](auto element) { using T = decltype(element); run<T>(static_cast<const T*>(x), ...); });
//
// Included by simd.h. Conversion rounds to nearest even; a NaN stays a NaN.
#pragma once

namespace fm::FM_TARGET {

FM_INLINE vf bf16_to_float(vu bits) { return (vf)(bits << 16); }
FM_INLINE vu float_to_bf16(vf v) {
  const vu bits = (vu)v;
  const vu rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  return v == v ? rounded : (bits >> 16) | 0x40u;
}
// Up when what is cut off, in units of 2^-16 of the last place, and the word in [0, 2^16) reach 2^16 together. Of numbers >= 0.
FM_INLINE vu float_to_bf16_by(vf v, vu words) {
  const vu bits = (vu)v;
  return v == v ? (bits + words) >> 16 : (bits >> 16) | 0x40u;
}

FM_INLINE vf load(const bf16* p) { return bf16_to_float(load_u16(&p->bits)); }
FM_INLINE vf load(const f16* p) { return half_to_float(load_u16(&p->bits)); }
FM_NARROW_LANES vf load_n(const bf16* p, int n) { return bf16_to_float(load_u16_n(&p->bits, n)); }
FM_NARROW_LANES vf load_n(const f16* p, int n) { return half_to_float(load_u16_n(&p->bits, n)); }
FM_INLINE void store(bf16* p, vf v) { store_u16(&p->bits, float_to_bf16(v)); }
FM_INLINE void store(f16* p, vf v) { store_u16(&p->bits, float_to_half(v)); }
FM_NARROW_LANES void store_n(bf16* p, vf v, int n) { store_u16_n(&p->bits, float_to_bf16(v), n); }
FM_NARROW_LANES void store_n(f16* p, vf v, int n) { store_u16_n(&p->bits, float_to_half(v), n); }

// 16-bit elements, two in a lane; n of them, the rest 0.
typedef uint32_t vu_halves __attribute__((vector_size(FM_VECTOR_BYTES), aligned(2), may_alias));
FM_INLINE vu load_pairs(const uint16_t* p) { return *reinterpret_cast<const vu_halves*>(p); }
FM_INLINE vu load_pairs_n(const uint16_t* p, int n) {
  vu words = {};
  for (int i = 0; i < n; ++i) words[i / 2] |= static_cast<uint32_t>(p[i]) << (i % 2 * 16);
  return words;
}

// Reads the pairs (k, k+1) of a bfloat16 matrix that a panel of pairs holds, a vector of them: those of one row from p on, of which
// `elements` exist, and those of `lanes` rows side by side, `stride` elements from one k to the next, of which `left` exist.
struct StoredPairs {
  static constexpr int STEP = 2;
  FM_INLINE vf along_k(const bf16* p, int64_t elements) {
    if (elements >= 2 * VL) return (vf)load_pairs(&p->bits);
    return (vf)load_pairs_n(&p->bits, static_cast<int>(elements));
  }
  FM_INLINE vf across_k(const bf16* p, int64_t stride, int64_t left, int lanes) {
    if (left < 1) return vf{};
    const vu low = lanes == VL ? load_u16(&p->bits) : load_u16_n(&p->bits, lanes);
    if (left < 2) return (vf)low;
    const uint16_t* next = &(p + stride)->bits;
    return (vf)(low | (lanes == VL ? load_u16(next) : load_u16_n(next, lanes)) << 16);
  }
};

// Scales of the rows of A or of the columns of B that a reader quantizes, from the first row or column at hand on.
struct Scales {
  float *scale = nullptr, *inverse = nullptr;  // inverse: what an element is multiplied by
  int32_t* correction = nullptr;               // of B
  const void* origin =
      nullptr;  // the operand's first element, where elements are rounded at random
};

FM_INLINE Scales scales_from(const Scales& all, int64_t first) {
  if (!all.scale) return {};
  return {all.scale + first, all.inverse ? all.inverse + first : nullptr,
          all.correction ? all.correction + first : nullptr, all.origin};
}

// along_k and across_k of a reader of words. scales: for readers that quantize, from the row or the first of the rows on.
template <class Reader>
constexpr bool QUANTIZES = false;
template <class Words, class T>
FM_INLINE vf along_k(const T* p, int64_t elements, [[maybe_unused]] const Scales& scales) {
  if constexpr (QUANTIZES<Words>)
    return Words::along_k(p, elements, scales);
  else
    return Words::along_k(p, elements);
}
template <class Words, class T>
FM_INLINE vf across_k(const T* p, int64_t stride, int64_t left, int lanes,
                      [[maybe_unused]] const Scales& scales) {
  if constexpr (QUANTIZES<Words>)
    return Words::across_k(p, stride, left, lanes, scales);
  else
    return Words::across_k(p, stride, left, lanes);
}

template <class T>
FM_INLINE float load_scalar(const T* p) {
  return load_n(p, 1)[0];
}

// Calls f with a value of the element type; the binding has checked that dtype is one of the three.
template <class F>
FM_INLINE void with_dtype(DType dtype, const F& f) {
  if (dtype == DType::f32) return f(float());
  if (dtype == DType::bf16) return f(bf16());
  f(f16());
}

// Runs body(i, lanes) over [begin, end) by vectors; only the last may have lanes < VL.
template <class F>
FM_INLINE void for_vectors(int64_t begin, int64_t end, const F& body) {
  int64_t i = begin;
  for (; i + VL <= end; i += VL) body(i, VL);
  if (i < end) body(i, static_cast<int>(end - i));
}

// A number as a type: what a generic lambda takes to fix the size of its arrays.
template <int N>
struct Count {
  static constexpr int value = N;
};

// Runs body(Count<N>(), i, VL) over [begin, end) for groups of N vectors from i on, then body(Count<1>(), i, lanes) for the rest.
template <int N, class F>
FM_INLINE void for_vector_groups(int64_t begin, int64_t end, const F& body) {
  int64_t i = begin;
  for (; i + N * VL <= end; i += N * VL) body(Count<N>(), i, VL);
  for_vectors(i, end, [&](int64_t j, int lanes) { body(Count<1>(), j, lanes); });
}

// load and store that take the whole vector when the caller's lane count says so: after inlining into for_vectors the
// test is gone.
template <class T>
FM_INLINE vf load_lanes(const T* p, int lanes) {
  return lanes == VL ? load(p) : load_n(p, lanes);
}
// Rounded exactly, denormals too: for what must be the same however it is made.
template <class T>
FM_INLINE void store_exact(T* p, vf v, int lanes) {
  lanes == VL ? store(p, v) : store_n(p, v, lanes);
}
// A kernel's result: where one instruction converts to bfloat16, a denormal one is stored as 0.
template <class T>
FM_INLINE void store_lanes(T* p, vf v, int lanes) {
  store_exact(p, v, lanes);
}
#ifdef FM_HAS_BF16_RESULTS
FM_INLINE void store_lanes(bf16* p, vf v, int lanes) {
  lanes == VL ? store_result(p, v) : store_result_n(p, v, lanes);
}
#endif

}  // namespace fm::FM_TARGET
