"""Cycles a vector of the elementwise loops on the A64FX, for tools/codegen.py: exp, activations, dropout, AdamW, softmax.

Each loop is alone in a function of SOURCE, without the choices that a call makes once, and is found by its name. Its vectors are
counted by an instruction that every vector needs. Tested by tests/arm/test_codegen.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from tools.asm_loops import BRANCH, Loop, innermost_loops

# A call with bias and an activation, or with its derivative, has no residual and one block of k.
SOURCE = """#include "simd/simd.h"
#include "optimizer/adamw.h"
#include "attention/attention_block.h"
#include "rowwise/elementwise.h"
#include "gemm/gemm_epilogue.h"
#include "rowwise/gate.h"
#define FM_ALONE extern "C" __attribute__((flatten))
using namespace fm;
using namespace fm::FM_TARGET;
FM_ALONE void exp_alone(const float* x, float* y, int64_t n) {
  for_vectors(0, n, [&](int64_t i, int lanes) { store_lanes(y + i, exp(load_lanes(x + i, lanes)), lanes); });
}
FM_ALONE void gelu_alone(const float* x, const float* bias, float* y, int64_t cols) {
  if (bias) activation_rows<ROW_BLOCK>(Gelu(), x, cols, bias, y, cols);
}
FM_ALONE void exact_gelu_alone(const float* x, const float* bias, float* y, int64_t cols) {
  if (bias) activation_rows<ROW_BLOCK>(ExactGelu(), x, cols, bias, y, cols);
}
FM_ALONE void gelu_epilogue(const GemmArgs& a, const float* tile, int64_t row, int64_t rows, int64_t col) {
  GemmArgs g{};
  g.c = a.c, g.c_row = a.c_row, g.bias = a.bias, g.pre = a.pre, g.pre_row = a.pre_row;
  if (g.bias && g.pre) finish_tile<Gelu, float, NR>(g, tile, nullptr, 0, row, rows, col, NR);
}
FM_ALONE void gelu_backward_epilogue(const GemmArgs& a, const float* tile, int64_t row, int64_t rows, int64_t col) {
  GemmArgs g{};
  g.c = a.c, g.c_row = a.c_row, g.activation_input = a.activation_input, g.activation_input_row = a.activation_input_row;
  if (g.activation_input) finish_tile<Gelu, float, NR>(g, tile, nullptr, 0, row, rows, col, NR);
}
FM_ALONE void swiglu_alone(const GateArgs& a, int64_t row, float* y) { gate_row<Silu>(a, row, y); }
FM_ALONE void swiglu_backward_alone(const GateArgs& a, const GateGradArgs& grad, int64_t row) {
  gate_backward_row<Silu, float>(a, grad, row);
}
FM_ALONE void geglu_alone(const GateArgs& a, int64_t row, float* y) { gate_row<Gelu>(a, row, y); }
FM_ALONE void geglu_backward_alone(const GateArgs& a, const GateGradArgs& grad, int64_t row) {
  gate_backward_row<Gelu, float>(a, grad, row);
}
FM_ALONE void dropout_alone(const DropoutArgs& a, const PhiloxKey& key, uint64_t sample, const float* x, float* y) {
  dropout_row(a, key, sample, 0, x, y);
}
FM_ALONE void adamw_alone(float* param, const float* grad, float* m, float* v, int64_t n, const AdamWArgs& args) {
  adamw_range(param, grad, m, v, static_cast<float*>(nullptr), 0, n, 0, args);
}
FM_ALONE void softmax_alone(const QueryBlock<Singles>& q, int64_t rows, float c, vf (*out)[2][ATTENTION_NV]) {
  vf sum[2][ATTENTION_NV] = {};
  exponentiate(q, 0, rows, c, sum, false, Vectors<0, ATTENTION_NV>());
  __builtin_memcpy(out, sum, sizeof sum);
}
FM_ALONE void attention_dropout_alone(const HeadDropout& dropout, QueryBlock<Singles>& q, int64_t k0, int64_t rows) {
  drop_scores(dropout, q, k0, rows);
}
FM_ALONE void attention_backward_dropout_alone(const HeadDropout& dropout, const BackwardBlock<Singles>& m) {
  block_dropout(dropout, m);
}
"""


@dataclass(frozen=True)
class VectorLoop:
    """A loop of SOURCE. marker: an instruction of which `each` stand for `vectors` vectors. limit: cycles a vector allowed."""

    name: str
    function: str
    limit: float
    marker: str = "fexpa"
    each: int = 1
    vectors: int = 1

    def vectors_of(self, loop: Loop) -> int:
        return self.vectors * round(sum(i.mnemonic == self.marker for i in loop.body) / self.each)


# Ten rounds of Philox take 18 to 20 UMULH, by what the compiler knows of the counters, and fill four vectors; backward of
# attention uses 6 of 8, since 96 columns lie in two blocks of 64.
PHILOX = {"marker": "umulh", "each": 19}
LOOPS = (
    VectorLoop("exp", "exp_alone", 24),
    VectorLoop("GELU", "gelu_alone", 26),
    VectorLoop("exact GELU", "exact_gelu_alone", 30),
    VectorLoop("GELU in the matmul's epilogue", "gelu_epilogue", 26),
    VectorLoop("GELU's derivative in the epilogue", "gelu_backward_epilogue", 26),
    VectorLoop("SwiGLU", "swiglu_alone", 26),
    VectorLoop("SwiGLU backward", "swiglu_backward_alone", 36),
    VectorLoop("GeGLU", "geglu_alone", 28),
    VectorLoop("GeGLU backward", "geglu_backward_alone", 40),
    VectorLoop("dropout", "dropout_alone", 45, vectors=4, **PHILOX),
    VectorLoop("AdamW", "adamw_alone", 48, marker="frsqrte"),
    VectorLoop("attention's softmax", "softmax_alone", 9),
    VectorLoop("attention's dropout", "attention_dropout_alone", 45, vectors=4, **PHILOX),
    VectorLoop(
        "attention's dropout backward", "attention_backward_dropout_alone", 45, vectors=3, **PHILOX
    ),
)


def straight(loop: Loop) -> bool:
    """Return whether every turn is the whole body: an edge of a row is handled in loops that branch."""
    return not any(BRANCH.match(i.mnemonic) for i in loop.body[:-1])


def hot_loop(text: str, wanted: VectorLoop) -> Loop | None:
    """Return one of the function's innermost loops: first without a branch inside, then with the most vectors, then the shorter."""
    loops = [
        loop
        for loop in innermost_loops(text)
        if loop.function == wanted.function and wanted.vectors_of(loop)
    ]
    return max(
        loops,
        key=lambda loop: (straight(loop), wanted.vectors_of(loop), -len(loop.body)),
        default=None,
    )
