// Memory for large tensors that stays with the process: one reserved range of addresses, grown from below, whose freed
// blocks are reused and never go back to the kernel (but for a buffer's, which is freed only to grow). So a step after the
// first one faults in no pages, and the pages may be huge.
//
// Why not malloc: glibc gives every block above its threshold back when it is freed, and the next tensor's pages are
// zeroed and faulted in again, one fault per 4 KiB (through one lock of the process in the kernel).
// Left out: blocks below SMALL, which are malloc's; returning memory. Bound to torch in arena_bind.cc; tested by
// tests/host/test_allocator.py.
#pragma once
#include <cstddef>

namespace fm::arena {

constexpr size_t SMALL = size_t(1)
                         << 18;  // bytes below which malloc serves: its heap keeps such blocks

struct Stats {
  size_t reserved, touched, in_use,
      peak;          // bytes of addresses, ever handed out, handed out now, peak of in_use
  size_t fallbacks;  // large blocks that malloc had to serve because the range was full
};

// Reserves addresses for `bytes`, or less where the system refuses so many. False when it refuses all.
bool reserve(size_t bytes);

// Tensors come and go with a step. Buffers of the kernels stay and have a part of the range for themselves, or they
// would keep freed blocks around them from becoming one.
enum class Use { tensor, buffer };

// Memory aligned to 64 bytes (a buffer: 256), large blocks from the range once it is reserved; null when there is none.
// Thread-safe.
void* allocate(size_t bytes, Use use);
void release(void* block);

Stats stats();

}  // namespace fm::arena
