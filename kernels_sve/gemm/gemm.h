// GEMM: the loops around the micro-kernel, after Goto and van de Geijn (ACM TOMS 34(3), 2008).
//
//   threads: a grid over C, each thread alone on its rows and columns (of several matmuls in one call: gemm_grouped.h)
//     jc: nc columns | pc: kc of k
//       ic: mc rows | B packed to [kc][NR] panels, a few ahead (or before: pack_weight)
//       jr: one panel of B, in L1 | ir: one panel of A, from L2: micro-kernel
//         with the first panel of B: A packed to [kc][MR] panels, one by one, while the micro-kernel fetches the next one's rows
//
// A value of C is a sum over k in order within blocks of kc, the blocks added in order: the same bits for any grid of
// threads. Partial sums lie in C when it is float32 and holds nothing that the epilogue reads, else in scratch memory.
// Reference: gemm_reference.cc. Tested by tests/kernels/test_gemm.py, timed by python -m benchmarks gemm.
#pragma once
#include "gemm/gemm_epilogue.h"
#include "gemm/gemm_q8.h"

namespace fm::FM_TARGET {

FM_INLINE int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Part `index` of `parts` of [0, n), its bounds multiples of unit.
FM_INLINE Span part(int64_t n, int64_t unit, int index, int parts) {
  const int64_t units = ceil_div(n, unit);
  return {min(n, units * index / parts * unit), min(n, units * (index + 1) / parts * unit)};
}

// A result in half precision keeps partial sums beside C, so pairs take longer blocks of k, in L2, and often need no
// such sums.
template <class Words>
FM_INLINE GemmBlocks blocks_of(bool adds) {
  GemmBlocks blocks = gemm_blocks(Words::TILE_ROWS, NR, Words::STEP, adds, Words::TILES);
  blocks.mc *= Words::WIDE, blocks.nc *= Words::WIDE;
  return blocks;
}

// Blocks of k of about equal size: a function of k, the chunk and the machine's caches alone. Whole chunks of FP16 sums.
template <class Words>
FM_INLINE int64_t block_depth(int64_t k, int64_t fp16_chunk, bool adds) {
  const int64_t unit = fp16_chunk ? fp16_chunk : max(8, Words::STEP * Words::BESIDE);
  const int64_t max_depth =
      max(blocks_of<Words>(adds).kc * Words::STEP / Words::PARTS / unit, 1) * unit;
  const int64_t count = ceil_div(k, max_depth);
  return count ? ceil_div(ceil_div(k, count), unit) * unit : 0;
}

template <class Words, class T>
struct Gemm {
  using Word = typename Words::Word;
  static constexpr int ROWS = Words::TILE_ROWS, ROW_STEP = Words::ROW_STEP;
  static constexpr int COLUMNS = NR * Words::WIDE,
                       A_ROW = ROWS / Words::WIDE;  // of a tile; of A's panel, in 32-bit words
  static constexpr int64_t GROUP =
      PACK_PANELS *
      COLUMNS;  // columns of B that are packed at a time, or GROUPS_OF_FEW times as many
  static constexpr int64_t SHARED_UNIT = 64;  // rows or columns: whole vectors of any element
  const GemmArgs& g;
  GemmBlocks blocks;
  int64_t depth;  // of a block of k
  bool
      few;  // steps of k: a row of tiles then goes over a group's columns, so that C is read and written in long pieces
  int64_t group;    // GROUP, or more where k has few steps
  Span rows, cols;  // of this thread
  bool first_cols;  // the first of the threads with these rows
  bool once;        // B is packed panel by panel
  Source source;    // of the panel of A that is packed next
  float *a_panels, *b_panels, *partial;
  float* next_sums =
      nullptr;  // what the next tile fetches instead of its own sums: those of a later tile
  int64_t partial_row;
  Scales a_scales,
      b_scales;  // of the rows from rows.begin and of the columns from cols.begin on, where Words are INT8
  bool scales_are_shared = false;

  static int64_t words(int64_t depth) { return panel_words<Words>(depth); }

  static bool adds(const GemmArgs& args) {
    return args.accumulate && !args.packed;
  }  // packed blocks are as deep as ever

  static GemmGrid grid_of(const GemmArgs& args, int parts) {
    return gemm_grid(parts, args.m, args.n, ROW_STEP, COLUMNS, args.packed != nullptr);
  }

