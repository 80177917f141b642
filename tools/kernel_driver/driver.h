// One kernel call on generated data: what the ops_*.cc files describe and main.cc runs.
//
//   static void my_op(Work& w, const Shape& n) {            n: the numbers of the command line
//     const void* x = w.input(n[0]); void* y = w.output(n[0]);
//     w.flops = 2.0 * n[0];
//     w.run = [=] { kernels().my_kernel(x, y, w.dtype, n[0]); };
//   }
//   static const Register mine{{"my_op", "N", {1024}, my_op}};
//
// Data are a function of position alone, so a checksum is the same on every machine and for every target up to rounding.
#pragma once
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "dispatch.h"

namespace fm::driver {

using Shape = std::vector<int64_t>;

class Work {
 public:
  Work(DType dtype, int64_t fp16_chunk) : dtype(dtype), fp16_chunk(fp16_chunk) {}

  // A tensor of n elements between -1 and 1 times scale, in `dtype` or in float32.
  void* input(int64_t n, float scale = 1) { return tensor(n, dtype, scale, true, false); }
  float* input_f32(int64_t n, float scale = 1) {
    return static_cast<float*>(tensor(n, DType::f32, scale, true, false));
  }
  // Zeros that the kernel writes; they make the checksum.
  void* output(int64_t n) { return tensor(n, dtype, 0, false, true); }
  float* output_f32(int64_t n) { return static_cast<float*>(tensor(n, DType::f32, 0, false, true)); }
  // Both: read and written.
  float* updated_f32(int64_t n, float scale = 1) {
    return static_cast<float*>(tensor(n, DType::f32, scale, true, true));
  }
  // n whole numbers from 0 to below limit.
  const int64_t* indices(int64_t n, int64_t limit);
  // Uninitialised memory, in no account.
  void* memory(int64_t bytes);

  double checksum() const;
  double bytes() const { return bytes_; }

  const DType dtype;
  const int64_t fp16_chunk;  // of gemm_args.h; 0 but for gemm ops
  double flops = 0;
  std::function<void()> run;

 private:
  struct Output {
    const void* data;
    DType dtype;
    int64_t n;
  };
  void* tensor(int64_t n, DType type, float scale, bool read, bool written);

  std::vector<std::unique_ptr<void, void (*)(void*)>> memory_;
  std::vector<Output> outputs_;
  double bytes_ = 0;
};

struct Op {
  std::string name, shape;  // shape: names of its numbers
  Shape defaults;
  void (*prepare)(Work&, const Shape&);
};

std::vector<Op>& ops();

struct Register {
  Register(Op op) { ops().push_back(std::move(op)); }
};

}  // namespace fm::driver
