// Causal self-attention, forward and backward, on Megatron's fused layout, without ever holding an s x s matrix.
//
//   qkv, dqkv   (s, b, heads key_size + groups (key_size + value_size)): per position and sample, for each group its heads /
//               groups queries, its key and its value
//   out, dout   (s, b, heads value_size)        lse (b, heads, s) FP32: natural log of the sum of exp(scores)
//
// Keys may be wider than values, as in multi-head latent attention (DeepSeek-V2, arXiv:2405.04434), or narrower: each product
// has the columns of its own operands, none is padded to the other's.
// Query heads of a group share its key and value (Ainslie et al., GQA, 2023), which are packed once for all of them and never
// repeated. With a window, query i sees the keys i - window < j <= i (Beltagy et al., Longformer, 2020): tiles that lie outside
// are left out, those at its two edges masked. With documents, query i sees no key before its document's first position: tiles
// between documents are left out in the same way.
//
// Products are FP32, or BF16 with FP32 sums where tensors are BF16 and the target has a dot product of pairs. Dropout
// of the probabilities is that of the kernel `dropout` on (b, heads, s, s), recomputed in both passes. Results have the
// same bits for any number of threads. attention_decode.h has generation. Left out: masks other than these.
// Reference: attention_reference.cc. Tested by tests/kernels/test_attention.py; timed by benchmarks/attention.py.
#pragma once
#include "attention/attention_backward.h"
#ifndef FM_HAS_TILES
#include "attention/attention_decode.h"
#endif

namespace fm::FM_TARGET {

#ifdef FM_HAS_TILES
static void attention_decode(const void* qkv, void* keys, void* values, void* out, DType dtype,
                             const DecodeArgs& args) {
  FM_BASE::attention_decode_kernel(qkv, keys, values, out, dtype, args);
}
#endif

// Calls f(policy, element) for the element type of a tensor; with tiles that is bfloat16.
template <class F>
FM_INLINE void with_operands([[maybe_unused]] DType dtype, const F& f) {
#ifdef FM_HAS_TILES
  f(Tiles(), bf16());
#else
  if (dtype == DType::f32) return f(Singles(), float());
#ifdef FM_HAS_BF16_PAIRS
  if (dtype == DType::bf16) return f(Pairs(), bf16());
#else
  if (dtype == DType::bf16) return f(Singles(), bf16());
#endif
  f(Singles(), f16());
#endif
}

static void attention_part_forward(const void* qkv, const void* kv, void* out, float* lse,
                                   DType dtype, const AttentionArgs& args) {
  FM_LEAVE_TO_BASE(dtype, attention_part_forward, qkv, kv, out, lse, dtype, args)
  with_operands(dtype, [&](auto policy, auto element) {
    using T = decltype(element);
    forward_of<decltype(policy)>(static_cast<const T*>(qkv), static_cast<const T*>(kv),
                                 static_cast<T*>(out), lse, args);
  });
}

static void attention_forward(const void* qkv, void* out, float* lse, DType dtype,
                              const AttentionArgs& args) {
  attention_part_forward(qkv, qkv, out, lse, dtype, args);
}

static void attention_part_backward(const void* qkv, const void* kv, const void* out,
                                    const float* lse, const void* dout, void* dqkv, void* dkv,
                                    DType dtype, const AttentionArgs& args) {
  FM_LEAVE_TO_BASE(dtype, attention_part_backward, qkv, kv, out, lse, dout, dqkv, dkv, dtype, args)
  with_operands(dtype, [&](auto policy, auto element) {
    using T = decltype(element);
    backward_of<decltype(policy)>(static_cast<const T*>(qkv), static_cast<const T*>(kv),
                                  static_cast<const T*>(out), lse, static_cast<const T*>(dout),
                                  dqkv, dkv, args);
  });
}

static void attention_backward(const void* qkv, const void* out, const float* lse, const void* dout,
                               void* dqkv, DType dtype, const AttentionArgs& args) {
  attention_part_backward(qkv, qkv, out, lse, dout, dqkv, dqkv, dtype, args);
}

}  // namespace fm::FM_TARGET
