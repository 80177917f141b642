// Routing of tokens to experts: the choice of k of them with their scores, its gradient, pairs of a token and an expert in the order
// of the experts, and rows of tokens in this order and back. Storage of rows float32, bfloat16 or float16, arithmetic float32.
// Reference: routing_reference.cc. Tested by tests/kernels/test_routing.py.
#pragma once
#include "rowwise/gate.h"

namespace fm::FM_TARGET {

constexpr int64_t ROWS_AHEAD = Tuning::TOKENS_AHEAD;

// Place of a value among others; of equal ones the first comes first.
struct Ranked {
  float value = __builtin_inff();
  float place = -1;
};

// The best of v[0] to v[n - 1] after `last`: the largest value, and of equal ones the first. A walk from Ranked() on is a sort.
FM_INLINE Ranked next_best(const float* v, int64_t n, Ranked last) {
  const vf lowest = broadcast(-__builtin_inff()), none = broadcast(__builtin_inff());
  const auto left = [&](int64_t i, int lanes, vf& x, vf& place) FM_INLINE_LAMBDA {
    x = first_of(load_lanes(v + i, lanes), lanes, lowest);
    place = to_float(lane_index()) + static_cast<float>(i);
    return (x < last.value) | ((x == last.value) & (place > last.place));
  };
  vf best = lowest, first = none, x, place;
  for_vectors(0, n, [&](int64_t i, int lanes) {
    const vi mask = left(i, lanes, x, place);
    best = max(select(mask, x, lowest), best);
  });
  Ranked found;
  found.value = hmax(best);
  for_vectors(0, n, [&](int64_t i, int lanes) {
    const vi mask = left(i, lanes, x, place) & (x == found.value);
    first = min(select(mask, place, none), first);
  });
  found.place = -hmax(-first);
  return found;
}

// f(vector of v) into out, and its sum.
template <class F>
FM_INLINE float map_and_sum(const float* v, int64_t n, float* out, const F& f) {
  vf total = {};
  for_vectors(0, n, [&](int64_t i, int lanes) {
    const vf y = first_of(f(load_lanes(v + i, lanes)), lanes);
    store_lanes(out + i, y, lanes);
    total += y;
  });
  return hsum(total);
}

FM_INLINE float largest(const float* v, int64_t n) {
  vf best = broadcast(-__builtin_inff());
  for_vectors(0, n, [&](int64_t i, int lanes) {
    best = max(best, first_of(load_lanes(v + i, lanes), lanes, best));
  });
  return hmax(best);
}

FM_INLINE void scale(float* v, int64_t n, float factor) {
  for_vectors(0, n, [&](int64_t i, int lanes) {
    store_lanes(v + i, load_lanes(v + i, lanes) * factor, lanes);
  });
}

FM_INLINE void softmax(const float* v, int64_t n, float* out) {
  const float top = largest(v, n);
  scale(out, n, 1 / map_and_sum(v, n, out, [&](vf x) FM_INLINE_LAMBDA { return exp(x - top); }));
}

// What the experts of a row are chosen by: its logits where nothing else takes part, because scores grow with them.
FM_INLINE void wishes_of(const RouteArgs& a, const float* logits, float* wish) {
  if (a.scores != Scores::softmax_of_chosen && (a.bias || a.groups)) {
    if (a.scores == Scores::softmax) softmax(logits, a.experts, wish);
    if (a.scores == Scores::sigmoid)
      map_and_sum(logits, a.experts, wish, [](vf x) FM_INLINE_LAMBDA { return sigmoid(x); });
  } else {
    map_and_sum(logits, a.experts, wish, [](vf x) FM_INLINE_LAMBDA { return x; });
  }
  for_vectors(0, a.experts, [&](int64_t i, int lanes) {
    vf x = load_lanes(wish + i, lanes);
    if (a.bias) x += load_lanes(a.bias + i, lanes);
    store_lanes(wish + i, select(x == x, x, broadcast(__builtin_inff())), lanes);
  });
}

// Leaves the wishes of a row's best groups alone; `of_groups` is memory for a value of each. A group counts as the sum of its best.
FM_INLINE void keep_best_groups(const RouteArgs& a, float* wish, float* of_groups) {
  const int64_t size = a.experts / a.groups, each = a.k / a.group_topk;
  for (int64_t g = 0; g < a.groups; ++g) {
    Ranked best = next_best(wish + g * size, size, {});
    of_groups[g] = best.value;
    for (int64_t i = 1; i < each; ++i)
      of_groups[g] += (best = next_best(wish + g * size, size, best)).value;
  }
  Ranked last;  // of the groups that are kept
  for (int64_t i = 0; i < a.group_topk; ++i) last = next_best(of_groups, a.groups, last);
  for (int64_t g = 0; g < a.groups; ++g) {
    const float value = of_groups[g], place = static_cast<float>(g);
    if (value > last.value || (value == last.value && place <= last.place)) continue;
    for (int64_t i = g * size; i < (g + 1) * size; ++i) wish[i] = -__builtin_inff();
  }
}

// The scores (k) of a row's experts, whose logits are in `own`, before they are scaled.
FM_INLINE void scores_of(const RouteArgs& a, const float* logits, float* own) {
  if (a.scores == Scores::softmax_of_chosen) return softmax(own, a.k, own);
  if (a.scores == Scores::sigmoid) {
    const float total =
        map_and_sum(own, a.k, own, [](vf x) FM_INLINE_LAMBDA { return sigmoid(x); });
    if (a.k > 1) scale(own, a.k, 1 / (total + a.normalizer));
    return;
  }
  const float top = largest(logits, a.experts);
  vf total = {};
  for_vectors(0, a.experts, [&](int64_t i, int lanes) {
    total += first_of(exp(load_lanes(logits + i, lanes) - top), lanes);
  });
  map_and_sum(own, a.k, own, [&](vf x) FM_INLINE_LAMBDA { return exp(x - top); });
  scale(own, a.k, 1 / hsum(total));
}

// Memory of a thread for a row: a wish of each expert, and a value of each group or chosen expert.
FM_INLINE float* row_memory(const RouteArgs& a) {
  return static_cast<float*>(scratch(0, 3 * a.experts * sizeof(float)));
}

static void route(const RouteArgs& a, float* scores, int64_t* chosen) {
  parallel_for(a.rows, row_grain(a.experts), [&](int64_t begin, int64_t end) {
    float* wish = row_memory(a);
    for (int64_t row = begin; row < end; ++row) {
      const float* logits = a.logits + row * a.experts;
      float* own = scores + row * a.k;
      wishes_of(a, logits, wish);
      if (a.groups) keep_best_groups(a, wish, wish + a.experts);
      Ranked best;
      for (int64_t j = 0; j < a.k; ++j) {
        best = next_best(wish, a.experts, best);
        chosen[row * a.k + j] = static_cast<int64_t>(best.place);
        own[j] = logits[chosen[row * a.k + j]];
      }
      scores_of(a, logits, own);
      scale(own, a.k, a.scaling);
    }
  });
}

// x[i] * y[i] + ...
FM_INLINE float dot(const float* x, const float* y, int64_t n) {
  vf total = {};
  for_vectors(0, n, [&](int64_t i, int lanes) {
    total += load_lanes(x + i, lanes) * load_lanes(y + i, lanes);
  });
  return hsum(total);
}

// With p the scores before they are scaled and g the gradients of these: dlogits = p (g - p . g), where g is 0 of experts that were
// not chosen, for a softmax over all or over the chosen ones. Of sigmoids s with p = s / S it is s (1 - s) (g - p . g) / S.
FM_INLINE void route_backward_row(const RouteArgs& a, const float* dscores, const float* kept,
                                  const int64_t* chosen, float* dlogits, float* p, float* g) {
  for_vectors(0, a.k, [&](int64_t i, int lanes) {
    store_lanes(g + i, load_lanes(dscores + i, lanes) * a.scaling, lanes);
  });
  if (a.scores == Scores::softmax) {
    softmax(kept, a.experts, dlogits);
    for (int64_t j = 0; j < a.k; ++j) p[j] = dlogits[chosen[j]];
    scale(dlogits, a.experts, -dot(p, g, a.k));
    for (int64_t j = 0; j < a.k; ++j) dlogits[chosen[j]] += p[j] * g[j];
    return;
  }
  clear(dlogits, a.experts);
  float total = 1, mean = 0;
  if (a.scores == Scores::sigmoid) {
    for (int64_t j = 0; j < a.k; ++j) p[j] = kept[chosen[j]];
    const float sum = map_and_sum(p, a.k, p, [](vf x) FM_INLINE_LAMBDA { return sigmoid(x); });
    if (a.k > 1) total = 1 / (sum + a.normalizer), mean = dot(p, g, a.k) * total;
  } else {
    const float inverse = 1 / a.scaling;
    for_vectors(0, a.k, [&](int64_t i, int lanes) {
      store_lanes(p + i, load_lanes(kept + i, lanes) * inverse, lanes);
    });
    mean = dot(p, g, a.k);
  }
  for (int64_t j = 0; j < a.k; ++j) {
    const float slope = a.scores == Scores::sigmoid ? p[j] * (1 - p[j]) * total : p[j];
    dlogits[chosen[j]] = slope * (g[j] - mean);
  }
}

static void route_backward(const RouteArgs& a, const float* dscores, const float* kept,
                           const int64_t* chosen, float* dlogits) {
  const int64_t width = a.scores == Scores::softmax_of_chosen ? a.k : a.experts;
  parallel_for(a.rows, row_grain(a.experts), [&](int64_t begin, int64_t end) {
    float* memory = row_memory(a);
    for (int64_t row = begin; row < end; ++row) {
      route_backward_row(a, dscores + row * a.k, kept + row * width, chosen + row * a.k,
                         dlogits + row * a.experts, memory, memory + a.experts);
    }
  });
}

// A counting sort: threads count the numbers of parts of the pairs, and then know where each part's pairs begin.
static void sort_pairs(const int64_t* numbers, int64_t n, int64_t groups, int64_t* counts,
                       int64_t* pairs, int64_t* places) {
  const int64_t chunks = max(1, min(num_threads(), n / Tuning::GRAIN)), width = groups + 1;
  int64_t* starts = static_cast<int64_t*>(scratch(0, chunks * width * sizeof(int64_t)));
  const auto for_chunks = [&](const auto& body) {
    parallel_for(chunks, 1, [&](int64_t begin, int64_t end) {
      for (int64_t c = begin; c < end; ++c)
        body(starts + c * width, n * c / chunks, n * (c + 1) / chunks);
    });
  };
  for_chunks([&](int64_t* count, int64_t begin, int64_t end) {
    for (int64_t g = 0; g < width; ++g) count[g] = 0;
    for (int64_t i = begin; i < end; ++i) ++count[numbers[i]];
  });
  int64_t start = 0;
  for (int64_t g = 0; g < width; ++g) {
    const int64_t first = start;
    for (int64_t c = 0; c < chunks; ++c) {
      const int64_t count = starts[c * width + g];
      starts[c * width + g] = start, start += count;
    }
    if (g < groups) counts[g] = start - first;
  }
  const int64_t dropped =
      starts[groups];  // where those of no group would begin: the number of all others
  for_chunks([&](int64_t* next, int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const bool kept = numbers[i] < groups;
      places[i] = kept ? next[numbers[i]]++ : dropped;
      if (kept) pairs[places[i]] = i;
    }
  });
}

