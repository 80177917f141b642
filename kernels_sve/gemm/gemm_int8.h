// Operands that are quantized to eight bits while they are packed (DType::int8_of_*). A row of A and a column of B have a scale each:
//
//   scale = max |x| over k / 127,   q = nearest(x 127 / max |x|),   C(i, j) = scale_a[i] scale_b[j] sum over k of qa qb
//
// The sums are exact in int32 for k <= INT8_MOST_K, so a product has the same bits on every target, with any blocks and threads. A row
// with a NaN or an infinity has a NaN for its scale, so its results are NaN; a row of zeros has the scale 0.
//
// A word holds four neighbouring k, or two as int16 where the target has no dot product of bytes. x86's takes the bytes of A as
// unsigned: they have BYTE_OFFSET added, and `correction`, BYTE_OFFSET times the sum of a column of B, is subtracted from the sums.
// Included by gemm_micro.h, inside its namespace.
#pragma once

#ifdef FM_HAS_BYTE_DOTS
#ifdef FM_HAS_TILES  // their products are of signed bytes
constexpr int OFFSET = 0;
#else
constexpr int OFFSET = BYTE_OFFSET;
#endif
#endif

// Reads elements as words of int8, for packing panels of B with BESIDE_ words side by side, or, IS_A, of A, with OFFSET added. RANDOM:
// with random rounding.
template <bool IS_A, int BESIDE_, bool RANDOM = false>
struct Int8Reader {
#ifdef FM_HAS_BYTE_DOTS
  static constexpr int STEP = 4;
#else
  static constexpr int STEP = 2;
#endif
  static constexpr int PARTS = 1, WIDE = 1, BESIDE = BESIDE_;

  // Numbers x inverse as integers. place: of the first of them from the operand's first element on.
  FM_INLINE vi quantized(vf x, vf inverse, [[maybe_unused]] int64_t place) {
    if constexpr (RANDOM) {
      const vu element = lane_index() + static_cast<uint32_t>(place);
      return round_int8(to_int(x * (inverse * INT8_UNITS)), element, (vu)inverse);
    } else {
      return to_int(x * inverse);
    }
  }
  template <class T>
  FM_INLINE int64_t place_of(const T* p, const Scales& scales) {
    return RANDOM ? p - static_cast<const T*>(scales.origin) : 0;
  }

  template <class T>
  FM_INLINE vf along_k(const T* p, int64_t elements, const Scales& scales) {
    const vf inverse = broadcast(*scales.inverse);
    const int64_t place = place_of(p, scales);
    vi q[STEP];
#pragma GCC unroll 4
    for (int v = 0; v < STEP; ++v) {
      const int64_t left = elements - v * VL;
      const vf x = left >= VL ? load(p + v * VL)
                   : left > 0 ? load_n(p + v * VL, static_cast<int>(left))
                              : vf{};
      q[v] = quantized(x, inverse, place + v * VL);
    }
#ifdef FM_HAS_BYTE_DOTS
    return shifted(bytes_of(q[0], q[1], q[2], q[3]));
#else
    return (vf)shorts_of(q[0], q[1]);
#endif
  }

  template <class T>
  FM_INLINE vf across_k(const T* p, int64_t stride, int64_t left, int lanes, const Scales& scales) {
    constexpr int BITS = 32 / STEP;
    constexpr uint32_t MASK = (UINT64_C(1) << BITS) - 1;
    const vf inverse = load(scales.inverse);
    const int64_t place = place_of(p, scales);
    vu words = {};
#pragma GCC unroll 4
    for (int s = 0; s < STEP; ++s) {
      if (s >= left) break;
      const vf x = load_lanes(p + s * stride, lanes);
      words |= ((vu)quantized(x, inverse, place + s * stride) & MASK) << (BITS * s);
    }
    return shifted(words);
  }

#ifdef FM_HAS_BYTE_DOTS
  // sum + the four numbers of each word.
  FM_INLINE vi add_bytes(vi sum, vf words) {
    return dot_bytes(sum, broadcast(0x01010101u), (vu)words);
  }

  FM_INLINE void add_correction(vi sum, int32_t* correction) {
    float* at = reinterpret_cast<float*>(correction);
    store(at, (vf)((vi)load(at) + sum * OFFSET));
  }
#endif