  // Part `index` of a grid over C.
  Gemm(const GemmArgs& args, const GemmGrid& grid, int index)
      : g(args), blocks(blocks_of<Words>(adds(args))) {
    rows = part(g.m, ROW_STEP, index % grid.rows_parts, grid.rows_parts);
    cols = part(g.n, COLUMNS, index / grid.rows_parts, grid.cols_parts);
    first_cols = index < grid.rows_parts;
    depth = block_depth<Words>(g.k, g.fp16_chunk, adds(g));
    const int64_t sweeps = ceil_div(rows.size() * words(depth),
                                    blocks.mc * blocks.kc);  // shorter blocks of k hold more rows
    blocks.mc = sweeps ? ceil_div(ceil_div(rows.size(), sweeps), ROWS) * ROWS : ROWS;
    a_panels = buffer(0, words(depth) * blocks.mc / Words::WIDE + VL);
    const bool in_place = sums_in_c(), whole = in_place || depth >= g.k;
    const int64_t all_columns = padded_columns(cols.size());
    // One sweep over the rows needs no block of B: its panels are packed, used and overwritten while they are in L2.
    once = !g.packed && sweeps <= 1;
    if (once && whole) blocks.nc = all_columns;
    const int64_t width = min(blocks.nc, all_columns);
    few = words(depth) <= Tuning::FEW_STEPS;
    group = few ? Tuning::GROUPS_OF_FEW * GROUP : GROUP;
    b_panels = g.packed ? nullptr : buffer(1, words(depth) * (once ? group : width) / Words::WIDE);
    partial_row = in_place ? g.c_row : width;
    partial = whole ? nullptr : buffer(2, rows.size() * partial_row);
    if constexpr (Words::INT8) find_places_of_scales(all_columns);
  }

  // Rows beyond this thread's are read with the last panels, so the places of their scales exist.
  void find_places_of_scales(int64_t all_columns) {
    const int64_t row_count = rows.size() + (PACK_PANELS + 1) * ROWS;
    const int64_t column_count = g.packed ? 0 : all_columns + GROUP;
    float* place = buffer(3, 2 * row_count + 3 * column_count);
    __builtin_memset(place, 0, (2 * row_count + 3 * column_count) * sizeof(float));
    a_scales = {place, place + row_count, nullptr, g.random_rounding ? g.a : nullptr};
    place += 2 * row_count;
    if (g.packed) {
      b_scales = packed_scales(const_cast<void*>(g.packed), g.n);
      b_scales.scale += cols.begin, b_scales.correction += cols.begin;
    } else {
      b_scales = {place, place + column_count,
                  reinterpret_cast<int32_t*>(place + 2 * column_count)};
    }
  }

  // The scales and corrections of a packed weight, before its panels.
  static Scales packed_scales(void* packed, int64_t n) {
    float* scale = static_cast<float*>(packed);
    return {scale, nullptr, reinterpret_cast<int32_t*>(scale + padded_columns(n))};
  }
  static int64_t padded_columns(int64_t n) { return ceil_div(n, COLUMNS) * COLUMNS; }
  static int64_t words_of_scales(int64_t n) { return Words::INT8 ? 2 * padded_columns(n) : 0; }

  static float* buffer(int slot, int64_t words) {
    return static_cast<float*>(scratch(slot, words * sizeof(float) + 256));
  }

  bool sums_in_c() const {
    return g.out_dtype == DType::f32 && g.activation_input != g.c && !(Words::INT8 && g.accumulate);
  }

  void run() {
    if (!rows.size() || (!cols.size() && !first_cols)) return;
    if constexpr (Words::INT8) {
      if (!scales_are_shared)
        find_scales_across_k(rows, cols, a_scales, b_scales, first_cols ? g.a_sums : nullptr);
    }
    int64_t jc = cols.begin;
    do {  // once without columns: the sums of A's rows
      const Span columns = {jc, min(cols.end, jc + blocks.nc)};
      int64_t p = 0;
      do {  // once for k == 0: the epilogue of a sum of nothing
        run_block(columns, p, min(g.k, p + depth) - p);
        p += depth;
      } while (p < g.k);
    } while ((jc += blocks.nc) < cols.end);
  }

