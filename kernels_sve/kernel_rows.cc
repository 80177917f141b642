// The rows of kernels.inc, and the matching of a call's shapes with a row's operands.
#include "kernel_rows.h"
#include "table.h"

#include <algorithm>
#include <sstream>
#include <stdexcept>

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
  KernelRow row = *std::find_if(rows.begin(), rows.end(), [&](const KernelRow& r) { return r.name == kernel; });
  row.name = name, row.operands = operands, row.bytes_text = bytes_text, row.bytes = bytes;
  return row;
}

std::vector<KernelRow> make_rows() {
  std::vector<KernelRow> rows;
#define FM_KERNEL(name, family, sizes, result, parameters, operands, flops, bytes)     \
  rows.push_back({#name, #name, #family, operands, #flops, #bytes, split_words(sizes), \
                  &evaluate<&Formulas::name##_flops>, &evaluate<&Formulas::name##_bytes>});
#define FM_CALL(name, kernel, operands, bytes) \
  rows.push_back(call_row(rows, #name, #kernel, operands, #bytes, &evaluate<&Formulas::name##_bytes>));
#include "kernels.inc"
  return rows;
}

// A factor of a dimension: "heads+2groups" is plus + times * symbol; a symbol or a number alone has no plus.
struct Factor {
  std::string plus, symbol;
  int64_t times = 1;
};

Factor parse_factor(const std::string& text) {
  const size_t sum = text.find('+');
  if (sum == std::string::npos) return {"", text};
  size_t digits = 0;
  const int64_t times = std::stoll(text.substr(sum + 1), &digits);
  return {text.substr(0, sum), text.substr(sum + 1 + digits), times};
}

// An operand of kernels.inc: "x (rows.., cols)" or, when it is no tensor, "sweeps".
struct Operand {
  std::string name;
  bool tensor = false, folds = false;     // folds: the first dimension stands for all that are left over
  std::vector<std::vector<Factor>> dims;  // factors of each dimension
};

// Pieces between the commas outside parentheses, or between all commas.
std::vector<std::string> split_commas(const std::string& text, bool nested) {
  std::vector<std::string> pieces(text.empty() ? 0 : 1);
  int depth = 0;
  for (char c : text) {
    depth += (c == '(') - (c == ')');
    if (c == ',' && (!nested || depth == 0)) {
      pieces.emplace_back();
    } else {
      pieces.back() += c;
    }
  }
  return pieces;
}

Operand parse_operand(const std::string& text) {
  const size_t open = text.find('(');
  Operand operand;
  operand.name = split_words(text.substr(0, open)).at(0);
  if (open == std::string::npos) return operand;
  operand.tensor = true;
  for (const std::string& dim : split_commas(text.substr(open + 1, text.rfind(')') - open - 1), false)) {
    operand.dims.emplace_back();
    for (const std::string& factor : split_words(dim)) operand.dims.back().push_back(parse_factor(factor));
    std::string& last = operand.dims.back().back().symbol;
    if (last.size() > 2 && last.substr(last.size() - 2) == "..") operand.folds = true, last.resize(last.size() - 2);
  }
  return operand;
}

std::vector<Operand> parse_operands(const KernelRow& row) {
  std::vector<Operand> operands;
  for (const std::string& text : split_commas(row.operands, true)) operands.push_back(parse_operand(text));
  return operands;
}

// Of each row, by its place in kernel_rows(): parsed once.
const std::vector<Operand>& operands_of(const KernelRow& row) {
  static const std::vector<std::vector<Operand>> all = [] {
    std::vector<std::vector<Operand>> parsed;
    for (const KernelRow& r : kernel_rows()) parsed.push_back(parse_operands(r));
    return parsed;
  }();
  return all[static_cast<size_t>(&row - kernel_rows().data())];
}

// A dimension of a call: its factors in the row and its size.
struct Dimension {
  const std::vector<Factor>* factors;
  int64_t size;
};

[[noreturn]] void fail(const KernelRow& row, const std::string& what) {
  throw std::invalid_argument(row.name + ": expected shapes " + row.operands + ", got " + what);
}

void add_dimensions(const KernelRow& row, const Operand& operand, std::vector<int64_t> shape,
                    std::vector<Dimension>& all) {
  while (operand.folds && shape.size() > operand.dims.size()) {
    shape[1] *= shape[0];
    shape.erase(shape.begin());
  }
  if (operand.folds && shape.size() + 1 == operand.dims.size()) shape.insert(shape.begin(), 1);
  if (shape.size() != operand.dims.size())
    fail(row, operand.name + " with " + std::to_string(shape.size()) + " dimensions");
  for (size_t i = 0; i < shape.size(); ++i) {
    if (operand.dims[i].front().symbol != "_") all.push_back({&operand.dims[i], shape[i]});
  }
}

// The value of a symbol that is known, of a number, or 0 of an empty word.
int64_t value_of(const std::string& word, Sizes& sizes) {
  if (word.empty()) return 0;
  return word[0] >= '0' && word[0] <= '9' ? std::stoll(word) : static_cast<int64_t>(*sizes.find(word));
}

// Solves for the dimension's one open symbol; false when it has more than one.
bool solve(const KernelRow& row, const Dimension& dimension, Sizes& sizes, std::vector<std::string>& open) {
  const auto is_open = [&](const std::string& word) { return std::find(open.begin(), open.end(), word) != open.end(); };
  int64_t product = 1;
  const Factor* unknown = nullptr;
  for (const Factor& factor : *dimension.factors) {
    if (is_open(factor.plus) || (is_open(factor.symbol) && unknown)) return false;
    if (is_open(factor.symbol)) {
      unknown = &factor;
    } else {
      product *= value_of(factor.plus, sizes) + factor.times * value_of(factor.symbol, sizes);
    }
  }
  if (unknown ? product && dimension.size % product : product != dimension.size)
    fail(row, "a dimension of " + std::to_string(dimension.size) + (unknown ? ", which is not a multiple of " : " instead of ") +
                  std::to_string(product));
  if (unknown && product) {
    const int64_t quotient = dimension.size / product - value_of(unknown->plus, sizes);
    *sizes.find(unknown->symbol) = static_cast<double>(quotient / unknown->times);
    open.erase(std::find(open.begin(), open.end(), unknown->symbol));
  }
  return true;
}

// e, e_out, e_avg, e_sq, dx and window, and the sizes that are whole numbers of the call.
Sizes plain_sizes(const std::vector<Operand>& operands, const std::vector<Argument>& arguments,
                  std::vector<std::string>& open) {
  Sizes sizes;
  for (size_t i = 0; i < operands.size(); ++i) {
    const Argument& argument = arguments[i];
    if (argument.floating && sizes.e == 0) sizes.e = static_cast<double>(argument.element_bytes);
    if (operands[i].name == "exp_avg") sizes.e_avg = static_cast<double>(argument.element_bytes);
    if (operands[i].name == "exp_avg_sq") sizes.e_sq = static_cast<double>(argument.element_bytes);
    if (operands[i].name == "dx") sizes.dx = argument.shape ? 1 : 0;
    if (operands[i].tensor) sizes.e_out = static_cast<double>(argument.element_bytes);
    const auto symbol = std::find(open.begin(), open.end(), operands[i].name);
    const bool known = argument.number || operands[i].name == "window";
    if (operands[i].tensor || !known || symbol == open.end()) continue;
    *sizes.find(*symbol) = static_cast<double>(argument.number.value_or(NO_WINDOW));
    open.erase(symbol);
  }
  return sizes;
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

std::vector<std::string> operand_names(const KernelRow& row) {
  std::vector<std::string> names;
  for (const Operand& operand : operands_of(row)) names.push_back(operand.name);
  return names;
}

Sizes call_sizes(const KernelRow& row, const std::vector<Argument>& arguments) {
  const std::vector<Operand>& operands = operands_of(row);
  std::vector<std::string> open = row.sizes;
  Sizes sizes = plain_sizes(operands, arguments, open);
  std::vector<Dimension> dimensions;
  for (size_t i = 0; i < operands.size(); ++i) {
    if (operands[i].tensor && arguments[i].shape) add_dimensions(row, operands[i], *arguments[i].shape, dimensions);
  }
  for (size_t pass = 0; pass <= row.sizes.size(); ++pass) {
    for (const Dimension& dimension : dimensions) solve(row, dimension, sizes, open);
  }
  if (!open.empty() && row.operands.find('(') != std::string::npos) fail(row, "none that tells " + open[0]);
  return sizes;
}

}  // namespace fm
