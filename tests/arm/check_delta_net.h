// The kernels of a gated delta net against the scalar reference. Included by check_rowwise.cc.
#pragma once

// Results, states and gradients of a rule with documents, and the next token; 4 value heads in 2 groups.
inline void check_delta_rule(DType dtype, float tolerance, int64_t s, int64_t d, int64_t dv) {
  compare("delta_rule", tolerance, tolerance, [&] {
    const int64_t cols = 2 * 2 * d + 4 * dv, results = s * 2 * 4 * dv, state = 2 * 4 * d * dv;
    Tensor qkv(dtype, s * 2 * cols, 1), out(dtype, results, 2), dout(dtype, results, 3),
        dqkv(dtype, s * 2 * cols, 4), next(dtype, 2 * 4 * dv, 5);
    Floats decay = random_floats(s * 2 * 4, 6), beta = random_floats(s * 2 * 4, 7),
           ddecay(s * 2 * 4), dbeta(s * 2 * 4), dstate = random_floats(state, 8);
    for (float& value : decay) value = -std::fabs(value);
    for (float& value : beta) value = std::fabs(value) / 2;
    const int64_t segments = (s + DELTA_SEGMENT - 1) / DELTA_SEGMENT;
    Floats states((segments + 1) * state);
    std::vector<int32_t> starts(2 * s);
    for (int64_t t = 0; t < s; ++t) starts[t] = t < 5 ? 0 : 5;
    DeltaArgs args{s,
                   2,
                   2,
                   4,
                   d,
                   dv,
                   qkv.data(),
                   decay.data(),
                   beta.data(),
                   dtype,
                   starts.data(),
                   states.data()};
    kernels().delta_rule_forward(args, out.data(), states.data());
    kernels().delta_rule_backward(
        args, {dout.data(), dqkv.data(), ddecay.data(), dbeta.data(), dstate.data()});
    const int64_t samples[2] = {1, 0};
    DeltaArgs token = args;
    token.s = 1, token.starts = nullptr;
    Floats last(states.end() - state, states.end());
    kernels().delta_rule_decode(token, samples, last.data(), next.data());
    return joined(
        {out.values(), states, dqkv.values(), ddecay, dbeta, dstate, next.values(), last});
  });
}

inline void check_convolution(DType dtype, float tolerance, int64_t cols) {
  compare("convolution", tolerance, tolerance, [&] {
    const int64_t n = ROWS * cols, edge = 3 * B * cols;
    Tensor x(dtype, n, 1), weight(dtype, 4 * cols, 2), earlier(dtype, edge, 3), y(dtype, n, 4),
        dy(dtype, n, 5), dx(dtype, n, 6), dearlier(dtype, edge, 7), next(dtype, B * cols, 8);
    Floats dweight(4 * cols);
    const int32_t starts[B * S] = {0, 0, 2, 3, 3};
    ConvolutionArgs args{S,     B,     cols, 4, x.data(), cols, weight.data(), earlier.data(),
                         dtype, starts};
    kernels().convolution_forward(args, y.data());
    kernels().convolution_backward(args, {dy.data(), dx.data(), dearlier.data(), dweight.data()});
    const int64_t samples[B] = {1, 0, 2};
    args.s = 1, args.starts = nullptr, args.earlier = nullptr;
    kernels().convolution_decode(args, samples, earlier.data(), next.data());
    return joined(
        {y.values(), dx.values(), dearlier.values(), dweight, next.values(), earlier.values()});
  });
}

inline void check_gated_norm(DType dtype, float tolerance, int64_t cols) {
  compare("gated_norm", tolerance, tolerance, [&] {
    const int64_t n = ROWS * cols;
    Tensor x(dtype, n, 1), gate(dtype, n + S, 2), weight(dtype, cols, 3), y(dtype, n, 4),
        dy(dtype, n, 5), dx(dtype, n, 6), dgate(dtype, n, 7);
    Floats dweight(cols);
    const GatedNormArgs args{ROWS,          B,     cols, x.data(), gate.data(), B * cols + 1,
                             weight.data(), 1e-2f, dtype};
    kernels().gated_norm(args, y.data());
    kernels().gated_norm_backward(args, {dy.data(), dx.data(), dgate.data(), dweight.data()});
    return joined({y.values(), dx.values(), dgate.values(), dweight});
  });
}
