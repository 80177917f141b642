// Tuning values: one block per machine, after one with what holds on all of them. target.cc takes the block of its target's
// name (setup.py compiles it with -DFM_TARGET=<name>, simd.h says `using Tuning = tuning::FM_TARGET`); files that are
// compiled once take tuning::Baseline. The caches themselves are read at run time (gemm_blocking.cc).
//
// Every number says where it is from: a manual, arithmetic on registers and cache sizes, or a measurement, which was made on
// x86-64 with AVX-512; for A64FX there is llvm-mca's model (make arm-codegen). Values marked (bits) fix the order of a sum:
// another value gives other last bits. docs/kernels-howto.md: "Tuning for a new machine".
#pragma once
#include <cstddef>
#include <cstdint>

namespace fm::tuning {

struct Common {
  // Memory. A64FX's cache line (Microarchitecture Manual 1.8.1) is a multiple of everybody else's. The huge page is the usual
  // one; where the kernel has another it ignores the advice. The base page is the largest in use (Fugaku's Linux). Buffers begin
  // at STAGGERS different lines of a page, or they would all meet in the same sets of a first-level cache.
  static constexpr size_t CACHE_LINE = 256, HUGE_PAGE = size_t(2) << 20,
                          BASE_PAGE = size_t(64) << 10, STAGGERS = 16;

  // Elements of a flat tensor, or about as many of a matrix, that are worth a thread.
  static constexpr int64_t GRAIN = 4096;

  // GEMM. Steps of k in one turn of the inner loop: 1 is best with packed operands (12.06 of 12 cycles in the model of A64FX).
  static constexpr int GEMM_UNROLL = 1;
  // Packing: panels side by side, so that whole cache lines of a row are used; steps of k that are prefetched.
  static constexpr int PACK_PANELS = 4, PACK_AHEAD = 8;
  // What the k-loop fetches beside its work (gemm_fetch.h): in every FETCH_STEPS steps four runs of FETCH_RUN bytes, a LINE at a time.
  static constexpr int FETCH_STEPS = 8, FETCH_RUN = 128, LINE = 64;
  // Shares of the caches that a block fills, after Goto and van de Geijn (ACM TOMS 34(3), 2008), who leave half to the other
  // streams: a panel of B in L1 (bits); the block of A in L2, more where an L3 takes the streams of B and C; the block of B in
  // L3, or several L2 where there is none.
  static constexpr double KC_L1_SHARE = 0.5;
  static constexpr double MC_L2_SHARE = 0.5, MC_L2_SHARE_BEFORE_L3 = 0.8;
  static constexpr double NC_L2_SHARE = 4.0, NC_L3_SHARE = 0.25;
  // Before an L3 panels are deeper and come from L2, because a tile of C then goes fewer times to L3 and back: with 384 steps
  // instead of 192 or 768 (L1 of 48 KiB) products of 124M are 2 to 5 per cent faster on Zen 5 (measured); so
  // are 512 steps where each block of k reads what C holds. The share of panels of pairs is twice as large where nothing is added to
  // C: with L1 of 32 KiB 768 k then are one block, and BF16 products of 124M 7 to 20 per cent faster on Zen 4 (measured). (bits)
  static constexpr double KC_L1_SHARE_BEFORE_L3 = 1.0, KC_L1_SHARE_ADDING_BEFORE_L3 = 4.0 / 3;
  // Of tiles half of L1 everywhere: their k-loop reads 32 bytes of each operand in a cycle, of which L2 can hold up one (Intel's
  // Optimization Reference Manual: 48 bytes a cycle sustained). (bits)
  static constexpr double KC_L1_SHARE_TILES = 0.5;
  // Multiply-adds of a full tile that take as long as packing an element (10 to 18 measured), and as reading one of a packed
  // weight from a shared cache.
  static constexpr double PACK_COST = 16, STREAM_COST = 3;
  // So few steps of k take tiles row by row, and pack GROUPS_OF_FEW times as many columns of B at a time.
  // They fetch what the tile FEW_AHEAD places later adds to, because memory takes longer than a tile: 3 or 6 are best on Zen 5 (measured).
  static constexpr int64_t FEW_STEPS = 128, GROUPS_OF_FEW = 4, FEW_AHEAD = 3;
  // Rows of A up to which a grouped matmul reads the rows of a weight where they lie, and tiles whose results it stores together.
  static constexpr int64_t MOST_FEW_ROWS = 128, FEW_TOGETHER = 8;
  // Parts of a grouped matmul for each thread: with 8 of them a thread waits at the end for 1/16 of its work at most on average.
  static constexpr int TASKS_EACH = 8;
  // Caches where the system does not describe them: the smallest of this decade. L2_EIGHTHS of L2 are the program's.
  static constexpr int64_t UNKNOWN_L1 = 32 << 10, UNKNOWN_L2 = 256 << 10, L2_EIGHTHS = 8;
  static constexpr int64_t UNKNOWN_L1_WAYS = 4;

