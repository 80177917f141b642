// The gated delta rule by chunks of 64 tokens (Yang et al. 2024, arXiv:2406.06484 and arXiv:2412.06464). In a chunk with first state S,
// unit keys k, unit queries q over sqrt(d), strengths b and decays D_ij = exp(g_j+1 + ... + g_i) of the same document, from_i and to_i
// the decays from S to token i and from token i to the last:
//   Z = V - from (K S) - G U,   U = b Z,   G = K K^T D strictly below the diagonal: a triangular solve
//   O = from (Q S) + (Q K^T D) U,   next S = whole S + K^T (to U)
// Backward recomputes Z and U of a segment of chunks from its first state, which forward saved:
//   dU = (Q K^T D)^T dO + to (K dS),   X = dU - G^T dV,   dV = b X: the same solve from below,   db = X Z
//   E = dO U^T D,   F = -dV U^T D strictly below
//   dQ = from (dO S^T) + E K,   dK = -from (dV S^T) + to (U dS^T) + E^T Q + (F + F^T) K
//   dS = whole dS + Q^T (from dO) - K^T (from dV)
// The gradient of a log decay is the sum of (gradient of a decay) decay over all decays that contain it; never a difference of results,
// which would lose small ones. multiply takes its first factor transposed: multiply(c, q_t, k_t) is C = Q K^T. A thread computes
// a head with float matrices in its own memory, so bits are the same for any number of threads.
// Reference: delta_net_reference.cc. Tested by tests/kernels/test_delta_net.py. Included by delta_net.h.
#pragma once
#include "delta_net/delta_matmul.h"

