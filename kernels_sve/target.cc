// Every kernel, once per row of TARGETS in setup.py: -DFM_TARGET names the namespace and the block of tuning.h,
// -DFM_VECTOR_BYTES the vectors. Nothing here may leave a weak symbol outside fm::FM_TARGET, or code for
// one CPU could be picked for another (tests/kernels/test_dispatch.py): headers keep to FM_INLINE functions, lambdas,
// and no std:: containers or algorithms.
#include "simd.h"

#include "adamw.h"
#include "attention.h"
#include "bench.h"
#include "cross_entropy.h"
#include "decode.h"
#include "elementwise.h"
#include "embedding.h"
#include "gelu.h"
#include "gemm.h"
#include "philox.h"
#include "reduce.h"
#include "rotary.h"
#include "rowwise.h"
#include "swiglu.h"

namespace fm::FM_TARGET {
extern const KernelTable kernel_table;
const KernelTable kernel_table = {
#define FM_KERNEL(name, family, sizes, result, parameters, operands, flops, bytes) &name,
#include "kernels.inc"
};
}  // namespace fm::FM_TARGET
