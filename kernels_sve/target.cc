// Every kernel, once per row of TARGETS in setup.py: -DFM_TARGET names the namespace, -DFM_VECTOR_BYTES the vectors,
// -DFM_MR and -DFM_NR_VECTORS the GEMM tile. Nothing here may leave a weak symbol outside fm::FM_TARGET, or code for
// one CPU could be picked for another (tests/kernels/test_dispatch.py): headers keep to FM_INLINE functions, lambdas,
// and no std:: containers or algorithms.
#include "simd.h"

#include "adamw.h"
#include "attention.h"
#include "bench.h"
#include "elementwise.h"
#include "gemm.h"
#include "philox.h"
#include "pointwise.h"
#include "pointwise_embedding.h"
#include "reduce.h"
#include "rowwise.h"
#include "rowwise_cross_entropy.h"

namespace fm::FM_TARGET {
extern const KernelTable kernel_table;
const KernelTable kernel_table = {
#define FM_KERNEL(name, result, parameters) &name,
#include "kernels.inc"
#undef FM_KERNEL
};
}  // namespace fm::FM_TARGET
