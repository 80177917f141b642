// What a call of attention describes: its sizes and where heads lie, the documents of a sample, and the dropout of a head.
// Included by attention_forward.h.
#pragma once
#include "attention/attention_pack.h"
#include "simd/philox.h"

namespace fm::FM_TARGET {

constexpr int64_t BLOCK = Tuning::ATTENTION_BLOCK, KEY_BLOCK = Tuning::KEY_BLOCK,
                  QUERY_BLOCKS = Tuning::QUERY_BLOCKS;
constexpr float LN_2 = 0.693147181f;

static_assert(BLOCK % LANES == 0 && KEY_BLOCK % PHILOX_BLOCK == 0, "blocks end where tiles end");
static_assert(BLOCK % ATTENTION_UNIT == 0 && KEY_BLOCK >= LANES + ATTENTION_UNIT,
              "in the first round every query sees a key of its window");

// Positions from which on the packed copies of a head are too large for a cache: heads at once are then as few as keep all threads
// at work, because backward takes about 12 matrices (s, d) for each; and what is read next is fetched.
constexpr int64_t LONG_SEQUENCE = 32768;

// The sizes of a call, where each head's matrices lie, and how many heads are worked on at once: that bounds the packed copies
// whatever the batch, and keeps them in cache, with work enough for all threads. `head` counts (sample, query head) pairs,
// `group` counts (sample, group) pairs; share: query heads of a group; key_columns, value_columns: sizes in whole units. Rows
// have the numbers of their positions in the sequence, and what is packed of them begins at a multiple of BLOCK: blocks and
// tiles are those of the whole sequence, whatever part a call has.
struct AttentionShape {
  int64_t s, b, heads, key_size, value_size, window, share, key_columns, value_columns,
      groups_at_once, heads_at_once;
  Positions queries, keys;  // of this call
  int64_t first_query, queries_padded, first_key,
      keys_padded;  // where packed rows begin, and how many there are
  bool part;
  explicit AttentionShape(const AttentionArgs& a)
      : s(a.s),
        b(a.b),
        heads(a.heads),
        key_size(a.key_size),
        value_size(a.value_size),
        window(a.window < a.s ? a.window : NO_WINDOW),
        share(a.heads / a.groups),
        key_columns(round_up(a.key_size, ATTENTION_UNIT)),
        value_columns(round_up(a.value_size, ATTENTION_UNIT)),
        queries(a.part() ? a.queries : Positions{0, a.s}),
        keys(a.part() ? a.keys : Positions{0, a.s}),
        first_query(queries.begin / BLOCK * BLOCK),
        queries_padded(round_up(queries.end, BLOCK) - first_query),
        first_key(keys.begin / BLOCK * BLOCK),
        keys_padded(round_up(keys.end, BLOCK) - first_key),
        part(a.part()) {
    const int64_t partials = dquery_partials(), enough = (num_threads() + partials - 1) / partials,
                  most = max(2, min(16, num_threads()));
    const int64_t wanted = max(queries.end - queries.begin, keys.end - keys.begin) > LONG_SEQUENCE
                               ? min(most, enough)
                               : most;
    groups_at_once = min((wanted + share - 1) / share, all_heads() / share);
    heads_at_once =
        share > wanted ? wanted : groups_at_once * share;  // parts of one group, or whole groups
  }
  int64_t all_heads() const { return b * heads; }
  int64_t query_matrix() const { return queries_padded * key_columns; }
  int64_t context_matrix() const { return queries_padded * value_columns; }
  int64_t key_matrix() const { return keys_padded * key_columns; }
  int64_t value_matrix() const { return keys_padded * value_columns; }
  int64_t dquery_partials() const { return min(keys_padded / BLOCK, Tuning::DQUERY_PARTIALS); }
  // Keys that are not there are hidden from the queries after them; in a whole sequence there are no such queries.
  int64_t keys_end() const { return part ? keys.end : NO_WINDOW; }
  // Floats of what backward packs and sums for a query head and for a group (attention_block.h), `step` elements to a packed
  // word; the sums of dK and dV only where heads share them.
  int64_t head_floats(int64_t step) const {
    return 2 / step * (query_matrix() + context_matrix()) + dquery_partials() * query_matrix() +
           shared_sums() + 2 * queries_padded;
  }
  int64_t group_floats(int64_t step) const { return key_matrix() / step + shared_sums(); }
  int64_t shared_sums() const { return share > 1 ? key_matrix() + value_matrix() : 0; }
  // Bytes of all that is held at once. Forward mostly packs less, but takes as much: a buffer that grew later would leave its old
  // place empty.
  size_t packed_bytes(int64_t step) const {
    const int64_t backward =
        heads_at_once * head_floats(step) + groups_at_once * group_floats(step);
    const int64_t forward = groups_at_once * (key_matrix() + value_matrix()) / step;
    return static_cast<size_t>(max(backward, forward)) * sizeof(float);
  }
  template <class T>
  static Rows<T> rows(T* data, int64_t stride, const Positions& at, int64_t d) {
    return {data - at.begin * stride, stride, at.end, d, at.begin};
  }
  // Columns of a group, with `heads` queries in front of its key.
  int64_t group_columns(int64_t heads) const { return (heads + 1) * key_size + value_size; }
  template <class T>
  Rows<T> query(T* qkv, int64_t head) const {
    const int64_t columns = group_columns(share);
    return rows(qkv + head / share * columns + head % share * key_size,
                all_heads() / share * columns, queries, key_size);
  }
  // which: 0 key, 1 value. In a part of a call they are a tensor of their own.
  template <class T>
  Rows<T> key_value(T* kv, int64_t group, int which) const {
    const int64_t before = part ? 0 : share, columns = group_columns(before);
    return rows(kv + group * columns + (before + which) * key_size, all_heads() / share * columns,
                keys, which == 0 ? key_size : value_size);
  }
  // A head's numbers, one for each query.
  template <class T>
  T* statistics(T* data, int64_t head) const {
    return data + head * (queries.end - queries.begin) - queries.begin;
  }
  template <class T>
  Rows<T> context(T* data, int64_t head) const {
    return rows(data + head * value_size, all_heads() * value_size, queries, value_size);
  }
};

// The documents of one sample: starts (s), or null for one document.
struct Documents {
  const int32_t* starts = nullptr;
  int64_t s = 0, first_key = 0;
  Documents() = default;
  Documents(const AttentionArgs& a, int64_t sample)
      : starts(a.starts ? a.starts + sample * a.s : nullptr), s(a.s), first_key(a.keys.begin) {}
  // The first key of query q; queries beyond s are of the last document.
  int64_t start(int64_t q) const { return starts ? starts[min(q, s - 1)] : 0; }
  // The same among the keys that a call has.
  int64_t seen_from(int64_t q) const { return max(start(q), first_key); }
  // Where the queries end that see key k, or s_max where no document ends them.
  int64_t end(int64_t k, int64_t s_max) const {
    if (!starts || starts[s - 1] <= k) return s_max;
    int64_t low = min(k, s - 1), high = s - 1;  // starts[low] <= k < starts[high]
    while (high - low > 1) {
      const int64_t middle = (low + high) / 2;
      (starts[middle] <= k ? low : high) = middle;
    }
    return high;
  }
  // Where the task ends whose queries begin at `first`, a multiple of EDGE; `first` where none begins. A task has at most LANES
  // queries and ends with a document, up to the next multiple of EDGE, so that it reads the keys of one document and a few more.
  template <int EDGE>
  int64_t task_end(int64_t first) const {
    if ((first - round_up(start(first), EDGE)) % LANES) return first;
    int64_t end = first + EDGE;
    while (end < first + LANES && end < s && start(end) <= end - EDGE) end += EDGE;
    return min(end, s);
  }
  // Positions of the longest document.
  int64_t longest() const {
    int64_t most = 0;
    for (int64_t end = s; end > 0; end = start(end - 1)) most = max(most, end - start(end - 1));
    return most;
  }
};

// Lanes whose query does not see its key: `distance` is query - key, negative for a later key.
FM_INLINE vi hidden(vi distance, int64_t window) {
  return (vi)((vu)distance >= static_cast<uint32_t>(window));
}

// What the dropout mask of one head depends on.
struct HeadDropout {
  PhiloxKey key;
  uint64_t sample;
  uint32_t row0, threshold;
  HeadDropout(const AttentionArgs& a, int64_t head)
      : key(philox_key(a.seed, a.stream)),
        sample(a.first_sample + head / a.heads),
        row0(static_cast<uint32_t>((a.first_head + head % a.heads) * a.s)),
        threshold(dropout_threshold(a.p)) {}
};

FM_INLINE float keep_scale(const AttentionArgs& a) { return 1.0f / (1.0f - a.p); }

}  // namespace fm::FM_TARGET
