// Scalar references of cross_entropy.h, in double.
#include <cmath>

#include "reference.h"

namespace fm::reference {

void cross_entropy_max(const CrossEntropyArgs& a) {
  for (int64_t r = 0; r < a.rows; ++r) {
    a.row_max[r] = -INFINITY;
    for (int64_t c = 0; c < a.cols; ++c)
      a.row_max[r] = std::fmax(a.row_max[r], get(a.logits, a.dtype, r * a.cols + c));
  }
}

void cross_entropy_sum(const CrossEntropyArgs& a) {
  for (int64_t r = 0; r < a.rows; ++r) {
    double sum = 0;
    a.target_logit[r] = 0;
    for (int64_t c = 0; a.labels[r] >= 0 && c < a.cols; ++c) {
      const float logit = get(a.logits, a.dtype, r * a.cols + c);
      sum += std::exp(static_cast<double>(logit) - a.row_max[r]);
      if (a.labels[r] - a.first_row == c) a.target_logit[r] = logit - a.row_max[r];
    }
    a.sum_exp[r] = static_cast<float>(sum);
  }
}

void cross_entropy_forward(const CrossEntropyArgs& a) {
  cross_entropy_max(a);
  for (int64_t r = 0; r < a.rows; ++r)
    if (a.labels[r] < 0) a.row_max[r] = 0;
  cross_entropy_sum(a);
}

void cross_entropy_backward(const CrossEntropyArgs& a, const float* dloss, void* out,
                            DType out_dtype) {
  for (int64_t r = 0; r < a.rows; ++r) {
    const double factor =
        a.z_loss ? 1 + 2.0 * a.z_loss * (std::log(a.sum_exp[r]) + a.row_max[r]) : 1;
    for (int64_t c = 0; c < a.cols; ++c) {
      const int64_t i = r * a.cols + c;
      const double p =
          std::exp(static_cast<double>(get(a.logits, a.dtype, i)) - a.row_max[r]) / a.sum_exp[r];
      const double gradient = (factor * p - (a.labels[r] - a.first_row == c)) * dloss[r];
      put(out, out_dtype, i, a.labels[r] < 0 ? 0.0f : static_cast<float>(gradient));
    }
  }
}

}  // namespace fm::reference
