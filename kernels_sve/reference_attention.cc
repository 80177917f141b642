// Scalar references of attention.h: the formulas in double, one query at a time.
#include <algorithm>
#include <cmath>
#include <vector>

#include "philox_layout.h"
#include "reference.h"

namespace fm::reference {
namespace {

struct Head {
  const AttentionArgs& a;
  DType dtype;
  int64_t sample, head;

  int64_t share() const { return a.heads / a.groups; }
  int64_t group() const { return head / share(); }
  // Element of qkv: part 0 query, 1 key, 2 value.
  int64_t at(int64_t row, int part, int64_t column) const {
    const int64_t place = part == 0 ? head % share() : share() + part - 1;
    return (((row * a.b + sample) * a.groups + group()) * (share() + 2) + place) * a.d + column;
  }
  int64_t first_key(int64_t q) const {
    return std::max<int64_t>(a.starts ? a.starts[sample * a.s + q] : 0, q - a.window + 1);
  }
  int64_t context(int64_t row, int64_t column) const { return ((row * a.b + sample) * a.heads + head) * a.d + column; }
  int64_t row(int64_t q) const { return (sample * a.heads + head) * a.s + q; }

  double score(const void* qkv, int64_t q, int64_t k) const {
    double sum = 0;
    for (int64_t c = 0; c < a.d; ++c) sum += double(get(qkv, dtype, at(q, 0, c))) * get(qkv, dtype, at(k, 1, c));
    return sum / std::sqrt(double(a.d));
  }