  // Attention. A tile is ATTENTION_MR x ATTENTION_NV vectors. A packing task takes a multiple of 3 vectors of 4, 8 and 16 lanes
  // in rows (bits); a round of the online softmax as many keys as leave the scores in L1 (bits). With 6 partial sums of dQ one
  // head keeps four threads busy in backward, two heads twelve (bits).
  static constexpr int ATTENTION_NV = 3;
  static constexpr int64_t ATTENTION_BLOCK = 96, KEY_BLOCK = 128, DQUERY_PARTIALS = 6;
  // Blocks of queries that share the keys of a long sequence: at 131,072 positions of 64 columns FP32 is 11 per cent faster with 2 and
  // 13 with 4 than with 1, BF16 3 per cent (Zen 5, one thread, measured). More of them fill L2.
  static constexpr int64_t QUERY_BLOCKS = 4;
  // Slots of a cache that one task of decoding reads (bits): at 1024 positions one group is work for 8 threads, and 64 columns of
  // values stay in L1.
  static constexpr int64_t DECODE_SLOTS = 128;
  // Blocks of so many slots that one task reads of a cache of latents, at most, if there are LATENT_TASKS tasks (bits): its sums are
  // as large as a block, and are written and read once for each task.
  static constexpr int64_t LATENT_BLOCKS = 4, LATENT_TASKS = 24;

  // Independent elementary functions side by side: 4 for 16 registers, 8 for 32, where a chain of some twenty dependent operations
  // of 9 cycles takes 13 cycles a vector instead of 29 (A64FX, modelled). Sets of Philox counters likewise.
  static constexpr int CHAINS = 4, PHILOX_SETS = 1;

