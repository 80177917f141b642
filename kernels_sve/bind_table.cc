// The Python module _kernels.table: kernels.inc as data (kernel_rows.h). A module of its own, because its functions are no
// kernels: whoever observes the kernels of _kernels must not observe these.
#include <pybind11/stl.h>

#include "kernel_rows.h"
#include "tensor_view.h"

namespace fm {
namespace {

const KernelRow& row_named(const std::string& name) {
  const KernelRow* row = find_kernel_row(name);
  if (!row) throw py::value_error("no kernel of the table is called " + name);
  return *row;
}

py::dict describe(const KernelRow& row) {
  using namespace py::literals;
  return py::dict("name"_a = row.name, "kernel"_a = row.kernel, "family"_a = row.family, "sizes"_a = row.sizes,
                  "operands"_a = row.operands, "flops"_a = row.flops_text, "bytes"_a = row.bytes_text);
}

py::list describe_all() {
  py::list rows;
  for (const KernelRow& row : kernel_rows()) rows.append(describe(row));
  return rows;
}

Argument argument_of(py::handle value) {
  Argument argument;
  if (py::isinstance<py::int_>(value)) {
    argument.number = value.cast<int64_t>();
  } else if (py::hasattr(value, "shape")) {
    argument.shape = value.attr("shape").cast<std::vector<int64_t>>();
    argument.element_bytes = value.attr("element_size")().cast<int64_t>();
    argument.floating = value.attr("is_floating_point")().cast<bool>();
  }
  return argument;
}

Sizes sizes_of(const KernelRow& row, const py::args& args, const py::kwargs& kwargs) {
  std::vector<Argument> arguments;
  for (const std::string& name : operand_names(row)) {
    const size_t i = arguments.size();
    arguments.push_back(i < args.size()                 ? argument_of(args[i])
                        : kwargs.contains(name.c_str()) ? argument_of(kwargs[name.c_str()])
                                                        : Argument());
  }
  return call_sizes(row, arguments);
}

py::dict call_sizes_as_dict(const std::string& name, const py::args& args, const py::kwargs& kwargs) {
  const KernelRow& row = row_named(name);
  Sizes sizes = sizes_of(row, args, kwargs);
  py::dict result;
  for (const std::string& symbol : row.sizes) result[symbol.c_str()] = static_cast<int64_t>(*sizes.find(symbol));
  for (const char* symbol : {"e", "e_out"}) result[symbol] = static_cast<int64_t>(*sizes.find(symbol));
  return result;
}

py::tuple cost(const std::string& name, const py::kwargs& kwargs) {
  const KernelRow& row = row_named(name);
  Sizes sizes;
  sizes.e = 4, sizes.dx = 1;
  for (const auto& [symbol, value] : kwargs) {
    double* size = sizes.find(symbol.cast<std::string>());
    require(size, "sizes", "symbols of kernels.inc", symbol.cast<std::string>());
    *size = value.cast<double>();
  }
  if (!kwargs.contains("e_out")) sizes.e_out = sizes.e;
  for (const std::string& symbol : row.sizes) require(kwargs.contains(symbol.c_str()), "sizes", symbol, "none");
  return py::make_tuple(row.flops(sizes), row.bytes(sizes));
}

template <double (*KernelRow::*FORMULA)(const Sizes&)>
double call_cost(const std::string& name, const py::args& args, const py::kwargs& kwargs) {
  const KernelRow* row = find_kernel_row(name);
  return row ? (row->*FORMULA)(sizes_of(*row, args, kwargs)) : 0.0;
}

const char ROWS_DOC[] =
    R"(A dict per kernel: name, family, sizes (their symbols), operands (shapes), flops and bytes (formulas).

kernel: the name of the row whose kernel a Python function runs, where it is not its own.)";

const char SIZES_DOC[] = R"(sizes(name, *args, **kwargs): the sizes of the call name(*args, **kwargs) by symbol.

With e and e_out, bytes of an element of its first floating operand and of its last operand. ValueError when shapes do not fit the
row.)";

const char COST_DOC[] =
    R"(cost(name, **sizes): (flops, bytes) for these sizes. e is 4 by default, e_out is e and dx is 1.)";

const char FLOPS_DOC[] =
    R"(flops(name, *args, **kwargs): operations of the call name(*args, **kwargs), multiplies and adds counted apart.

0 where memory bounds a kernel, and for a function that is no kernel of the table.)";

const char BYTES_DOC[] =
    R"(bytes(name, *args, **kwargs): bytes that the call must read and write at least once; 0 for a name that is not a kernel.)";

}  // namespace

FM_BIND(table) {
  using namespace py::literals;
  py::module_ table = module.def_submodule("table", "The rows of kernels.inc: what each kernel is, what a call costs.");
  table.def("rows", &describe_all, ROWS_DOC);
  table.def("sizes", &call_sizes_as_dict, "name"_a, SIZES_DOC);
  table.def("cost", &cost, "name"_a, COST_DOC);
  table.def("flops", &call_cost<&KernelRow::flops>, "name"_a, FLOPS_DOC);
  table.def("bytes", &call_cost<&KernelRow::bytes>, "name"_a, BYTES_DOC);
}

}  // namespace fm
