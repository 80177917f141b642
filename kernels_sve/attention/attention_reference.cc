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
  int64_t query(int64_t q, int64_t column) const {
    return ((((q - queries().begin) * a.b + sample) * a.groups + group()) * (share() + 2) +
            head % share()) *
               a.d +
           column;
  }
  // Element of kv: which 0 key, 1 value. In a part that is a tensor of its own.
  int64_t key_value(int64_t k, int which, int64_t column) const {
    const int64_t before = a.part() ? 0 : share();
    return ((((k - keys().begin) * a.b + sample) * a.groups + group()) * (before + 2) + before +
            which) *
               a.d +
           column;
  }
  int64_t first_key(int64_t q) const {
    return std::max(
        {a.starts ? int64_t(a.starts[sample * a.s + q]) : 0, q - a.window + 1, keys().begin});
  }
  int64_t end_key(int64_t q) const { return std::min(q + 1, keys().end); }
  int64_t context(int64_t q, int64_t column) const {
    return (((q - queries().begin) * a.b + sample) * a.heads + head) * a.d + column;
  }
  int64_t row(int64_t q) const {
    return (sample * a.heads + head) * (queries().end - queries().begin) + q - queries().begin;
  }

  double score(const void* qkv, const void* kv, int64_t q, int64_t k) const {
    double sum = 0;
    for (int64_t c = 0; c < a.d; ++c)
      sum += double(get(qkv, dtype, query(q, c))) * get(kv, dtype, key_value(k, 0, c));
    return sum / std::sqrt(double(a.d));
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
  std::vector<double> p(q + 1), context(h.a.d);
  double maximum = -HUGE_VAL, sum = 0;
  const int64_t begin = h.first_key(q), end = h.end_key(q);
  for (int64_t k = begin; k < end; ++k) maximum = std::fmax(maximum, p[k] = h.score(qkv, kv, q, k));
  for (int64_t k = begin; k < end; ++k) sum += p[k] = std::exp(p[k] - maximum);
  const std::vector<double> keep = h.dropout(q);
  for (int64_t k = begin; k < end; ++k)
    for (int64_t c = 0; c < h.a.d; ++c)
      context[c] += p[k] / sum * keep[k] * get(kv, h.dtype, h.key_value(k, 1, c));
  for (int64_t c = 0; c < h.a.d; ++c)
    put(out, h.dtype, h.context(q, c), static_cast<float>(context[c]));
  lse[h.row(q)] = static_cast<float>(maximum + std::log(sum));
}

// Adds one query's part to grad (3, s, d): the query head's dQ, and the dK and dV of its group.
void backward_query(const Head& h, const void* qkv, const void* kv, const void* out,
                    const float* lse, const void* dout, double* grad, int64_t q) {
  const int64_t d = h.a.d, matrix = h.a.s * d;
  const std::vector<double> keep = h.dropout(q);
  double delta = 0;
  for (int64_t c = 0; c < d; ++c) {
    delta += double(get(dout, h.dtype, h.context(q, c))) * get(out, h.dtype, h.context(q, c));
  }
  for (int64_t k = h.first_key(q); k < h.end_key(q); ++k) {
    const double p = std::exp(h.score(qkv, kv, q, k) - lse[h.row(q)]);
    double dp = 0;
    for (int64_t c = 0; c < d; ++c) {
      dp += double(get(dout, h.dtype, h.context(q, c))) * get(kv, h.dtype, h.key_value(k, 1, c));
    }
    const double ds = p * (dp * keep[k] - delta) / std::sqrt(double(d));
    for (int64_t c = 0; c < d; ++c) {
      grad[q * d + c] += ds * get(kv, h.dtype, h.key_value(k, 0, c));
      grad[matrix + k * d + c] += ds * get(qkv, h.dtype, h.query(q, c));
      grad[2 * matrix + k * d + c] += p * keep[k] * get(dout, h.dtype, h.context(q, c));
    }
  }
}

// Attention of one query, `query` elements into qkv, to `known` slots from `cached` elements on, to `to` elements into out.
void decode_query(const DecodeArgs& a, DType dtype, const void* qkv, const void* keys,
                  const void* values, void* out, int64_t query, int64_t cached, int64_t known,
                  int64_t to) {
  std::vector<double> p(known), context(a.d);
  double maximum = -HUGE_VAL, sum = 0;
  for (int64_t k = 0; k < known; ++k) {
    for (int64_t c = 0; c < a.d; ++c) {
      p[k] += double(get(qkv, dtype, query + c)) * get(keys, dtype, cached + k * a.d + c) /
              std::sqrt(double(a.d));
    }
    maximum = std::fmax(maximum, p[k]);
  }
  for (int64_t k = 0; k < known; ++k) sum += p[k] = std::exp(p[k] - maximum);
  for (int64_t k = 0; k < known; ++k)
    for (int64_t c = 0; c < a.d; ++c)
      context[c] += p[k] / sum * get(values, dtype, cached + k * a.d + c);
  for (int64_t c = 0; c < a.d; ++c) put(out, dtype, to + c, static_cast<float>(context[c]));
}

}  // namespace

void attention_decode(const void* qkv, void* keys, void* values, void* out, DType dtype,
                      const DecodeArgs& a) {
  const int64_t share = a.heads / a.groups;
  for (int64_t row = 0; row < a.rows; ++row)
    for (int64_t group = 0; group < a.groups; ++group) {
      const int64_t query = (row * a.groups + group) * (share + 2) * a.d, key = query + share * a.d;
      const int64_t cached = (a.samples[row] * a.groups + group) * a.slots * a.d;
      const int64_t slot = cached + a.positions[row] % a.slots * a.d,
                    known = std::min(a.positions[row] + 1, a.slots);
      for (int64_t c = 0; c < a.d; ++c) {
        put(keys, dtype, slot + c, get(qkv, dtype, key + c));
        put(values, dtype, slot + c, get(qkv, dtype, key + a.d + c));
      }
      for (int64_t h = 0; h < share; ++h) {
        decode_query(a, dtype, qkv, keys, values, out, query + h * a.d, cached, known,
                     (row * a.heads + group * share + h) * a.d);
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
  for_heads(args, dtype, [&](const Head& h) {
    if (h.head % h.share() == 0) grad.assign(3 * args.s * args.d, 0);
    std::fill_n(grad.begin(), args.s * args.d, 0);
    for (int64_t q = h.queries().begin; q < h.queries().end; ++q)
      backward_query(h, qkv, kv, out, lse, dout, grad.data(), q);
    const auto write = [&](void* to, int64_t place, double value) {
      if (!args.part()) return put(to, dtype, place, static_cast<float>(value));
      static_cast<float*>(to)[place] += static_cast<float>(value);
    };
    for (int64_t c = 0; c < args.d; ++c) {
      for (int64_t q = h.queries().begin; q < h.queries().end; ++q)
        write(dqkv, h.query(q, c), grad[q * args.d + c]);
      if (h.head % h.share() != h.share() - 1)
        continue;  // dK and dV are whole with the group's last head
      for (int which = 0; which < 2; ++which)
        for (int64_t k = h.keys().begin; k < h.keys().end; ++k) {
          write(dkv, h.key_value(k, which, c), grad[((which + 1) * args.s + k) * args.d + c]);
        }
    }
  });
}

void attention_backward(const void* qkv, const void* out, const float* lse, const void* dout,
                        void* dqkv, DType dtype, const AttentionArgs& args) {
  attention_part_backward(qkv, qkv, out, lse, dout, dqkv, dqkv, dtype, args);
}

}  // namespace fm::reference
