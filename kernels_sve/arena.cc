// The arena of arena.h: first fit at the lowest address, so that what is in use stays together; free neighbours are merged.
#include "arena.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <map>
#include <mutex>
#include <unordered_map>

namespace fm::arena {
namespace {

constexpr size_t UNIT = size_t(64) << 10;  // blocks are multiples of this: the largest base page in use
constexpr size_t LINE = 256;               // A64FX's cache line, a multiple of everybody else's

// Blocks all beginning at the same offset in a page would meet in the same sets of a first-level cache; each begins another
// STAGGERS-th of a page further.
constexpr size_t STAGGERS = 16;

struct Arena {
  std::mutex mutex;
  char *begin = nullptr, *top = nullptr, *end = nullptr;
  std::map<char*, size_t> free;                     // by address
  std::unordered_map<void*, std::pair<char*, size_t>> used;  // handed out -> block
  Stats stats{};
  size_t turn = 0;

  char* take(size_t bytes) {
    for (auto block = free.begin(); block != free.end(); ++block) {
      const auto [address, size] = *block;
      if (size < bytes) continue;
      free.erase(block);
      if (size > bytes) free[address + bytes] = size - bytes;
      return address;
    }
    return grow(bytes);
  }

  // From the top, a free block that ends there included.
  char* grow(size_t bytes) {
    char* address = top;
    if (!free.empty() && free.rbegin()->first + free.rbegin()->second == top) address = free.rbegin()->first;
    if (static_cast<size_t>(end - address) < bytes) return nullptr;
    if (address != top) free.erase(address);
    top = address + bytes;
    stats.touched = static_cast<size_t>(top - begin);
    return address;
  }

  void give_back(char* address, size_t bytes) {
    auto next = free.lower_bound(address);
    if (next != free.end() && next->first == address + bytes) {
      bytes += next->second;
      next = free.erase(next);
    }
    if (next != free.begin()) {
      auto before = std::prev(next);
      if (before->first + before->second == address) {
        before->second += bytes;
        return;
      }
    }
    free[address] = bytes;
  }
};

// Never destroyed: tensors may outlive static objects.
Arena& the_arena() {
  static Arena& arena = *new Arena;
  return arena;
}

}  // namespace

void advise_huge_pages(void* begin, size_t bytes) {
  const uintptr_t first = (reinterpret_cast<uintptr_t>(begin) + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE;
  const uintptr_t last = (reinterpret_cast<uintptr_t>(begin) + bytes) / HUGE_PAGE * HUGE_PAGE;
  if (first < last) madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
}

bool reserve(size_t bytes) {
  Arena& arena = the_arena();
  const std::lock_guard<std::mutex> lock(arena.mutex);
  if (arena.begin) return true;
  for (; bytes >= HUGE_PAGE; bytes /= 2) {
    void* range = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (range == MAP_FAILED) continue;
    advise_huge_pages(range, bytes);
    arena.begin = arena.top = reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(range) + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE);
    arena.end = static_cast<char*>(range) + bytes;
    arena.stats.reserved = bytes;
    return true;
  }
  return false;
}

void* allocate(size_t bytes) {
  if (!bytes) return nullptr;
  Arena& arena = the_arena();
  if (bytes >= SMALL) {
    const std::lock_guard<std::mutex> lock(arena.mutex);
    const size_t offset = arena.turn % STAGGERS * LINE, size = (bytes + offset + UNIT - 1) / UNIT * UNIT;
    if (char* block = arena.take(size)) {
      ++arena.turn;
      arena.stats.in_use += size;
      arena.stats.peak = std::max(arena.stats.peak, arena.stats.in_use);
      arena.used[block + offset] = {block, size};
      return block + offset;
    }
    ++arena.stats.fallbacks;
  }
  void* block = nullptr;
  return posix_memalign(&block, 64, bytes) ? nullptr : block;
}

void release(void* block) {
  if (!block) return;
  Arena& arena = the_arena();
  if (block < arena.begin || block >= arena.end) return std::free(block);
  const std::lock_guard<std::mutex> lock(arena.mutex);
  const auto found = arena.used.find(block);
  const auto [address, size] = found->second;
  arena.used.erase(found);
  arena.stats.in_use -= size;
  arena.give_back(address, size);
}

Stats stats() {
  Arena& arena = the_arena();
  const std::lock_guard<std::mutex> lock(arena.mutex);
  return arena.stats;
}

}  // namespace fm::arena
