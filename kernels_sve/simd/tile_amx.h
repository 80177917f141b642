// The tile instructions of AMX, the only place that has them: hooks of tiles.h, which includes this. In assembly, because the
// compilers' own intrinsics do not say that a load reads memory; each of the statements orders memory accesses around it.
#pragma once

namespace fm::FM_TARGET {

struct alignas(64) TileConfiguration {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

FM_INLINE void tiles_begin() {
  const TileConfiguration all;
  __asm__ volatile("ldtilecfg %0" ::"m"(all));
}
FM_INLINE void tiles_end() { __asm__ volatile("tilerelease"); }

template <int TILE>
FM_INLINE void tile_zero() {
  __asm__ volatile("tilezero %%tmm%c0" ::"i"(TILE));
}
template <int TILE>
FM_INLINE void tile_load(const void* p, int64_t stride) {
  __asm__ volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(p), "r"(stride), "i"(TILE) : "memory");
}
template <int TILE>
FM_INLINE void tile_store(void* p, int64_t stride) {
  __asm__ volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(p), "r"(stride), "i"(TILE) : "memory");
}
template <bool INT8, int SUM, int A, int B>
FM_INLINE void tile_dot() {
  if (INT8)
    __asm__ volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(SUM), "i"(A), "i"(B));
  else
    __asm__ volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(SUM), "i"(A), "i"(B));
}

}  // namespace fm::FM_TARGET
