// GEMM against the scalar reference: forward, data gradient and weight gradient, packed and not. Part of
// check_kernels.cc.
#pragma once
// C = A B of the three layouts: 0 forward (B transposed in memory), 1 data gradient, 2 weight gradient (A transposed).
GemmArgs gemm_layout(int form, int64_t m, int64_t n, int64_t k) {
  GemmArgs g = {};
  g.m = m, g.n = n, g.k = k;
  g.a_row = form == 2 ? 1 : k + 3, g.a_col = form == 2 ? m + 1 : 1;
  g.b_row = form == 0 ? 1 : n + 2, g.b_col = form == 0 ? k + 5 : 1;
  g.c_row = n + 1;
  g.accumulate = form == 2;
  return g;
}

// A matrix of some dtype from float values; uint16_t words when it is a half.
std::vector<uint32_t> stored(const Floats& values, DType dtype) {
  std::vector<uint32_t> words(values.size() + 1);
  kernels().convert(values.data(), DType::f32, words.data(), dtype,
                    static_cast<int64_t>(values.size()));
  return words;
}

// bf16x3 is float32 on a target without BF16 arithmetic.
Floats run_gemm(int form, int64_t m, int64_t n, int64_t k, DType dtype, bool packed,
                int64_t fp16_chunk) {
  if (dtype == DType::bf16x3 && !kernels().has_bf16_arithmetic()) dtype = DType::f32;
  GemmArgs g = gemm_layout(form, m, n, k);
  g.fp16_chunk = fp16_chunk;
  // No more numbers than there are elements: an emulator takes longer to make them than to multiply them.
  const DType type = stored_dtype(dtype);
  const auto a = stored(random_floats(form == 2 ? k * g.a_col : m * g.a_row, 1), type);
  const auto b = stored(random_floats(form == 0 ? n * g.b_col : k * g.b_row, 2), type);
  const auto bias = stored(random_floats(n, 4), DType::f32),
             other = stored(random_floats(m * n, 5), DType::f32);
  Floats c = random_floats(m * (n + 1) + 1, 3), pre(m * n), sums(m, 0.25f);
  g.in_dtype = dtype, g.out_dtype = DType::f32, g.a = a.data(), g.b = b.data(), g.c = c.data();
  std::vector<float> panels;
  if (packed) {
    panels.resize(kernels().packed_weight_size(n, k, dtype, fp16_chunk) / 4 + 64);
    char* aligned =
        reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(panels.data()) + 255) / 256 * 256);
    kernels().pack_weight({n, k, dtype, b.data(), g.b_row, g.b_col, aligned, fp16_chunk});
    g.packed = aligned;
  }
  if (form == 0)
    g.bias = bias.data(), g.activation = Activation::gelu_exact, g.pre = pre.data(), g.pre_row = n,
    g.residual = other.data(), g.residual_row = n;
  if (form == 1)
    g.activation = Activation::gelu, g.activation_input = other.data(), g.activation_input_row = n;
  if (form == 2) g.a_sums = sums.data();
  kernels().gemm(g);
  return joined({c, pre, sums});
}

// Groups of 0, 1, 13 and the rest of the rows, each with a weight: the forms of gemm_layout.
Floats run_groups(int form, int64_t rows, int64_t n, int64_t k, DType dtype, bool random = false) {
  const int64_t counts[] = {0, 1, 13, rows - 14}, groups = 4, weight = n * k;
  GemmArgs g = {};
  g.m = form == 2 ? n : rows, g.n = form == 0 ? n : k, g.k = form == 0 ? k : n;
  if (form == 2) g.k = rows;
  const int64_t out = form == 2 ? groups * weight : rows * g.n;
  const DType type = stored_dtype(dtype);
  const auto a = stored(random_floats(rows * (form == 0 ? k : n), 1), type);
  const auto b = stored(random_floats(form == 2 ? rows * k : groups * weight, 2), type);
  Floats c = random_floats(out, 3);
  g.a_row = form == 2 ? 1 : g.k, g.a_col = form == 2 ? n : 1;
  g.b_row = form == 0 ? 1 : g.n, g.b_col = form == 0 ? k : 1;
  g.c_row = g.n, g.accumulate = form == 2, g.random_rounding = random;
  g.in_dtype = dtype, g.out_dtype = DType::f32, g.a = a.data(), g.b = b.data(), g.c = c.data();
  kernels().grouped_linear_forward({g, groups, counts, weight, form == 2});
  return c;
}

