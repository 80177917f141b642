// One kernel call on generated data: what the ops_*.cc files describe and main.cc runs.
//
//   static void my_op(Work& w, const Shape& n) {            n: the sizes of the kernel's row in kernels.inc, in its order
//     const void* x = w.input(n[0]); void* y = w.output(n[0]);
//     w.run = [=, &w] { kernels().my_kernel(x, y, w.dtype, n[0]); };
//   }
//   static const Register mine{{"my_op", {1024}, my_op, "my_kernel"}};
//
// FLOPs and bytes are those of the kernel's row; Work counts the bytes of its tensors as well, and a test compares the two.
// Data are a function of position alone, so a checksum is the same on every machine and for every target up to rounding.
#pragma once
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "dispatch.h"
#include "kernel_rows.h"

namespace fm::driver {

using Shape = std::vector<int64_t>;

constexpr int64_t ALL = -1;

class Work {
 public:
  Work(DType dtype, DType operands, int64_t fp16_chunk, const Sizes& sizes)
      : dtype(dtype), operands(operands), fp16_chunk(fp16_chunk), sizes(sizes) {}

  // A tensor of n elements between -1 and 1 times scale, in `dtype` or in float32. touched: elements that one run reads or
  // writes, as in all of these.
  void* input(int64_t n, float scale = 1, int64_t touched = ALL) {
    return tensor(n, dtype, scale, true, false, touched);
  }
  float* input_f32(int64_t n, float scale = 1) {
    return static_cast<float*>(tensor(n, DType::f32, scale, true, false, ALL));
  }
  // Zeros that the kernel writes; they make the checksum.
  void* output(int64_t n, int64_t touched = ALL) {
    return tensor(n, dtype, 0, false, true, touched);
  }
  float* output_f32(int64_t n, int64_t touched = ALL) {
    return static_cast<float*>(tensor(n, DType::f32, 0, false, true, touched));
  }
  // Of whole numbers, whose checksum is that of the numbers times 2^-32.
  uint32_t* output_u32(int64_t n) {
    return static_cast<uint32_t*>(tensor(n, DType::i32, 0, false, true, ALL));
  }
  void* output_of(DType type, int64_t n) { return tensor(n, type, 0, false, true, ALL); }
  // Both: read and written.
  void* updated(int64_t n, DType type, float scale) {
    return tensor(n, type, scale, true, true, ALL);
  }
  float* updated_f32(int64_t n, float scale = 1, int64_t touched = ALL) {
    return static_cast<float*>(tensor(n, DType::f32, scale, true, true, touched));
  }
  // n whole numbers from 0 to below limit.
  const int64_t* indices(int64_t n, int64_t limit, int64_t touched = ALL);
  // Uninitialised memory, in no account.
  void* memory(int64_t bytes);

  double checksum() const;
  // Of the tensors, each once per read and write.
  double bytes() const { return bytes_; }

  const DType dtype;
  const DType operands;      // of a matmul: dtype, or bf16x3 or int8 of float32
  const int64_t fp16_chunk;  // of gemm_args.h; 0 but for gemm ops
  Sizes sizes;       // of the kernel's row; e and e_out are those of dtype unless an op sets them
  double flops = 0;  // where the kernel counts them itself
  std::function<void()> run;
  std::function<void()> after;  // once, before the checksum

 private:
  struct Output {
    const void* data;
    DType dtype;
    int64_t n;
  };
  void* tensor(int64_t n, DType type, float scale, bool read, bool written, int64_t touched);

  std::vector<std::unique_ptr<void, void (*)(void*)>> memory_;
  std::vector<Output> outputs_;
  double bytes_ = 0;
};

struct Op {
  std::string name;
  Shape defaults;
  void (*prepare)(Work&, const Shape&);
  std::string kernel = {};  // a row of kernels.inc; empty: that of the op's name
};

std::vector<Op>& ops();

struct Register {
  Register(Op op) {
    if (op.kernel.empty()) op.kernel = op.name;
    ops().push_back(std::move(op));
  }
};

}  // namespace fm::driver
