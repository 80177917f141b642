// Limits of the largest magnitude of numbers that share a scale in eight bits, as the bits of a float.
#pragma once
#include <cstdint>

namespace fm::FM_TARGET {

constexpr uint32_t INFINITY_BITS = 0x7f800000u;  // from here on, also for NaN, the scale is NaN
constexpr uint32_t SMALLEST_BITS =
    0x0d800000u;  // 2^-100: below it the numbers are zeros with scale 0

}  // namespace fm::FM_TARGET