  // Factors 0 or 1 / (1 - p) of one query's probabilities.
  std::vector<double> dropout(int64_t q) const {
    std::vector<float> ones(a.s, 1.0f), out(a.s);
    const DropoutArgs args{
        1, 1, 1, a.s, a.p, a.seed, a.stream, a.first_sample + sample, (a.first_head + head) * a.s + q, 0};
    if (a.p > 0) reference::dropout(ones.data(), out.data(), DType::f32, args);
    return a.p > 0 ? std::vector<double>(out.begin(), out.end()) : std::vector<double>(a.s, 1.0);
  }
};

template <class F>
void for_heads(const AttentionArgs& a, DType dtype, const F& f) {
  for (int64_t sample = 0; sample < a.b; ++sample)
    for (int64_t head = 0; head < a.heads; ++head) f(Head{a, dtype, sample, head});
}

void forward_query(const Head& h, const void* qkv, void* out, float* lse, int64_t q) {
  std::vector<double> p(q + 1), context(h.a.d);
  double maximum = -HUGE_VAL, sum = 0;
  for (int64_t k = h.first_key(q); k <= q; ++k) maximum = std::fmax(maximum, p[k] = h.score(qkv, q, k));
  for (int64_t k = h.first_key(q); k <= q; ++k) sum += p[k] = std::exp(p[k] - maximum);
  const std::vector<double> keep = h.dropout(q);
  for (int64_t k = h.first_key(q); k <= q; ++k)
    for (int64_t c = 0; c < h.a.d; ++c) context[c] += p[k] / sum * keep[k] * get(qkv, h.dtype, h.at(k, 2, c));
  for (int64_t c = 0; c < h.a.d; ++c) put(out, h.dtype, h.context(q, c), static_cast<float>(context[c]));
  lse[h.row(q)] = static_cast<float>(maximum + std::log(sum));
}

// Adds one query's part to grad (3, s, d): the query head's dQ, and the dK and dV of its group.
void backward_query(const Head& h, const void* qkv, const void* out, const float* lse, const void* dout, double* grad,
                    int64_t q) {
  const int64_t d = h.a.d, matrix = h.a.s * d;
  const std::vector<double> keep = h.dropout(q);
  double delta = 0;
  for (int64_t c = 0; c < d; ++c) {
    delta += double(get(dout, h.dtype, h.context(q, c))) * get(out, h.dtype, h.context(q, c));
  }
  for (int64_t k = h.first_key(q); k <= q; ++k) {
    const double p = std::exp(h.score(qkv, q, k) - lse[h.row(q)]);
    double dp = 0;
    for (int64_t c = 0; c < d; ++c) {
      dp += double(get(dout, h.dtype, h.context(q, c))) * get(qkv, h.dtype, h.at(k, 2, c));
    }
    const double ds = p * (dp * keep[k] - delta) / std::sqrt(double(d));
    for (int64_t c = 0; c < d; ++c) {
      grad[q * d + c] += ds * get(qkv, h.dtype, h.at(k, 1, c));
      grad[matrix + k * d + c] += ds * get(qkv, h.dtype, h.at(q, 0, c));
      grad[2 * matrix + k * d + c] += p * keep[k] * get(dout, h.dtype, h.context(q, c));
    }
  }
}

// Attention of one query, `query` elements into qkv, to `known` slots from `cached` elements on, to `to` elements into out.
void decode_query(const DecodeArgs& a, DType dtype, const void* qkv, const void* keys, const void* values, void* out,
                  int64_t query, int64_t cached, int64_t known, int64_t to) {
  std::vector<double> p(known), context(a.d);
  double maximum = -HUGE_VAL, sum = 0;
  for (int64_t k = 0; k < known; ++k) {
    for (int64_t c = 0; c < a.d; ++c) {
      p[k] += double(get(qkv, dtype, query + c)) * get(keys, dtype, cached + k * a.d + c) / std::sqrt(double(a.d));
    }
    maximum = std::fmax(maximum, p[k]);
  }
  for (int64_t k = 0; k < known; ++k) sum += p[k] = std::exp(p[k] - maximum);
  for (int64_t k = 0; k < known; ++k)
    for (int64_t c = 0; c < a.d; ++c) context[c] += p[k] / sum * get(values, dtype, cached + k * a.d + c);
  for (int64_t c = 0; c < a.d; ++c) put(out, dtype, to + c, static_cast<float>(context[c]));
}

}  // namespace

void attention_decode(const void* qkv, void* keys, void* values, void* out, DType dtype, const DecodeArgs& a) {
  const int64_t share = a.heads / a.groups;
  for (int64_t row = 0; row < a.rows; ++row)
    for (int64_t group = 0; group < a.groups; ++group) {
      const int64_t query = (row * a.groups + group) * (share + 2) * a.d, key = query + share * a.d;
      const int64_t cached = (a.samples[row] * a.groups + group) * a.slots * a.d;
      const int64_t slot = cached + a.positions[row] % a.slots * a.d, known = std::min(a.positions[row] + 1, a.slots);
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

void attention_forward(const void* qkv, void* out, float* lse, DType dtype, const AttentionArgs& args) {
  for_heads(args, dtype, [&](const Head& h) {
    for (int64_t q = 0; q < args.s; ++q) forward_query(h, qkv, out, lse, q);
  });
}

void attention_backward(const void* qkv, const void* out, const float* lse, const void* dout, void* dqkv, DType dtype,
                        const AttentionArgs& args) {
  std::vector<double> grad;
  for_heads(args, dtype, [&](const Head& h) {
    if (h.head % h.share() == 0) grad.assign(3 * args.s * args.d, 0);
    std::fill_n(grad.begin(), args.s * args.d, 0);
    for (int64_t q = 0; q < args.s; ++q) backward_query(h, qkv, out, lse, dout, grad.data(), q);
    for (int part = 0; part < 3; ++part)  // dK and dV are whole with the group's last head
      for (int64_t r = 0; r < args.s; ++r)
        for (int64_t c = 0; c < args.d; ++c) {
          put(dqkv, dtype, h.at(r, part, c), static_cast<float>(grad[(part * args.s + r) * args.d + c]));
        }
  });
}

}  // namespace fm::reference
