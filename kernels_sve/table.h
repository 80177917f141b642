// What every part of the extension shares: element types, argument structs, and the table of kernels made from
// kernels.inc. Leaves out: anything with an instruction set in it (simd.h) and anything of Python (tensor_view.h).
#pragma once
#include <cstdint>

namespace fm {

enum class DType : int32_t { f32, f64, bf16, f16, i32, i64, u8, b8 };

// Storage of the 16-bit formats. No compiler type: GCC 12 has no _Float16 in C++ on aarch64.
struct bf16 {
  uint16_t bits;
};
struct f16 {
  uint16_t bits;
};

// elementwise.h
enum class Function : int32_t { exp, log, sqrt, rsqrt, reciprocal };

// philox.h: dropout on a contiguous (outer, samples, inner, cols) view; philox_layout.h: which word an element gets.
struct DropoutArgs {
  int64_t outer, samples, inner, cols;
  float p;
  uint64_t seed, stream;
  int64_t first_sample, row0, col0;
};

// philox.h: a slice of rows x cols at (row0, col0) of a global matrix.
struct NormalArgs {
  int64_t rows, cols, row0, col0;
  uint64_t seed, stream;
  float std, mean;
};

// attention.h: causal self-attention of heads of d columns over sequences of s positions; p = 0 for no dropout.
struct AttentionArgs {
  int64_t s, b, heads, d;
  float p;
  uint64_t seed, stream;
  int64_t first_sample, first_head;
};

// adamw.h: the scalars of one AdamW step, made in double from the options by bind_adamw.cc.
struct AdamWArgs {
  float grad_scale, decay, one_minus_beta1, beta2, one_minus_beta2, step_size, inverse_sqrt_correction, eps;
};

struct KernelTable {
#define FM_KERNEL(name, result, parameters) result(*name) parameters;
#include "kernels.inc"
#undef FM_KERNEL
};

// The table of the target in use (dispatch.cc).
const KernelTable& kernels();

}  // namespace fm
