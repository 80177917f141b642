// kernels.inc as data: what a kernel costs for given sizes, and the sizes of a call from its operands. Bound as _kernels.table
// (bind_table.cc), used by tools/kernel_driver. Tested by tests/kernels/test_table.py.
#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace fm {

// The symbols of kernels.inc's formulas.
#define FM_SIZES(X) \
  X(m)              \
  X(n) X(k) X(rows) X(cols) X(s) X(b) X(heads) X(groups) X(d) X(window) X(half) X(tokens) X(words) X(calls) X(slots) X(steps) \
  X(sweeps) X(experts) X(queries) X(keys) X(first_query) X(first_key) X(e) X(e_out) X(e_avg) X(e_sq) X(dx)

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

// One argument of a call: a tensor with its shape, a whole number, or neither (None, a float, a dtype, not passed).
struct Argument {
  std::optional<std::vector<int64_t>> shape;
  int64_t element_bytes = 0;
  bool floating = false;
  std::optional<int64_t> number;
};

// Names of a row's operands, in order.
std::vector<std::string> operand_names(const KernelRow& row);
// Sizes of a call whose arguments are in the order of operand_names(row). Throws std::invalid_argument when shapes do not fit
// the row, or leave a size open.
Sizes call_sizes(const KernelRow& row, const std::vector<Argument>& arguments);

}  // namespace fm
