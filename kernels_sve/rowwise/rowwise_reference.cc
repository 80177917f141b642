// Scalar references of rowwise.h and rowwise_dropout.h, in double.
#include <cmath>
#include <vector>

#include "reference.h"

namespace fm::reference {

void layer_norm(const LayerNormArgs& a) {
  for (int64_t r = 0; r < a.rows; ++r) {
    double mean = 0, variance = 0;
    for (int64_t c = 0; c < a.cols; ++c)
      mean += get(a.x, a.dtype, r * a.cols + c) / static_cast<double>(a.cols);
    for (int64_t c = 0; c < a.cols; ++c)
      variance += std::pow(get(a.x, a.dtype, r * a.cols + c) - mean, 2);
    const double rstd = 1 / std::sqrt(variance / static_cast<double>(a.cols) + a.eps);
    a.mean[r] = static_cast<float>(mean);
    a.rstd[r] = static_cast<float>(rstd);
    for (int64_t c = 0; c < a.cols; ++c) {
      const double normal = (get(a.x, a.dtype, r * a.cols + c) - mean) * rstd;
      put(a.y, a.dtype, r * a.cols + c,
          static_cast<float>(normal * get(a.weight, a.dtype, c) + get(a.bias, a.dtype, c)));
    }
  }
}

void rms_norm(const LayerNormArgs& a) {
  for (int64_t r = 0; r < a.rows; ++r) {
    double squares = 0;
    for (int64_t c = 0; c < a.cols; ++c) squares += std::pow(get(a.x, a.dtype, r * a.cols + c), 2);
    const double rstd = 1 / std::sqrt(squares / static_cast<double>(a.cols) + a.eps);
    a.rstd[r] = static_cast<float>(rstd);
    for (int64_t c = 0; c < a.cols; ++c) {
      const double normal = get(a.x, a.dtype, r * a.cols + c) * rstd;
      put(a.y, a.dtype, r * a.cols + c, static_cast<float>(normal * get(a.weight, a.dtype, c)));
    }
  }
}

void rms_norm_backward(const LayerNormGradArgs& a) {
  std::vector<double> dweight(a.cols);
  for (int64_t r = 0; r < a.rows; ++r) {
    auto dy = [&](int64_t c) { return static_cast<double>(get(a.dy, a.dtype, r * a.cols + c)); };
    auto xhat = [&](int64_t c) {
      return static_cast<double>(get(a.x, a.dtype, r * a.cols + c)) * a.rstd[r];
    };
    double gx_mean = 0;
    for (int64_t c = 0; c < a.cols; ++c)
      gx_mean += dy(c) * get(a.weight, a.dtype, c) * xhat(c) / static_cast<double>(a.cols);
    for (int64_t c = 0; c < a.cols; ++c) {
      const int64_t i = r * a.cols + c;
      dweight[c] += dy(c) * xhat(c);
      const double through = a.rstd[r] * (dy(c) * get(a.weight, a.dtype, c) - xhat(c) * gx_mean);
      put(a.dx, a.dtype, i, static_cast<float>(through + (a.add ? get(a.add, a.dtype, i) : 0)));
    }
  }
  for (int64_t c = 0; c < a.cols; ++c) a.dweight[c] += static_cast<float>(dweight[c]);
}

void layer_norm_backward(const LayerNormGradArgs& a) {
  std::vector<double> dweight(a.cols), dbias(a.cols);
  for (int64_t r = 0; r < a.rows; ++r) {
    auto dy = [&](int64_t c) { return static_cast<double>(get(a.dy, a.dtype, r * a.cols + c)); };
    auto g = [&](int64_t c) { return dy(c) * get(a.weight, a.dtype, c); };
    auto xhat = [&](int64_t c) {
      return (static_cast<double>(get(a.x, a.dtype, r * a.cols + c)) - a.mean[r]) * a.rstd[r];
    };
    double g_mean = 0, gx_mean = 0;
    for (int64_t c = 0; c < a.cols; ++c) {
      g_mean += g(c) / static_cast<double>(a.cols);
      gx_mean += g(c) * xhat(c) / static_cast<double>(a.cols);
    }
    for (int64_t c = 0; c < a.cols; ++c) {
      const int64_t i = r * a.cols + c;
      dweight[c] += dy(c) * xhat(c);
      dbias[c] += dy(c);
      const double through = a.rstd[r] * (g(c) - g_mean - xhat(c) * gx_mean);
      put(a.dx, a.dtype, i, static_cast<float>(through + (a.add ? get(a.add, a.dtype, i) : 0)));
    }
  }
  for (int64_t c = 0; c < a.cols; ++c) {
    a.dweight[c] += static_cast<float>(dweight[c]);
    a.dbias[c] += static_cast<float>(dbias[c]);
  }
}

void bias_dropout_add(const ResidualArgs& a) {
  const int64_t cols = a.dropout.cols, n = a.dropout.outer * a.dropout.samples * cols;
  std::vector<float> sum(n);
  for (int64_t i = 0; i < n; ++i)
    sum[i] = get(a.x, a.dtype, i) + (a.bias ? get(a.bias, a.dtype, i % cols) : 0);
  dropout(sum.data(), sum.data(), DType::f32, a.dropout);
  for (int64_t i = 0; i < n; ++i) put(a.out, a.dtype, i, get(a.residual, a.dtype, i) + sum[i]);
}

void bias_dropout_add_backward(const ResidualGradArgs& a) {
  const int64_t cols = a.dropout.cols, n = a.dropout.outer * a.dropout.samples * cols;
  std::vector<float> grad(n);
  std::vector<double> dbias(cols);
  for (int64_t i = 0; i < n; ++i) grad[i] = get(a.dout, a.dtype, i);
  dropout(grad.data(), grad.data(), DType::f32, a.dropout);
  for (int64_t i = 0; i < n; ++i) {
    if (a.dx) put(a.dx, a.dtype, i, grad[i]);
    dbias[i % cols] += grad[i];
  }
  for (int64_t c = 0; c < cols && a.dbias; ++c) a.dbias[c] += static_cast<float>(dbias[c]);
}

void bias_dropout_add_layer_norm(const ResidualArgs& sum, const LayerNormArgs& norm) {
  bias_dropout_add(sum);
  layer_norm(norm);
}

void bias_dropout_add_layer_norm_backward(const LayerNormGradArgs& norm,
                                          const ResidualGradArgs& sum) {
  layer_norm_backward(norm);
  bias_dropout_add_backward(sum);
}

void bias_dropout_add_rms_norm(const ResidualArgs& sum, const LayerNormArgs& norm) {
  bias_dropout_add(sum);
  rms_norm(norm);
}

void bias_dropout_add_rms_norm_backward(const LayerNormGradArgs& norm,
                                        const ResidualGradArgs& sum) {
  rms_norm_backward(norm);
  bias_dropout_add_backward(sum);
}

}  // namespace fm::reference
