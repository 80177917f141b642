// What scalar references share: element i of a tensor of any floating dtype as a float. Each kernel's reference has its
// row's signature.
#pragma once
#include "table.h"

namespace fm::reference {

#define FM_KERNEL(name, family, sizes, result, parameters, operands, flops, bytes) \
  result name parameters;
#include "kernels.inc"

float get(const void* x, DType dtype, int64_t i);
// a b + sum rounded once to binary16; the three are binary16 numbers.
float fma_half(float a, float b, float sum);
// An activation and its derivative; of none, x.
double activation(Activation f, double x);
double activation_slope(Activation f, double x);
// Number `column` of row `row` of a Q8 weight, whose value is at `value`.
float q8_element(const int8_t* value, const Q8Scales& scales, int64_t row, int64_t column);
// A value as a number of this type.
float rounded(float value, DType dtype);
// Rounds to nearest even; a NaN stays a NaN.
void put(void* x, DType dtype, int64_t i, float value);

}  // namespace fm::reference
