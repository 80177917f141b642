// How exp_avg_sq is rounded to BF16: the definition that the vector kernel and the reference share.
//
// The moving average of squared gradients changes by a share of at most 1 - beta2 in a step, 0.001 at beta2 = 0.999, and a BF16
// number is a multiple of 1/256 to 1/128 of itself: rounded to nearest it would never fall (docs/numerics.md has figures). So it
// is rounded up with the probability of what is cut off, a word of 16 bits added to the 16 bits below the result's last. The word
// is a hash of the element's number in the GLOBAL tensor with the key of seed, tensor and step: the same in every parallel layout
// and for every thread count, in a resumed run, and in the copies of a tensor that several ranks hold.
#pragma once
#include "simd/rounding_word.h"

namespace fm {

template <class U>
static inline __attribute__((always_inline)) U rounding_word(U element, PhiloxKey key) {
  return rounding_word(element, key.k0, key.k1);
}

}  // namespace fm