namespace fm::FM_TARGET {

constexpr int64_t CHUNK = DELTA_CHUNK, SEGMENT = DELTA_SEGMENT / DELTA_CHUNK;

// The tensors of a call at sequence `sample`, value head `head`.
template <class T>
struct DeltaHead {
  const DeltaArgs& a;
  int64_t sample, head;
  int64_t share() const { return a.heads / a.groups; }
  int64_t group_cols() const { return 2 * a.d + share() * a.dv; }
  int64_t stride() const { return a.b * a.groups * group_cols(); }
  // Places in qkv, and so in its gradient.
  int64_t query(int64_t token) const {
    return ((token * a.b + sample) * a.groups + head / share()) * group_cols();
  }
  int64_t key(int64_t token) const { return query(token) + a.d; }
  int64_t value(int64_t token) const { return key(token) + a.d + head % share() * a.dv; }
  const T* queries(int64_t token) const { return static_cast<const T*>(a.qkv) + query(token); }
  const T* keys(int64_t token) const { return static_cast<const T*>(a.qkv) + key(token); }
  const T* values(int64_t token) const { return static_cast<const T*>(a.qkv) + value(token); }
  int64_t gate(int64_t token) const { return (token * a.b + sample) * a.heads + head; }
  int64_t result(int64_t token) const { return gate(token) * a.dv; }
  int64_t state(int64_t number) const {
    return ((number * a.b + sample) * a.heads + head) * a.d * a.dv;
  }
};

// A chunk's decays, strengths and factors.
struct DeltaDecays {
  float beta[CHUNK], from[CHUNK], to[CHUNK], minus_from[CHUNK], whole;
  int64_t count;
};

// D below and on the diagonal to `pairwise`. Sums of log decays are two floats each, as their differences are small.
template <class T>
FM_INLINE void read_decays(const DeltaHead<T>& at, int64_t first, DeltaDecays& decays,
                           const Matrix& pairwise) {
  const DeltaArgs& a = at.a;
  const int64_t count = decays.count = min(CHUNK, a.s - first);
  alignas(256) float high[CHUNK], low[CHUNK];
  int32_t start[CHUNK];
  double sum = 0;
  for (int64_t i = 0; i < CHUNK; ++i) {
    if (i < count) sum += static_cast<double>(a.decay[at.gate(first + i)]);
    high[i] = static_cast<float>(sum);
    low[i] = static_cast<float>(sum - static_cast<double>(high[i]));
    decays.beta[i] = i < count ? a.beta[at.gate(first + i)] : 0.0f;
    const int64_t token = first + min(i, count - 1);
    start[i] = a.starts ? a.starts[at.sample * a.s + token] : 0;
  }
  for (int64_t j = 0; j < CHUNK; j += VL) {
    const vf e = exp(load(high + j) + load(low + j));
    for (int l = 0; l < VL && j + l < CHUNK; ++l)
      decays.from[j + l] = start[j + l] < max(first, 1) ? e[l] : 0.0f;
  }
  for (int64_t i = 0; i < CHUNK; ++i) {
    decays.minus_from[i] = -decays.from[i];
    const int32_t earliest = static_cast<int32_t>(max(0, start[i] - first));
    for (int64_t j = 0; j < CHUNK; j += VL) {
      const vi token = (vi)lane_index() + static_cast<int32_t>(j);
      const vf difference = (high[i] - load(high + j)) + (low[i] - load(low + j));
      const vi visible = (token <= static_cast<int32_t>(i)) & (token >= earliest);
      store(pairwise.row(i) + j, select(visible, exp(min(difference, vf{})), vf{}));
    }
  }
  for (int64_t j = 0; j < CHUNK; ++j) decays.to[j] = pairwise.row(CHUNK - 1)[j];
  decays.whole = decays.from[CHUNK - 1];
}

// Rows divided by their lengths and times `scale`; the reciprocal lengths.
FM_ONCE void unit_rows(Matrix m, float scale, float* reciprocal) {
  row_products(reciprocal, m, m, CHUNK);
  for (int64_t r = 0; r < CHUNK; r += VL)
    store(reciprocal + r, rsqrt(load(reciprocal + r) + 1e-6f));
  alignas(256) float factors[CHUNK];
  for (int64_t r = 0; r < CHUNK; ++r) factors[r] = reciprocal[r] * scale;
  scale_rows(m, CHUNK, factors);
}

// Below the diagonal of -M D, and zeros: above it of their transposed where M D^T is given.
template <bool TRANSPOSED>
FM_INLINE void negate_triangle(const Matrix& m, const Matrix& pairwise) {
  for_elements(m, CHUNK, [&](int64_t r, int64_t i) {
    const vi column = (vi)lane_index() + static_cast<int32_t>(i);
    const int32_t row = static_cast<int32_t>(r);
    const vf value = -(load(m.row(r) + i) * load(pairwise.row(r) + i));
    store(m.row(r) + i, select(TRANSPOSED ? column > row : column < row, value, vf{}));
  });
}

FM_INLINE void multiply_elements(const Matrix& m, const Matrix& by) {
  for_elements(m, CHUNK, [&](int64_t r, int64_t i) {
    store(m.row(r) + i, load(m.row(r) + i) * load(by.row(r) + i));
  });
}

// Rows [first, first + N) of z, of which all terms of other rows are added: those of each other, and u = beta z.
template <int N, bool FROM_BELOW>
FM_INLINE void solve_block(const Matrix& z, const Matrix& u, const Matrix& factors,
                           const float* beta, int64_t first) {
  for (int64_t c = 0; c < z.cols; c += VL) {
    vf rows[N];
#pragma GCC unroll 12
    for (int i = 0; i < N; ++i) rows[i] = load(z.row(first + i) + c);
#pragma GCC unroll 12
    for (int step = 0; step < N; ++step) {
      const int i = FROM_BELOW ? N - 1 - step : step;
      const vf update = rows[i] * beta[first + i];
      store(z.row(first + i) + c, rows[i]);
      store(u.row(first + i) + c, update);
      const float* factor = factors.row(first + i) + first;
#pragma GCC unroll 12
      for (int other = 0; other < N; ++other) {
        if (FROM_BELOW ? other < i : other > i) rows[other] = update * factor[other] + rows[other];
      }
    }
  }
}

constexpr int SOLVE_ROWS = 12, SOLVE_REST = CHUNK % SOLVE_ROWS;
static_assert(SOLVE_REST > 0 && SOLVE_REST % 2 == 0, "the last block is the smaller one");

// z_i += the sum over j < i of factors[j][i] u_j, u_i = beta_i z_i.
FM_ONCE void solve_from_above(Matrix z, Matrix u, Matrix factors, const float* beta) {
  for (int64_t row = 0; row < CHUNK; row += SOLVE_ROWS) {
    const int64_t rows = min(SOLVE_ROWS, CHUNK - row);
    if (row > 0) multiply<true>(z.from(row, 0), factors.from(0, row), u, rows, row);
    if (rows == SOLVE_ROWS)
      solve_block<SOLVE_ROWS, false>(z, u, factors, beta, row);
    else
      solve_block<SOLVE_REST, false>(z, u, factors, beta, row);
  }
}

// z_i += the sum over j > i of factors[j][i] u_j, u_i = beta_i z_i.
FM_ONCE void solve_from_below(Matrix z, Matrix u, Matrix factors, const float* beta) {
  for (int64_t row = CHUNK - SOLVE_REST; row >= 0; row -= SOLVE_ROWS) {
    const int64_t rows = min(SOLVE_ROWS, CHUNK - row), end = row + rows;
    if (end < CHUNK)
      multiply<true>(z.from(row, 0), factors.from(end, row), u.from(end, 0), rows, CHUNK - end);
    if (rows == SOLVE_ROWS)
      solve_block<SOLVE_ROWS, true>(z, u, factors, beta, row);
    else
      solve_block<SOLVE_REST, true>(z, u, factors, beta, row);
  }
}

// A thread's matrices of a chunk. Names with _t are transposed.
struct DeltaChunk {
  Matrix q, k, q_t, k_t;               // Q, K: (CHUNK, d), transposed (d, CHUNK)
  Matrix keys_sum;                     // (CHUNK, d), the product at work
  Matrix values_sum;                   // (CHUNK, dv), the product at work
  Matrix pairwise, pairwise_t;         // D: (CHUNK, CHUNK)
  Matrix scores, g_t;                  // Q K^T D, -G^T: (CHUNK, CHUNK)
  float *query_lengths, *key_lengths;  // reciprocals of the lengths of rows before the division
  DeltaDecays decays;

