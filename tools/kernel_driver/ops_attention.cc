// Ops of the family attention.h, on Megatron's fused layout (S, B, COLS).
#include <algorithm>
#include <cmath>

#include "driver.h"

namespace fm::driver {
namespace {

struct Tensors {
  AttentionArgs args;
  const void* qkv;
  void* out;
  float* lse;
};

// Groups of a row of `columns`.
int64_t groups_of(int64_t columns, int64_t heads, int64_t key_size, int64_t value_size) {
  return (columns - heads * key_size) / (key_size + value_size);
}

// sizes: b, columns of qkv, heads, key_size, value_size.
Tensors prepare(Work& w, const int64_t* sizes, int64_t s, int64_t queries, int64_t window) {
  const int64_t b = sizes[0], columns = sizes[1], heads = sizes[2], key_size = sizes[3],
                value_size = sizes[4];
  const AttentionArgs args{
      s,        b,          heads,  groups_of(columns, heads, key_size, value_size),
      key_size, value_size, window, std::sqrt(static_cast<float>(key_size)),
      0.1f,     1234,       5,      0,
      0};
  return {args, w.input(queries * b * columns, 2), w.output(queries * b * heads * value_size),
          w.output_f32(queries * b * heads)};
}

int64_t qkv_elements(const Shape& n) { return n[0] * n[1] * n[2]; }
int64_t context_elements(const Shape& n) { return n[0] * n[1] * n[3] * n[5]; }

void attention_forward(Work& w, const Shape& n) {
  const Tensors t = prepare(w, &n[1], n[0], n[0], n[6]);
  w.run = [t, &w] { kernels().attention_forward(t.qkv, t.out, t.lse, w.dtype, t.args); };
}

void attention_backward(Work& w, const Shape& n) {
  const Tensors t = prepare(w, &n[1], n[0], n[0], n[6]);
  const void* dout = w.input(context_elements(n));
  void* dqkv = w.output(qkv_elements(n));
  kernels().attention_forward(t.qkv, t.out, t.lse, w.dtype, t.args);
  w.run = [=, &w] {
    kernels().attention_backward(t.qkv, t.out, t.lse, dout, dqkv, w.dtype, t.args);
  };
}

// The queries of a part see all keys before them.
Tensors prepare_part(Work& w, const Shape& n) {
  const int64_t first_query = n[7], first_key = n[8],
                s = std::max(first_query + n[0], first_key + n[1]);
  Tensors t = prepare(w, &n[2], s, n[0], NO_WINDOW);
  t.args.queries = {first_query, first_query + n[0]}, t.args.keys = {first_key, first_key + n[1]};
  return t;
}

int64_t part_keys(const Shape& n) { return n[1] * n[2] * (n[3] - n[4] * n[5]); }

void attention_part_forward(Work& w, const Shape& n) {
  const Tensors t = prepare_part(w, n);
  const void* kv = w.input(part_keys(n));
  w.run = [=, &w] { kernels().attention_part_forward(t.qkv, kv, t.out, t.lse, w.dtype, t.args); };
}

void attention_part_backward(Work& w, const Shape& n) {
  const Tensors t = prepare_part(w, n);
  const int64_t keys = part_keys(n), inputs = n[0] * n[2] * n[3];
  const void *kv = w.input(keys), *dout = w.input(n[0] * n[2] * n[4] * n[6]);
  float *dqkv = w.output_f32(inputs), *dkv = w.output_f32(keys);
  kernels().attention_part_forward(t.qkv, kv, t.out, t.lse, w.dtype, t.args);
  w.run = [=, &w] {
    std::fill_n(dqkv, inputs, 0.0f), std::fill_n(dkv, keys, 0.0f);
    kernels().attention_part_backward(t.qkv, kv, t.out, t.lse, dout, dqkv, dkv, w.dtype, t.args);
  };
}

void attention_decode(Work& w, const Shape& n) {
  const int64_t rows = n[0], heads = n[2], key_size = n[3], value_size = n[4], slots = n[5];
  const int64_t groups = groups_of(n[1], heads, key_size, value_size),
                cached = rows * groups * slots;
  const void* qkv = w.input(rows * n[1], 2);
  void *keys = w.input(cached * key_size), *values = w.input(cached * value_size);
  int64_t *samples = const_cast<int64_t*>(w.indices(rows, 1)),
          *positions = const_cast<int64_t*>(w.indices(rows, 1));
  for (int64_t row = 0; row < rows; ++row)
    samples[row] = row, positions[row] = slots + row;  // full caches
  const DecodeArgs args{rows,       heads,    groups, key_size,
                        value_size, slots,    false,  std::sqrt(static_cast<float>(key_size)),
                        samples,    positions};
  void* out = w.output(rows * heads * value_size);
  w.run = [=, &w] { kernels().attention_decode(qkv, keys, values, out, w.dtype, args); };
}

const Register all[] = {
    {{"attention_decode", {2, 768, 8, 64, 64, 512}, attention_decode}},
    {{"attention_forward", {192, 1, 512, 4, 64, 64, 128}, attention_forward}},
    {{"attention_backward", {192, 1, 512, 4, 64, 64, 128}, attention_backward}},
    {{"attention_part_forward", {96, 192, 1, 512, 4, 64, 64, 256, 0}, attention_part_forward}},
    {{"attention_part_backward", {96, 192, 1, 512, 4, 64, 64, 256, 0}, attention_part_backward}},
};

}  // namespace
}  // namespace fm::driver
