// The arena of arena.h: best fit, the lowest address among equals; new blocks come from the top, free neighbours are merged.
#include "arena/arena.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <map>
#include <mutex>
#include <unordered_map>

#include "tuning.h"

namespace fm::arena {
namespace {

constexpr size_t UNIT = tuning::Baseline::BASE_PAGE;  // blocks are multiples of this
constexpr size_t HUGE_PAGE = tuning::Baseline::HUGE_PAGE, LINE = tuning::Baseline::CACHE_LINE;
// Each block begins a line further into a page than the one before, STAGGERS times.
constexpr size_t STAGGERS = tuning::Baseline::STAGGERS;

struct Range {
  char *begin = nullptr, *top = nullptr, *end = nullptr;
  std::map<char*, size_t> free;  // by address

  size_t touched() const { return static_cast<size_t>(top - begin); }

  char* take(size_t bytes) {
    auto best = free.end();
    for (auto block = free.begin(); block != free.end(); ++block) {
      if (block->second >= bytes && (best == free.end() || block->second < best->second))
        best = block;
    }
    if (best != free.end()) {
      const auto [address, size] = *best;
      free.erase(best);
      if (size > bytes) free[address + bytes] = size - bytes;
      return address;
    }
    return grow(bytes);
  }

  // From the top, a free block that ends there included.
  char* grow(size_t bytes) {
    char* address = top;
    if (!free.empty() && free.rbegin()->first + free.rbegin()->second == top)
      address = free.rbegin()->first;
    if (static_cast<size_t>(end - address) < bytes) return nullptr;
    if (address != top) free.erase(address);
    top = address + bytes;
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

struct Block {
  Range* range;
  char* address;
  size_t size;
};

struct Arena {
  std::mutex mutex;
  Range tensors, buffers;
  char *begin = nullptr, *end = nullptr;
  std::unordered_map<void*, Block> used;  // handed out -> block
  Stats stats{};
  size_t turn = 0;
};

// Never destroyed: tensors may outlive static objects.
Arena& the_arena() {
  static Arena& arena = *new Arena;
  return arena;
}

constexpr size_t BUFFER_SHARE = 8;  // part of the range

}  // namespace

bool reserve(size_t bytes) {
  Arena& arena = the_arena();
  const std::lock_guard<std::mutex> lock(arena.mutex);
  if (arena.begin) return true;
  for (; bytes >= 2 * BUFFER_SHARE * HUGE_PAGE; bytes /= 2) {
    void* range = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (range == MAP_FAILED) continue;
    madvise(range, bytes, MADV_HUGEPAGE);
    const uintptr_t first =
        (reinterpret_cast<uintptr_t>(range) + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE;
    arena.begin = reinterpret_cast<char*>(first), arena.end = static_cast<char*>(range) + bytes;
    char* middle = arena.begin + bytes / HUGE_PAGE / BUFFER_SHARE * HUGE_PAGE;
    arena.buffers.begin = arena.buffers.top = arena.begin, arena.buffers.end = middle;
    arena.tensors.begin = arena.tensors.top = middle, arena.tensors.end = arena.end;
    arena.stats.reserved = bytes;
    return true;
  }
  return false;
}

void* allocate(size_t bytes, Use use) {
  if (!bytes) return nullptr;
  Arena& arena = the_arena();
  if (bytes >= SMALL && arena.begin) {
    const std::lock_guard<std::mutex> lock(arena.mutex);
    Range& range = use == Use::tensor ? arena.tensors : arena.buffers;
    const size_t offset = arena.turn % STAGGERS * LINE,
                 size = (bytes + offset + UNIT - 1) / UNIT * UNIT;
    if (char* block = range.take(size)) {
      ++arena.turn;
      arena.stats.in_use += size;
      arena.stats.peak = std::max(arena.stats.peak, arena.stats.in_use);
      arena.used[block + offset] = {&range, block, size};
      return block + offset;
    }
    ++arena.stats.fallbacks;
  }
  void* block = nullptr;
  return posix_memalign(&block, use == Use::tensor ? 64 : LINE, bytes) ? nullptr : block;
}

void release(void* block) {
  if (!block) return;
  Arena& arena = the_arena();
  if (block < arena.begin || block >= arena.end) return std::free(block);
  const std::lock_guard<std::mutex> lock(arena.mutex);
  const auto entry = arena.used.find(block);
  const Block freed = entry->second;
  arena.used.erase(entry);
  arena.stats.in_use -= freed.size;
  freed.range->give_back(freed.address, freed.size);
  // A buffer is only released to grow, elsewhere: hardly anything fits where it was, so its pages go.
  if (freed.range == &arena.buffers) madvise(freed.address, freed.size, MADV_DONTNEED);
}

Stats stats() {
  Arena& arena = the_arena();
  const std::lock_guard<std::mutex> lock(arena.mutex);
  Stats now = arena.stats;
  now.touched = arena.tensors.touched() + arena.buffers.touched();
  return now;
}

}  // namespace fm::arena