  DeltaChunk(Memory& memory, int64_t d, int64_t dv)
      : q(memory.matrix(CHUNK, d)),
        k(memory.matrix(CHUNK, d)),
        q_t(memory.matrix(whole_tiles(d), CHUNK)),
        k_t(memory.matrix(whole_tiles(d), CHUNK)),
        keys_sum(memory.matrix(CHUNK, d)),
        values_sum(memory.matrix(CHUNK, dv)),
        pairwise(memory.matrix(CHUNK, CHUNK)),
        pairwise_t(memory.matrix(CHUNK, CHUNK)),
        scores(memory.matrix(CHUNK, CHUNK)),
        g_t(memory.matrix(CHUNK, CHUNK)),
        query_lengths(memory.floats(CHUNK)),
        key_lengths(memory.floats(CHUNK)),
        decays() {}

  int64_t steps() const { return q.cols; }
  float query_scale(int64_t d) const { return 1.0f / __builtin_sqrtf(static_cast<float>(d)); }

  template <class T>
  void read(const DeltaHead<T>& at, int64_t first) {
    const DeltaArgs& a = at.a;
    read_decays(at, first, decays, pairwise);
    transpose_matrix(pairwise_t, pairwise, CHUNK);
    load_matrix(q, at.queries(first), at.stride(), decays.count, a.d, CHUNK);
    load_matrix(k, at.keys(first), at.stride(), decays.count, a.d, CHUNK);
    unit_rows(q, query_scale(a.d), query_lengths);
    unit_rows(k, 1.0f, key_lengths);
    transpose_matrix(q_t, q, CHUNK);
    transpose_matrix(k_t, k, CHUNK);
  }

  // Z = V - from (K S) - G U and U = b Z from the first state S. Leaves K S in values_sum.
  template <class T>
  void solve(const DeltaHead<T>& at, int64_t first, const Matrix& state, const Matrix& z,
             const Matrix& u) {
    multiply<false>(g_t, k_t, k_t, CHUNK, steps());  // K K^T
    negate_triangle<true>(g_t, pairwise_t);          // -G^T
    load_matrix(z, at.values(first), at.stride(), decays.count, at.a.dv, CHUNK);
    multiply<false>(values_sum, k_t, state, CHUNK, steps());  // K S
    // V - from (K S)
    for_elements(z, CHUNK, [&](int64_t r, int64_t i) {
      store(z.row(r) + i, load(values_sum.row(r) + i) * decays.minus_from[r] + load(z.row(r) + i));
    });
    solve_from_above(z, u, g_t, decays.beta);
  }

