// The Python module _kernels.table: kernels.inc as data (kernel_rows.h). A module of its own, because its functions are not
// kernels: whoever observes the kernels of _kernels must not observe these.
#include <pybind11/stl.h>

#include "kernel_rows.h"
#include "table.h"
#include "extension/tensor_view.h"

namespace fm {
namespace {

const KernelRow& row_named(const std::string& name) {
  const KernelRow* row = find_kernel_row(name);
  if (!row) throw py::value_error("no kernel of the table is called " + name);
  return *row;
}

py::dict describe(const KernelRow& row) {
  using namespace py::literals;
  return py::dict("name"_a = row.name, "kernel"_a = row.kernel, "family"_a = row.family,
                  "sizes"_a = row.sizes, "operands"_a = row.operands, "flops"_a = row.flops_text,
                  "bytes"_a = row.bytes_text);
}

py::list describe_all() {
  py::list rows;
  for (const KernelRow& row : kernel_rows()) rows.append(describe(row));
  return rows;
}

py::tuple cost(const std::string& name, const py::kwargs& kwargs) {
  const KernelRow& row = row_named(name);
  Sizes sizes;
  sizes.e = 4, sizes.dx = 1, sizes.window = NO_WINDOW;
  for (const auto& [symbol, value] : kwargs) {
    double* size = sizes.find(symbol.cast<std::string>());
    require(size, "sizes", "symbols of kernels.inc", symbol.cast<std::string>());
    *size = value.cast<double>();
  }
  if (!kwargs.contains("e_out")) sizes.e_out = sizes.e;
  for (const std::string& symbol : row.sizes)
    require(symbol == "window" || kwargs.contains(symbol.c_str()), "sizes", symbol, "none");
  return py::make_tuple(row.flops(sizes), row.bytes(sizes));
}

const char ROWS_DOC[] =
    R"(A dict per kernel: name, family, sizes (their symbols), operands (shapes), flops and bytes (formulas).

kernel: the name of the row whose kernel a Python function runs, where it is not its own.)";

const char COST_DOC[] =
    R"(cost(name, **sizes): (flops, bytes) for these sizes. Defaults: e = 4, e_out = e, dx = 1, no window.)";

}  // namespace

FM_BIND(table) {
  using namespace py::literals;
  py::module_ table = module.def_submodule(
      "table", "The rows of kernels.inc: what each kernel is, what a call costs.");
  table.def("rows", &describe_all, ROWS_DOC);
  table.def("cost", &cost, "name"_a, COST_DOC);
}

}  // namespace fm