  void run_block(Span columns, int64_t p, int64_t deep) {
    const float* b = b_panels;
    if (g.packed)
      b = static_cast<const float*>(g.packed) + words_of_scales(g.n) +
          words(p) * (padded_columns(g.n) / Words::WIDE) +
          columns.begin / Words::WIDE * words(deep);
    for (int64_t ic = rows.begin; ic < rows.end; ic += blocks.mc) {
      const Span some = {ic, min(rows.end, ic + blocks.mc)};
      if constexpr (Words::INT8) {
        if (p == 0 && columns.begin == cols.begin && !a_is_across_k(g))
          find_scales_along_k(a_at(some.begin, 0), g.a_row, some.size(), g.k,
                              scales_from(a_scales, some.begin - rows.begin));
      }
      int64_t j = columns.begin;
      do {  // once without columns
        Span some_columns = {j, min(columns.end, j + group)};
        const float* panels = b + (once ? 0 : (j - columns.begin) / Words::WIDE * words(deep));
        if (!g.packed && ic == rows.begin)
          pack_b(some_columns, p, deep, const_cast<float*>(panels));
        if (j == columns.begin) {
          pack_and_run_tiles(some, {j, min(columns.end, j + COLUMNS)}, p, deep, panels);
          some_columns.begin += COLUMNS, panels += words(deep) * NR;
        }
        if (!g.packed && ic == rows.begin) source = source_of_b(columns, j + group, p, deep);
        few ? run_tiles_along_rows(some, some_columns, columns.begin, p, deep, panels)
            : run_tiles(some, some_columns, columns.begin, p, deep, panels);
      } while ((j += group) < columns.end);
    }
  }

  void pack_b(Span some, int64_t p, int64_t deep, float* panels) {
    Scales scales;
    if constexpr (Words::INT8) {
      scales = scales_from(b_scales, some.begin - cols.begin);
      if (p == 0 && b().along_k()) find_b_scales(b(), some, g.k, scales);
    }
    pack_b_panels<Words, COLUMNS>(b(), some, g.n, p, deep, panels, scales);
  }

  // True if the scales of A are found across k: its rows are not contiguous, or their sums are wanted, which only that pass has.
  static bool a_is_across_k(const GemmArgs& args) { return args.a_col != 1 || args.a_sums; }

  static bool b_is_across_k(const GemmArgs& args) { return !args.packed && !b_of(args).along_k(); }

  // Scales of operands that are contiguous along their rows or columns, all at once: memory is read in its order. Others are found
  // for a block of rows or columns before it is packed. a, b: of the first of them. sums: null, or those of all rows of A.
  void find_scales_across_k(Span some_rows, Span some_cols, Scales a, Scales of_b, float* sums) {
    if (a_is_across_k(g)) {
      fm::FM_TARGET::find_scales_across_k(a_at(some_rows.begin, 0), g.a_col, some_rows.size(), g.k,
                                          a, sums ? sums + some_rows.begin : nullptr);
    }
    if (b_is_across_k(g)) find_b_scales(b(), some_cols, g.k, of_b);
  }

  // Zeros for the scales and their inverses of all rows and columns; null if none are found across k.
  static float* shared_scales(const GemmArgs& args) {
    if (!a_is_across_k(args) && !b_is_across_k(args)) return nullptr;
    const int64_t floats = 2 * (shared_size(args.m) + shared_size(args.n));
    float* memory = buffer(5, floats);
    __builtin_memset(memory, 0, floats * sizeof(float));
    return memory;
  }
  static int64_t shared_size(int64_t count) {
    return ceil_div(count, SHARED_UNIT) * SHARED_UNIT + (PACK_PANELS + 1) * max(ROWS, COLUMNS);
  }

  // All threads of a call find its scales across k together, so that an operand is read once and not by every part of the grid that
  // needs it. memory: shared_scales.
  void share_scales(float* memory, int index, int threads) {
    const int64_t all_rows = shared_size(g.m), all_columns = shared_size(g.n);
    const Span some_rows = part(g.m, SHARED_UNIT, index, threads),
               some_cols = part(g.n, SHARED_UNIT, index, threads);
    const Scales all_a = {memory, memory + all_rows};
    memory += 2 * all_rows;
    const Scales all_b = {memory, memory + all_columns};
    find_scales_across_k(some_rows, some_cols, scales_from(all_a, some_rows.begin),
                         scales_from(all_b, some_cols.begin), g.a_sums);
    if (a_is_across_k(g)) {
      a_scales.scale = all_a.scale + rows.begin, a_scales.inverse = all_a.inverse + rows.begin;
    }
    if (b_is_across_k(g)) {
      b_scales.scale = all_b.scale + cols.begin, b_scales.inverse = all_b.inverse + cols.begin;
    }
    scales_are_shared = true;
    barrier();
  }

