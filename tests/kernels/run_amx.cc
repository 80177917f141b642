// The machine code of target amx on a CPU without AMX: each tile instruction raises SIGILL, and the handler does its work on the bytes
// of the instruction, so encoding, operands, tile configuration and addresses are those that run on the real CPU. Every result must
// have the bits of target amx_emulated. Exit code 0 and a line that counts the instructions; where the CPU has AMX they just run.
// Built and run by tests/kernels/test_amx.py.
#include <immintrin.h>
#include <signal.h>
#include <ucontext.h>

#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "cpu_features.h"
#include "parallel.h"
#include "table.h"

namespace fm::amx {
extern const KernelTable kernel_table;
}
namespace fm::amx_emulated {
extern const KernelTable kernel_table;
}

namespace {
using namespace fm;

struct Tiles {
  bool configured;
  float row[8][16][16];
};
thread_local Tiles tiles;
std::atomic<long> counts[6];
enum Kind { CONFIGURE, RELEASE, ZERO, LOAD, STORE, PRODUCT };

float bits(uint32_t word) {
  float value;
  std::memcpy(&value, &word, 4);
  return value;
}
float normal(float x) { return std::fabs(x) < 0x1p-126f ? std::copysign(0.0f, x) : x; }

void multiply(int sum, int a, int b) {
  float result[16][16];
  for (int m = 0; m < 16; ++m) {
    for (int n = 0; n < 16; ++n) {
      float even = 0, odd = 0;
      for (int k = 0; k < 16; ++k) {
        uint32_t x, y;
        std::memcpy(&x, &tiles.row[a][m][k], 4), std::memcpy(&y, &tiles.row[b][k][n], 4);
        even = normal(std::fma(normal(bits(x << 16)), normal(bits(y << 16)), even));
        odd = normal(std::fma(normal(bits(x & 0xffff0000u)), normal(bits(y & 0xffff0000u)), odd));
      }
      result[m][n] = normal(normal(tiles.row[sum][m][n]) + normal(even + odd));
    }
  }
  std::memcpy(tiles.row[sum], result, sizeof result);
}

void multiply_bytes(int sum, int a, int b) {
  for (int m = 0; m < 16; ++m) {
    for (int n = 0; n < 16; ++n) {
      int32_t total;
      std::memcpy(&total, &tiles.row[sum][m][n], 4);
      for (int k = 0; k < 16; ++k) {
        int8_t x[4], y[4];
        std::memcpy(x, &tiles.row[a][m][k], 4), std::memcpy(y, &tiles.row[b][k][n], 4);
        for (int i = 0; i < 4; ++i) total += x[i] * y[i];
      }
      std::memcpy(&tiles.row[sum][m][n], &total, 4);
    }
  }
}

// A three-byte VEX instruction of map 0F38, W 0 and length 128, as Intel's manual lists them: 49 and 4B for tiles, 5C for TDPBF16PS, 5E for TDPBSSD.
void step(int, siginfo_t*, void* context) {
  static const int REGISTERS[] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP,
                                  REG_RSI, REG_RDI, REG_R8,  REG_R9,  REG_R10, REG_R11,
                                  REG_R12, REG_R13, REG_R14, REG_R15};
  greg_t* registers = static_cast<ucontext_t*>(context)->uc_mcontext.gregs;
  const auto* code = reinterpret_cast<const uint8_t*>(registers[REG_RIP]);
  const auto unknown = [&] {
    std::fprintf(stderr, "illegal instruction %02x %02x %02x %02x %02x\n", code[0], code[1],
                 code[2], code[3], code[4]);
    std::_Exit(2);
  };
  if (code[0] != 0xc4 || (code[1] & 0x1f) != 2 || code[2] & 0x84) unknown();
  const int prefix = code[2] & 3, opcode = code[3], mod = code[4] >> 6, middle = code[4] >> 3 & 7,
            low = code[4] & 7;
  int length = 5;
  const auto address = [&](int64_t& stride) {
    int base = low, index = 4;
    if (low == 4) index = code[5] >> 3 & 7, base = code[5] & 7, ++length;
    if (mod == 0 && low == 5) {  // relative to the next instruction
      int32_t offset;
      std::memcpy(&offset, code + 5, 4);
      length = 9, stride = 0;
      return const_cast<char*>(reinterpret_cast<const char*>(code)) + length + offset;
    }
    if (mod == 0 && base == 5) unknown();
    base |= code[1] & 0x20 ? 0 : 8, index |= code[1] & 0x40 ? 0 : 8;
    int64_t at = registers[REGISTERS[base]];
    if (mod == 1) at += static_cast<int8_t>(code[length]), length += 1;
    if (mod == 2) {
      int32_t offset;
      std::memcpy(&offset, code + length, 4);
      at += offset, length += 4;
    }
    stride = index == 4 ? 0 : registers[REGISTERS[index]] << (code[5] >> 6);
    return reinterpret_cast<char*>(at);
  };
  const bool in_use = tiles.configured;
  int64_t stride;
  if (opcode == 0x49 && prefix == 0 && mod != 3) {  // LDTILECFG
    const char* at = address(stride);
    bool right = at[0] == 1 && at[1] == 0;
    for (int t = 0; t < 8; ++t)
      right = right && at[16 + 2 * t] == 64 && at[17 + 2 * t] == 0 && at[48 + t] == 16;
    if (!right) unknown();
    std::memset(&tiles, 0, sizeof tiles), tiles.configured = true, ++counts[CONFIGURE];
  } else if (opcode == 0x49 && prefix == 0 && code[4] == 0xc0) {  // TILERELEASE
    tiles.configured = false, ++counts[RELEASE];
  } else if (!in_use) {
    unknown();
  } else if (opcode == 0x49 && prefix == 3 && mod == 3 && low == 0) {  // TILEZERO
    std::memset(tiles.row[middle], 0, 1024), ++counts[ZERO];
  } else if (opcode == 0x4b && (prefix == 3 || prefix == 2) && mod != 3 &&
             low == 4) {  // TILELOADD, TILESTORED
    char* at = address(stride);
    for (int r = 0; r < 16; ++r) {
      if (prefix == 3) std::memcpy(tiles.row[middle][r], at + r * stride, 64);
      if (prefix == 2) std::memcpy(at + r * stride, tiles.row[middle][r], 64);
    }
    ++counts[prefix == 3 ? LOAD : STORE];
  } else if (opcode == 0x5c && prefix == 2 && mod == 3) {  // TDPBF16PS
    multiply(middle, low, ~code[2] >> 3 & 7), ++counts[PRODUCT];
  } else if (opcode == 0x5e && prefix == 3 && mod == 3) {  // TDPBSSD
    multiply_bytes(middle, low, ~code[2] >> 3 & 7), ++counts[PRODUCT];
  } else {
    unknown();
  }
  registers[REG_RIP] += length;
}

