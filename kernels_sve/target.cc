// The kernels of one row of TARGETS in setup.py, a family at a time: -DFM_TARGET names the namespace and the block of tuning.h,
// -DFM_VECTOR_BYTES the length of the vectors, -DFM_HEADER="gemm.h" the family, and -DFM_IS_gemm=,,, marks its rows of kernels.inc,
// which the unit defines. No symbol may be weak and outside fm::FM_TARGET, or code for one CPU could be picked for
// another (tests/kernels/test_dispatch.py): headers keep to FM_INLINE functions, lambdas, and no std:: containers or algorithms.
//
// -DFM_BASE names the target whose kernels a target takes where it has none of its own; without it that is the target.
//
// Without FM_HEADER it is the table of the row's kernels. That unit is compiled for the baseline, because its constructor runs
// on every CPU.
#include "table.h"

// Three commas before the first argument move it to the fourth place, where otherwise the other one is.
#define FM_FOURTH(first, second, third, fourth, ...) fourth
#define FM_PICK(...) FM_FOURTH(__VA_ARGS__)

#ifdef FM_BASE
namespace fm::FM_BASE {
#define FM_KERNEL(name, family, sizes, result, parameters, operands, flops, bytes) \
  extern result(*const name##_kernel) parameters;
#include "kernels.inc"
}  // namespace fm::FM_BASE
#endif

#ifdef FM_HEADER
#include FM_HEADER

namespace fm::FM_TARGET {
#define FM_SKIP(name, result, parameters)
#define FM_DEFINE(name, result, parameters)       \
  extern result(*const name##_kernel) parameters; \
  result(*const name##_kernel) parameters = &name;
#define FM_KERNEL(name, family, sizes, result, parameters, operands, flops, bytes) \
  FM_PICK(FM_IS_##family FM_DEFINE, , , FM_SKIP, )(name, result, parameters)
#include "kernels.inc"
}  // namespace fm::FM_TARGET

#else

#ifndef FM_BASE
#define FM_BASE FM_TARGET
#endif

namespace fm::FM_TARGET {
#define FM_KERNEL(name, family, sizes, result, parameters, operands, flops, bytes) \
  extern result(*const name##_kernel) parameters;
#include "kernels.inc"

extern const KernelTable kernel_table;
const KernelTable kernel_table = {
#define FM_KERNEL(name, family, sizes, result, parameters, operands, flops, bytes) \
  FM_PICK(FM_IS_##family FM_TARGET, , , FM_BASE, )::name##_kernel,
#include "kernels.inc"
};
}  // namespace fm::FM_TARGET

#endif