// A sum in FP16 has the reference's bits: what may differ is its sum in float32. Every target for ARM has FP16 arithmetic.
void check_fp16_chunks(const int64_t* shape) {
  for (const std::string& target : compared()) {
    use(target);
    if (!kernels().has_fp16_arithmetic()) return;
  }
  for (int64_t chunk : {1, 8, 24, 1000}) {
    for (int form = 0; form < 3; ++form) {
      compare("gemm with sums in FP16", 2e-5f, 2.4e-6f * static_cast<float>(shape[2] + 20), [&] {
        return run_gemm(form, shape[0], shape[1], shape[2], DType::f16, chunk == 8, chunk);
      });
    }
  }
}

// Root mean square of the difference from double of C = A B^T (m, n), relative to C's.
double relative_error(DType operands, int64_t m, int64_t n, int64_t k) {
  const Floats a = random_floats(m * k, 1), b = random_floats(n * k, 2);
  Floats c(m * n);
  GemmArgs g = {};
  g.m = m, g.n = n, g.k = k, g.in_dtype = operands, g.out_dtype = DType::f32, g.a = a.data(),
  g.b = b.data(), g.c = c.data();
  g.a_row = k, g.a_col = 1, g.b_row = 1, g.b_col = k, g.c_row = n;
  kernels().gemm(g);
  double difference = 0, size = 0;
  for (int64_t i = 0; i < m * n; ++i) {
    double exact = 0;
    for (int64_t p = 0; p < k; ++p) exact += double(a[i / n * k + p]) * b[i % n * k + p];
    difference += (c[i] - exact) * (c[i] - exact), size += exact * exact;
  }
  return std::sqrt(difference / size);
}

void check_bf16x3_errors() {
  for (const std::string& target : compared()) {
    use(target);
    if (!kernels().has_bf16_arithmetic()) continue;
    for (int64_t k : {768, 3072, 7168, 1009}) {
      const double split = relative_error(DType::bf16x3, 13, 37, k),
                   ieee = relative_error(DType::f32, 13, 37, k);
      std::printf("%s: error over %lld terms %.2e in bf16x3, %.2e in FP32\n", active(),
                  static_cast<long long>(k), split, ieee);
      if (split > 2 * ieee) std::exit(1);
    }
  }
}

// CRC-32 as in zlib, continued from `crc`.
uint32_t crc32(uint32_t crc, const void* data, size_t bytes) {
  crc = ~crc;
  for (size_t i = 0; i < bytes; ++i) {
    crc ^= static_cast<const uint8_t*>(data)[i];
    for (int bit = 0; bit < 8; ++bit) crc = crc >> 1 ^ (crc & 1 ? 0xedb88320u : 0);
  }
  return ~crc;
}