  // Kernels on rows. Rows worked on together (bits): their horizontal sums overlap, and a column sum is loaded and stored once
  // for all of them. Longer rows than SHORT_ROW fill L1 alone.
  static constexpr int ROW_BLOCK = 4;
  static constexpr int64_t SHORT_ROW = 2048;
  // Partial sums over rows (bits): whole shares for 12, 24 and 48 cores. Floats of one step of their sum: a line of 256 bytes.
  static constexpr int64_t ROW_CHUNKS = 48, COLUMN_BLOCK = 64;
  // Logits that are read twice while they are in L1 (bits), and independent exponentials in flight (bits).
  static constexpr int64_t VOCABULARY_BLOCK = 2048;
  static constexpr int EXP_WAYS = 4;
  // Dot products side by side: 3 rows of W by 8 of x, or 4 by up to 4, in 32 registers with a vector of each row of W.
  static constexpr int DOT_SUMS = 24;
  // Bytes that the dot products, at least, and gates prefetch ahead; 0: left to the hardware.
  static constexpr int64_t DOT_AHEAD = 0, GATE_AHEAD = 0;
  // Dot products leave longer rows to the hardware: a row's bytes times an element's bytes.
  static constexpr int64_t DOT_FETCHED = INT64_MAX;
  // Rows of an embedding table are at random places: they are prefetched this many tokens early.
  static constexpr int64_t TOKENS_AHEAD = 4;
};

// Any CPU with vectors of 16 bytes. Registers: 8 accumulators, 2 vectors of B and a broadcast of A in 16.
struct portable : Common {
  static constexpr int DOT_SUMS = 12;  // 16 registers
  static constexpr int GEMM_MR = 4, GEMM_NR_VECTORS = 2;
  static constexpr int ATTENTION_MR =
      4;  // 4 x 3 accumulators, 3 vectors and a broadcast in 16 registers
  static constexpr int FMA_CHAINS = 12;
};

// x86-64 with AVX2. Registers: 12 accumulators, 2 vectors and a broadcast in 16; an FMA of latency 4 or 5 on two pipes needs 10.
struct avx2 : Common {
  static constexpr int DOT_SUMS = 12;  // 16 registers
  static constexpr int GEMM_MR = 6, GEMM_NR_VECTORS = 2;
  static constexpr int ATTENTION_MR = 4;
  static constexpr int FMA_CHAINS = 12;
  // Zen 3, measured: rows of int8 are read at 1.0 to 2.1 times the rate up to 8192 bytes, of BF16 at 1.1 to 1.4 times up to 4096;
  // longer ones, and float's from 3072 bytes on, are slower.
  static constexpr int64_t DOT_AHEAD = 8192, DOT_FETCHED = 8192;
};

struct avx2vnni : avx2 {};

// x86-64 with AVX-512. Registers: 24 accumulators, 2 vectors and a broadcast in 32; attention's 8 x 3, 3 vectors and a broadcast,
// and 8 divides the usual head sizes.
struct avx512 : Common {
  static constexpr int CHAINS = 8, PHILOX_SETS = 4;
  static constexpr int GEMM_MR = 12, GEMM_NR_VECTORS = 2;
  static constexpr int ATTENTION_MR = 8;
  static constexpr int FMA_CHAINS = 24;
  // Zen 4, measured: 8 rows of x read W at the rate of one row, 18 GB/s, instead of 7 to 10 GB/s without fetching. Gates: 2048 of 512
  // to 4096 (Zen 5, measured).
  static constexpr int64_t DOT_AHEAD = 8192, GATE_AHEAD = 2048;
};
struct avx512vnni : avx512 {};
struct avx512bf16 : avx512 {};

// Matrix tiles (tiles.h): a step of k takes 64 cycles, in which an operand of 32 rows has 2 KiB, so it fetches four times. A round of
// attention's tiles has 32 lanes.
struct amx : avx512bf16 {
  static constexpr int FETCH_STEPS = 4;
  static constexpr int ATTENTION_NV = 2;
};
struct amx_emulated : amx {};

// A64FX (Microarchitecture Manual 1.8.1): FMLA has latency 9 on two pipes, so 18 accumulators or more; 32 registers hold 24, 2
// vectors and a broadcast. 64 KiB L1; 8 MiB L2 for 12 cores, of which 7 are left when assistant cores hold ways.
struct sve512 : Common {
  static constexpr int CHAINS = 8, PHILOX_SETS = 4;
  static constexpr int GEMM_MR = 12, GEMM_NR_VECTORS = 2;
  static constexpr int ATTENTION_MR = 8;
  static constexpr int FMA_CHAINS = 24;
  static constexpr int64_t UNKNOWN_L1 = 64 << 10, UNKNOWN_L2 = (7 << 20) / 12, L2_EIGHTHS = 7;
  // The loop of a step fills 11 of the 12 cycles in which 4 instructions each are decoded, so what it fetches costs what does not
  // fit beside it: 6 per cent in every 8 steps, nothing in every 16 (model). A run is a line.
  static constexpr int LINE = 256, FETCH_STEPS = 16, FETCH_RUN = 256;
};

// Other SVE machines: 32 registers as A64FX; no machine of theirs was measured.
struct sve256 : sve512 {
  static constexpr int LINE = Common::LINE, FETCH_STEPS = Common::FETCH_STEPS,
                       FETCH_RUN = Common::FETCH_RUN;
};
struct sve128 : sve256 {
  static constexpr int ATTENTION_MR = 4;  // at most the lanes of a vector
};

// With BFMMLA (Neoverse V1, V2): the tile's registers hold 2 x 2 blocks of sums, as many as in FP32.
struct sve256bf16 : sve256 {};
struct sve128bf16 : sve128 {};

#if defined(__aarch64__)
using Baseline = sve512;
#else
using Baseline = Common;
#endif

}  // namespace fm::tuning
