// Rotary position embedding of a token's queries and keys, behind an RMS norm of each head where it has weights. A position turns
// the pairs of a head's columns by its angles:
//   y1 = x1 cos - x2 sin,   y2 = x2 cos + x1 sin                                            (Su et al., 2021)
// A pair is columns i and i + half (GPT-NeoX, Hugging Face), or 2 i and 2 i + 1 (interleaved). Columns from 2 half on are not
// turned, values stay as they are. With a norm x becomes xhat w, xhat = x rstd, rstd = 1 / sqrt(mean(x^2) + eps). Backward:
//   u = dy turned back,   dx = rstd (u w - xhat mean(u w xhat)),   dw += sum(u xhat)
// A token stays in the first-level cache from its sums to its result. Storage float32, bfloat16 or float16, arithmetic float32.
// Reference: rotary_reference.cc. Tested by tests/kernels/test_rotary.py.
#pragma once
// In a function of its own the end of a head would round sums of products elsewhere (bits).
#define FM_NARROW_LANES FM_INLINE
#include "rowwise/rowwise_blocks.h"

namespace fm::FM_TARGET {

// A position's angles as turn_head reads them: cos and sin (half), or interleaved cos twice and sin as -sin, sin (2 half).
struct Turn {
  const float *cos, *sin;
  int64_t half;
  bool interleaved;
};

// sign -1 turns back. memory: 4 half floats.
FM_INLINE Turn turn_of(const RotaryArgs& a, int64_t row, float sign, float* memory) {
  const float *cos = a.cos + row * a.half, *sin = a.sin + row * a.half;
  float *new_cos = memory, *new_sin = memory + 2 * a.half;
  for (int64_t i = 0; i < a.half; ++i) {
    if (a.interleaved) {
      new_cos[2 * i] = new_cos[2 * i + 1] = cos[i];
      new_sin[2 * i] = -sign * sin[i];
      new_sin[2 * i + 1] = sign * sin[i];
    } else {
      new_cos[i] = cos[i];
      new_sin[i] = sign * sin[i];
    }
  }
  return {new_cos, new_sin, a.half, a.interleaved};
}

typedef uint64_t vpairs __attribute__((vector_size(FM_VECTOR_BYTES)));
FM_INLINE vf swap_pairs(vf v) { return (vf)((vpairs)v >> 32 | (vpairs)v << 32); }

// put(i, v, lanes) for all columns of a head, v being get(i, lanes) turned; get of a pair comes before its puts.
template <class Get, class Put>
FM_INLINE void turn_head(const Turn& turn, int64_t d, const Get& get, const Put& put) {
  if (turn.interleaved) {
    for_vectors(0, 2 * turn.half, [&](int64_t i, int lanes) {
      const vf v = get(i, lanes);
      put(i, v * load_lanes(turn.cos + i, lanes) + swap_pairs(v) * load_lanes(turn.sin + i, lanes),
          lanes);
    });
  } else {
    for_vectors(0, turn.half, [&](int64_t i, int lanes) {
      const vf first = get(i, lanes), second = get(i + turn.half, lanes);
      const vf cos = load_lanes(turn.cos + i, lanes), sin = load_lanes(turn.sin + i, lanes);
      put(i, first * cos - second * sin, lanes);
      put(i + turn.half, second * cos + first * sin, lanes);
    });
  }
  for_vectors(2 * turn.half, d, [&](int64_t i, int lanes) { put(i, get(i, lanes), lanes); });
}

// body(head, whether it is a key) for the heads that are turned.
template <class F>
FM_INLINE void for_turned_heads(const RotaryArgs& a, const F& body) {
  for (int64_t group = 0; group < a.heads; group += a.queries + 2) {
    for (int64_t i = 0; i <= a.queries; ++i) body(group + i, i == a.queries);
  }
}

template <class T>
FM_INLINE void copy_values(const RotaryArgs& a, const T* from, T* to) {
  if (from == to) return;
  for (int64_t head = a.queries + 1; head < a.heads; head += a.queries + 2) {
    __builtin_memcpy(to + head * a.d, from + head * a.d, a.d * sizeof(T));
  }
}

// body(token, turn, sums) for the tokens of [begin, end); sums: memory for two floats per head.
template <class F>
FM_INLINE void for_tokens(const RotaryArgs& a, int64_t begin, int64_t end, float sign,
                          const F& body) {
  float* memory = static_cast<float*>(scratch(1, (4 * a.half + 2 * a.heads) * sizeof(float)));
  Turn turn = {};
  for (int64_t token = begin, last = -1; token < end; ++token) {
    const int64_t row = a.angles_of(token);
    if (row != last) turn = turn_of(a, last = row, sign, memory);
    body(token, turn, memory + 4 * a.half);
  }
}

// rstd of each head of x (heads, d), those of values too.
template <class T>
FM_INLINE void head_rstds(const RotaryArgs& a, const T* x, float* rstd) {
  for_row_blocks(0, a.heads, [&](auto block, int64_t head) {
    constexpr int R = decltype(block)::value;
    float squares[R];
    sum_over_columns<R>(a.d, squares, [&](int r, int64_t i, int lanes) {
      const vf v = load_lanes(x + (head + r) * a.d + i, lanes);
      return v * v;
    });
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) rstd[head + r] = squares[r];
  });
  const float inverse = 1.0f / static_cast<float>(a.d);
  for_vectors(0, a.heads, [&](int64_t i, int lanes) {
    store_lanes(rstd + i, rsqrt(load_lanes(rstd + i, lanes) * inverse + a.eps), lanes);
  });
}

