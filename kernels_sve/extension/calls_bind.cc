// The Python class of calls.h; def_repeatable adds its methods.
#include "extension/calls.h"

namespace fm {

void bind_calls(py::module_& module) {
  py::class_<Calls>(module, "Calls",
                    "Kernel calls that are made again. A method has the name and the arguments of "
                    "a kernel, makes its "
                    "call and\n"
                    "keeps it with its tensors; it takes only the kernels of a step of generation.")
      .def(py::init<>())
      .def("__call__", &Calls::repeat,
           "Makes all calls again, in order, on what their tensors hold now.")
      .def("__len__", &Calls::size);
}

}  // namespace fm
