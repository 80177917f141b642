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

// Scales of the rows of A or of the columns of B, from the first row or column of a thread on.
struct Scales {
  float *scale = nullptr, *inverse = nullptr;  // inverse: what an element is multiplied by
  int32_t* correction = nullptr;               // of B
};

// Reads elements as words of int8, for packing panels of B with BESIDE_ words side by side, or, IS_A, of A, with OFFSET added.
template <bool IS_A, int BESIDE_>
struct Int8Reader {
#ifdef FM_HAS_BYTE_DOTS
  static constexpr int STEP = 4;
#else
  static constexpr int STEP = 2;
#endif
  static constexpr int PARTS = 1, WIDE = 1, BESIDE = BESIDE_;

  template <class T>
  FM_INLINE vf along_k(const T* p, int64_t elements, float inverse) {
    vi q[STEP];
#pragma GCC unroll 4
    for (int v = 0; v < STEP; ++v) {
      const int64_t left = elements - v * VL;
      const vf x = left >= VL ? load(p + v * VL)
                   : left > 0 ? load_n(p + v * VL, static_cast<int>(left))
                              : vf{};
      q[v] = to_int(x * inverse);
    }
#ifdef FM_HAS_BYTE_DOTS
    return shifted(bytes_of(q[0], q[1], q[2], q[3]));
#else
    return (vf)shorts_of(q[0], q[1]);
#endif
  }

  template <class T>
  FM_INLINE vf across_k(const T* p, int64_t stride, int64_t left, int lanes, const float* inverse) {
    constexpr int BITS = 32 / STEP;
    constexpr uint32_t MASK = (UINT64_C(1) << BITS) - 1;
    const vf factor = load(inverse);
    vu words = {};
#pragma GCC unroll 4
    for (int s = 0; s < STEP; ++s) {
      if (s >= left) break;
      words |= ((vu)to_int(load_lanes(p + s * stride, lanes) * factor) & MASK) << (BITS * s);
    }
    return shifted(words);
  }

  FM_INLINE vf shifted(vu words) {
#ifdef FM_HAS_BYTE_DOTS
    if (IS_A && OFFSET) words ^= 0x80808080u;
#endif
    return (vf)words;
  }
};

template <bool IS_A, int BESIDE>
constexpr bool QUANTIZES<Int8Reader<IS_A, BESIDE>> = true;

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

// Bits of the magnitude of x, which are ordered as the magnitudes are, infinity and NaN included.
FM_INLINE vu magnitude(vf x) { return (vu)x & 0x7fffffffu; }
FM_INLINE vu larger(vu a, vu b) { return a > b ? a : b; }

// Scale and inverse of a row whose largest magnitude has these bits. One below 2^-100 counts as 0.
FM_INLINE void set_scale(uint32_t bits, float* scale, float* inverse) {
  float most;
  __builtin_memcpy(&most, &bits, sizeof most);
  const bool finite = bits < 0x7f800000u, zero = bits < 0x0d800000u;
  *scale = !finite ? __builtin_nanf("") : zero ? 0.0f : most / 127.0f;
  *inverse = !finite || zero ? 0.0f : 127.0f / most;
}

// The scales of `count` rows over `depth` of k, where element (i, k) is at src + i * i_stride + k * k_stride and one of the strides is
// 1. sums: null, or (count) += the sum of each row.
template <class T>
static void find_scales(const T* src, int64_t i_stride, int64_t k_stride, int64_t count,
                        int64_t depth, Scales out, float* sums) {
  if (k_stride == 1) {
    for (int64_t i = 0; i < count; ++i) {
      const T* row = src + i * i_stride;
      vu most = {};
      vf sum = {};
      for_vector_groups<4>(0, depth, [&](auto group, int64_t k, int lanes) FM_INLINE_LAMBDA {
#pragma GCC unroll 4
        for (int v = 0; v < decltype(group)::value; ++v) {
          const vf x = load_lanes(row + k + v * VL, lanes);
          most = larger(most, magnitude(x));
          if (sums) sum += x;
        }
      });
      uint32_t bits = 0;
      for (int lane = 0; lane < VL; ++lane) bits = bits > most[lane] ? bits : most[lane];
      set_scale(bits, out.scale + i, out.inverse + i);
      if (sums) sums[i] += hsum(sum);
    }
    return;
  }
  constexpr int64_t AHEAD = Tuning::PACK_AHEAD;
  for_vector_groups<8>(0, count, [&](auto group, int64_t i, int lanes) FM_INLINE_LAMBDA {
    constexpr int N = decltype(group)::value;
    vu most[N] = {};
    vf sum[N] = {};
    for (int64_t k = 0; k < depth; ++k) {
      const T* p = src + i + k * k_stride;
#pragma GCC unroll 8
      for (int v = 0; v < N; ++v) {
        if (v * VL * sizeof(T) % Tuning::LINE == 0 && k + AHEAD < depth)
          prefetch(p + AHEAD * k_stride + v * VL);
        const vf x = load_lanes(p + v * VL, lanes);
        most[v] = larger(most[v], magnitude(x));
        if (sums) sum[v] += x;
      }
    }
#pragma GCC unroll 8
    for (int v = 0; v < N; ++v) {
      for (int lane = 0; lane < lanes; ++lane)
        set_scale(most[v][lane], out.scale + i + v * VL + lane, out.inverse + i + v * VL + lane);
      if (!sums) continue;
      float* at = sums + i + v * VL;
      store_lanes(at, load_lanes(at, lanes) + sum[v], lanes);
    }
  });
}

// correction[j] += BYTE_OFFSET times the sum of column j of `columns` columns of B, of whole panels of `words` steps.
FM_INLINE void add_correction([[maybe_unused]] const float* panels, [[maybe_unused]] int64_t words,
                              [[maybe_unused]] int64_t columns,
                              [[maybe_unused]] int32_t* correction) {
#ifdef FM_HAS_BYTE_DOTS
  if (!OFFSET) return;
  for (int64_t j = 0; j < columns; j += NR, panels += words * NR) {
    vi sum[NR_VECTORS] = {};
    for (int64_t w = 0; w < words; ++w) {
#pragma GCC unroll 8
      for (int v = 0; v < NR_VECTORS; ++v)
        sum[v] =
            dot_bytes(sum[v], broadcast(0x01010101u), (vu)load_aligned(panels + w * NR + v * VL));
    }
#pragma GCC unroll 8
    for (int v = 0; v < NR_VECTORS; ++v) {
      float* at = reinterpret_cast<float*>(correction + j + v * VL);
      store(at, (vf)((vi)load(at) + sum[v] * OFFSET));
    }
  }
#endif
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
