// What the static checkers share: numbers from a hash, and a comparison of one target with the scalar reference.
#pragma once
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "dispatch.h"

using namespace fm;
using Floats = std::vector<float>;

inline float random_float(uint32_t i) {
  i = (i + 1) * 2654435761u;
  i = (i ^ (i >> 15)) * 2246822519u;
  return static_cast<float>(static_cast<int32_t>(i ^ (i >> 13))) * 0x1p-30f;
}

inline Floats random_floats(int64_t n, uint32_t seed) {
  Floats values(n);
  for (int64_t i = 0; i < n; ++i) values[i] = random_float(static_cast<uint32_t>(i) + seed * 7919u);
  return values;
}

inline void close(const char* what, const Floats& got, const Floats& want, float relative, float absolute) {
  for (size_t i = 0; i < want.size(); ++i) {
    if (std::fabs(got[i] - want[i]) <= absolute + relative * std::fabs(want[i])) continue;
    if (std::isnan(want[i]) ? std::isnan(got[i]) : got[i] == want[i]) continue;
    std::printf("%s: %s[%zu of %zu] is %.9g, the reference %.9g\n", active(), what, i, want.size(), got[i], want[i]);
    std::exit(1);
  }
}

// Runs f for the target and for the reference, and compares what the two return.
template <class F>
inline void compare(const std::string& target, const char* what, float relative, float absolute, const F& f) {
  use("reference");
  const Floats want = f();
  use(target);
  close(what, f(), want, relative, absolute);
}