static void permute(const PermuteArgs& a, const int64_t* pairs, const void* x, void* out) {
  with_dtype(a.dtype, [&](auto element) {
    using T = decltype(element);
    parallel_for(a.n, row_grain(a.cols), [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const T* from = static_cast<const T*>(x) + pairs[i] / a.k * a.cols;
        T* to = static_cast<T*>(out) + i * a.cols;
        if (i + ROWS_AHEAD < end)
          prefetch(static_cast<const T*>(x) + pairs[i + ROWS_AHEAD] / a.k * a.cols);
        for_vectors(0, a.cols, [&](int64_t c, int lanes) {
          store_exact(to + c, load_lanes(from + c, lanes), lanes);
        });
      }
    });
  });
}

static void unpermute(const PermuteArgs& a, const int64_t* places, const void* x, void* out) {
  with_dtype(a.dtype, [&](auto element) {
    using T = decltype(element);
    const bool ahead = a.k * a.cols * int64_t(sizeof(T)) <=
                       Tuning::UNKNOWN_L1;  // more would push out what is read now (measured)
    parallel_for(a.rows, row_grain(a.cols), [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        T* to = static_cast<T*>(out) + row * a.cols;
        for_vector_groups<CHAINS>(
            0, a.cols, [&](auto count, int64_t c, int lanes) FM_INLINE_LAMBDA {
              constexpr int N = decltype(count)::value;
              vf sum[N] = {};
              for (int64_t j = row * a.k; j < (row + 1) * a.k; ++j) {
                if (places[j] >= a.n) continue;
                const T* from = static_cast<const T*>(x) + places[j] * a.cols + c;
                if (ahead && row + 1 < end) {  // the same columns of the next token's rows
                  const char* next = reinterpret_cast<const char*>(
                      static_cast<const T*>(x) + min(places[j + a.k], a.n) * a.cols + c);
                  for (int64_t b = 0; b < N * VL * int64_t(sizeof(T)); b += Tuning::LINE)
                    prefetch_l2(next + b);
                }
#pragma GCC unroll 8
                for (int v = 0; v < N; ++v) sum[v] += load_lanes(from + v * VL, lanes);
              }
#pragma GCC unroll 8
              for (int v = 0; v < N; ++v) store_lanes(to + c + v * VL, sum[v], lanes);
            });
      }
    });
  });
}

}  // namespace fm::FM_TARGET