  FM_INLINE vf shifted(vu words) {
#ifdef FM_HAS_BYTE_DOTS
    if (IS_A && OFFSET) words ^= 0x80808080u;
#endif
    return (vf)words;
  }
};

template <bool IS_A, int BESIDE, bool RANDOM>
constexpr bool QUANTIZES<Int8Reader<IS_A, BESIDE, RANDOM>> = true;

// Whether the sums of the columns that a reader packs are wanted, for `correction`.
template <class Reader>
constexpr bool CORRECTS = false;
#ifdef FM_HAS_BYTE_DOTS
template <int BESIDE>
constexpr bool CORRECTS<Int8Reader<false, BESIDE>> = OFFSET != 0;
#endif

struct Int8Words : VectorSums {
  using Word = uint32_t;
  static constexpr bool INT8 = true;
  static constexpr int WIDE = 1, STEP = Int8Reader<true, 1>::STEP;
#ifdef FM_HAS_BYTE_QUADS
  static constexpr int BESIDE = 2;
  FM_INLINE vf multiply_quads(vf sum, vu a, vu b) { return (vf)multiply_byte_quads((vi)sum, a, b); }
#else
  static constexpr int BESIDE = 1;
#endif
  FM_INLINE vf multiply_add(Word x, vf b, vf sum) {
#ifdef FM_HAS_BYTE_DOTS
    return (vf)dot_bytes((vi)sum, broadcast(x), (vu)b);
#else
    return (vf)dot_shorts((vi)sum, broadcast(x), (vu)b);
#endif
  }
  FM_INLINE vf add(vf a, vf b) { return (vf)((vi)a + (vi)b); }
};

// Bits of the magnitudes of elements, which are ordered as the magnitudes are, infinity and NaN included: as many as a vector holds.
typedef uint16_t vh __attribute__((vector_size(FM_VECTOR_BYTES)));
typedef uint16_t vh_unaligned __attribute__((vector_size(FM_VECTOR_BYTES), aligned(2), may_alias));

template <class T>
struct Magnitudes {  // of float and of f16, as float
  using Bits = uint32_t;
  static constexpr int LANES = VL;
  FM_INLINE vu at(const T* p, int lanes) { return (vu)load_lanes(p, lanes) & 0x7fffffffu; }
  FM_INLINE vu most(const Bits* p) { return load(p); }
  FM_INLINE void set_most(Bits* p, vu v) { store(p, v); }
  FM_INLINE uint32_t as_float(Bits bits) { return bits; }
};
template <>
struct Magnitudes<bf16> {
  using Bits = uint16_t;
  static constexpr int LANES = 2 * VL;
  FM_INLINE vh at(const bf16* p, int lanes) {
    const vu pairs = lanes == LANES ? load_pairs(&p->bits) : load_pairs_n(&p->bits, lanes);
    return (vh)(pairs & 0x7fff7fffu);
  }
  FM_INLINE vh most(const Bits* p) { return *reinterpret_cast<const vh_unaligned*>(p); }
  FM_INLINE void set_most(Bits* p, vh v) { *reinterpret_cast<vh_unaligned*>(p) = v; }
  FM_INLINE uint32_t as_float(Bits bits) { return uint32_t(bits) << 16; }
};

template <class V>
FM_INLINE V larger(V a, V b) {
  return a > b ? a : b;
}

// Scale and inverse of a row whose largest magnitude has these bits as a float.
// Not inline: in a loop the divisions would be vector instructions, which take 98 cycles on A64FX.
static __attribute__((noinline)) void set_scale(uint32_t bits, float* scale, float* inverse) {
  float most;
  __builtin_memcpy(&most, &bits, sizeof most);
  const bool finite = bits < INFINITY_BITS, zero = bits < SMALLEST_BITS;
  *scale = !finite ? __builtin_nanf("") : zero ? 0.0f : most / 127.0f;
  *inverse = !finite || zero ? 0.0f : 127.0f / most;
}