  static BOperand<T> b_of(const GemmArgs& args) {
    return {args.b, args.b_row, args.b_col, args.b_scales};
  }
  BOperand<T> b() const { return b_of(g); }

  // What pack_b reads next, from column j on or of the next block of k.
  Source source_of_b(Span columns, int64_t j, int64_t p, int64_t deep) const {
    if (j >= columns.end) j = columns.begin, p += deep, deep = min(deep, g.k - p);
    if (deep <= 0) return {};
    const int64_t width = min(group, columns.end - j), bytes = b().element_bytes();
    const char* first = b().at(p, j);
    if (g.b_col == 1) return Source::of_rows(first, width * bytes, g.b_row * bytes, deep);
    return Source::of_rows(first, deep * bytes, g.b_col * bytes, width);
  }

  // First row of tile t. A last tile of few rows would not hide the multiply-add's latency, so it takes some from the
  // one before: 12 + 4 rows run as 8 + 8.
  static int64_t tile_begin(Span some, int64_t t) {
    const int64_t tiles = ceil_div(some.size(), ROWS), rest = some.size() % ROWS;
    if (t == tiles) return some.end;
    const bool share = ROWS >= 3 * ROW_STEP && t > 0 && t == tiles - 1 && rest && rest <= ROW_STEP;
    return some.begin + t * ROWS - (share ? ROW_STEP : 0);
  }

  // The tiles of one panel of B, each after its panel of A was packed.
  void pack_and_run_tiles(Span some, Span j, int64_t p, int64_t deep, const float* b) {
    const int64_t tiles = ceil_div(some.size(), ROWS), panel = A_ROW * words(deep);
    [[maybe_unused]] const bool sums = g.a_sums && first_cols && j.begin == cols.begin;
    for (int64_t t = 0; t < tiles;) {
      const int64_t next = t + pack_a(some, t, p, deep);
      source = next < tiles ? source_of(tile_begin(some, next), p, deep) : Source();
      for (; t < next; ++t) {
        const Span i = {tile_begin(some, t), tile_begin(some, t + 1)};
        float* a = a_panels + t * panel;
        if constexpr (!Words::INT8) {
          if (sums) add_sums(a, words(deep), g.a_sums + i.begin, i.size());
        }
        fetch_slice(b + words(deep) * NR, words(deep) * NR, t, tiles);
        if (few)
          next_sums =
              sums_at(tile_begin(some, min(t + Tuning::FEW_AHEAD, tiles - 1)), j.begin, j.begin);
        if (j.size() > 0) run_tile(i, j, j.begin, p, deep, a, b);
      }
    }
  }

  // Packs the panel of tile t, or several; returns how many.
  int pack_a(Span some, int64_t t, int64_t p, int64_t deep) {
    const int64_t last = ceil_div(some.size(), ROWS) - 1, begin = tile_begin(some, t),
                  end = t < last ? some.begin + last * ROWS : some.end;
    float* panels = a_panels + t * A_ROW * words(deep);
    Scales scales;
    if constexpr (Words::INT8) scales = scales_from(a_scales, begin - rows.begin);
#ifdef FM_HAS_TILES
    if constexpr (Words::TILES)
      return pack_tile_panels<Words>(a_at(begin, p), g.a_row, g.a_col, end - begin, g.m - begin,
                                     deep, scales, panels);
#endif
    return pack_panels<Words, ROWS, true>(a_at(begin, p), g.a_row, g.a_col, end - begin,
                                          g.m - begin, deep, scales, panels);
  }

  // What pack_a reads next, as it lies in memory.
  Source source_of(int64_t begin, int64_t p, int64_t deep) const {
    constexpr int64_t BYTES = sizeof(T);
    if (g.a_row == 1)
      return Source::of_rows(a_at(begin, p), PACK_PANELS * ROWS * BYTES, g.a_col * BYTES, deep);
    return Source::of_rows(a_at(begin, p), deep * BYTES, g.a_row * BYTES, ROWS);
  }

