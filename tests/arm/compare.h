// What the static checkers share: numbers from a hash, a comparison of targets with the scalar reference, the main function.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <initializer_list>
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

// The values of several tensors one after another.
inline Floats joined(std::initializer_list<Floats> parts) {
  Floats out;
  for (const Floats& part : parts) out.insert(out.end(), part.begin(), part.end());
  return out;
}

inline void close(const char* what, const Floats& got, const Floats& want, float relative,
                  float absolute) {
  for (size_t i = 0; i < want.size(); ++i) {
    if (std::fabs(got[i] - want[i]) <= absolute + relative * std::fabs(want[i])) continue;
    if (std::isnan(want[i]) ? std::isnan(got[i]) : got[i] == want[i]) continue;
    std::printf("%s: %s[%zu of %zu] is %.9g, the reference %.9g\n", active(), what, i, want.size(),
                got[i], want[i]);
    std::exit(1);
  }
}

// The targets under test, set by compare_targets().
inline std::vector<std::string>& compared() {
  static std::vector<std::string> names;
  return names;
}

// Runs f once for the reference, then for every target, and compares what they return.
template <class F>
inline void compare(const char* what, float relative, float absolute, const F& f) {
  use("reference");
  const Floats want = f();
  for (const std::string& target : compared()) {
    use(target);
    close(what, f(), want, relative, absolute);
  }
}

// The main function of a checker: `check` compares every target that this CPU can run and that is not an argument. One line per
// target says that it agrees, or why it is not run.
inline int compare_targets(int argc, char** argv, void (*check)()) {
  const std::vector<std::string> left_out(argv + 1, argv + argc);
  for (const TargetInfo& target : targets()) {
    if (!target.runnable)
      std::printf("%s not run: %s\n", target.name.c_str(), target.reason.c_str());
    else if (target.name != "reference" &&
             std::find(left_out.begin(), left_out.end(), target.name) == left_out.end())
      compared().push_back(target.name);
  }
  check();
  for (const std::string& target : compared())
    std::printf("%s agrees with the reference\n", target.c_str());
  return 0;
}