// Products in int8 have the same bits on every target. The formula of the operands, the order and the checksum are those of
// tests/kernels/test_gemm_int8.py.
void check_int8_checksum() {
  const int64_t shapes[][3] = {{61, 131, 1009}, {97, 96, 256}};
  for (const std::string& target : compared()) {
    use(target);
    uint32_t crc = 0;
    for (const auto& [m, n, k] : shapes) {
      Floats x(m * k), weight(n * k), out(m * n);
      for (int64_t i = 0; i < m * k; ++i) x[i] = float(i * 7919 % 2003 - 1001) / 1024;
      for (int64_t i = 0; i < n * k; ++i) weight[i] = float(i * 104729 % 1999 - 999) / 512;
      for (DType operands : {DType::int8_of_f32, DType::int8_of_bf16}) {
        const auto a = stored(x, stored_dtype(operands)),
                   b = stored(weight, stored_dtype(operands));
        GemmArgs g = {};
        g.m = m, g.n = n, g.k = k, g.in_dtype = operands, g.out_dtype = DType::f32, g.a = a.data(),
        g.b = b.data(), g.c = out.data();
        g.a_row = k, g.a_col = 1, g.b_row = 1, g.b_col = k, g.c_row = n;
        kernels().gemm(g);
        crc = crc32(crc, out.data(), out.size() * sizeof(float));
      }
    }
    if (crc == 2022273958u) continue;
    std::printf("%s: checksum %u of products in int8\n", active(), crc), std::exit(1);
  }
}

// Forward and data gradient with a Q8 weight have the bits of the same product with its numbers.
void check_q8_gemm(int form, int64_t m, int64_t n, int64_t k, DType operands) {
  for (const std::string& target : compared()) {
    use(target);
    GemmArgs g = gemm_layout(form, m, n, k);
    const int64_t rows = form == 0 ? n : k, columns = form == 0 ? k : n;
    const DType type = stored_dtype(operands);
    const auto a = stored(random_floats(m * g.a_row, 1), type);
    Floats weight = random_floats(rows * columns, 2);
    std::vector<int8_t> values(rows * columns);
    std::vector<bf16> scales(rows * q8_blocks(columns));
    const Q8Args args{rows,    columns,       DType::f32,   weight.data(),
                      columns, values.data(), scales.data()};
    kernels().quantize_q8(args);
    kernels().dequantize_q8(args);
    const auto plain = stored(weight, type);
    Floats want(m * g.c_row + 1), got(want.size());
    (form == 0 ? g.b_col : g.b_row) = columns;
    g.in_dtype = operands, g.out_dtype = DType::f32, g.a = a.data();
    g.b = plain.data(), g.c = want.data();
    kernels().gemm(g);
    g.b = values.data(), g.b_scales = {scales.data(), q8_blocks(columns)}, g.c = got.data();
    kernels().gemm(g);
    close("gemm of a Q8 weight", got, want, 0, 0);
  }
}

void check_gemm() {
  for (int form = 0; form < 2; ++form) {
    for (DType operands : {DType::f32, DType::bf16, DType::f16, DType::int8_of_f32}) {
      check_q8_gemm(form, 13, 70, 133, operands);
      check_q8_gemm(form, 40, 33, 700, operands);
    }
  }
  check_bf16x3_errors();
  check_int8_checksum();
  for (int form = 0; form < 3; ++form) {
    for (DType dtype : {DType::f32, DType::bf16, DType::f16})
      compare("grouped gemm", 2e-5f, 3e-4f, [&] { return run_groups(form, 40, 37, 70, dtype); });
    compare("grouped gemm in int8", 0, 0,
            [&] { return run_groups(form, 40, 37, 70, DType::int8_of_f32); });
    compare("grouped gemm in int8, rounded at random", 0, 0,
            [&] { return run_groups(form, 40, 37, 70, DType::int8_of_bf16, true); });
  }
  const int64_t shapes[][3] = {{1, 1, 1},  {12, 32, 16}, {13, 33, 17},
                               {5, 70, 0}, {29, 67, 71}, {14, 34, 700}};
  for (const auto& s : shapes) {
    check_fp16_chunks(s);
    for (int form = 0; form < 3; ++form) {
      for (DType dtype : {DType::f32, DType::bf16, DType::f16, DType::bf16x3, DType::int8_of_f32,
                          DType::int8_of_bf16}) {
        for (bool packed : {false, true}) {
          const float tolerance = 3e-7f * static_cast<float>(s[2] + 20);
          compare("gemm", 2e-5f, 8 * tolerance,
                  [&] { return run_gemm(form, s[0], s[1], s[2], dtype, packed, 0); });
        }
      }
    }
  }
}