  const T* a_at(int64_t row, int64_t p) const {
    return static_cast<const T*>(g.a) + p * g.a_col + row * g.a_row;
  }

  // out[i] += sum over the panel's k: first in blocks of up to kc, so the error does not grow with all of k.
  static void add_sums(const float* panel, int64_t deep, float* out, int64_t count) {
    const Word* words = reinterpret_cast<const Word*>(panel);
#ifdef FM_HAS_TILES
    if constexpr (Words::TILES) return add_tile_sums(panel, deep, out, count);
#endif
    if constexpr (Words::BESIDE == 2) {
      float sums[2 * ROWS] = {};
      for_vectors(0, 2 * count, [&](int64_t i, int lanes) {
        vf sum = {};
        for (int64_t k = 0; k < deep; k += 2)
          sum = Words::sum_words(words + k * ROWS + i, lanes, sum);
        store_lanes(sums + i, sum, lanes);
      });
      for (int64_t i = 0; i < count; ++i) out[i] += sums[2 * i] + sums[2 * i + 1];
    } else {
      for_vectors(0, count, [&](int64_t i, int lanes) {
        vf sum[2] = {};
        for (int64_t k = 0; k < deep; ++k)
          sum[k & 1] = Words::sum_words(words + k * ROWS + i, lanes, sum[k & 1]);
        store_lanes(out + i, load_lanes(out + i, lanes) + (sum[0] + sum[1]), lanes);
      });
    }
  }

  // While one panel of B is in use the next is fetched into L2, a slice for every tile.
  void run_tiles(Span some, Span columns, int64_t first_col, int64_t p, int64_t deep,
                 const float* b) {
    const int64_t panel = words(deep) * NR, tiles = ceil_div(some.size(), ROWS);
    for (int64_t j = columns.begin; j < columns.end; j += COLUMNS, b += panel) {
      for (int64_t t = 0; t < tiles; ++t) {
        fetch_slice(b + panel, panel, t, tiles);
        run_tile({tile_begin(some, t), tile_begin(some, t + 1)}, {j, min(columns.end, j + COLUMNS)},
                 first_col, p, deep, a_panels + t * A_ROW * words(deep), b);
      }
    }
  }

  // The same with few steps of k, whose panels of B are all in L2.
  void run_tiles_along_rows(Span some, Span columns, int64_t first_col, int64_t p, int64_t deep,
                            const float* b) {
    const int64_t tiles = ceil_div(some.size(), ROWS);
    for (int64_t t = 0; t < tiles; ++t) {
      const Span i = {tile_begin(some, t), tile_begin(some, t + 1)};
      const float *a = a_panels + t * A_ROW * words(deep), *panel = b;
      for (int64_t j = columns.begin; j < columns.end; j += COLUMNS, panel += words(deep) * NR) {
        const int64_t ahead = j + Tuning::FEW_AHEAD * COLUMNS, over = ahead - columns.end;
        next_sums = over < 0 ? sums_at(i.begin, ahead, first_col)
                             : sums_at(tile_begin(some, min(t + 1, tiles - 1)),
                                       columns.begin + over, first_col);
        run_tile(i, {j, min(columns.end, j + COLUMNS)}, first_col, p, deep, a, panel);
      }
    }
  }

  static void fetch_slice(const float* panel, int64_t size, int64_t t, int64_t tiles) {
    const int64_t slice = ceil_div(size, tiles);
    for (int64_t word = t * slice; word < min(size, (t + 1) * slice); word += 16)
      prefetch_l2(panel + word);
  }

  float* sums_at(int64_t i, int64_t j, int64_t first_col) const {
    return sums_in_c() ? static_cast<float*>(g.c) + i * g.c_row + j
                       : partial + (i - rows.begin) * partial_row + (j - first_col);
  }