  // The next state: S = whole S + K^T (to U). Leaves to U in values_sum.
  void advance(const Matrix& state, const Matrix& u) {
    for_elements(values_sum, CHUNK, [&](int64_t r, int64_t i) {
      store(values_sum.row(r) + i, load(u.row(r) + i) * decays.to[r]);
    });
    for_elements(state, steps(), [&](int64_t r, int64_t i) {
      store(state.row(r) + i, load(state.row(r) + i) * decays.whole);
    });
    multiply<true>(state, k, values_sum, steps(), CHUNK);
  }
};

struct DeltaForward {
  DeltaChunk chunk;
  Matrix state, z, u;
  DeltaForward(Memory& memory, const DeltaArgs& a)
      : chunk(memory, a.d, a.dv),
        state(memory.matrix(whole_tiles(a.d), a.dv)),
        z(memory.matrix(CHUNK, a.dv)),
        u(memory.matrix(CHUNK, a.dv)) {}
};

// A thread's work of this kind.
template <class Work>
FM_INLINE Work delta_work(const DeltaArgs& a) {
  Memory counted;
  Work nothing(counted, a);
  Memory memory{static_cast<float*>(scratch(0, counted.used * sizeof(float)))};
  return Work(memory, a);
}

template <class T>
static void delta_forward_head(const DeltaHead<T>& at, T* out, float* states) {
  const DeltaArgs& a = at.a;
  auto work = delta_work<DeltaForward>(a);
  DeltaChunk& chunk = work.chunk;
  load_matrix(work.state, states + at.state(0), a.dv, a.d, a.dv,
              work.state.cols ? chunk.steps() : 0);
  for (int64_t first = 0; first < a.s; first += CHUNK) {
    if (first > 0 && first % DELTA_SEGMENT == 0)
      store_matrix(work.state, states + at.state(first / DELTA_SEGMENT), a.dv, a.d, a.dv);
    chunk.read(at, first);
    chunk.solve(at, first, work.state, work.z, work.u);
    // scores = (Q K^T D)^T: columns are queries.
    multiply<false>(chunk.scores, chunk.k_t, chunk.q_t, CHUNK, chunk.steps());
    multiply_elements(chunk.scores, chunk.pairwise_t);
    // O = from (Q S) + (Q K^T D) U, in the memory of Z
    const Matrix& results = work.z;
    multiply<false>(results, chunk.q_t, work.state, CHUNK, chunk.steps());
    scale_rows(results, CHUNK, chunk.decays.from);
    multiply<true>(results, chunk.scores, work.u, CHUNK, CHUNK, Steps::UNTIL_ROW);
    store_matrix(results, out + at.result(first), a.b * a.heads * a.dv, chunk.decays.count, a.dv);
    chunk.advance(work.state, work.u);
  }
  const int64_t last = (a.s + DELTA_SEGMENT - 1) / DELTA_SEGMENT;
  store_matrix(work.state, states + at.state(last), a.dv, a.d, a.dv);
}

static void delta_rule_forward(const DeltaArgs& a, void* out, float* states) {
  with_dtype(a.dtype, [&](auto element) {
    using T = decltype(element);
    parallel_for(a.b * a.heads, 1, [&](int64_t begin, int64_t end) {
      for (int64_t task = begin; task < end; ++task)
        delta_forward_head(DeltaHead<T>{a, task / a.heads, task % a.heads}, static_cast<T*>(out),
                           states);
    });
  });
}

struct DeltaBackward {
  DeltaChunk chunk;
  // Of every chunk of a segment: its first S (d, dv), Z, U (CHUNK, dv), dQ, dK (CHUNK, d).
  Matrix states[SEGMENT], z[SEGMENT], u[SEGMENT], dq[SEGMENT], dk[SEGMENT];
  Matrix state, state_t, dstate_t;  // S (d, dv), S^T, dS^T (dv, d)
  Matrix g, e, e_t, f, f_t;         // -G, E, E^T, F, F^T: (CHUNK, CHUNK)
  // dO, dV, X (CHUNK, dv) and dO^T, dV^T, U^T (dv, CHUNK).
  Matrix dout, dout_t, dv, dv_t, u_t, x;
  float *row_sums, *column_sums;  // of the gradients of log D_ij, i > j
  float *dlog_from, *dlog_to;     // gradients of log from_i by way of O, of log to_i
  Matrix dstate;                  // of the first value head of a group, the others behind it
  int64_t dstate_size;

