// kernel_driver OP [SHAPE...] [--target T] [--dtype f32|bf16|f16|bf16x3|int8] [--fp16-chunk K] [--threads N] [--repeat N]
//
// Runs one kernel without Python: for a profiler on an A64FX, for a cycle-level model of one (static, one thread, few system
// calls), and for a quick look anywhere. Prints the checksum of one run and, with --repeat N, the best and the median time of N
// more; under an emulator those times mean nothing. Built by tools/build_driver.py (make driver, make arm-driver), tested by
// tests/arm/test_driver.py.
#include <algorithm>
#include <cctype>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <stdexcept>

#include "driver.h"
#include "parallel.h"

namespace fm::driver {

std::vector<Op>& ops() {
  static std::vector<Op> all;
  return all;
}

namespace {

float number(uint32_t i) {  // a hash of i in [-1, 1)
  i = (i + 1) * 2654435761u;
  i = (i ^ (i >> 15)) * 2246822519u;
  return static_cast<float>(static_cast<int32_t>(i ^ (i >> 13))) * 0x1p-31f;
}

int64_t element_bytes(DType dtype) { return dtype == DType::bf16 || dtype == DType::f16 ? 2 : 4; }

}  // namespace

void* Work::memory(int64_t bytes) {
  void* data = std::aligned_alloc(256, (bytes + 511) / 256 * 256);
  if (!data) throw std::runtime_error("not enough memory for this shape");
  memory_.emplace_back(data, &std::free);
  return data;
}

const int64_t* Work::indices(int64_t n, int64_t limit, int64_t touched) {
  int64_t* data = static_cast<int64_t*>(memory(8 * n));
  for (int64_t i = 0; i < n; ++i) data[i] = (i * 7919 + 13) % limit;
  bytes_ += 8.0 * (touched == ALL ? n : touched);
  return data;
}

void* Work::tensor(int64_t n, DType type, float scale, bool read, bool written, int64_t touched) {
  const uint32_t seed = static_cast<uint32_t>(memory_.size()) * 40503u;
  std::vector<float> values(n);
  for (int64_t i = 0; read && i < n; ++i)
    values[i] = scale * number(static_cast<uint32_t>(i) + seed);
  void* data = memory(n * element_bytes(type));
  if (type == DType::i32) {
    std::memset(data, 0, n * sizeof(uint32_t));
  } else {
    kernels().convert(values.data(), DType::f32, data, type, n);
  }
  if (written) outputs_.push_back({data, type, n});
  bytes_ +=
      static_cast<double>((read + written) * (touched == ALL ? n : touched) * element_bytes(type));
  return data;
}

double Work::checksum() const {
  double sum = 0;
  for (const Output& output : outputs_) {
    std::vector<float> values(output.n);
    if (output.dtype == DType::i32) {
      const uint32_t* words = static_cast<const uint32_t*>(output.data);
      for (int64_t i = 0; i < output.n; ++i) values[i] = static_cast<float>(words[i]) * 0x1p-32f;
    } else {
      kernels().convert(output.data, output.dtype, values.data(), DType::f32, output.n);
    }
    for (int64_t i = 0; i < output.n; ++i) sum += (1 + i % 7) * static_cast<double>(values[i]);
  }
  return sum;
}

namespace {

struct Options {
  std::string op, target, dtype = "f32";
  Shape shape;
  int threads = 1, repeat = 0;
  int64_t fp16_chunk = 0;
};

int64_t whole_number(const std::string& what, const std::string& text) {
  char* end = nullptr;
  const long long value = std::strtoll(text.c_str(), &end, 10);
  if (text.empty() || *end || value < 0)
    throw std::invalid_argument(what + ": expected a number, got '" + text + "'");
  return value;
}

Options parse(int argc, char** argv) {
  Options o;
  for (int i = 1; i < argc; ++i) {
    const std::string word = argv[i];
    if (word.rfind("--", 0) != 0) {
      if (o.op.empty()) {
        o.op = word;
      } else {
        o.shape.push_back(whole_number("shape", word));
      }
      continue;
    }
    if (i + 1 == argc) throw std::invalid_argument(word + ": expected a value");
    const std::string value = argv[++i];
    if (word == "--target") {
      o.target = value;
    } else if (word == "--dtype") {
      o.dtype = value;
    } else if (word == "--fp16-chunk") {
      o.fp16_chunk = whole_number(word, value);
    } else if (word == "--threads") {
      o.threads = std::max(1, static_cast<int>(whole_number(word, value)));
    } else if (word == "--repeat") {
      o.repeat = static_cast<int>(whole_number(word, value));
    } else {
      throw std::invalid_argument("unknown option " + word +
                                  "; known: --target --dtype --fp16-chunk --threads --repeat");
    }
  }
  return o;
}

DType dtype_of(const std::string& name) {
  if (name == "f32") return DType::f32;
  if (name == "bf16") return DType::bf16;
  if (name == "f16") return DType::f16;
  if (name == "bf16x3") return DType::bf16x3;
  if (name == "int8") return DType::int8_of_f32;
  throw std::invalid_argument("--dtype: expected f32, bf16, f16, bf16x3 or int8, got '" + name +
                              "'");
}

bool is_matmul(const Options& o) { return !o.op.rfind("gemm_n", 0) || o.op == "gemm_tn"; }

// The tensors' type: bf16x3 and int8 are how float32 matrices are multiplied, the first on a target that multiplies bfloat16.
DType stored(const Options& o, DType dtype) {
  if (dtype != DType::bf16x3 && !is_int8(dtype)) return dtype;
  if (!is_matmul(o)) throw std::invalid_argument("--dtype " + o.dtype + ": not for " + o.op);
  if (dtype == DType::bf16x3 && !kernels().has_bf16_arithmetic())
    throw std::invalid_argument(std::string("--dtype bf16x3: target ") + active() +
                                " has no BF16 arithmetic");
  return DType::f32;
}

// FP16 sums are for matmuls of f16 on a target that has them.
int64_t checked_chunk(const Options& o, DType dtype) {
  if (!o.fp16_chunk) return 0;
  if (!is_matmul(o)) throw std::invalid_argument("--fp16-chunk: not for " + o.op);
  if (dtype != DType::f16)
    throw std::invalid_argument("--fp16-chunk: expected --dtype f16, got " + o.dtype);
  if (!kernels().has_fp16_arithmetic())
    throw std::invalid_argument(std::string("--fp16-chunk: target ") + active() +
                                " has no FP16 arithmetic");
  return o.fp16_chunk;
}

const KernelRow& row_of(const Op& op) {
  const KernelRow* row = find_kernel_row(op.kernel);
  if (!row) throw std::logic_error(op.name + ": kernels.inc has no row " + op.kernel);
  return *row;
}

// The names of a row's sizes as the command line has them: "M N K".
std::string size_names(const KernelRow& row) {
  std::string names;
  for (const std::string& size : row.sizes) names += (names.empty() ? "" : " ") + size;
  for (char& c : names) c = static_cast<char>(std::toupper(c));
  return names;
}

Sizes sizes_of(const KernelRow& row, const Shape& shape, DType dtype) {
  Sizes sizes;
  for (size_t i = 0; i < shape.size(); ++i)
    *sizes.find(row.sizes[i]) = static_cast<double>(shape[i]);
  sizes.dx = 1;
  sizes.e = sizes.e_out = static_cast<double>(element_bytes(dtype));
  return sizes;
}

const Op& find(const std::string& name) {
  std::string known;
  for (const Op& op : ops()) {
    if (op.name == name) return op;
    known += " " + op.name;
  }
  throw std::invalid_argument("unknown op '" + name + "'; known:" + known);
}

int list() {
  std::printf(
      "kernel_driver OP [SHAPE...] [--target T] [--dtype f32|bf16|f16|bf16x3|int8] "
      "[--fp16-chunk K] [--threads N] [--repeat N]\n");
  for (const Op& op : ops()) {
    std::printf("  %-37s %-37s %-18s default", op.name.c_str(), op.kernel.c_str(),
                size_names(row_of(op)).c_str());
    for (int64_t n : op.defaults) std::printf(" %lld", static_cast<long long>(n));
    std::printf("\n");
  }
  std::printf("targets:");
  for (const TargetInfo& target : targets()) {
    if (target.runnable) std::printf(" %s", target.name.c_str());
  }
  std::printf("\n");
  return 0;
}

std::vector<double> times(const Work& work, int repeat) {
  std::vector<double> seconds;
  for (int i = 0; i < repeat; ++i) {
    const auto begin = std::chrono::steady_clock::now();
    work.run();
    seconds.push_back(
        std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
  }
  std::sort(seconds.begin(), seconds.end());
  return seconds;
}

void report_times(const std::vector<double>& seconds, double flops, double bytes) {
  const double best = seconds[0], median = seconds[seconds.size() / 2];
  std::printf("seconds best %.3e median %.3e of %zu runs (no meaning under an emulator)\n", best,
              median, seconds.size());
  if (flops > 0)
    std::printf("GFLOP/s best %.3f median %.3f\n", flops / best * 1e-9, flops / median * 1e-9);
  if (bytes > 0)
    std::printf("GB/s best %.3f median %.3f, of bytes that must be moved\n", bytes / best * 1e-9,
                bytes / median * 1e-9);
}

Shape checked_shape(const Options& options, const Op& op, const KernelRow& row) {
  if (options.shape.empty()) return op.defaults;
  if (options.shape.size() != row.sizes.size()) {
    throw std::invalid_argument(op.name + ": expected " + std::to_string(row.sizes.size()) +
                                " numbers (" + size_names(row) + "), got " +
                                std::to_string(options.shape.size()));
  }
  return options.shape;
}

void report_call(const Options& options, const Shape& shape) {
  std::printf("%s", options.op.c_str());
  for (int64_t n : shape) std::printf(" %lld", static_cast<long long>(n));
  std::printf(" %s fp16_chunk %lld target %s threads %d\n", options.dtype.c_str(),
              static_cast<long long>(options.fp16_chunk), active(), options.threads);
}

// Prints a note when only the baseline can run here, for example in a simulator that does not report the length of SVE vectors: its
// times would otherwise be taken for those of the CPU's own target.
void choose_target(const std::string& name) {
  if (!name.empty()) return use(name);
  use_default();
  if (std::strcmp(active(), "portable") || std::getenv("FUGAKU_MEGATRON_TARGET")) return;
  std::string reason;
  for (const TargetInfo& target : targets()) {
    if (target.compiled && !target.runnable) reason = target.name + ": " + target.reason;
  }
  if (!reason.empty())
    std::fprintf(stderr, "kernel_driver: runs target portable, the slowest, without %s\n",
                 reason.c_str());
}

int run(const Options& options) {
  const Op& op = find(options.op);
  const KernelRow& row = row_of(op);
  const Shape shape = checked_shape(options, op, row);
  set_num_threads(options.threads);
  choose_target(options.target);
  const DType operands = dtype_of(options.dtype), dtype = stored(options, operands);
  Work work(dtype, operands, checked_chunk(options, dtype), sizes_of(row, shape, dtype));
  op.prepare(work, shape);
  work.run();
  if (work.after) work.after();
  report_call(options, shape);
  const double flops = work.flops ? work.flops : row.flops(work.sizes),
               bytes = row.bytes(work.sizes);
  std::printf("checksum %.9g\nbytes %.0f of tensors %.0f flops %.0f\n", work.checksum(), bytes,
              work.bytes(), flops);
  if (options.repeat) report_times(times(work, options.repeat), flops, bytes);
  return 0;
}

}  // namespace
}  // namespace fm::driver

int main(int argc, char** argv) {
  try {
    if (argc == 1) return fm::driver::list();
    return fm::driver::run(fm::driver::parse(argc, argv));
  } catch (const std::exception& error) {
    std::fprintf(stderr, "kernel_driver: %s\n", error.what());
    return 2;
  }
}