  void run_tile(Span i, Span j, int64_t first_col, int64_t p, int64_t deep, const float* a,
                const float* b) {
    const Word* panel = reinterpret_cast<const Word*>(a);
    const bool last = p + deep >= g.k, in_place = sums_in_c(),
               add = p > 0 || (g.reads_c() && !Words::INT8);
    float* sums = sums_at(i.begin, j.begin, first_col);
    const bool finish = last && (Words::INT8 || !in_place || has_epilogue(g));
    alignas(64) float tile[ROWS * COLUMNS];
    if constexpr (Words::WIDE == 2) {
      multiply_in_chunks(ceil_div(i.size(), ROW_STEP) * ROW_STEP, deep, g.fp16_chunk, panel, b,
                         tile);
    } else {
      const auto kernel = micro_kernel_for<Words>(i.size());
      const bool direct =
          !finish && i.size() % ROW_STEP == 0 && j.size() == NR && !(Words::TILES && add);
      Fetches fetches = finish
                            ? fetches_of(i.begin, j.begin)
                            : Fetches{tile_rows_at(next_sums ? next_sums : sums, partial_row, NR)};
      next_sums = nullptr;
      fetches.source = source;
      kernel(words(deep), panel, b, direct ? sums : tile, direct ? partial_row : NR, direct && add,
             fetches);
      source = fetches.source;
      if (direct) return;
    }
    if constexpr (Words::INT8) {
      if (finish) {
        scale_tile<COLUMNS>(tile, add ? sums : nullptr, partial_row, i.size(), j.size(),
                            scales_from(a_scales, i.begin - rows.begin),
                            scales_from(b_scales, j.begin - cols.begin));
        const float* c = static_cast<const float*>(g.c) + i.begin * g.c_row + j.begin;
        return finish_as(tile, g.reads_c() ? c : nullptr, g.c_row, i, j);
      }
    }
    if (finish) return finish_as(tile, add ? sums : nullptr, partial_row, i, j);
    for (int64_t r = 0; r < i.size(); ++r) {
      for_vectors(0, j.size(), [&](int64_t v, int lanes) {
        float* q = sums + r * partial_row + v;
        const vf t = load_aligned(tile + r * COLUMNS + v);
        store_lanes(q, add ? Words::add(load_lanes(q, lanes), t) : t, lanes);
      });
    }
  }

  // What finish_as writes and, beside it, the largest of what else it reads or writes.
  Fetches fetches_of(int64_t i, int64_t j) const {
    Fetches fetches;
    with_dtype(g.out_dtype, [&](auto element) {
      const auto below = [&](const void* matrix, int64_t row) {
        auto* first = static_cast<decltype(element)*>(const_cast<void*>(matrix));
        return first ? tile_rows_at(first + i * row + j, row, NR) : TileRows();
      };
      fetches.results = below(g.c, g.c_row);
      fetches.beside = g.pre                ? below(g.pre, g.pre_row)
                       : g.activation_input ? below(g.activation_input, g.activation_input_row)
                                            : below(g.residual, g.residual_row);
    });
    return fetches;
  }