// The scales of `count` rows over `depth` of k, rows `stride` elements apart and contiguous along k.
template <class T>
static void find_scales_along_k(const T* src, int64_t stride, int64_t count, int64_t depth,
                                Scales out) {
  using M = Magnitudes<T>;
  constexpr int CHAINS = 4;
  for (int64_t i = 0; i < count; ++i) {
    const T* row = src + i * stride;
    decltype(M::at(row, 0)) most[CHAINS] = {};
    int64_t k = 0;
    for (; k + CHAINS * M::LANES <= depth; k += CHAINS * M::LANES) {
#pragma GCC unroll 4
      for (int c = 0; c < CHAINS; ++c)
        most[c] = larger(most[c], M::at(row + k + c * M::LANES, M::LANES));
    }
    for (; k < depth; k += M::LANES)
      most[0] = larger(most[0], M::at(row + k, static_cast<int>(min(M::LANES, depth - k))));
    const auto all = larger(larger(most[0], most[1]), larger(most[2], most[3]));
    typename M::Bits bits = 0;
    for (int lane = 0; lane < M::LANES; ++lane) bits = bits > all[lane] ? bits : all[lane];
    set_scale(M::as_float(bits), out.scale + i, out.inverse + i);
  }
}

// most[i] = the larger of itself and the bits of row[i].
template <class T>
FM_INLINE void raise_most(const T* row, int64_t count, typename Magnitudes<T>::Bits* most) {
  using M = Magnitudes<T>;
  constexpr int UNROLLED = 4;
  const int64_t whole = count / (UNROLLED * M::LANES) * (UNROLLED * M::LANES);
  for (int64_t i = 0; i < whole; i += UNROLLED * M::LANES) {
#pragma GCC unroll 4
    for (int v = 0; v < UNROLLED; ++v) {
      const int64_t at = i + v * M::LANES;
      M::set_most(most + at, larger(M::at(row + at, M::LANES), M::most(most + at)));
    }
  }
  for (int64_t i = whole; i < count; i += M::LANES) {
    const int lanes = static_cast<int>(min(M::LANES, count - i));
    M::set_most(most + i, larger(M::at(row + i, lanes), M::most(most + i)));
  }
}

// The scales of `count` columns over `depth` of k, rows of k `stride` elements apart, in one pass over memory in its order. sums: null,
// or (count) += the sum of each column. out.inverse has room for a vector more.
template <class T>
static void find_scales_across_k(const T* src, int64_t stride, int64_t count, int64_t depth,
                                 Scales out, float* sums) {
  using M = Magnitudes<T>;
  using Bits = typename M::Bits;
  constexpr int64_t ROWS = 8;  // of k, whose sums are added at once
  Bits* most = reinterpret_cast<Bits*>(out.inverse);
  for (int64_t i = 0; i < count; ++i) most[i] = 0;
  for (int64_t k = 0; k < depth; k += ROWS) {
    const T* rows = src + k * stride;
    const int64_t left = min(ROWS, depth - k);
    // One row after another: side by side they came from memory at a sixth of the rate (Zen 4, measured).
    for (int64_t r = 0; r < left; ++r) raise_most<T>(rows + r * stride, count, most);
    if (!sums) continue;
    for_vectors(0, count, [&](int64_t i, int lanes) {
      vf sum = load_lanes(rows + i, lanes);
      for (int64_t r = 1; r < left; ++r) sum += load_lanes(rows + r * stride + i, lanes);
      store_lanes(sums + i, load_lanes(sums + i, lanes) + sum, lanes);
    });
  }
  for (int64_t i = count; i-- > 0;) {  // from the last: a scale lies where smaller bits were
    const uint32_t bits = M::as_float(most[i]);
    set_scale(bits, out.scale + i, out.inverse + i);
  }
}

// A tile's sums as numbers, in place: (tile + partial - correction) scale_a scale_b. partial: int32 sums of the blocks of k before, or
// null. Scales and corrections are those of the tile's first row and column, and exist for all COLUMNS.
template <int COLUMNS>
static __attribute__((noinline)) void scale_tile(float* tile, const float* partial,
                                                 int64_t partial_row, int64_t rows, int64_t cols,
                                                 Scales a, Scales b) {
  for (int64_t r = 0; r < rows; ++r, tile += COLUMNS) {
    const vf row_scale = broadcast(a.scale[r]);
    for_vectors(0, COLUMNS, [&](int64_t j, int) FM_INLINE_LAMBDA {
      vi sum = (vi)load_aligned(tile + j);
      if (partial && j < cols)
        sum += (vi)load_lanes(partial + r * partial_row + j, static_cast<int>(min(VL, cols - j)));
      if (b.correction) sum -= (vi)load(reinterpret_cast<const float*>(b.correction + j));
      store_aligned(tile + j, __builtin_convertvector(sum, vf) * row_scale * load(b.scale + j));
    });
  }
}
