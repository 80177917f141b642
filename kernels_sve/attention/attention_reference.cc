// Scalar references of attention.h: the formulas in double, one query at a time.
#include <algorithm>
#include <cmath>
#include <vector>

#include "simd/philox_layout.h"
#include "reference.h"

namespace fm::reference {
namespace {

struct Head {
  const AttentionArgs& a;
  DType dtype;
  int64_t sample, head;

  int64_t share() const { return a.heads / a.groups; }
  int64_t group() const { return head / share(); }
  Positions queries() const { return a.part() ? a.queries : Positions{0, a.s}; }
  Positions keys() const { return a.part() ? a.keys : Positions{0, a.s}; }
  // Columns of a group, with `heads` queries in front of its key.
  int64_t group_columns(int64_t heads) const { return (heads + 1) * a.key_size + a.value_size; }
  int64_t query(int64_t q, int64_t column) const {
    const int64_t group_row = ((q - queries().begin) * a.b + sample) * a.groups + group();
    return group_row * group_columns(share()) + head % share() * a.key_size + column;
  }
  // Element of kv: which 0 key, 1 value. In a part that is a tensor of its own.
  int64_t key_value(int64_t k, int which, int64_t column) const {
    const int64_t before = a.part() ? 0 : share(),
                  group_row = ((k - keys().begin) * a.b + sample) * a.groups + group();
    return group_row * group_columns(before) + (before + which) * a.key_size + column;
  }
  int64_t first_key(int64_t q) const {
    return std::max(
        {a.starts ? int64_t(a.starts[sample * a.s + q]) : 0, q - a.window + 1, keys().begin});
  }
  int64_t end_key(int64_t q) const { return std::min(q + 1, keys().end); }
  int64_t context(int64_t q, int64_t column) const {
    return (((q - queries().begin) * a.b + sample) * a.heads + head) * a.value_size + column;
  }
  int64_t row(int64_t q) const {
    return (sample * a.heads + head) * (queries().end - queries().begin) + q - queries().begin;
  }

  double score(const void* qkv, const void* kv, int64_t q, int64_t k) const {
    double sum = 0;
    for (int64_t c = 0; c < a.key_size; ++c)
      sum += double(get(qkv, dtype, query(q, c))) * get(kv, dtype, key_value(k, 0, c));
    return sum / a.score_divisor;
  }