  void finish_as(const float* tile, const float* sums, int64_t sums_row, Span i, Span j) {
    with_dtype(g.out_dtype, [&](auto element) {
      const auto finish = [&](auto f) {
        finish_tile<decltype(f), decltype(element), COLUMNS>(g, tile, sums, sums_row, i.begin,
                                                             i.size(), j.begin, j.size());
      };
      g.activation == Activation::none ? finish(NoActivation())
                                       : with_activation(g.activation, finish);
    });
  }
};

// Calls f(words, element) for the input's type; with tiles that is bfloat16 or bf16x3, and FM_LEAVE_TO_BASE has the others.
template <class F>
FM_INLINE void with_words([[maybe_unused]] DType dtype, [[maybe_unused]] int64_t fp16_chunk,
                          const F& f) {
#ifdef FM_HAS_TILES
  if (is_int8(dtype))
    return with_dtype(stored_dtype(dtype), [&](auto element) { f(Int8Tiles(), element); });
  if (dtype == DType::bf16x3) return f(SplitWords<TilePairs>(), float());
  f(TilePairs(), bf16());
#else
  if (is_int8(dtype))
    return with_dtype(stored_dtype(dtype), [&](auto element) { f(Int8Words(), element); });
#ifdef FM_HAS_HALF_ARITHMETIC
  if (fp16_chunk) return f(HalfWords(), f16());
#endif
#ifdef FM_HAS_BF16_PAIRS
  if (dtype == DType::bf16x3) return f(SplitWords<Bf16Pairs>(), float());
  if (dtype == DType::bf16) return f(Bf16Pairs(), bf16());
#endif
  with_dtype(dtype, [&](auto element) { f(FloatWords(), element); });
#endif
}

// bf16 for operands that tiles multiply, others as they are: what decides between a target with tiles and its base.
FM_INLINE DType factors_of(DType operands) {
  return operands == DType::bf16x3 || is_int8(operands) ? DType::bf16 : operands;
}

// Calls f(words, element, thread, threads) in every thread, whose tiles and denormals are as these words need them.
template <class F>
FM_INLINE void with_gemm_threads(const GemmArgs& args, const F& f) {
  with_words(args.in_dtype, args.fp16_chunk, [&](auto words, auto element) {
    parallel_run([&](int thread, int threads) {
      const uint64_t mode = decltype(words)::WIDE == 2 ? keep_half_denormals() : 0;
      if (decltype(words)::TILES) tiles_begin();
      f(words, element, thread, threads);
      if (decltype(words)::TILES) tiles_end();
      if (decltype(words)::WIDE == 2) restore_denormals(mode);
    });
  });
}

static void gemm(const GemmArgs& args) {
  FM_LEAVE_TO_BASE(factors_of(args.in_dtype), gemm, args)
  if (!args.m || (!args.n && !args.a_sums)) return;
  float* scales = nullptr;
  with_words(args.in_dtype, args.fp16_chunk, [&](auto words, auto element) {
    if constexpr (decltype(words)::INT8)
      scales = Gemm<decltype(words), decltype(element)>::shared_scales(args);
  });
  with_gemm_threads(args, [&](auto words, auto element, int thread, int threads) {
    using Work = Gemm<decltype(words), decltype(element)>;
    Work work(args, Work::grid_of(args, threads), thread);
    if constexpr (decltype(words)::INT8) {
      if (scales) work.share_scales(scales, thread, threads);
    }
    work.run();
  });
}

static bool has_fp16_arithmetic() {
#ifdef FM_HAS_HALF_ARITHMETIC
  return true;
#else
  return false;
#endif
}

static int64_t packed_weight_size(int64_t n, int64_t k, DType dtype, int64_t fp16_chunk) {
  FM_LEAVE_TO_BASE(factors_of(dtype), packed_weight_size, n, k, dtype, fp16_chunk)
  int64_t bytes = 0;
  with_words(dtype, fp16_chunk, [&](auto words, auto element) {
    using Words = decltype(words);
    using Work = Gemm<Words, decltype(element)>;
    const int64_t panels = panel_words<Words>(k) * Work::padded_columns(n) / Words::WIDE;
    bytes = (panels + Work::words_of_scales(n)) * 4;
  });
  return bytes;
}

static void pack_weight(const GemmPackArgs& args) {
  FM_LEAVE_TO_BASE(factors_of(args.dtype), pack_weight, args)
  with_words(args.dtype, args.fp16_chunk, [&](auto words, auto element) {
    using Words = decltype(words);
    using T = decltype(element);
    using Work = Gemm<Words, T>;
    constexpr int COLUMNS = Work::COLUMNS;
    const int64_t depth = block_depth<Words>(args.k, args.fp16_chunk, false),
                  width = Work::padded_columns(args.n);
    float* panels = static_cast<float*>(args.packed) + Work::words_of_scales(args.n);
    const BOperand<T> b = {args.b, args.b_row, args.b_col, args.scales};
    parallel_for(width, COLUMNS, [&](int64_t begin, int64_t end) {
      Scales scales;
      if constexpr (Words::INT8) {
        scales = scales_from(Work::packed_scales(args.packed, args.n), begin);
        scales.inverse = static_cast<float*>(scratch(3, (end - begin + COLUMNS) * sizeof(float)));
        for (int64_t j = 0; j < end - begin; ++j)
          scales.scale[j] = scales.inverse[j] = 0, scales.correction[j] = 0;
        find_b_scales(b, {begin, min(end, args.n)}, args.k, scales);
      }
      for (int64_t p = 0; p < args.k; p += depth) {
        const int64_t deep = min(depth, args.k - p), deep_words = panel_words<Words>(deep);
        float* block =
            panels + panel_words<Words>(p) * width / Words::WIDE + begin / Words::WIDE * deep_words;
        pack_b_panels<Words, COLUMNS>(b, {begin, end}, args.n, p, deep, block, scales);
      }
    });
  });
}

}  // namespace fm::FM_TARGET

#include "gemm/gemm_grouped.h"
