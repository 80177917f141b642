// The table of scalar references, offered as the target "reference". The functions are in <family>_reference.cc: one
// plain loop each, written from the formula, single-threaded, double inside where that costs nothing. Compiled with
// -ffp-contract=off.
#include "reference.h"

#include <cmath>
#include <cstring>

namespace fm::reference {

extern const KernelTable kernel_table;
const KernelTable kernel_table = {
#define FM_KERNEL(name, family, sizes, result, parameters, operands, flops, bytes) &name,
#include "kernels.inc"
};

namespace {

uint32_t bits_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

float float_of(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

float from_half(uint16_t h) {
  const int exponent = h >> 10 & 31, fraction = h & 1023;
  const float sign = h & 0x8000 ? -1.0f : 1.0f;
  if (exponent == 31) return fraction ? float_of(0x7fc00000u) : sign * HUGE_VALF;
  // Not by ldexp, which takes an emulator longer than the product that the number goes into.
  return sign * (exponent ? float_of(static_cast<uint32_t>((exponent + 112) << 23 | fraction << 13))
                          : 0x1p-24f * fraction);
}

// Of normal numbers.
int exponent_of(double value) {
  uint64_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return static_cast<int>(bits >> 52 & 2047) - 1023;
}

double power_of_two(int exponent) {
  const uint64_t bits = static_cast<uint64_t>(exponent + 1023) << 52;
  double power;
  std::memcpy(&power, &bits, sizeof power);
  return power;
}

uint16_t to_half(double value) {
  const uint16_t sign = std::signbit(value) ? 0x8000 : 0;
  if (std::isnan(value)) return sign | 0x7e00;
  const double size = std::fabs(value);
  if (size >= 65520) return sign | 0x7c00;
  int exponent =
      -14;  // of the leading bit; binary16 has 10 bits below it, denormals share the smallest exponent
  if (size >= 0x1p-14) exponent = exponent_of(size);
  const int units = static_cast<int>(std::nearbyint(size * power_of_two(10 - exponent)));
  return sign | static_cast<uint16_t>(units + (exponent + 14) * 1024);
}

}  // namespace

float get(const void* x, DType dtype, int64_t i) {
  if (dtype == DType::f32) return static_cast<const float*>(x)[i];
  const uint16_t bits = static_cast<const uint16_t*>(x)[i];
  return dtype == DType::bf16 ? float_of(uint32_t{bits} << 16) : from_half(bits);
}

// In double the product is exact, and the sum rounded to 53 bits is never taken for a tie of 11 bits that it is not: products
// end at 2^-48, and a term that reaches 53 bits above that is too far from the small product's end.
float fma_half(float a, float b, float sum) { return from_half(to_half(double(a) * b + sum)); }

void put(void* x, DType dtype, int64_t i, float value) {
  if (dtype == DType::f32) {
    static_cast<float*>(x)[i] = value;
    return;
  }
  uint16_t& bits = static_cast<uint16_t*>(x)[i];
  if (dtype == DType::f16) {
    bits = to_half(value);
    return;
  }
  const uint32_t word = bits_of(value);
  bits =
      std::isnan(value) ? 0x7fc0 : static_cast<uint16_t>((word + 0x7fff + (word >> 16 & 1)) >> 16);
}

}  // namespace fm::reference
