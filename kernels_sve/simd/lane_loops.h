// Hooks of simd.h for the first n lanes of narrow numbers, in loops over lanes. Included by the targets without instructions for them.
#pragma once

// Of load_n and store_n of such numbers, whose loops and conversions a kernel needs at the end of each of its rows.
#ifndef FM_NARROW_LANES
#define FM_NARROW_LANES FM_ONCE
#endif

namespace fm::FM_TARGET {

FM_INLINE vu load_u16_n(const uint16_t* p, int n) {
  vu v = {};
  for (int i = 0; i < n; ++i) v[i] = p[i];
  return v;
}
FM_INLINE void store_u16_n(uint16_t* p, vu v, int n) {
  for (int i = 0; i < n; ++i) p[i] = static_cast<uint16_t>(v[i]);
}
FM_INLINE vi load_i8_n(const int8_t* p, int n) {
  vi v = {};
  for (int i = 0; i < n; ++i) v[i] = p[i];
  return v;
}
FM_INLINE void store_i8_n(int8_t* p, vi v, int n) {
  for (int i = 0; i < n; ++i) p[i] = static_cast<int8_t>(v[i]);
}

}  // namespace fm::FM_TARGET