  DeltaBackward(Memory& memory, const DeltaArgs& a) : chunk(memory, a.d, a.dv) {
    const int64_t d = whole_tiles(a.d), dv_cols = whole_tiles(a.dv);
    for (int64_t i = 0; i < SEGMENT; ++i) {
      states[i] = memory.matrix(d, a.dv);
      z[i] = memory.matrix(CHUNK, a.dv);
      u[i] = memory.matrix(CHUNK, a.dv);
      dq[i] = memory.matrix(CHUNK, a.d);
      dk[i] = memory.matrix(CHUNK, a.d);
    }
    state = memory.matrix(d, a.dv);
    state_t = memory.matrix(dv_cols, a.d);
    dstate_t = memory.matrix(dv_cols, a.d);
    g = memory.matrix(CHUNK, CHUNK);
    e = memory.matrix(CHUNK, CHUNK);
    e_t = memory.matrix(CHUNK, CHUNK);
    f = memory.matrix(CHUNK, CHUNK);
    f_t = memory.matrix(CHUNK, CHUNK);
    dout = memory.matrix(CHUNK, a.dv);
    dout_t = memory.matrix(dv_cols, CHUNK);
    dv = memory.matrix(CHUNK, a.dv);
    dv_t = memory.matrix(dv_cols, CHUNK);
    u_t = memory.matrix(dv_cols, CHUNK);
    x = memory.matrix(CHUNK, a.dv);
    row_sums = memory.floats(CHUNK);
    column_sums = memory.floats(CHUNK);
    dlog_from = memory.floats(CHUNK);
    dlog_to = memory.floats(CHUNK);
    dstate = memory.matrix(d, a.dv);
    dstate_size = d * dstate.stride;
    memory.floats((a.heads / a.groups - 1) * dstate_size);
  }
  Matrix dstate_of(int64_t place) const {
    return {dstate.data + place * dstate_size, dstate.cols, dstate.stride};
  }
};

// e = dO U^T and f = dV U^T become E and F; sums over rows and columns of the gradients of the decays below the diagonal.
FM_ONCE void delta_triangles(DeltaBackward& w) {
  const DeltaChunk& c = w.chunk;
  for (int64_t i = 0; i < CHUNK; i += VL) store(w.column_sums + i, vf{});
  for (int64_t r = 0; r < CHUNK; ++r) {
    vf sum = {};
    for (int64_t i = 0; i < CHUNK; i += VL) {
      const vi below = (vi)lane_index() + static_cast<int32_t>(i) < static_cast<int32_t>(r);
      const vf e = load(w.e.row(r) + i), f = load(w.f.row(r) + i);
      const vf decay = load(c.pairwise.row(r) + i);
      const vf weighted =
          select(below, e * load(c.scores.row(r) + i) + f * load(w.g.row(r) + i), vf{});
      sum += weighted;
      store(w.column_sums + i, load(w.column_sums + i) + weighted);
      store(w.e.row(r) + i, e * decay);
      store(w.f.row(r) + i, select(below, -(f * decay), vf{}));
    }
    w.row_sums[r] = hsum(sum);
  }
}

// to += from, after each row of `from` times its factor.
FM_ONCE void add_scaled_rows(Matrix to, Matrix from, const float* factors) {
  for_elements(from, CHUNK, [&](int64_t r, int64_t i) {
    const vf value = load(from.row(r) + i) * factors[r];
    store(from.row(r) + i, value);
    store(to.row(r) + i, load(to.row(r) + i) + value);
  });
}

FM_ONCE double matrix_product(Matrix a, Matrix b, int64_t rows) {
  double total = 0;
  for (int64_t r = 0; r < rows; ++r) {
    vf sum = {};
    for (int64_t i = 0; i < a.cols; i += VL) sum += load(a.row(r) + i) * load(b.row(r) + i);
    total += static_cast<double>(hsum(sum));
  }
  return total;
}

// The gradients of a chunk whose first state, z and u are at `place` of the segment; dS in place.
template <class T>
FM_ONCE void delta_backward_chunk(const DeltaHead<T>& at, const DeltaGradArgs& grad,
                                  DeltaBackward& w, int64_t first, int64_t place,
                                  const Matrix& dstate) {
  const DeltaArgs& a = at.a;
  DeltaChunk& c = w.chunk;
  const Matrix &state = w.states[place], &z = w.z[place], &u = w.u[place];
  const int64_t d = c.steps(), dv_steps = z.cols;
  c.read(at, first);
  const DeltaDecays& decays = c.decays;
  load_matrix(w.dout, static_cast<const T*>(grad.dout) + at.result(first), a.b * a.heads * a.dv,
              decays.count, a.dv, CHUNK);
  // scores = Q K^T D
  multiply<false>(c.scores, c.q_t, c.k_t, CHUNK, d);
  multiply_elements(c.scores, c.pairwise);
  // g = -G = -K K^T D strictly below the diagonal
  multiply<false>(w.g, c.k_t, c.k_t, CHUNK, d);
  negate_triangle<false>(w.g, c.pairwise);

  // x = dU = to (K dS) + (Q K^T D)^T dO
  multiply<false>(w.x, c.k_t, dstate, CHUNK, d);
  scale_rows(w.x, CHUNK, decays.to);
  multiply<true>(w.x, c.scores, w.dout, CHUNK, CHUNK, Steps::FROM_ROW);
  // X = dU - G^T dV, dV = b X, db = X Z
  solve_from_below(w.x, w.dv, w.g, decays.beta);
  alignas(256) float dbeta[CHUNK];
  row_products(dbeta, w.x, z, CHUNK);

  transpose_matrix(w.dout_t, w.dout, CHUNK);
  transpose_matrix(w.dv_t, w.dv, CHUNK);
  transpose_matrix(w.u_t, u, CHUNK);
  multiply<false>(w.e, w.dout_t, w.u_t, CHUNK, dv_steps);  // dO U^T
  multiply<false>(w.f, w.dv_t, w.u_t, CHUNK, dv_steps);    // dV U^T
  // E = dO U^T D, F = -dV U^T D strictly below
  delta_triangles(w);
  transpose_matrix(w.e_t, w.e, CHUNK);
  transpose_matrix(w.f_t, w.f, CHUNK);
  // f = F + F^T
  for_elements(w.f, CHUNK, [&](int64_t r, int64_t i) {
    store(w.f.row(r) + i, load(w.f.row(r) + i) + load(w.f_t.row(r) + i));
  });

  transpose_matrix(w.state_t, state, d);
  transpose_matrix(w.dstate_t, dstate, d);
  const Matrix &dq = w.dq[place], &dk = w.dk[place], &sum = c.keys_sum;
  alignas(256) float dlog_from_by_values[CHUNK];
  // dQ += from (dO S^T); the gradient of log from_i is this row times query i
  multiply<false>(sum, w.dout_t, w.state_t, CHUNK, dv_steps);
  add_scaled_rows(dq, sum, decays.from);
  row_products(w.dlog_from, sum, c.q, CHUNK);
  // dQ += E K
  multiply<true>(dq, w.e_t, c.k, CHUNK, CHUNK, Steps::UNTIL_ROW);
  // dK -= from (dV S^T); the gradient of log from_i by way of Z is this row times key i
  multiply<false>(sum, w.dv_t, w.state_t, CHUNK, dv_steps);
  add_scaled_rows(dk, sum, decays.minus_from);
  row_products(dlog_from_by_values, sum, c.k, CHUNK);
  // dK += to (U dS^T); the gradient of log to_i is this row times key i
  multiply<false>(sum, w.u_t, w.dstate_t, CHUNK, dv_steps);
  add_scaled_rows(dk, sum, decays.to);
  row_products(w.dlog_to, sum, c.k, CHUNK);
  // dK += E^T Q + (F + F^T) K
  multiply<true>(dk, w.e, c.q, CHUNK, CHUNK, Steps::FROM_ROW);
  multiply<true>(dk, w.f, c.k, CHUNK, CHUNK);
  store_matrix(w.dv, static_cast<T*>(grad.dqkv) + at.value(first), at.stride(), decays.count, a.dv);

  // The log decay of token i is part of whole, from_l for l >= i, to_j for j < i, and D_lj for l >= i > j: from the last token
  // to the first each token adds what its decay is part of and the next one's is not.
  const int64_t last = decays.count - 1;
  double total = decays.whole * matrix_product(state, dstate, d);
  for (int64_t i = 0; i < last; ++i) total += static_cast<double>(w.dlog_to[i]);
  // The last token is added to the next state as it is.
  w.dlog_to[last] = 0;
  for (int64_t i = last; i >= 0; --i) {
    total += static_cast<double>((w.row_sums[i] - w.column_sums[i]) +
                                 (w.dlog_from[i] + dlog_from_by_values[i] - w.dlog_to[i]));
    grad.ddecay[at.gate(first + i)] = static_cast<float>(total);
    grad.dbeta[at.gate(first + i)] = dbeta[i];
  }

  // dS = whole dS + Q^T (from dO) - K^T (from dV)
  scale_rows(w.dout, CHUNK, decays.from);
  scale_rows(w.dv, CHUNK, decays.minus_from);
  for_elements(dstate, d, [&](int64_t r, int64_t i) {
    store(dstate.row(r) + i, load(dstate.row(r) + i) * decays.whole);
  });
  multiply<true>(dstate, c.q, w.dout, d, CHUNK);
  multiply<true>(dstate, c.k, w.dv, d, CHUNK);
}

// dx = the gradient through the division by the length, of the unit rows' gradient times `scale`.
template <class T>
FM_INLINE void store_unit_gradient(const Matrix& dunit, const Matrix& unit, float scale,
                                   const float* reciprocal, T* dx, int64_t stride, int64_t count,
                                   int64_t d) {
  alignas(256) float along[CHUNK];
  row_products(along, dunit, unit, CHUNK);
  for (int64_t r = 0; r < count; ++r) {
    // Rows of `unit` have the length `scale`.
    const float factor = reciprocal[r] * scale, back = along[r] / (scale * scale);
    for_vectors(0, d, [&](int64_t i, int lanes) {
      const vf value = load(dunit.row(r) + i) - load(unit.row(r) + i) * back;
      store_lanes(dx + r * stride + i, value * factor, lanes);
    });
  }
}

// The value heads of a key head, a segment after another from the end.
template <class T>
static void delta_backward_group(const DeltaArgs& a, const DeltaGradArgs& grad, int64_t sample,
                                 int64_t group) {
  auto w = delta_work<DeltaBackward>(a);
  DeltaChunk& c = w.chunk;
  const int64_t share = a.heads / a.groups, segments = (a.s + DELTA_SEGMENT - 1) / DELTA_SEGMENT;
  const auto head = [&](int64_t place) { return DeltaHead<T>{a, sample, group * share + place}; };
  for (int64_t place = 0; place < share; ++place)
    load_matrix(w.dstate_of(place), grad.dstate + head(place).state(0), a.dv, a.d, a.dv, c.steps());
  for (int64_t segment = segments - 1; segment >= 0; --segment) {
    const int64_t begin = segment * DELTA_SEGMENT,
                  chunks = (min(DELTA_SEGMENT, a.s - begin) + CHUNK - 1) / CHUNK;
    for (int64_t i = 0; i < chunks; ++i) {
      clear(w.dq[i].data, CHUNK * w.dq[i].stride);
      clear(w.dk[i].data, CHUNK * w.dk[i].stride);
    }
    for (int64_t place = 0; place < share; ++place) {
      const DeltaHead<T> at = head(place);
      load_matrix(w.state, a.states + at.state(segment), a.dv, a.d, a.dv, c.steps());
      for (int64_t i = 0; i < chunks; ++i) {
        const int64_t first = begin + i * CHUNK;
        __builtin_memcpy(w.states[i].data, w.state.data,
                         c.steps() * w.state.stride * sizeof(float));
        c.read(at, first);
        c.solve(at, first, w.state, w.z[i], w.u[i]);
        if (i + 1 < chunks) c.advance(w.state, w.u[i]);
      }
      for (int64_t i = chunks - 1; i >= 0; --i)
        delta_backward_chunk(at, grad, w, begin + i * CHUNK, i, w.dstate_of(place));
    }
    for (int64_t i = 0; i < chunks; ++i) {
      const DeltaHead<T> at = head(0);
      const int64_t first = begin + i * CHUNK;
      c.read(at, first);
      T* dqkv = static_cast<T*>(grad.dqkv);
      store_unit_gradient(w.dq[i], c.q, c.query_scale(a.d), c.query_lengths, dqkv + at.query(first),
                          at.stride(), c.decays.count, a.d);
      store_unit_gradient(w.dk[i], c.k, 1.0f, c.key_lengths, dqkv + at.key(first), at.stride(),
                          c.decays.count, a.d);
    }
  }
  for (int64_t place = 0; place < share; ++place)
    store_matrix(w.dstate_of(place), grad.dstate + head(place).state(0), a.dv, a.d, a.dv);
}

static void delta_rule_backward(const DeltaArgs& a, const DeltaGradArgs& grad) {
  with_dtype(a.dtype, [&](auto element) {
    parallel_for(a.b * a.groups, 1, [&](int64_t begin, int64_t end) {
      for (int64_t task = begin; task < end; ++task)
        delta_backward_group<decltype(element)>(a, grad, task / a.groups, task % a.groups);
    });
  });
}

// One token of a value head: (d) floats of a unit query or key.
template <class T>
FM_INLINE void unit_row(const T* x, int64_t d, float scale, float* to) {
  vf squares = {};
  for_vectors(0, d, [&](int64_t i, int lanes) {
    const vf v = load_lanes(x + i, lanes);
    squares += v * v;
  });
  const vf factor = rsqrt(broadcast(hsum(squares) + 1e-6f)) * scale;
  for_vectors(0, d, [&](int64_t i, int lanes) {
    store_lanes(to + i, load_lanes(x + i, lanes) * factor, lanes);
  });
}

// qkv (rows, ...) with a row of one token of each sample; states (samples, heads, d, dv) are read and written.
template <class T>
static void delta_decode_head(const DeltaArgs& a, const int64_t* samples, float* states, T* out,
                              int64_t row, int64_t head) {
  const DeltaHead<T> at{a, row, head};
  float* query = static_cast<float*>(scratch(0, 2 * a.d * sizeof(float)));
  float* key = query + a.d;
  unit_row(at.queries(0), a.d, 1.0f / __builtin_sqrtf(static_cast<float>(a.d)), query);
  unit_row(at.keys(0), a.d, 1.0f, key);
  const float decay = exp(broadcast(a.decay[at.gate(0)]))[0], beta = a.beta[at.gate(0)];
  float* state = states + (samples[row] * a.heads + head) * a.d * a.dv;
  for_vector_groups<4>(0, a.dv, [&](auto count, int64_t i, int lanes) FM_INLINE_LAMBDA {
    constexpr int N = decltype(count)::value;
    vf predicted[N] = {}, update[N], result[N] = {};
    for (int64_t r = 0; r < a.d; ++r) {
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n)
        predicted[n] = load_lanes(state + r * a.dv + i + n * VL, lanes) * key[r] + predicted[n];
    }
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n)
      update[n] = (load_lanes(at.values(0) + i + n * VL, lanes) - predicted[n] * decay) * beta;
    for (int64_t r = 0; r < a.d; ++r) {
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) {
        float* p = state + r * a.dv + i + n * VL;
        const vf next = load_lanes(p, lanes) * decay + update[n] * key[r];
        store_lanes(p, next, lanes);
        result[n] = next * query[r] + result[n];
      }
    }
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) store_lanes(out + at.result(0) + i + n * VL, result[n], lanes);
  });
}

// a.s is 1, a.b the number of rows.
static void delta_rule_decode(const DeltaArgs& a, const int64_t* samples, float* states,
                              void* out) {
  with_dtype(a.dtype, [&](auto element) {
    using T = decltype(element);
    parallel_for(a.b * a.heads, 1, [&](int64_t begin, int64_t end) {
      for (int64_t task = begin; task < end; ++task)
        delta_decode_head(a, samples, states, static_cast<T*>(out), task / a.heads, task % a.heads);
    });
  });
}

}  // namespace fm::FM_TARGET
