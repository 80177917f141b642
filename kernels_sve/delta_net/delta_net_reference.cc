// Scalar references of delta_net.h, in double. The delta rule is its recurrence token by token, and its backward the recurrence's.
#include <cmath>
#include <vector>

#include "reference.h"

namespace fm::reference {
namespace {

using Doubles = std::vector<double>;

double sigmoid(double x) { return 1 / (1 + std::exp(-x)); }

// One value head of one sequence.
struct Head {
  const DeltaArgs& a;
  int64_t sample, head;
  int64_t share() const { return a.heads / a.groups; }
  int64_t query(int64_t t) const {
    return ((t * a.b + sample) * a.groups + head / share()) * (2 * a.d + share() * a.dv);
  }
  int64_t key(int64_t t) const { return query(t) + a.d; }
  int64_t value(int64_t t) const { return key(t) + a.d + head % share() * a.dv; }
  int64_t gate(int64_t t) const { return (t * a.b + sample) * a.heads + head; }
  int64_t state(int64_t number) const {
    return ((number * a.b + sample) * a.heads + head) * a.d * a.dv;
  }
  bool begins(int64_t t) const { return t > 0 && a.starts && a.starts[sample * a.s + t] == t; }
};

// A query or key divided by its length, and the reciprocal length at the end.
Doubles unit(const DeltaArgs& a, int64_t first) {
  double squares = 1e-6;
  Doubles x(a.d + 1);
  for (int64_t i = 0; i < a.d; ++i) {
    x[i] = get(a.qkv, a.dtype, first + i);
    squares += x[i] * x[i];
  }
  x[a.d] = 1 / std::sqrt(squares);
  for (int64_t i = 0; i < a.d; ++i) x[i] *= x[a.d];
  return x;
}

// S after the decay of token t; then the update v - S^T k; then S after it.
void decay_state(const Head& at, int64_t t, Doubles& state) {
  const double decay = at.begins(t) ? 0 : std::exp(static_cast<double>(at.a.decay[at.gate(t)]));
  for (double& value : state) value *= decay;
}

Doubles update_of(const Head& at, int64_t t, const Doubles& key, const Doubles& state) {
  const DeltaArgs& a = at.a;
  Doubles update(a.dv);
  for (int64_t j = 0; j < a.dv; ++j) {
    update[j] = get(a.qkv, a.dtype, at.value(t) + j);
    for (int64_t i = 0; i < a.d; ++i) update[j] -= key[i] * state[i * a.dv + j];
  }
  return update;
}

void add_update(const Head& at, int64_t t, const Doubles& key, const Doubles& update,
                Doubles& state) {
  const DeltaArgs& a = at.a;
  for (int64_t i = 0; i < a.d; ++i) {
    for (int64_t j = 0; j < a.dv; ++j)
      state[i * a.dv + j] += a.beta[at.gate(t)] * key[i] * update[j];
  }
}

void step(const Head& at, int64_t t, Doubles& state, void* out) {
  const DeltaArgs& a = at.a;
  const Doubles key = unit(a, at.key(t)), query = unit(a, at.query(t));
  decay_state(at, t, state);
  add_update(at, t, key, update_of(at, t, key, state), state);
  for (int64_t j = 0; j < a.dv && out; ++j) {
    double sum = 0;
    for (int64_t i = 0; i < a.d; ++i) sum += query[i] * state[i * a.dv + j];
    put(out, a.dtype, at.gate(t) * a.dv + j,
        static_cast<float>(sum / std::sqrt(static_cast<double>(a.d))));
  }
}

Doubles read_state(const Head& at, const float* state) {
  return Doubles(state, state + at.a.d * at.a.dv);
}

void write_state(const Doubles& from, float* state) {
  for (size_t i = 0; i < from.size(); ++i) state[i] = static_cast<float>(from[i]);
}

// The gradients of a head's token from the state before it; those of query and key are added to dq and dk (2 d).
void step_backward(const Head& at, int64_t t, const Doubles& before, const DeltaGradArgs& grad,
                   Doubles& dstate, double* dquery, double* dkey) {
  const DeltaArgs& a = at.a;
  const Doubles key = unit(a, at.key(t)), query = unit(a, at.query(t));
  const double beta = a.beta[at.gate(t)], root = std::sqrt(static_cast<double>(a.d));
  Doubles decayed = before;
  decay_state(at, t, decayed);
  const Doubles update = update_of(at, t, key, decayed);
  Doubles after = decayed, dupdate(a.dv);
  add_update(at, t, key, update, after);
  double dbeta = 0, ddecay = 0;
  Doubles dq(a.d), dk(a.d);
  for (int64_t j = 0; j < a.dv; ++j) {
    const double dout = get(grad.dout, a.dtype, at.gate(t) * a.dv + j) / root;
    for (int64_t i = 0; i < a.d; ++i) {
      const int64_t ij = i * a.dv + j;
      dq[i] += after[ij] * dout;
      dstate[ij] += query[i] * dout;
      dbeta += dstate[ij] * key[i] * update[j];
      dk[i] += dstate[ij] * beta * update[j];
      dupdate[j] += dstate[ij] * beta * key[i];
    }
    put(grad.dqkv, a.dtype, at.value(t) + j, static_cast<float>(dupdate[j]));
  }
  for (int64_t i = 0; i < a.d; ++i) {
    for (int64_t j = 0; j < a.dv; ++j) {
      const int64_t ij = i * a.dv + j;
      dk[i] -= decayed[ij] * dupdate[j];
      dstate[ij] -= key[i] * dupdate[j];
      ddecay += dstate[ij] * decayed[ij];
    }
  }
  decay_state(at, t, dstate);
  grad.ddecay[at.gate(t)] = static_cast<float>(ddecay);
  grad.dbeta[at.gate(t)] = static_cast<float>(dbeta);
  double along_q = 0, along_k = 0;
  for (int64_t i = 0; i < a.d; ++i) along_q += dq[i] * query[i], along_k += dk[i] * key[i];
  for (int64_t i = 0; i < a.d; ++i) {
    dquery[i] += query[a.d] * (dq[i] - query[i] * along_q);
    dkey[i] += key[a.d] * (dk[i] - key[i] * along_k);
  }
}

// Token t of a sample as a convolution reads it for the tap of a later token.
double input(const ConvolutionArgs& a, int64_t t, int64_t later, int64_t sample, int64_t column) {
  const int64_t start = a.starts ? a.starts[sample * a.s + later] : 0;
  if (start > 0 && t < start) return 0;
  if (t >= 0) return get(a.x, a.dtype, (t * a.b + sample) * a.x_row + column);
  if (!a.earlier) return 0;
  return get(a.earlier, a.dtype, ((t + a.taps - 1) * a.b + sample) * a.cols + column);
}

double convolved(const ConvolutionArgs& a, int64_t t, int64_t sample, int64_t column) {
  double sum = 0;
  for (int64_t tap = 0; tap < a.taps; ++tap) {
    sum += get(a.weight, a.dtype, column * a.taps + tap) *
           input(a, t - a.taps + 1 + tap, t, sample, column);
  }
  return sum;
}

struct NormRow {
  const void *x, *gate;
  int64_t first, gate_first;
  double rstd;
};

NormRow norm_row(const GatedNormArgs& a, int64_t row) {
  double squares = 0;
  for (int64_t i = 0; i < a.cols; ++i) squares += std::pow(get(a.x, a.dtype, row * a.cols + i), 2);
  return {a.x, a.gate, row * a.cols, row / a.heads * a.gate_row + row % a.heads * a.cols,
          1 / std::sqrt(squares / static_cast<double>(a.cols) + a.eps)};
}

}  // namespace

void delta_rule_forward(const DeltaArgs& a, void* out, float* states) {
  for (int64_t task = 0; task < a.b * a.heads; ++task) {
    const Head at{a, task / a.heads, task % a.heads};
    Doubles state = read_state(at, states + at.state(0));
    for (int64_t t = 0; t < a.s; ++t) {
      if (t > 0 && t % DELTA_SEGMENT == 0) write_state(state, states + at.state(t / DELTA_SEGMENT));
      step(at, t, state, out);
    }
    write_state(state, states + at.state((a.s + DELTA_SEGMENT - 1) / DELTA_SEGMENT));
  }
}

void delta_rule_backward(const DeltaArgs& a, const DeltaGradArgs& grad) {
  for (int64_t task = 0; task < a.b * a.groups; ++task) {
    const int64_t share = a.heads / a.groups, sample = task / a.groups;
    const int64_t first_head = task % a.groups * share;
    Doubles dqueries(a.s * a.d), dkeys(a.s * a.d);
    for (int64_t head = first_head; head < first_head + share; ++head) {
      const Head at{a, sample, head};
      std::vector<Doubles> before;
      Doubles state = read_state(at, a.states + at.state(0));
      for (int64_t t = 0; t < a.s; ++t) {
        before.push_back(state);
        step(at, t, state, nullptr);
      }
      Doubles dstate = read_state(at, grad.dstate + at.state(0));
      for (int64_t t = a.s - 1; t >= 0; --t) {
        step_backward(at, t, before[t], grad, dstate, &dqueries[t * a.d], &dkeys[t * a.d]);
      }
      write_state(dstate, grad.dstate + at.state(0));
    }
    const Head at{a, sample, first_head};
    for (int64_t t = 0; t < a.s; ++t) {
      for (int64_t i = 0; i < a.d; ++i) {
        put(grad.dqkv, a.dtype, at.query(t) + i, static_cast<float>(dqueries[t * a.d + i]));
        put(grad.dqkv, a.dtype, at.key(t) + i, static_cast<float>(dkeys[t * a.d + i]));
      }
    }
  }
}

void delta_rule_decode(const DeltaArgs& a, const int64_t* samples, float* states, void* out) {
  for (int64_t task = 0; task < a.b * a.heads; ++task) {
    const Head at{a, task / a.heads, task % a.heads};
    float* place = states + (samples[at.sample] * a.heads + at.head) * a.d * a.dv;
    Doubles state = read_state(at, place);
    step(at, 0, state, out);
    write_state(state, place);
  }
}

void convolution_forward(const ConvolutionArgs& a, void* y) {
  for (int64_t i = 0; i < a.s * a.b * a.cols; ++i) {
    const int64_t row = i / a.cols;
    const double c = convolved(a, row / a.b, row % a.b, i % a.cols);
    put(y, a.dtype, i, static_cast<float>(c * sigmoid(c)));
  }
}

void convolution_backward(const ConvolutionArgs& a, const ConvolutionGradArgs& grad) {
  for (int64_t sample = 0; sample < a.b; ++sample) {
    for (int64_t column = 0; column < a.cols; ++column) {
      Doubles dx(a.s + a.taps - 1), dweight(a.taps);
      for (int64_t t = 0; t < a.s; ++t) {
        const double c = convolved(a, t, sample, column), s = sigmoid(c);
        const double dc =
            get(grad.dy, a.dtype, (t * a.b + sample) * a.cols + column) * s * (1 + c * (1 - s));
        for (int64_t tap = 0; tap < a.taps; ++tap) {
          const int64_t from = t - a.taps + 1 + tap;
          const int64_t start = a.starts ? a.starts[sample * a.s + t] : 0;
          dweight[tap] += dc * input(a, from, t, sample, column);
          if (start == 0 || from >= start)
            dx[from + a.taps - 1] += dc * get(a.weight, a.dtype, column * a.taps + tap);
        }
      }
      for (int64_t t = 1 - a.taps; t < a.s; ++t) {
        const auto value = static_cast<float>(dx[t + a.taps - 1]);
        if (t >= 0) put(grad.dx, a.dtype, (t * a.b + sample) * a.cols + column, value);
        if (t < 0 && grad.dearlier)
          put(grad.dearlier, a.dtype, ((t + a.taps - 1) * a.b + sample) * a.cols + column, value);
      }
      for (int64_t tap = 0; tap < a.taps; ++tap)
        grad.dweight[column * a.taps + tap] += static_cast<float>(dweight[tap]);
    }
  }
}

void convolution_decode(const ConvolutionArgs& a, const int64_t* samples, void* inputs, void* y) {
  for (int64_t row = 0; row < a.b; ++row) {
    const int64_t first = samples[row] * (a.taps - 1) * a.cols;
    for (int64_t column = 0; column < a.cols; ++column) {
      double c = 0;
      for (int64_t tap = 0; tap < a.taps; ++tap) {
        const float x = tap + 1 < a.taps ? get(inputs, a.dtype, first + tap * a.cols + column)
                                         : get(a.x, a.dtype, row * a.x_row + column);
        c += x * static_cast<double>(get(a.weight, a.dtype, column * a.taps + tap));
        if (tap > 0) put(inputs, a.dtype, first + (tap - 1) * a.cols + column, x);
      }
      put(y, a.dtype, row * a.cols + column, static_cast<float>(c * sigmoid(c)));
    }
  }
}

void gated_norm(const GatedNormArgs& a, void* y) {
  for (int64_t row = 0; row < a.rows; ++row) {
    const NormRow r = norm_row(a, row);
    for (int64_t i = 0; i < a.cols; ++i) {
      const double z = get(r.gate, a.dtype, r.gate_first + i);
      put(y, a.dtype, r.first + i,
          static_cast<float>(get(r.x, a.dtype, r.first + i) * r.rstd * get(a.weight, a.dtype, i) *
                             z * sigmoid(z)));
    }
  }
}

void gated_norm_backward(const GatedNormArgs& a, const GatedNormGradArgs& grad) {
  Doubles dweight(a.cols);
  for (int64_t row = 0; row < a.rows; ++row) {
    const NormRow r = norm_row(a, row);
    double along = 0;
    Doubles g(a.cols);
    for (int64_t i = 0; i < a.cols; ++i) {
      const double z = get(r.gate, a.dtype, r.gate_first + i), s = sigmoid(z);
      const double dy = get(grad.dy, a.dtype, r.first + i), w = get(a.weight, a.dtype, i);
      const double xhat = get(r.x, a.dtype, r.first + i) * r.rstd;
      put(grad.dgate, a.dtype, r.first + i,
          static_cast<float>(dy * xhat * w * s * (1 + z * (1 - s))));
      dweight[i] += dy * z * s * xhat;
      g[i] = dy * z * s * w;
      along += g[i] * xhat / static_cast<double>(a.cols);
    }
    for (int64_t i = 0; i < a.cols; ++i) {
      const double xhat = get(r.x, a.dtype, r.first + i) * r.rstd;
      put(grad.dx, a.dtype, r.first + i, static_cast<float>(r.rstd * (g[i] - xhat * along)));
    }
  }
  for (int64_t i = 0; i < a.cols; ++i) grad.dweight[i] += static_cast<float>(dweight[i]);
}

}  // namespace fm::reference