std::vector<uint16_t> random_halves(size_t n, uint32_t seed) {
  std::vector<uint16_t> values(n);
  for (uint16_t& value : values) {
    seed = seed * 1664525u + 1013904223u;
    const float x = static_cast<float>(static_cast<int32_t>(seed)) * 0x1p-31f;
    uint32_t word;
    std::memcpy(&word, &x, 4);
    value = static_cast<uint16_t>(word >> 16);
  }
  return values;
}

// f(table) with both targets; what it leaves in its result must have the same bits.
template <class F>
void compare(const char* what, const F& f) {
  const auto got = f(amx::kernel_table), want = f(amx_emulated::kernel_table);
  if (got.size() == want.size() &&
      !std::memcmp(got.data(), want.data(), got.size() * sizeof(got[0])))
    return;
  std::printf("%s differs\n", what), std::exit(1);
}

// The three layouts of a linear layer, with the epilogues of each.
std::vector<float> gemm(const KernelTable& table, DType operands, int form, int64_t m, int64_t n,
                        int64_t k, bool packed) {
  GemmArgs g = {};
  g.m = m, g.n = n, g.k = k, g.in_dtype = operands, g.out_dtype = DType::f32;
  g.a_row = form == 2 ? 1 : k + 3, g.a_col = form == 2 ? m + 1 : 1;
  g.b_row = form == 0 ? 1 : n + 2, g.b_col = form == 0 ? k + 5 : 1;
  const auto a = random_halves(form == 2 ? k * g.a_col : m * g.a_row, 1),
             b = random_halves(form == 0 ? n * g.b_col : k * g.b_row, 2);
  std::vector<float> out(2 * m * n + m, 0.5f), panels;
  g.a = a.data(), g.b = b.data(), g.c = out.data(), g.c_row = n, g.accumulate = form == 2;
  const std::vector<float> other(m * n + n, -0.75f);
  if (form == 0)
    g.activation = Activation::gelu, g.pre = out.data() + m * n, g.pre_row = n,
    g.bias = other.data();
  if (form == 1)
    g.activation = Activation::gelu, g.activation_input = other.data(), g.activation_input_row = n;
  if (form == 2) g.a_sums = out.data() + 2 * m * n;
  if (packed) {
    panels.resize(table.packed_weight_size(n, k, operands, 0) / 4 + 64);
    char* aligned =
        reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(panels.data()) + 255) / 256 * 256);
    table.pack_weight({n, k, operands, b.data(), g.b_row, g.b_col, aligned});
    g.packed = aligned;
  }
  table.gemm(g);
  return out;
}