  // Factors 0 or 1 / (1 - p) of one query's probabilities.
  std::vector<double> dropout(int64_t q) const {
    std::vector<float> ones(a.s, 1.0f), out(a.s);
    const DropoutArgs args{1,
                           1,
                           1,
                           a.s,
                           a.p,
                           a.seed,
                           a.stream,
                           a.first_sample + sample,
                           (a.first_head + head) * a.s + q,
                           0};
    if (a.p > 0) reference::dropout(ones.data(), out.data(), DType::f32, args);
    return a.p > 0 ? std::vector<double>(out.begin(), out.end()) : std::vector<double>(a.s, 1.0);
  }
};

template <class F>
void for_heads(const AttentionArgs& a, DType dtype, const F& f) {
  for (int64_t sample = 0; sample < a.b; ++sample)
    for (int64_t head = 0; head < a.heads; ++head) f(Head{a, dtype, sample, head});
}

void forward_query(const Head& h, const void* qkv, const void* kv, void* out, float* lse,
                   int64_t q) {
  std::vector<double> p(q + 1), context(h.a.value_size);
  double maximum = -HUGE_VAL, sum = 0;
  const int64_t begin = h.first_key(q), end = h.end_key(q);
  for (int64_t k = begin; k < end; ++k) maximum = std::fmax(maximum, p[k] = h.score(qkv, kv, q, k));
  for (int64_t k = begin; k < end; ++k) sum += p[k] = std::exp(p[k] - maximum);
  const std::vector<double> keep = h.dropout(q);
  for (int64_t k = begin; k < end; ++k)
    for (int64_t c = 0; c < h.a.value_size; ++c)
      context[c] += p[k] / sum * keep[k] * get(kv, h.dtype, h.key_value(k, 1, c));
  for (int64_t c = 0; c < h.a.value_size; ++c)
    put(out, h.dtype, h.context(q, c), static_cast<float>(context[c]));
  lse[h.row(q)] = static_cast<float>(maximum + std::log(sum));
}

// Adds one query's part to the query head's dQ and to the dK and dV of its group, (s, columns) each in grad.
void backward_query(const Head& h, const void* qkv, const void* kv, const void* out,
                    const float* lse, const void* dout, double* grad, int64_t q) {
  const int64_t d = h.a.key_size, dv = h.a.value_size, matrix = h.a.s * d;
  const std::vector<double> keep = h.dropout(q);
  double delta = 0;
  for (int64_t c = 0; c < dv; ++c) {
    delta += double(get(dout, h.dtype, h.context(q, c))) * get(out, h.dtype, h.context(q, c));
  }
  for (int64_t k = h.first_key(q); k < h.end_key(q); ++k) {
    const double p = std::exp(h.score(qkv, kv, q, k) - lse[h.row(q)]);
    double dp = 0;
    for (int64_t c = 0; c < dv; ++c) {
      dp += double(get(dout, h.dtype, h.context(q, c))) * get(kv, h.dtype, h.key_value(k, 1, c));
    }
    const double ds = p * (dp * keep[k] - delta) / h.a.score_divisor;
    for (int64_t c = 0; c < d; ++c) {
      grad[q * d + c] += ds * get(kv, h.dtype, h.key_value(k, 0, c));
      grad[matrix + k * d + c] += ds * get(qkv, h.dtype, h.query(q, c));
    }
    for (int64_t c = 0; c < dv; ++c)
      grad[2 * matrix + k * dv + c] += p * keep[k] * get(dout, h.dtype, h.context(q, c));
  }
}

// Attention of one query, `query` elements into qkv, to `known` slots from `cached` on, to `to` elements into out.
void decode_query(const DecodeArgs& a, DType dtype, const void* qkv, const void* keys,
                  const void* values, void* out, int64_t query, int64_t cached, int64_t known,
                  int64_t to) {
  std::vector<double> p(known), context(a.value_size);
  double maximum = -HUGE_VAL, sum = 0;
  for (int64_t k = 0; k < known; ++k) {
    for (int64_t c = 0; c < a.key_size; ++c) {
      p[k] += double(get(qkv, dtype, query + c)) * get(keys, dtype, (cached + k) * a.key_size + c) /
              a.score_divisor;
    }
    maximum = std::fmax(maximum, p[k]);
  }
  for (int64_t k = 0; k < known; ++k) sum += p[k] = std::exp(p[k] - maximum);
  for (int64_t k = 0; k < known; ++k)
    for (int64_t c = 0; c < a.value_size; ++c)
      context[c] += p[k] / sum * get(values, dtype, (cached + k) * a.value_row() + c);
  for (int64_t c = 0; c < a.value_size; ++c)
    put(out, dtype, to + c, static_cast<float>(context[c]));
}

}  // namespace

void attention_decode(const void* qkv, void* keys, void* values, void* out, DType dtype,
                      const DecodeArgs& a) {
  const int64_t share = a.heads / a.groups;
  for (int64_t row = 0; row < a.rows; ++row)
    for (int64_t group = 0; group < a.groups; ++group) {
      const int64_t query = (row * a.groups + group) * a.group_columns(),
                    key = query + share * a.key_size;
      const int64_t cached = (a.samples[row] * a.groups + group) * a.slots;
      const int64_t slot = cached + a.positions[row] % a.slots,
                    known = std::min(a.positions[row] + 1, a.slots);
      for (int64_t c = 0; c < a.key_size; ++c)
        put(keys, dtype, slot * a.key_size + c, get(qkv, dtype, key + c));
      for (int64_t c = 0; !a.shared && c < a.value_size; ++c)
        put(values, dtype, slot * a.value_size + c, get(qkv, dtype, key + a.key_size + c));
      for (int64_t h = 0; h < share; ++h) {
        decode_query(a, dtype, qkv, keys, values, out, query + h * a.key_size, cached, known,
                     (row * a.heads + group * share + h) * a.value_size);
      }
    }
}

void attention_part_forward(const void* qkv, const void* kv, void* out, float* lse, DType dtype,
                            const AttentionArgs& args) {
  for_heads(args, dtype, [&](const Head& h) {
    for (int64_t q = h.queries().begin; q < h.queries().end; ++q)
      forward_query(h, qkv, kv, out, lse, q);
  });
}

void attention_forward(const void* qkv, void* out, float* lse, DType dtype,
                       const AttentionArgs& args) {
  attention_part_forward(qkv, qkv, out, lse, dtype, args);
}

void attention_part_backward(const void* qkv, const void* kv, const void* out, const float* lse,
                             const void* dout, void* dqkv, void* dkv, DType dtype,
                             const AttentionArgs& args) {
  std::vector<double> grad;
  const int64_t keys = args.s * args.key_size, values = args.s * args.value_size;
  for_heads(args, dtype, [&](const Head& h) {
    if (h.head % h.share() == 0) grad.assign(2 * keys + values, 0);
    std::fill_n(grad.begin(), keys, 0);
    for (int64_t q = h.queries().begin; q < h.queries().end; ++q)
      backward_query(h, qkv, kv, out, lse, dout, grad.data(), q);
    const auto write = [&](void* to, int64_t place, double value) {
      if (!args.part()) return put(to, dtype, place, static_cast<float>(value));
      static_cast<float*>(to)[place] += static_cast<float>(value);
    };
    for (int64_t q = h.queries().begin; q < h.queries().end; ++q)
      for (int64_t c = 0; c < args.key_size; ++c)
        write(dqkv, h.query(q, c), grad[q * args.key_size + c]);
    if (h.head % h.share() != h.share() - 1) return;  // dK and dV are whole with the last head
    for (int64_t k = h.keys().begin; k < h.keys().end; ++k) {
      for (int64_t c = 0; c < args.key_size; ++c)
        write(dkv, h.key_value(k, 0, c), grad[keys + k * args.key_size + c]);
      for (int64_t c = 0; c < args.value_size; ++c)
        write(dkv, h.key_value(k, 1, c), grad[2 * keys + k * args.value_size + c]);
    }
  });
}

void attention_backward(const void* qkv, const void* out, const float* lse, const void* dout,
                        void* dqkv, DType dtype, const AttentionArgs& args) {
  attention_part_backward(qkv, qkv, out, lse, dout, dqkv, dqkv, dtype, args);
}

}  // namespace fm::reference
