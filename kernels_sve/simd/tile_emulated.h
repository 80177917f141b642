// The hooks of tiles.h in plain C++, for tests on a CPU without AMX (target amx_emulated): the numbers of TDPBF16PS and TDPBSSD as Intel's
// Software Developer's Manual (volume 2) defines it, denormals and the order of its sums included. A use of tiles between no
// tiles_begin() and tiles_end() ends the process, as it does on the CPU.
#pragma once

namespace fm::FM_TARGET {

static thread_local bool tiles_in_use;
static thread_local vu tile_rows[8][16];

FM_INLINE void tiles_begin() {
  tiles_in_use = true;
  __builtin_memset(tile_rows, 0, sizeof tile_rows);
}
FM_INLINE void tiles_end() { tiles_in_use = false; }

// Row r of a tile.
FM_INLINE vu& tile_row(int tile, int r) {
  if (!tiles_in_use) __builtin_trap();
  return tile_rows[tile][r];
}

template <int TILE>
FM_INLINE void tile_zero() {
  for (int r = 0; r < 16; ++r) tile_row(TILE, r) = vu{};
}
template <int TILE>
FM_INLINE void tile_load(const void* p, int64_t stride) {
  for (int r = 0; r < 16; ++r)
    __builtin_memcpy(&tile_row(TILE, r), static_cast<const char*>(p) + r * stride, 64);
}
template <int TILE>
FM_INLINE void tile_store(void* p, int64_t stride) {
  for (int r = 0; r < 16; ++r)
    __builtin_memcpy(static_cast<char*>(p) + r * stride, &tile_row(TILE, r), 64);
}

// Denormals count as zero, in operands and in results.
FM_INLINE vf normal(vf v) { return abs(v) < 0x1p-126f ? (vf)((vu)v & 0x80000000u) : v; }
FM_INLINE vf low_half(vu words) { return normal((vf)(words << 16)); }
FM_INLINE vf high_half(vu words) { return normal((vf)(words & 0xffff0000u)); }

static __attribute__((noinline)) void emulated_dot(int sum, int a, int b) {
  vf low[16], high[16];
  for (int k = 0; k < 16; ++k)
    low[k] = low_half(tile_row(b, k)), high[k] = high_half(tile_row(b, k));
  for (int r = 0; r < 16; ++r) {
    vf even = {}, odd = {};
    for (int k = 0; k < 16; ++k) {
      const vu word = broadcast(tile_row(a, r)[k]);
      even = normal(fma(low_half(word), low[k], even));
      odd = normal(fma(high_half(word), high[k], odd));
    }
    tile_row(sum, r) = (vu)normal(normal((vf)tile_row(sum, r)) + normal(even + odd));
  }
}
// TDPBSSD.
static __attribute__((noinline)) void emulated_byte_dot(int sum, int a, int b) {
  for (int r = 0; r < 16; ++r) {
    vi total = (vi)tile_row(sum, r);
    for (int k = 0; k < 16; ++k) {
      const vu word = broadcast(tile_row(a, r)[k]);
      for (int shift = 0; shift < 32; shift += 8)
        total += ((vi)(word << shift) >> 24) * ((vi)(tile_row(b, k) << shift) >> 24);
    }
    tile_row(sum, r) = (vu)total;
  }
}
template <bool INT8, int SUM, int A, int B>
FM_INLINE void tile_dot() {
  INT8 ? emulated_byte_dot(SUM, A, B) : emulated_dot(SUM, A, B);
}

}  // namespace fm::FM_TARGET