template <class T>
FM_INLINE void rotary_token(const RotaryArgs& a, const Turn& turn, int64_t token, float* rstd) {
  const T* x = static_cast<const T*>(a.x) + token * a.heads * a.d;
  T* y = static_cast<T*>(a.y) + token * a.heads * a.d;
  if (a.q_weight) head_rstds(a, x, rstd);
  for_turned_heads(a, [&](int64_t head, bool key) {
    const T *from = x + head * a.d, *weight = static_cast<const T*>(key ? a.k_weight : a.q_weight);
    T* to = y + head * a.d;
    auto put = [&](int64_t i, vf v, int lanes) { store_lanes(to + i, v, lanes); };
    if (weight) {
      const float scale = rstd[head];
      turn_head(
          turn, a.d,
          [&](int64_t i, int lanes) {
            return load_lanes(from + i, lanes) * scale * load_lanes(weight + i, lanes);
          },
          put);
    } else {
      turn_head(turn, a.d, [&](int64_t i, int lanes) { return load_lanes(from + i, lanes); }, put);
    }
  });
  copy_values(a, x, y);
}

static void rotary(const RotaryArgs& a) {
  with_dtype(a.dtype, [&](auto element) {
    parallel_for(a.s * a.b, row_grain(a.heads * a.d), [&](int64_t begin, int64_t end) {
      for_tokens(a, begin, end, a.inverse ? -1.0f : 1.0f,
                 [&](int64_t token, const Turn& turn, float* sums) {
                   rotary_token<decltype(element)>(a, turn, token, sums);
                 });
    });
  });
}

// rstd and of_x of each turned head, of which dx = rstd u w + of_x x.
template <class T>
FM_INLINE void head_factors(const RotaryArgs& a, const Turn& back, const T* x, const T* dy,
                            float* rstd, float* of_x) {
  clear(rstd, a.heads);
  clear(of_x, a.heads);
  for_turned_heads(a, [&](int64_t head, bool key) {
    const T *from = x + head * a.d, *grad = dy + head * a.d;
    const T* weight = static_cast<const T*>(key ? a.k_weight : a.q_weight);
    vf squares = {}, products = {};
    turn_head(
        back, a.d, [&](int64_t i, int lanes) { return load_lanes(grad + i, lanes); },
        [&](int64_t i, vf u, int lanes) {
          const vf v = load_lanes(from + i, lanes);
          squares += v * v;
          products += u * load_lanes(weight + i, lanes) * v;
        });
    rstd[head] = hsum(squares);
    of_x[head] = hsum(products);
  });
  const float inverse = 1.0f / static_cast<float>(a.d);
  for_vectors(0, a.heads, [&](int64_t i, int lanes) {
    const vf r = rsqrt(load_lanes(rstd + i, lanes) * inverse + a.eps);
    store_lanes(rstd + i, r, lanes);
    store_lanes(of_x + i, -r * r * (r * inverse * load_lanes(of_x + i, lanes)), lanes);
  });
}

// dq_weight and dk_weight: this chunk's column sums.
template <class T>
FM_INLINE void rotary_backward_token(const RotaryArgs& a, const void* dy_data, const Turn& back,
                                     int64_t token, float* sums, float* dq_weight,
                                     float* dk_weight) {
  const int64_t first = token * a.heads * a.d;
  const T *x = static_cast<const T*>(a.x) + first, *dy = static_cast<const T*>(dy_data) + first;
  T* dx = static_cast<T*>(a.y) + first;
  float *rstd = sums, *of_x = sums + a.heads;
  head_factors(a, back, x, dy, rstd, of_x);
  for_turned_heads(a, [&](int64_t head, bool key) {
    const T *from = x + head * a.d, *grad = dy + head * a.d;
    const T* weight = static_cast<const T*>(key ? a.k_weight : a.q_weight);
    T* to = dx + head * a.d;
    float* dweight = key ? dk_weight : dq_weight;
    const float scale = rstd[head], of_value = of_x[head];
    turn_head(
        back, a.d, [&](int64_t i, int lanes) { return load_lanes(grad + i, lanes); },
        [&](int64_t i, vf u, int lanes) {
          const vf v = load_lanes(from + i, lanes), scaled = u * scale;
          store_lanes(to + i, scaled * load_lanes(weight + i, lanes) + v * of_value, lanes);
          add_to(dweight + i, scaled * v, lanes);
        });
  });
  copy_values(a, dy, dx);
}

static void rotary_norm_backward(const RotaryArgs& a, const RotaryGradArgs& grad) {
  with_dtype(a.dtype, [&](auto element) {
    float* const totals[2] = {grad.dq_weight, grad.dk_weight};
    with_column_sums<2>(
        a.s * a.b, a.d, totals, [&](int64_t begin, int64_t end, float* partial, int64_t stride) {
          for_tokens(a, begin, end, -1.0f, [&](int64_t token, const Turn& back, float* sums) {
            rotary_backward_token<decltype(element)>(a, grad.dy, back, token, sums, partial,
                                                     partial + stride);
          });
        });
  });
}

}  // namespace fm::FM_TARGET
