// Which random word belongs to which element: the definition that the vector kernels and the references share.
//
// Philox4x32-10 (Salmon et al., SC 2011) turns a 128-bit counter and a 64-bit key into four 32-bit words. An element
// has a sample (64 bits), a row and a column, each counted in the GLOBAL tensor, so its word is the same in every
// parallel layout and for every thread count. Columns are taken in blocks of 64, and a block costs 16 calls:
//
//   column = 64 * block + 16 * word + call
//   counter = (16 * block + call, row, sample low, sample high)
//   key = philox_key(seed, stream)
//
// So the words number w of consecutive calls are the words of consecutive columns, and vectors of 4, 8 or 16 lanes need
// no shuffle.
#pragma once
#include <cstdint>

namespace fm {

constexpr int PHILOX_BLOCK = 64;  // columns that share 16 calls
constexpr int PHILOX_CALLS = 16;
constexpr uint32_t PHILOX_M0 = 0xD2511F53u, PHILOX_M1 = 0xCD9E8D57u, PHILOX_W0 = 0x9E3779B9u,
                   PHILOX_W1 = 0xBB67AE85u;

struct PhiloxKey {
  uint32_t k0, k1;
};

// SplitMix64's finaliser (Steele, Lea and Flood, OOPSLA 2014) over both, so that neighbouring seeds and streams give
// unrelated keys.
static inline PhiloxKey philox_key(uint64_t seed, uint64_t stream) {
  uint64_t z = seed;
  for (int round = 0; round < 2; ++round) {
    z += 0x9E3779B97F4A7C15u;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    z ^= z >> 31;
    if (round == 0)
      z ^=
          stream * 0xD1342543DE82EF95u + 0x2545F4914F6CDD1Du;  // odd factor: no two streams collide
  }
  return {static_cast<uint32_t>(z), static_cast<uint32_t>(z >> 32)};
}

// An element is dropped when its word is below this.
static inline uint32_t dropout_threshold(float p) {
  const double threshold = static_cast<double>(p) * 4294967296.0;
  return threshold >= 4294967295.0 ? 4294967295u : static_cast<uint32_t>(threshold);
}

}  // namespace fm
