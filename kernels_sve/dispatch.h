// Which builds of the kernels this process holds, which of them the CPU can run, and which one is in use.
#pragma once
#include <string>
#include <vector>

#include "table.h"

namespace fm {

struct TargetInfo {
  std::string name;
  int vector_bytes;
  int gemm_rows, gemm_vectors;  // the GEMM tile: rows, vectors of columns
  int fetch_steps;              // of k, between two turns of gemm_fetch.h
  bool compiled, runnable;
  std::string reason;  // why not runnable, else empty
};

std::vector<TargetInfo> targets();
const char* active();
// Throws std::invalid_argument for an unknown name, std::runtime_error with the reason when this CPU or this build
// lacks it.
void use(const std::string& name);
// The environment's FUGAKU_MEGATRON_TARGET, else the fastest runnable target. Throws as use() does.
void use_default();

}  // namespace fm
