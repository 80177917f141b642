// The Python module fugaku_megatron._kernels: the choice of target and of threads. Kernels are bound in
// <family>_bind.cc.
#include <pybind11/stl.h>

#include "extension/calls.h"
#include "extension/openmp.h"

namespace fm {
namespace {

py::dict describe(const TargetInfo& info) {
  py::dict row;
  row["name"] = info.name;
  row["vector_bytes"] = info.vector_bytes;
  row["gemm_tile"] = py::make_tuple(info.gemm_rows, info.gemm_vectors);
  row["fetch_steps"] = info.fetch_steps;
  row["compiled"] = info.compiled;
  row["runnable"] = info.runnable;
  row["reason"] = info.reason;
  return row;
}

void require_openmp() {
  if (!py::module_::import("sys").attr("modules").contains("torch"))
    throw py::import_error(
        "import torch (or fugaku_megatron.host.kernels) before fugaku_megatron._kernels: they "
        "share torch's OpenMP runtime");
  if (!find_openmp())
    throw py::import_error(
        "this torch was built without OpenMP, and the system has no libgomp.so.1: install libgomp1 "
        "(Debian) or libgomp (RHEL)");
}

void choose_target() {
  try {
    use_default();
  } catch (const std::exception& error) {
    throw py::import_error(std::string("environment variable FUGAKU_MEGATRON_TARGET: ") +
                           error.what());
  }
}

}  // namespace
}  // namespace fm

PYBIND11_MODULE(_kernels, module) {
  using namespace fm;
  require_openmp();
  choose_target();
  module.doc() =
      "CPU kernels of fugaku_megatron. Arguments are torch tensors in CPU memory; outputs are "
      "written in place.";
  module.def(
      "targets",
      [] {
        py::list rows;
        for (const TargetInfo& info : targets()) rows.append(describe(info));
        return rows;
      },
      "Every target: name, vector_bytes, gemm_tile (rows, vectors of columns), fetch_steps (of k, "
      "between which "
      "the k-loop fetches),\n"
      "compiled, runnable, reason (why not runnable). The reference is the scalar one.");
  module.def("active", [] { return std::string(active()); }, "Name of the target in use.");
  module.def("use", &use, py::arg("name"),
             "Uses this target from now on, in the whole process. ValueError: unknown name. "
             "RuntimeError: this CPU or "
             "build lacks it.");
  module.def("num_threads", &num_threads, "Threads that a kernel may use.");
  module.def(
      "set_num_threads",
      [](int threads) {
        if (threads < 1)
          throw py::value_error("threads: expected at least 1, got " + std::to_string(threads));
        set_num_threads(threads);
      },
      py::arg("threads"),
      "Sets the threads of kernels called by this thread; the same setting as "
      "torch.set_num_threads.");
  module.def("flush_denormals", &flush_denormals, py::arg("on"),
             "Denormal numbers, which are slow, count as zero in all threads of the calling "
             "thread's kernels and of torch.");
  module.def("pin_threads", &pin_threads, py::arg("cpus"),
             "Thread i of the calling thread's kernels (0 is the caller) runs on cpus[i] only. "
             "Returns where each now "
             "runs, -1 "
             "where the system refused.");
  module.def("thread_cpus", &thread_cpus, "The CPU that each thread runs on.");
  bind_calls(module);
  for (BindFunction bind : bind_functions()) bind(module);
}
