// Scalar references of routing.h, in double. Experts are chosen by the same float32 numbers.
#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

#include "reference.h"

namespace fm::reference {
namespace {

double sigmoid(double x) { return 1 / (1 + std::exp(-x)); }

std::vector<double> softmax(const std::vector<double>& x) {
  const double top = *std::max_element(x.begin(), x.end());
  std::vector<double> y;
  for (double value : x) y.push_back(std::exp(value - top));
  const double total = std::accumulate(y.begin(), y.end(), 0.0);
  for (double& value : y) value /= total;
  return y;
}

// Numbers of the `count` largest, of equal ones the first; NaN counts as infinity.
std::vector<int64_t> best(const std::vector<float>& x, int64_t count) {
  const auto value = [&](int64_t i) {
    return std::isnan(x[i]) ? std::numeric_limits<float>::infinity() : x[i];
  };
  std::vector<int64_t> order(x.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](int64_t i, int64_t j) { return value(i) > value(j); });
  order.resize(count);
  return order;
}

// Scores of all experts of a row; those of the chosen ones alone are divided by their sum later.
std::vector<double> all_scores(const RouteArgs& a, const float* logits) {
  std::vector<double> x(logits, logits + a.experts);
  if (a.scores != Scores::sigmoid) return softmax(x);
  for (double& value : x) value = sigmoid(value);
  return x;
}

std::vector<int64_t> choose(const RouteArgs& a, const float* logits) {
  std::vector<float> wish(logits, logits + a.experts);
  if (a.scores != Scores::softmax_of_chosen && (a.bias || a.groups)) {
    const std::vector<double> scores = all_scores(a, logits);
    for (int64_t e = 0; e < a.experts; ++e)
      wish[e] = static_cast<float>(scores[e]) + (a.bias ? a.bias[e] : 0);
  }
  if (!a.groups) return best(wish, a.k);
  const int64_t size = a.experts / a.groups;
  std::vector<float> of_groups;
  for (int64_t g = 0; g < a.groups; ++g) {
    const std::vector<float> own(wish.begin() + g * size, wish.begin() + (g + 1) * size);
    float total = 0;
    for (int64_t i : best(own, a.k / a.group_topk)) total += own[i];
    of_groups.push_back(total);
  }
  const std::vector<int64_t> open = best(of_groups, a.group_topk);
  for (int64_t e = 0; e < a.experts; ++e) {
    if (std::find(open.begin(), open.end(), e / size) == open.end())
      wish[e] = -std::numeric_limits<float>::infinity();
  }
  return best(wish, a.k);
}

}  // namespace

void route(const RouteArgs& a, float* scores, int64_t* chosen) {
  for (int64_t r = 0; r < a.rows; ++r) {
    const float* logits = a.logits + r * a.experts;
    const std::vector<int64_t> experts = choose(a, logits);
    const std::vector<double> all = all_scores(a, logits);
    double total = a.scores == Scores::sigmoid && a.k > 1 ? a.normalizer : 0;
    for (int64_t e : experts) total += all[e];
    if (a.scores == Scores::softmax || (a.scores == Scores::sigmoid && a.k == 1)) total = 1;
    for (int64_t j = 0; j < a.k; ++j) {
      chosen[r * a.k + j] = experts[j];
      scores[r * a.k + j] = static_cast<float>(all[experts[j]] / total * a.scaling);
    }
  }
}

void route_backward(const RouteArgs& a, const float* dscores, const float* kept,
                    const int64_t* chosen, float* dlogits) {
  for (int64_t r = 0; r < a.rows; ++r) {
    const int64_t* own = chosen + r * a.k;
    std::vector<double> g(a.experts), p(a.experts),
        slope(a.experts);  // p: the scores that were normalised, 0 of others
    double total = 1;
    if (a.scores == Scores::softmax_of_chosen) {
      for (int64_t j = 0; j < a.k; ++j) p[own[j]] = slope[own[j]] = kept[r * a.k + j] / a.scaling;
    } else {
      const std::vector<double> all = all_scores(a, kept + r * a.experts);
      if (a.scores == Scores::softmax) p = slope = all;
      if (a.scores == Scores::sigmoid && a.k > 1) {
        total = a.normalizer;
        for (int64_t j = 0; j < a.k; ++j) total += all[own[j]];
        for (int64_t j = 0; j < a.k; ++j) p[own[j]] = all[own[j]] / total;
      }
      if (a.scores == Scores::sigmoid)
        for (int64_t j = 0; j < a.k; ++j) slope[own[j]] = all[own[j]] * (1 - all[own[j]]) / total;
    }
    for (int64_t j = 0; j < a.k; ++j) g[own[j]] = double(dscores[r * a.k + j]) * a.scaling;
    const double mean = std::inner_product(p.begin(), p.end(), g.begin(), 0.0);
    for (int64_t e = 0; e < a.experts; ++e)
      dlogits[r * a.experts + e] = static_cast<float>(slope[e] * (g[e] - mean));
  }
}

void sort_pairs(const int64_t* numbers, int64_t n, int64_t groups, int64_t* counts, int64_t* pairs,
                int64_t* places) {
  int64_t kept = 0;
  for (int64_t g = 0; g < groups; ++g) {
    const int64_t first = kept;
    for (int64_t i = 0; i < n; ++i) {
      if (numbers[i] == g) pairs[kept] = i, places[i] = kept++;
    }
    counts[g] = kept - first;
  }
  for (int64_t i = 0; i < n; ++i) {
    if (numbers[i] == groups) places[i] = kept;
  }
}

void permute(const PermuteArgs& a, const int64_t* pairs, const void* x, void* out) {
  for (int64_t i = 0; i < a.n; ++i) {
    for (int64_t c = 0; c < a.cols; ++c)
      put(out, a.dtype, i * a.cols + c, get(x, a.dtype, pairs[i] / a.k * a.cols + c));
  }
}

void unpermute(const PermuteArgs& a, const int64_t* places, const void* x, void* out) {
  for (int64_t r = 0; r < a.rows; ++r) {
    for (int64_t c = 0; c < a.cols; ++c) {
      double sum = 0;
      for (int64_t j = r * a.k; j < (r + 1) * a.k; ++j)
        sum += places[j] < a.n ? get(x, a.dtype, places[j] * a.cols + c) : 0;
      put(out, a.dtype, r * a.cols + c, static_cast<float>(sum));
    }
  }
}

}  // namespace fm::reference
