// Arguments of the GEMM family and its cache blocks. Included by table.h; the blocks are computed in gemm_blocking.cc.
#pragma once
#include <cstdint>

namespace fm {

// Products of int8 numbers that an int32 sum holds, whatever they are: 127 x 127 x k < 2^31.
constexpr int64_t INT8_MOST_K = 1 << 17;

// Neighbouring numbers of a row of a Q8 weight that share a scale; the last block of a row may be shorter.
constexpr int64_t Q8_BLOCK = 64;
constexpr int64_t q8_blocks(int64_t columns) { return (columns + Q8_BLOCK - 1) / Q8_BLOCK; }

// Scales of a Q8 weight, whose elements are int8: number i of row j is value * at[j * row + i / Q8_BLOCK]. Null: a weight of plain
// elements.
struct Q8Scales {
  const bf16* at = nullptr;
  int64_t row = 0;
  explicit operator bool() const { return at; }
};

// C(m, n) (+)= A(m, k) B(k, n), then, in this order, whatever of the epilogue is not null.
// A and B have the same element type; one of the two strides of each is 1. Accumulating needs a float32 C. in_dtype is bf16x3 for
// float32 elements that are multiplied in bfloat16 parts, where has_bf16_arithmetic(), and int8_of_* for elements that are quantized
// to int8, where k is at most INT8_MOST_K.
struct GemmArgs {
  int64_t m, n, k;
  DType in_dtype, out_dtype;
  const void* a;  // element (i, p) at i * a_row + p * a_col
  int64_t a_row, a_col;
  const void* b;  // element (p, j) at p * b_row + j * b_col; not read when packed
  int64_t b_row, b_col;
  Q8Scales b_scales;   // or null; rows of the weight are those along which B is contiguous
  const void* packed;  // B from pack_weight of the same target and fp16_chunk, or null
  void* c;
  int64_t c_row;
  bool accumulate;
  bool overwrite;        // with accumulate: onto zeros in place of C's values, which are not read
  bool random_rounding;  // of A, where in_dtype is int8_of_*: up or down, so that the mean is right
  float* a_sums;         // (m,) += sum over k of A
  // 0: products and sums in float32. Else, of f16 operands and where has_fp16_arithmetic(): every fp16_chunk consecutive
  // products are summed in FP16, the first rounded and each of the others added with one rounding, their sums in float32.
  int64_t fp16_chunk;

  // Epilogue. All of C's element type; matrices have contiguous rows.
  const void* bias;  // (n,): C += bias
  void* pre;         // (m, n) receives C before the activation
  int64_t pre_row;
  Activation activation;         // C = f(C), or with activation_input
  const void* activation_input;  // (m, n): C *= f'(activation_input); may be C
  int64_t activation_input_row;
  const void* residual;  // (m, n): C += residual
  int64_t residual_row;

  bool reads_c() const { return accumulate && !overwrite; }
};

// A matmul of each of `groups` groups of consecutive rows with its own weight; counts[i] rows are in group i, and any of them may be 0.
// `each`: of the first group, without its number of rows. The weights lie weight_step elements apart. sums: the weights are C, over
// whose group's rows the sum is (k): of a group without rows C stays as it is, or is zeros with `overwrite`; else they are B and the
// rows are C's (m).
struct GroupedGemmArgs {
  GemmArgs each;
  int64_t groups;
  const int64_t* counts;
  int64_t weight_step;
  bool sums;
  int64_t scale_step = 0;  // from the scales of a Q8 weight to those of the next
};

// Packs B(k, n) for gemm: element (p, j) at p * b_row + j * b_col.
struct GemmPackArgs {
  int64_t n, k;
  DType dtype;
  const void* b;
  int64_t b_row, b_col;
  void* packed;
  int64_t fp16_chunk = 0;
  Q8Scales scales = {};
};

// Bytes of one core's share of each cache.
struct CacheGeometry {
  int64_t l1, l2, l3;       // l3 is 0 when there is none
  int64_t l1_ways, l1_way;  // of the whole L1: ways of a set, and bytes of a way
};
const CacheGeometry& cache_geometry();

// Whether L1 can hold a line of each of so many rows, `stride` bytes apart: a stride of whole pages has them all in one set.
bool rows_share_l1(int64_t rows, int64_t stride);

// The loops' steps in words for tiles of mr x nr accumulators: see gemm.h. step: elements of k per word. adds: onto what C holds.
// tiles: of tiles.h.
struct GemmBlocks {
  int64_t kc, mc, nc;
};
GemmBlocks gemm_blocks(int mr, int nr, int step, bool adds, bool tiles);

// A grid of threads over C: rows_parts x cols_parts == threads.
struct GemmGrid {
  int rows_parts, cols_parts;
};
GemmGrid gemm_grid(int threads, int64_t m, int64_t n, int row_unit, int col_unit, bool packed);

}  // namespace fm
