// What the k-loop of a micro-kernel fetches beside its work: the rows that its tile writes and reads at the end, and what is
// packed next. All of it at once, before the loop, would keep the loop's own loads waiting behind it for hundreds of cycles: on Zen 5
// products of 124M were 2 per cent slower, and 2 more while packing waited for memory (measured).
#pragma once
#include "simd/simd.h"

namespace fm::FM_TARGET {

// The operand that is packed next, fetched into L2: four runs of bytes in each turn.
struct Source {
  static constexpr int64_t RUN = Tuning::FETCH_RUN;
  const char* at = nullptr;
  int64_t count = 0;  // turns that are left
  int64_t second = 0, third = 0,
          step = 0;  // bytes from a turn's first run to those and to the next turn's first
  int64_t turns = 0, left = 0;  // turns of a row, and what is left of this row's
  int64_t row = 0;              // bytes from the end of a row's last turn to the next row

  // So many rows of `bytes`, `stride` apart: in a turn four short ones, two, or a part of one.
  static Source of_rows(const void* first, int64_t bytes, int64_t stride, int64_t rows) {
    const char* at = static_cast<const char*>(first);
    if (bytes <= RUN) return {at, (rows + 3) / 4, stride, 2 * stride, 4 * stride, 1, 1, 0};
    if (bytes <= 2 * RUN) return {at, (rows + 1) / 2, RUN, stride, 2 * stride, 1, 1, 0};
    const int64_t turns = (bytes + 4 * RUN - 1) / (4 * RUN);
    return {at, rows * turns, RUN, 2 * RUN, 4 * RUN, turns, turns, stride - turns * 4 * RUN};
  }

  inline __attribute__((always_inline)) void fetch() {
    if (!count) return;
    --count;
#pragma GCC unroll 8
    for (int64_t i = 0; i < RUN; i += Tuning::LINE) {
      prefetch_l2(at + i), prefetch_l2(at + second + i);
      prefetch_l2(at + third + i), prefetch_l2(at + third + second + i);
    }
    at += step;
    if (--left == 0) at += row, left = turns;
  }
};

// Rows of a matrix below a tile, one in each turn: its first and its last line, of which a tile has no more.
struct TileRows {
  char* at = nullptr;         // nothing is fetched when null
  int64_t row = 0, last = 0;  // bytes to the next row, and to a row's last byte

  inline __attribute__((always_inline)) void fetch() {
    if (!at) return;
    prefetch_write(at), prefetch_write(at + last);
    at += row;
  }
};

template <class T>
FM_INLINE TileRows tile_rows_at(T* first, int64_t row, int columns) {
  return {reinterpret_cast<char*>(first), row * int64_t(sizeof(T)),
          columns * int64_t(sizeof(T)) - 1};
}

// A micro-kernel calls begin(), then turn() before every FETCH_STEPS steps of k.
struct Fetches {
  static constexpr int64_t STEPS = Tuning::FETCH_STEPS;
  TileRows results = {}, beside = {};  // beside: another matrix of the epilogue
  Source source = {};
  int64_t rows = 0;  // that are left

  inline __attribute__((always_inline)) void begin(int64_t tile_rows, int64_t words) {
    for (rows = tile_rows; rows * STEPS > words + STEPS - 1; --rows)
      results.fetch(), beside.fetch();  // more than turns
  }

  inline __attribute__((always_inline)) void turn() {
    if (rows > 0) results.fetch(), beside.fetch(), --rows;
    source.fetch();
  }
};

}  // namespace fm::FM_TARGET