std::vector<uint16_t> attention(const KernelTable& table, int64_t s, int64_t groups, int64_t window,
                                float p, int64_t key_size = 36) {
  const AttentionArgs args{s, 1, 4, groups, key_size, 36, window, 6, p, 99, 3, 5, 1};
  const int64_t inputs = s * ((4 + groups) * key_size + groups * 36), outputs = s * 4 * 36;
  const auto qkv = random_halves(inputs, 3), dout = random_halves(outputs, 4);
  std::vector<uint16_t> results(outputs + inputs);
  std::vector<float> lse(4 * s);
  table.attention_forward(qkv.data(), results.data(), lse.data(), DType::bf16, args);
  table.attention_backward(qkv.data(), results.data(), lse.data(), dout.data(),
                           results.data() + outputs, DType::bf16, args);
  return results;
}

}  // namespace

int main() {
  // A CPU with AMX runs tile configurations without permission, and traps only what comes after them.
  if (cpu::has_amx(24) && !cpu::tiles_refused().empty()) {
    std::fprintf(stderr, "the system refuses AMX tiles: %s\n", cpu::tiles_refused().c_str());
    return 2;
  }
  struct sigaction action = {};
  action.sa_sigaction = step, action.sa_flags = SA_SIGINFO;
  sigaction(SIGILL, &action, nullptr);
  set_num_threads(2);
  const int64_t shapes[][3] = {{1, 1, 1},    {16, 32, 32},   {33, 31, 63}, {5, 70, 0},
                               {61, 67, 71}, {34, 40, 1100}, {200, 64, 64}};
  for (const auto& s : shapes) {
    for (int form = 0; form < 3; ++form) {
      for (DType operands : {DType::bf16, DType::int8_of_bf16}) {
        for (bool packed : {false, true}) {
          compare(packed ? "gemm of a packed weight" : "gemm", [&](const KernelTable& table) {
            return gemm(table, operands, form, s[0], s[1], s[2], packed);
          });
        }
      }
    }
  }
  for (int64_t s : {1, 40, 131}) {
    compare("attention", [&](const KernelTable& table) {
      return attention(table, s, 2, s == 131 ? 21 : NO_WINDOW, 0);
    });
    compare("attention with dropout",
            [&](const KernelTable& table) { return attention(table, s, 4, NO_WINDOW, 0.3f); });
    compare("attention with wide keys",
            [&](const KernelTable& table) { return attention(table, s, 2, NO_WINDOW, 0, 76); });
  }
  std::printf(
      "amx has the bits of amx_emulated: %ld tile products, %ld loads and %ld stores trapped, %ld "
      "configurations, %ld releases\n",
      counts[PRODUCT].load(), counts[LOAD].load(), counts[STORE].load(), counts[CONFIGURE].load(),
      counts[RELEASE].load());
}
