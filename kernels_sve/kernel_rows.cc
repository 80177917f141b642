// The rows of kernels.inc.
#include "kernel_rows.h"
#include "table.h"

#include <algorithm>
#include <sstream>

namespace fm {
namespace {

// The formulas as functions: inside a member function a symbol is the member of that name.
struct Formulas : Sizes {
  static double min(double x, double y) { return std::min(x, y); }
#define FM_KERNEL(name, family, sizes, result, parameters, operands, flops, bytes) \
  double name##_flops() const { return flops; }                                    \
  double name##_bytes() const { return bytes; }
#define FM_CALL(name, kernel, operands, bytes) \
  double name##_bytes() const { return bytes; }
#include "kernels.inc"
};

template <double (Formulas::*FORMULA)() const>
double evaluate(const Sizes& sizes) {
  Formulas formulas;
  static_cast<Sizes&>(formulas) = sizes;
  return (formulas.*FORMULA)();
}

std::vector<std::string> split_words(const std::string& text) {
  std::istringstream stream(text);
  std::vector<std::string> words;
  for (std::string word; stream >> word;) words.push_back(word);
  return words;
}

KernelRow call_row(const std::vector<KernelRow>& rows, const char* name, const std::string& kernel,
                   const char* operands, const char* bytes_text, double (*bytes)(const Sizes&)) {
  KernelRow row =
      *std::find_if(rows.begin(), rows.end(), [&](const KernelRow& r) { return r.name == kernel; });
  row.name = name, row.operands = operands, row.bytes_text = bytes_text, row.bytes = bytes;
  return row;
}

std::vector<KernelRow> make_rows() {
  std::vector<KernelRow> rows;
#define FM_KERNEL(name, family, sizes, result, parameters, operands, flops, bytes)     \
  rows.push_back({#name, #name, #family, operands, #flops, #bytes, split_words(sizes), \
                  &evaluate<&Formulas::name##_flops>, &evaluate<&Formulas::name##_bytes>});
#define FM_CALL(name, kernel, operands, bytes) \
  rows.push_back(                              \
      call_row(rows, #name, #kernel, operands, #bytes, &evaluate<&Formulas::name##_bytes>));
#include "kernels.inc"
  return rows;
}

}  // namespace

double* Sizes::find(const std::string& symbol) {
#define X(name) \
  if (symbol == #name) return &name;
  FM_SIZES(X)
#undef X
  return nullptr;
}

const std::vector<KernelRow>& kernel_rows() {
  static const std::vector<KernelRow> rows = make_rows();
  return rows;
}

const KernelRow* find_kernel_row(const std::string& name) {
  for (const KernelRow& row : kernel_rows()) {
    if (row.name == name) return &row;
  }
  return nullptr;
}

}  // namespace fm
