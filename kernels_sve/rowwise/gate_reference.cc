// Scalar references of gate.h, in double.
#include "reference.h"

namespace fm::reference {

void gate(const GateArgs& a, void* y) {
  for (int64_t r = 0; r < a.rows; ++r) {
    for (int64_t c = 0; c < a.cols; ++c) {
      const double gate = get(a.x, a.dtype, r * a.x_row + c),
                   up = get(a.x, a.dtype, r * a.x_row + a.x_part + c);
      put(y, a.dtype, r * a.cols + c,
          static_cast<float>(activation(a.activation, gate) * up * (a.factors ? a.factors[r] : 1)));
    }
  }
}

void gate_backward(const GateArgs& a, const GateGradArgs& grad) {
  for (int64_t r = 0; r < a.rows; ++r) {
    const double factor = a.factors ? a.factors[r] : 1;
    double dfactor = 0;
    for (int64_t c = 0; c < a.cols; ++c) {
      const double gate = get(a.x, a.dtype, r * a.x_row + c),
                   up = get(a.x, a.dtype, r * a.x_row + a.x_part + c);
      const double y = activation(a.activation, gate) * up,
                   raw = get(grad.dy, a.dtype, r * a.cols + c), dy = raw * factor;
      dfactor += raw * y;
      if (grad.y) put(grad.y, a.dtype, r * a.cols + c, static_cast<float>(y * factor));
      const int64_t at = r * grad.dx_row + c;
      put(grad.dx, a.dtype, at, static_cast<float>(dy * up * activation_slope(a.activation, gate)));
      put(grad.dx, a.dtype, at + grad.dx_part,
          static_cast<float>(dy * activation(a.activation, gate)));
    }
    if (grad.dfactors) grad.dfactors[r] = static_cast<float>(dfactor);
  }
}

}  // namespace fm::reference
