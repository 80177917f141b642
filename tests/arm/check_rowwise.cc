// The kernels on rows of every vector target that this CPU can run against the scalar reference, in
// float32 and bfloat16, as check_kernels.cc. Built and run by test_static.py.
#include "compare.h"

namespace {

const int64_t COLUMNS[] = {1, 15, 16, 17, 33, 67, 257};
constexpr int64_t S = 5, B = 3, ROWS = S * B;  // blocks of four rows and a rest

// A tensor of either dtype, made from and turned back into floats by the reference's own conversion.
struct Tensor {
  DType dtype;
  int64_t n;
  std::vector<uint32_t> words;

  Tensor(DType dtype, int64_t n, uint32_t seed) : dtype(dtype), n(n), words(n + 1) {
    const Floats values = random_floats(n, seed);
    kernels().convert(values.data(), DType::f32, words.data(), dtype, n);
  }
  void* data() { return words.data(); }
  Floats values() {
    Floats values(n);
    kernels().convert(words.data(), dtype, values.data(), DType::f32, n);
    return values;
  }
};

void check_norms(DType dtype, float tolerance, int64_t cols, float p) {
  compare("bias_dropout_add_layer_norm", tolerance, tolerance, [&] {
    const int64_t n = ROWS * cols;
    Tensor x(dtype, n, 1), residual(dtype, n, 2), dy(dtype, n, 3), dsum(dtype, n, 4),
        bias(dtype, cols, 5), weight(dtype, cols, 6), norm_bias(dtype, cols, 7), sum(dtype, n, 8),
        y(dtype, n, 9), dresidual(dtype, n, 10), dx(dtype, n, 11), alone(dtype, n, 12);
    Floats mean(ROWS), rstd(ROWS),
        sums[4] = {Floats(cols), Floats(cols), Floats(cols), Floats(cols)};
    const DropoutArgs dropout{S, B, 1, cols, p, {99, 3, INT64_C(1) << 33, 2, 0}};
    const LayerNormArgs norm{
        sum.data(), weight.data(), norm_bias.data(), y.data(), mean.data(), rstd.data(), ROWS, cols,
        1e-2f,      dtype};
    kernels().bias_dropout_add_layer_norm(
        {x.data(), bias.data(), residual.data(), sum.data(), dtype, dropout}, norm);
    const LayerNormGradArgs grad{
        dy.data(),        dsum.data(),    sum.data(),     weight.data(), mean.data(), rstd.data(),
        dresidual.data(), sums[0].data(), sums[1].data(), ROWS,          cols,        dtype};
    kernels().bias_dropout_add_layer_norm_backward(
        grad, {dresidual.data(), dx.data(), sums[2].data(), dtype, dropout});
    kernels().bias_dropout_add({x.data(), nullptr, residual.data(), alone.data(), dtype, dropout});
    kernels().bias_dropout_add_backward({dy.data(), nullptr, sums[3].data(), dtype, dropout});
    return joined({mean, rstd, sums[0], sums[1], sums[2], sums[3], sum.values(), y.values(),
                   dresidual.values(), dx.values(), alone.values()});
  });
}

void check_rms_norm(DType dtype, float tolerance, int64_t cols) {
  compare("bias_dropout_add_rms_norm", tolerance, tolerance, [&] {
    const int64_t n = ROWS * cols;
    Tensor x(dtype, n, 1), residual(dtype, n, 2), dy(dtype, n, 3), weight(dtype, cols, 6),
        sum(dtype, n, 8), y(dtype, n, 9), dresidual(dtype, n, 10), dx(dtype, n, 11);
    Floats rstd(ROWS), dweight(cols);
    const DropoutArgs dropout{S, B, 1, cols, 0.3f, {99, 3, INT64_C(1) << 33, 2, 0}};
    kernels().bias_dropout_add_rms_norm(
        {x.data(), nullptr, residual.data(), sum.data(), dtype, dropout},
        {sum.data(), weight.data(), nullptr, y.data(), nullptr, rstd.data(), ROWS, cols, 1e-2f,
         dtype});
    kernels().bias_dropout_add_rms_norm_backward(
        {dy.data(), nullptr, sum.data(), weight.data(), nullptr, rstd.data(), dresidual.data(),
         dweight.data(), nullptr, ROWS, cols, dtype},
        {dresidual.data(), dx.data(), nullptr, dtype, dropout});
    return joined({rstd, dweight, sum.values(), y.values(), dresidual.values(), dx.values()});
  });
}

void check_gate(DType dtype, float tolerance, int64_t cols, Activation activation) {
  compare("gate", tolerance, tolerance, [&] {
    const int64_t n = ROWS * cols;
    Tensor x(dtype, 2 * n, 15), dy(dtype, n, 16), y(dtype, n, 17), dx(dtype, 2 * n, 18);
    const GateArgs args{x.data(), 2 * cols, cols, ROWS, cols, dtype, activation};
    kernels().gate(args, y.data());
    kernels().gate_backward(args, {dy.data(), dx.data(), 2 * cols, cols});
    Tensor again(dtype, n, 19), scaled_dx(dtype, 2 * n, 20);
    Floats factors = random_floats(ROWS, 21), dfactors(ROWS);
    const GateArgs scaled{x.data(), 2 * cols, cols, ROWS, cols, dtype, activation, factors.data()};
    kernels().gate_backward(
        scaled, {dy.data(), scaled_dx.data(), 2 * cols, cols, dfactors.data(), again.data()});
    return joined({y.values(), dx.values(), scaled_dx.values(), again.values(), dfactors});
  });
}

// Of three groups of experts, in the best two of which each token has two; one expert's pairs are dropped.
void check_routing(DType dtype, float tolerance, int64_t cols, Scores kind) {
  compare("routing", tolerance, tolerance, [&] {
    const int64_t experts = 3 * cols + 3, k = 4, n = ROWS * k;
    Floats logits = random_floats(ROWS * experts, 22), dscores = random_floats(n, 23),
           bias = random_floats(experts, 24), scores(n), dlogits(ROWS * experts), choice;
    std::vector<int64_t> chosen(n), counts(experts - 1), pairs(n), places(n);
    const RouteArgs args{logits.data(),
                         kind == Scores::sigmoid ? bias.data() : nullptr,
                         ROWS,
                         experts,
                         k,
                         3,
                         2,
                         kind,
                         1.5f,
                         1e-20f};
    kernels().route(args, scores.data(), chosen.data());
    const float* kept = kind == Scores::softmax_of_chosen ? scores.data() : logits.data();
    kernels().route_backward(args, dscores.data(), kept, chosen.data(), dlogits.data());
    kernels().sort_pairs(chosen.data(), n, experts - 1, counts.data(), pairs.data(), places.data());
    int64_t sorted = 0;
    for (int64_t count : counts) sorted += count;
    Tensor x(dtype, ROWS * cols, 25), there(dtype, sorted * cols, 26), back(dtype, ROWS * cols, 27);
    kernels().permute({ROWS, sorted, k, cols, dtype}, pairs.data(), x.data(), there.data());
    kernels().unpermute({ROWS, sorted, k, cols, dtype}, places.data(), there.data(), back.data());
    for (int64_t place : places) choice.push_back(static_cast<float>(place));
    return joined({choice, scores, dlogits, there.values(), back.values()});
  });
}

// Two groups of two queries; a third of the columns are turned, at last by angles that each token names.
void check_rotary(DType dtype, float tolerance, int64_t d, bool interleaved) {
  compare("rotary", tolerance, tolerance, [&] {
    const int64_t heads = 8, half = d / 3, n = ROWS * heads * d;
    Tensor x(dtype, n, 1), dy(dtype, n, 2), q_weight(dtype, d, 3), k_weight(dtype, d, 4),
        y(dtype, n, 5), dx(dtype, n, 6), plain(dtype, n, 7), named(dtype, n, 10);
    Floats cos = random_floats(S * half, 8), sin = random_floats(S * half, 9), dq(d), dk(d);
    RotaryArgs args{x.data(),
                    q_weight.data(),
                    k_weight.data(),
                    cos.data(),
                    sin.data(),
                    y.data(),
                    S,
                    B,
                    heads,
                    2,
                    d,
                    half,
                    1e-2f,
                    interleaved,
                    false,
                    dtype};
    kernels().rotary(args);
    args.y = dx.data();
    kernels().rotary_norm_backward(args, {dy.data(), dq.data(), dk.data()});
    args.q_weight = args.k_weight = nullptr, args.inverse = true, args.y = plain.data();
    kernels().rotary(args);
    std::vector<int32_t> positions(S * B);
    for (int64_t i = 0; i < S * B; ++i) positions[i] = static_cast<int32_t>(7 * i % S);
    args.positions = positions.data(), args.y = named.data();
    kernels().rotary(args);
    return joined({dq, dk, y.values(), dx.values(), plain.values(), named.values()});
  });
}

void check_cross_entropy(DType dtype, float tolerance, int64_t cols) {
  compare("cross_entropy", tolerance, tolerance, [&] {
    Tensor logits(dtype, ROWS * cols, 13);
    std::vector<int64_t> labels(ROWS);
    for (int64_t i = 0; i < ROWS; ++i)
      labels[i] = i * 7 % (cols + 3);  // some of them another rank's
    Floats row_max(ROWS), sum_exp(ROWS), target_logit(ROWS), dloss = random_floats(ROWS, 14);
    labels[0] = -1;  // not counted
    CrossEntropyArgs args{logits.data(),       dtype, ROWS,           cols,
                          labels.data(),       0,     row_max.data(), sum_exp.data(),
                          target_logit.data(), 1e-3f};
    args.labels = nullptr;  // the largest logit is that of every row
    kernels().cross_entropy_max(args);
    args.labels = labels.data();
    kernels().cross_entropy_sum(args);
    const Floats apart = joined({row_max, sum_exp, target_logit});
    kernels().cross_entropy_forward(args);
    kernels().cross_entropy_backward(args, dloss.data(), logits.data(), dtype);
    return joined({apart, row_max, sum_exp, target_logit, logits.values()});
  });
}

void check_activation(DType dtype, float tolerance, int64_t cols, Activation activation) {
  compare("activate", tolerance, tolerance, [&] {
    Tensor x(dtype, ROWS * cols, 15), bias(dtype, cols, 17), y(dtype, ROWS * cols, 18);
    kernels().activate({x.data(), bias.data(), y.data(), cols, ROWS, cols, dtype, activation});
    return y.values();
  });
}

void check_few_rows(DType dtype, float tolerance, int64_t cols) {
  compare("linear_few_rows", tolerance, tolerance, [&] {
    Tensor x(dtype, S * cols, 25), weight(dtype, 7 * cols, 26), bias(dtype, 7, 27),
        y(dtype, S * 7, 28);
    kernels().linear_few_rows({S, 7, cols, dtype, x.data(), cols, weight.data(), cols, bias.data(),
                               y.data(), 7,
                               cols % 2 ? Activation::none : Activation::squared_relu});
    return y.values();
  });
}

// A Q8 weight of 7 rows, its numbers again, and a matmul with it.
void check_q8(DType dtype, float tolerance, int64_t cols) {
  std::vector<int8_t> values(7 * cols);
  std::vector<bf16> scales(7 * q8_blocks(cols));
  compare("quantize_q8", 0, 0, [&] {
    Tensor weight(dtype, 7 * cols, 26);
    const Q8Args args{7, cols, dtype, weight.data(), cols, values.data(), scales.data()};
    kernels().quantize_q8(args);
    kernels().dequantize_q8(args);
    Floats codes(values.begin(), values.end());
    return joined({codes, weight.values()});
  });
  compare("linear_few_rows of a Q8 weight", tolerance, tolerance, [&] {
    Tensor x(dtype, S * cols, 25), bias(dtype, 7, 27), y(dtype, S * 7, 28);
    kernels().linear_few_rows({S,
                               7,
                               cols,
                               dtype,
                               x.data(),
                               cols,
                               values.data(),
                               cols,
                               bias.data(),
                               y.data(),
                               7,
                               Activation::none,
                               {scales.data(), q8_blocks(cols)}});
    return y.values();
  });
}

void check_embedding(DType dtype, int64_t cols) {
  compare("embedding", 1e-6f, 1e-6f, [&] {
    Tensor table(dtype, 9 * cols, 22), out_rows(dtype, ROWS * cols, 23),
        dout(dtype, ROWS * cols, 24);
    std::vector<int64_t> tokens(ROWS);
    for (int64_t i = 0; i < ROWS; ++i) tokens[i] = i * 5 % 13;
    Floats grad(9 * cols), positions(S * cols);
    const EmbeddingArgs args{tokens.data(), ROWS, 2, 9, cols};
    kernels().embedding(args, table.data(), out_rows.data(), dtype);
    kernels().embedding_backward(args, dout.data(), dtype, grad.data());
    kernels().add_position(out_rows.data(), table.data(), out_rows.data(), dtype, S, B, cols);
    kernels().add_position_backward(dout.data(), dtype, positions.data(), S, B, cols);
    return joined({out_rows.values(), grad, positions});
  });
}

#include "check_delta_net.h"

void check_all() {
  for (DType dtype : {DType::f32, DType::bf16}) {
    const float tolerance = dtype == DType::f32 ? 2e-5f : 5e-2f;
    for (int64_t cols : COLUMNS) {
      check_norms(dtype, tolerance, cols, 0.0f);
      check_norms(dtype, tolerance, cols, 0.3f);
      check_cross_entropy(dtype, tolerance, cols);
      for (Activation f : {Activation::gelu, Activation::gelu_exact, Activation::squared_relu})
        check_activation(dtype, tolerance, cols, f);
      check_rms_norm(dtype, tolerance, cols);
      for (Activation f : {Activation::silu, Activation::gelu})
        check_gate(dtype, tolerance, cols, f);
      for (Scores kind : {Scores::softmax, Scores::softmax_of_chosen, Scores::sigmoid})
        check_routing(dtype, tolerance, cols, kind);
      check_rotary(dtype, tolerance, cols, false);
      check_rotary(dtype, tolerance, cols, true);
      check_few_rows(dtype, tolerance, cols);
      check_q8(dtype, tolerance, cols);
      check_embedding(dtype, cols);
      check_convolution(dtype, tolerance, cols);
      check_gated_norm(dtype, tolerance, cols);
    }
    check_delta_rule(dtype, tolerance, 1, 8, 16);
    check_delta_rule(dtype, tolerance, 70, 5, 37);
  }
  check_cross_entropy(DType::f32, 2e-5f, 4133);
}

}  // namespace

int main(int argc, char** argv) { return compare_targets(argc, argv, check_all); }
