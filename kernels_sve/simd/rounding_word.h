// Random words for rounding a number up or down so that its mean is right, the same in the vector kernels and the references.
#pragma once
#include "simd/philox_layout.h"

namespace fm {

// Number of an element modulo 2^32 -> word in [0, 2^16). U: uint32_t or a vector of them. The finaliser of MurmurHash3 (Appleby, in
// the public domain), with a key before each product.
template <class U, class K>
static inline __attribute__((always_inline)) U rounding_word(U element, K key0, uint32_t key1) {
  U h = element ^ key0;
  h = (h ^ (h >> 16)) * 0x85ebca6bu;
  h = (h ^ (h >> 13) ^ key1) * 0xc2b2ae35u;
  return h >> 16;
}

// An element of an INT8 operand, in units of 2^-16 of its row's unit, as an integer up to INT8_MOST. I, U: int32_t and uint32_t, or
// vectors of them. element: its number in the operand; factor_bits: those of the factor that its row is multiplied by.
constexpr int32_t INT8_UNITS = 1 << 16, INT8_MOST = 127;
template <class I, class U>
static inline __attribute__((always_inline)) I round_int8(I units, U element, U factor_bits) {
  constexpr int32_t MOST = INT8_MOST * INT8_UNITS;
  units = units > MOST ? MOST : units;
  return (units + (I)rounding_word(element, factor_bits, 0u)) >> 16;
}

}  // namespace fm
