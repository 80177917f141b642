// kernels.inc as data, and what a kernel costs for given sizes. Bound as _kernels.table (kernel_rows_bind.cc) for host/kernels.py, which
// finds the sizes of a call; used by tools/kernel_driver. Tested by tests/kernels/test_table.py.
#pragma once
#include <string>
#include <vector>

namespace fm {

// The symbols of kernels.inc's formulas.
// clang-format off
#define FM_SIZES(X)                                                             \
  X(m) X(n) X(k) X(rows) X(cols) X(s) X(b) X(heads) X(groups) X(d) X(window)    \
  X(half) X(tokens) X(words) X(calls) X(slots) X(steps) X(sweeps) X(experts)    \
  X(queries) X(keys) X(first_query) X(first_key) X(e) X(e_out) X(e_avg) X(e_sq) \
  X(dx) X(dv) X(key_size) X(value_size)
// clang-format on

struct Sizes {
#define X(name) double name = 0;
  FM_SIZES(X)
#undef X
  // Null for a name that is no symbol.
  double* find(const std::string& symbol);
};

struct KernelRow {
  std::string name, kernel, family, operands, flops_text,
      bytes_text;  // kernel: the row's own name, or that of FM_CALL's kernel
  std::vector<std::string> sizes;
  double (*flops)(const Sizes&);
  double (*bytes)(const Sizes&);
};

// Rows of FM_KERNEL and of FM_CALL, in the order of kernels.inc.
const std::vector<KernelRow>& kernel_rows();
// Null for a name that is no row.
const KernelRow* find_kernel_row(const std::string& name);

}  // namespace fm
