// Kernel calls that are made again: their arguments are checked once, and a repetition crosses from Python once for all of them.
//
//   Call check(py::handle x_object, ...) { TensorView x("x", x_object); ...; return [args] { kernels().some_kernel(args); }; }
//   FM_BIND(family) { def_repeatable(module, "some_kernel", &check, "x"_a, ...); }
//
// Python functions of Calls: calls_bind.cc. Tested by tests/kernels/test_calls.py and tests/inference/test_recorded_step.py.
#pragma once
#include <functional>
#include <utility>
#include <vector>

#include "extension/tensor_view.h"

namespace fm {

// A kernel with its checked arguments, which it holds by value; tensors are addresses.
using Call = std::function<void()>;

class Calls {
 public:
  // Makes the call and keeps it, and its Python arguments so that the addresses stay theirs.
  void make(Call call, py::tuple arguments) {
    unlocked(call);
    calls_.push_back(std::move(call));
    arguments_.push_back(std::move(arguments));
  }
  // In order, on what the tensors hold now.
  void repeat() const {
    unlocked([&] {
      for (const Call& call : calls_) call();
    });
  }
  size_t size() const { return calls_.size(); }

 private:
  std::vector<Call> calls_;
  std::vector<py::tuple> arguments_;
};

// The class Calls, before any FM_BIND.
void bind_calls(py::module_& module);

// Binds module.name, which makes the call that `check` returns, and Calls.name, which keeps it as well.
template <class... Arguments, class... Extra>
void def_repeatable(py::module_& module, const char* name, Call (*check)(Arguments...),
                    const Extra&... extra) {
  module.def(name, [check](Arguments... arguments) { unlocked(check(arguments...)); }, extra...);
  py::reinterpret_borrow<py::class_<Calls>>(module.attr("Calls"))
      .def(
          name,
          [check](Calls& calls, Arguments... arguments) {
            calls.make(check(arguments...), py::make_tuple(arguments...));
          },
          extra...);
}

}  // namespace fm
