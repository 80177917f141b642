// Scalar references of rotary.h, in double.
#include <cmath>
#include <vector>

#include "reference.h"

namespace fm::reference {
namespace {

enum class Head { QUERY, KEY, VALUE };

Head kind_of(const RotaryArgs& a, int64_t head) {
  const int64_t place = head % (a.queries + 2);
  return place < a.queries ? Head::QUERY : place == a.queries ? Head::KEY : Head::VALUE;
}

std::vector<double> head_of(const RotaryArgs& a, const void* x, int64_t token, int64_t head) {
  std::vector<double> values(a.d);
  for (int64_t i = 0; i < a.d; ++i) values[i] = get(x, a.dtype, (token * a.heads + head) * a.d + i);
  return values;
}

void put_head(const RotaryArgs& a, int64_t token, int64_t head, const std::vector<double>& values) {
  const int64_t first = (token * a.heads + head) * a.d;
  for (int64_t i = 0; i < a.d; ++i) put(a.y, a.dtype, first + i, static_cast<float>(values[i]));
}

void turn(const RotaryArgs& a, int64_t token, double sign, std::vector<double>& v) {
  for (int64_t i = 0; i < a.half; ++i) {
    const int64_t one = a.interleaved ? 2 * i : i, two = a.interleaved ? 2 * i + 1 : i + a.half;
    const int64_t at = a.angles_of(token) * a.half + i;
    const double cos = a.cos[at], sin = sign * a.sin[at], x1 = v[one], x2 = v[two];
    v[one] = x1 * cos - x2 * sin;
    v[two] = x2 * cos + x1 * sin;
  }
}

double rstd_of(const RotaryArgs& a, const std::vector<double>& v) {
  double squares = 0;
  for (double value : v) squares += value * value;
  return 1 / std::sqrt(squares / static_cast<double>(a.d) + a.eps);
}

}  // namespace

void rotary(const RotaryArgs& a) {
  for (int64_t token = 0; token < a.s * a.b; ++token) {
    for (int64_t head = 0; head < a.heads; ++head) {
      std::vector<double> v = head_of(a, a.x, token, head);
      const Head kind = kind_of(a, head);
      const void* weight = kind == Head::QUERY ? a.q_weight : a.k_weight;
      const double rstd = rstd_of(a, v);
      for (int64_t i = 0; i < a.d && weight && kind != Head::VALUE; ++i)
        v[i] *= rstd * get(weight, a.dtype, i);
      if (kind != Head::VALUE) turn(a, token, a.inverse ? -1 : 1, v);
      put_head(a, token, head, v);
    }
  }
}

void rotary_norm_backward(const RotaryArgs& a, const RotaryGradArgs& grad) {
  std::vector<double> sums[2] = {std::vector<double>(a.d), std::vector<double>(a.d)};
  for (int64_t token = 0; token < a.s * a.b; ++token) {
    for (int64_t head = 0; head < a.heads; ++head) {
      std::vector<double> u = head_of(a, grad.dy, token, head);
      const std::vector<double> x = head_of(a, a.x, token, head);
      const Head kind = kind_of(a, head);
      if (kind != Head::VALUE) {
        const void* weight = kind == Head::QUERY ? a.q_weight : a.k_weight;
        std::vector<double>& dweight = sums[kind == Head::KEY];
        const double rstd = rstd_of(a, x);
        double mean = 0;  // of u w xhat
        turn(a, token, -1, u);
        for (int64_t i = 0; i < a.d; ++i) {
          dweight[i] += u[i] * x[i] * rstd;
          u[i] *= get(weight, a.dtype, i);
          mean += u[i] * x[i] * rstd / static_cast<double>(a.d);
        }
        for (int64_t i = 0; i < a.d; ++i) u[i] = rstd * (u[i] - x[i] * rstd * mean);
      }
      put_head(a, token, head, u);
    }
  }
  for (int64_t i = 0; i < a.d; ++i) {
    grad.dq_weight[i] += static_cast<float>(sums[0][i]);
    grad.dk_weight[i] += static_cast<float>(sums[1][i]);
  }
}

}  // namespace fm::reference
