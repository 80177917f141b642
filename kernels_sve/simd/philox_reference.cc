// Scalar references of philox.h, written from philox_layout.h's definition element by element.
#include <cmath>
#include <cstring>

#include "simd/philox_layout.h"
#include "reference.h"

namespace fm::reference {

void philox4x32(const uint32_t* counter, uint32_t* out, int64_t calls, uint32_t key0,
                uint32_t key1) {
  for (int64_t call = 0; call < calls; ++call) {
    uint32_t c[4], k0 = key0, k1 = key1;
    std::memcpy(c, counter + 4 * call, sizeof c);
    for (int round = 0; round < 10; ++round, k0 += PHILOX_W0, k1 += PHILOX_W1) {
      const uint64_t a = uint64_t{c[0]} * PHILOX_M0, b = uint64_t{c[2]} * PHILOX_M1;
      const uint32_t next[4] = {uint32_t(b >> 32) ^ c[1] ^ k0, uint32_t(b),
                                uint32_t(a >> 32) ^ c[3] ^ k1, uint32_t(a)};
      std::memcpy(c, next, sizeof c);
    }
    std::memcpy(out + 4 * call, c, sizeof c);
  }
}

namespace {

// The four words of the call that serves a column; *word is the column's own.
void call_of(PhiloxKey key, uint64_t sample, uint32_t row, int64_t column, uint32_t words[4],
             int* word) {
  *word = static_cast<int>(column % PHILOX_BLOCK / PHILOX_CALLS);
  const uint32_t call =
      static_cast<uint32_t>(column / PHILOX_BLOCK * PHILOX_CALLS + column % PHILOX_CALLS);
  const uint32_t counter[4] = {call, row, static_cast<uint32_t>(sample),
                               static_cast<uint32_t>(sample >> 32)};
  philox4x32(counter, words, 1, key.k0, key.k1);
}

}  // namespace

void philox_normal(float* out, const NormalArgs& a) {
  const double PI = 3.14159265358979323846;
  const PhiloxKey key = philox_key(a.seed, a.stream);
  for (int64_t r = 0; r < a.rows; ++r) {
    for (int64_t c = 0; c < a.cols; ++c) {
      uint32_t words[4];
      int word;
      call_of(key, 0, static_cast<uint32_t>(a.row0 + r), a.col0 + c, words, &word);
      const double u1 = ((words[word & 2] >> 8) + 0.5) / 16777216,
                   angle = 2 * PI * (words[word | 1] >> 8) / 16777216;
      const double normal =
          std::sqrt(-2 * std::log(u1)) * (word & 1 ? std::sin(angle) : std::cos(angle));
      out[r * a.cols + c] = static_cast<float>(normal * a.std + a.mean);
    }
  }
}

void dropout(const void* x, void* out, DType dtype, const DropoutArgs& a) {
  const PhiloxKey key = philox_key(a.key.seed, a.key.stream);
  const float scale = 1.0f / (1.0f - a.p);
  int64_t i = 0;
  for (int64_t o = 0; o < a.outer; ++o)
    for (int64_t b = 0; b < a.samples; ++b)
      for (int64_t n = 0; n < a.inner; ++n)
        for (int64_t c = 0; c < a.cols; ++c, ++i) {
          uint32_t words[4];
          int word;
          call_of(key, a.key.first_sample + b, static_cast<uint32_t>(a.key.row0 + o * a.inner + n),
                  a.key.col0 + c, words, &word);
          put(out, dtype, i,
              words[word] >= dropout_threshold(a.p) ? get(x, dtype, i) * scale : 0.0f);
        }
}

}  // namespace fm::reference
