// Memory for large tensors that stays with the process: one reserved range of addresses, grown from below, whose freed blocks are
// reused and never go back to the kernel. So a step after the first one faults in no pages, and the pages may be huge.
//
// Why not malloc: glibc gives every block above its threshold back when it is freed, and the next tensor's pages are zeroed and
// faulted in again, one fault per 4 KiB (shared by all threads of a process, through one lock in the kernel).
// Left out: blocks below SMALL, which are malloc's; returning memory. Bound to torch in bind_arena.cc; tested by
// tests/test_allocator.py.
#pragma once
#include <cstddef>

namespace fm::arena {

constexpr size_t SMALL = size_t(1) << 18;      // bytes below which malloc serves: its heap keeps such blocks
constexpr size_t HUGE_PAGE = size_t(2) << 20;  // the usual one; where the kernel has another it ignores the advice

struct Stats {
  size_t reserved, touched, in_use, peak;  // bytes of addresses, ever handed out, handed out now, most at once
  size_t fallbacks;                        // large blocks that malloc had to serve because the range was full
};

// Reserves addresses for `bytes`, or less where the system refuses so many. False when it refuses all.
bool reserve(size_t bytes);

// 64-byte aligned memory, large blocks from the range; null when there is none. Thread-safe.
void* allocate(size_t bytes);
void release(void* block);

Stats stats();

// Asks the kernel for huge pages in the whole pages of [begin, begin + bytes).
void advise_huge_pages(void* begin, size_t bytes);

}  // namespace fm::arena
