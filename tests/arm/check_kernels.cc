// Every vector target that this CPU can run against the scalar reference, without Python: a static program for an
// emulator. Exit code 0 and one line per target; the first difference is printed and ends it with 1. Arguments are targets
// to leave out. Built and run by test_static.py.
#include <cstring>

#include "compare.h"

namespace {

const int64_t SIZES[] = {0, 1, 7, 15, 16, 17, 31, 33, 61, 64, 65, 257, 1031};

void check_elementwise(int64_t n) {
  const Floats x = random_floats(n, 1);
  for (Function function :
       {Function::exp, Function::log, Function::sqrt, Function::rsqrt, Function::reciprocal}) {
    compare("elementwise", 4e-7f, 2e-7f, [&] {
      Floats in = x, out(n);
      for (float& v : in) v = function == Function::exp ? v * 40 : std::fabs(v) + 1e-6f;
      kernels().elementwise(function, in.data(), out.data(), n);
      return out;
    });
  }
}

void check_convert(int64_t n) {
  for (DType half : {DType::bf16, DType::f16}) {
    compare("convert", 0, 0, [&] {
      Floats x = random_floats(n, 2), out(n);
      for (size_t i = 0; i < x.size(); ++i) x[i] = std::ldexp(x[i], static_cast<int>(i % 44) - 26);
      if (n > 3) x[0] = INFINITY, x[1] = -INFINITY, x[2] = NAN, x[3] = -0.0f;
      std::vector<uint16_t> bits(n + 1, 0xabcd);
      kernels().convert(x.data(), DType::f32, bits.data(), half, n);
      kernels().convert(bits.data(), half, out.data(), DType::f32, n);
      out.push_back(bits[n]);  // the element after the last must not be touched
      return out;
    });
  }
}

void check_reduce(int64_t n) {
  compare("reduce", 1e-6f, 0, [&] {
    Floats x = random_floats(n, 3);
    for (int64_t i = 0; i < n; i += 5) x[i] = 0;
    return Floats{static_cast<float>(kernels().squared_norm(x.data(), DType::f32, n)),
                  static_cast<float>(kernels().count_zeros(x.data(), DType::f32, n))};
  });
}

void check_philox(int64_t n) {
  for (int64_t col0 : {0, 5, 64}) {
    compare("philox_normal", 1e-5f, 1e-5f, [&] {
      Floats out(3 * n);
      kernels().philox_normal(out.data(), {3, n, 7, col0, 1234, 5, 0.02f, 1.0f});
      return out;
    });
    compare("dropout", 0, 0, [&] {
      const Floats x = random_floats(6 * n, 4);
      Floats out(6 * n);
      kernels().dropout(x.data(), out.data(), DType::f32,
                        {3, 2, 1, n, 0.3f, {99, 3, INT64_C(1) << 33, 2, col0}});
      return out;
    });
  }
}

const AdamWArgs ADAMW{
    0.5f, 0.999f, 0.1f, 0.95f, 0.05f, 1e-3f, 3.0f, 1e-8f, {1234, 5, 7, 3, 11, 29}};

// Where a sum lies within its last bit of a word, one target rounds up and the other down: a unit of BF16's last place, 2^-7.
void check_adamw(int64_t n, DType moments) {
  compare("adamw", moments == DType::bf16 ? 0x1p-7f : 2e-6f, 1e-7f, [&] {
    Floats param = random_floats(n, 5), grad = random_floats(n, 6), m = random_floats(n, 7),
           v = random_floats(n, 8);
    for (float& value : v) value = std::fabs(value);
    std::vector<uint32_t> kept_m(n), kept_v(n);
    kernels().convert(m.data(), DType::f32, kept_m.data(), moments, n);
    kernels().convert(v.data(), DType::f32, kept_v.data(), moments, n);
    kernels().adamw(param.data(), grad.data(), {kept_m.data(), moments}, {kept_v.data(), moments},
                    nullptr, DType::f32, n, ADAMW);
    kernels().convert(kept_m.data(), moments, m.data(), DType::f32, n);
    kernels().convert(kept_v.data(), moments, v.data(), DType::f32, n);
    return joined({param, m, v});
  });
}

// Output, log-sum-exp and gradients of s positions, with dropout and head sizes that end in the middle of a vector. heads / groups
// queries share a key and a value.
void check_attention(int64_t s, int64_t heads, int64_t groups, int64_t window,
                     int64_t key_size = 36) {
  for (DType dtype : {DType::f32, DType::f16, DType::bf16}) {
    const float tolerance = dtype == DType::f32 ? 4e-6f : dtype == DType::f16 ? 4e-3f : 3e-2f;
    compare("attention", tolerance, tolerance, [&] {
      const AttentionArgs args{s, 1, heads, groups, key_size, 36, window, 6, 0.3f, 99, 3, 5, 1};
      const int64_t n = s * heads * 36, inputs = s * ((heads + groups) * key_size + groups * 36);
      Floats qkv = random_floats(inputs, 9), dout = random_floats(n, 10), out(n), lse(heads * s),
             dqkv(inputs);
      std::vector<uint16_t> half_qkv(inputs), half_dout(n), half_out(n), half_dqkv(inputs);
      const bool whole = dtype == DType::f32;
      if (!whole) kernels().convert(qkv.data(), DType::f32, half_qkv.data(), dtype, inputs);
      if (!whole) kernels().convert(dout.data(), DType::f32, half_dout.data(), dtype, n);
      const auto pick = [&](Floats& f, std::vector<uint16_t>& h) {
        return whole ? (void*)f.data() : (void*)h.data();
      };
      kernels().attention_forward(pick(qkv, half_qkv), pick(out, half_out), lse.data(), dtype,
                                  args);
      kernels().attention_backward(pick(qkv, half_qkv), pick(out, half_out), lse.data(),
                                   pick(dout, half_dout), pick(dqkv, half_dqkv), dtype, args);
      if (!whole) kernels().convert(half_out.data(), dtype, out.data(), DType::f32, n);
      if (!whole) kernels().convert(half_dqkv.data(), dtype, dqkv.data(), DType::f32, inputs);
      return joined({out, lse, dqkv});
    });
  }
}

// One token of two samples, of which one has seen 11 and one more than its cache holds: output and both caches. shared: values
// are the beginnings of keys, and a group has heads for more than a tile.
void check_decode(int64_t slots, bool shared) {
  compare("decode", 4e-6f, 4e-6f, [&] {
    const int64_t samples[2] = {2, 0}, positions[2] = {11, 1000}, heads = shared ? 10 : 6;
    const Floats qkv = random_floats(2 * (heads * 76 + 2 * (76 + 36)), 11);
    Floats keys = random_floats(3 * 2 * slots * 76, 12),
           values = random_floats(3 * 2 * slots * 36, 13), out(2 * heads * 36);
    const DecodeArgs args{2, heads, 2, 76, 36, slots, shared, 9, samples, positions};
    kernels().attention_decode(qkv.data(), keys.data(), shared ? keys.data() : values.data(),
                               out.data(), DType::f32, args);
    return joined({out, keys, values});
  });
}

// Philox4x32-10 known answers of Random123.
void check_known_answers(const std::string& target) {
  use(target);
  const uint32_t counters[8] = {0, 0, 0, 0, ~0u, ~0u, ~0u, ~0u};
  const uint32_t zeros[4] = {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8};
  const uint32_t ones[4] = {0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd};
  uint32_t out[8];
  kernels().philox4x32(counters, out, 2, 0, 0);
  bool good = std::memcmp(out, zeros, sizeof zeros) == 0;
  kernels().philox4x32(counters, out, 2, ~0u, ~0u);
  good = good && std::memcmp(out + 4, ones, sizeof ones) == 0;
  if (!good)
    std::printf("%s: Philox4x32-10 misses its known answers\n", target.c_str()), std::exit(1);
}

#include "check_gemm.h"

void check_all() {
  check_known_answers("reference");
  for (const std::string& target : compared()) check_known_answers(target);
  for (int64_t n : SIZES) {
    check_elementwise(n);
    check_convert(n);
    check_reduce(n);
    check_philox(n);
    for (DType moments : {DType::f32, DType::bf16}) check_adamw(n, moments);
  }
  for (int64_t s : {1, 17, 131}) check_attention(s, 2, 2, NO_WINDOW);
  check_attention(61, 6, 2, NO_WINDOW);
  check_attention(131, 3, 1, 21);
  check_attention(61, 6, 2, NO_WINDOW, 76);
  check_attention(131, 3, 1, 21, 20);
  for (int64_t slots : {20, 150}) {
    for (bool shared : {false, true}) check_decode(slots, shared);
  }
  check_gemm();
}

}  // namespace

int main(int argc, char** argv) { return compare_targets(argc, argv, check_all); }
