// SPDX-License-Identifier: Apache-2.0
//
// What one CTA does with (a chunk of) a row. Shared by every CUDA kernel; nothing here
// knows of other CTAs.
//
// The idea: find a safe threshold from a sample, read the row once keeping what passes,
// select exactly among the few kept.
//
//   SampleFilter   a filter that about 1.3 to 2 k columns of the row pass
//   ReduceChunk    one read: the survivors into shared memory, in column order; if
//                  more survive than fit, SelectExactly on the chunk
//   SelectByValue  the exact select: the k-th largest key, and how many are above it
//   KeepSelected   with it, exactly k entries
//   EmitRow        the selected in their final order
// A row that fits in the registers of a CTA needs no sample: SelectResident.
//
// Exactness never rests on the sample: a threshold decides only how many survive, and
// whoever counts fewer than k or more than fit takes the exact path over the scores.
//
// Plateaus. Many columns may equal the threshold (sums of ReLUs are often exactly 0).
// If the sample shows that they would not fit, the filter is strict: only larger keys
// survive, and the ties still missing are read off from the row's start, in column
// order, stopping as soon as there are enough.
//
// Whatever is kept is kept in column order from the start, so that the answer in index
// order needs no sort, and the ties of the k-th key are taken by counting.
//
// Scores are kept as they are in memory. 16-bit scores are widened to the upper half of
// a word, so that there is one order, and one code, for all types: a float32 of the same
// order (bfloat16: of the same value).
//
// All functions are called by the whole CTA. Unless said otherwise, shared memory that
// they leave behind is visible to every thread when they return.

#pragma once

#include <cstdint>

#include "top_k.h"

namespace jax_topk {

inline constexpr int kWarps = kThreads / 32;
inline constexpr unsigned kFullWarp = 0xFFFFFFFFu;
// Words that are ranked by comparing all pairs, with a lane for each, or with a thread.
inline constexpr uint32_t kFew = 32;
inline constexpr uint32_t kSome = 256;
// Entries of a bucket of the sort that are ranked by comparing all pairs.
inline constexpr uint32_t kFewInBucket = 256;

// Stream tells 64 bytes apart by the bits of addresses.
extern __shared__ __align__(128) char dynamic_shared_memory[];

// A bin, the words in larger bins, and the words in it.
struct Bin {
  uint32_t index;
  uint32_t above;
  uint32_t inside;
};

// The shared memory of a CTA, carved out of its dynamic allocation in this order:
// scratch, bins, list (plan.h: SharedMemoryBytes). Offsets, not pointers: they
// are constants, and cost no registers.
//
// At rest, that is between the calls of the functions below and after the next barrier,
// all bins are 0, and so is num_few.
struct Cta {
  struct Scratch {
    uint32_t totals[2][kWarps];   // sums of the warps, in turns
    uint32_t bin_totals[kWarps];  // of the bins that a warp looks at
    uint32_t min_keys[kWarps];    // extremes of the keys of the warps
    uint32_t max_keys[kWarps];
    alignas(16) uint64_t few[kFew];  // composites
    uint32_t ranks[kFew];            // how many of them are larger
    // Read as 16 bytes: nothing that may be written meanwhile lies beside it.
    alignas(16) Bin bin;  // that FindBin has found
    alignas(16) uint32_t num_few;
    uint32_t min_key;  // extremes of the keys met
    uint32_t max_key;
    uint32_t column;  // of the last tie selected
    uint32_t most;    // entries of a bucket
    uint32_t flag;
    // For the CTAs of a cluster (cluster.cuh).
    uint32_t counts[kMaxClusterSize];  // of all
    alignas(8) uint64_t mailboxes[3];
  };
  static_assert(sizeof(Scratch) <= kScratchBytes);

  uint32_t capacity;

  __device__ Scratch& scratch() const {
    return *reinterpret_cast<Scratch*>(dynamic_shared_memory);
  }
  __device__ uint32_t* bins() const {  // [kNumBins]
    return reinterpret_cast<uint32_t*>(dynamic_shared_memory + kScratchBytes);
  }
  __device__ uint64_t* list() const {  // [capacity] entries
    return reinterpret_cast<uint64_t*>(dynamic_shared_memory + kScratchBytes +
                                       kNumBins * sizeof(uint32_t));
  }
};

// Columns [start, stop). Below 2^31, so that sums with the threads of a CTA fit.
struct Columns {
  uint32_t start;
  uint32_t stop;
};

// Scores as words, and back.
template <typename Bits>
__device__ __forceinline__ uint32_t Widen(Bits bits) {
  return sizeof(Bits) == 4 ? bits : static_cast<uint32_t>(bits) << 16;
}
template <typename Bits>
__device__ __forceinline__ Bits Narrow(uint32_t word) {
  return static_cast<Bits>(sizeof(Bits) == 4 ? word : word >> 16);
}

// Score e, a constant, of 16 bytes of them, as a word.
template <typename Bits>
__device__ __forceinline__ uint32_t WordIn(const uint4& vector, int e) {
  const uint32_t words[4] = {vector.x, vector.y, vector.z, vector.w};
  if constexpr (sizeof(Bits) == 4) {
    return words[e];
  } else {
    return e % 2 == 0 ? words[e / 2] << 16 : words[e / 2] & 0xFFFF0000u;
  }
}

__device__ __forceinline__ uint32_t KeyOf(uint32_t word) {
  return OrderedKey<uint32_t>(word);
}
__device__ __forceinline__ uint32_t WordOf(uint32_t key) {
  return ScoreBits<uint32_t>(key);
}

// A word and its column, as the list keeps them.
__device__ __forceinline__ uint64_t Entry(uint32_t word, uint32_t column) {
  return static_cast<uint64_t>(word) << 32 | column;
}
__device__ __forceinline__ uint32_t EntryWord(uint64_t entry) {
  return static_cast<uint32_t>(entry >> 32);
}
__device__ __forceinline__ uint32_t EntryColumn(uint64_t entry) {
  return static_cast<uint32_t>(entry);
}

// Whether the key of a word exceeds `floor`, in two instructions: among words of one
// sign the order of keys is that of the words or its reverse.
struct Beyond {
  uint32_t flip;
  uint32_t limit;

  __device__ explicit Beyond(uint32_t floor) {
    flip = floor >> 31 != 0 ? 0x7FFFFFFFu : 0;
    limit = WordOf(floor) ^ flip;
  }
  __device__ bool operator()(uint32_t word) const { return (word ^ flip) < limit; }
};

// The inclusive sum over the lanes of a warp.
template <typename T>
__device__ __forceinline__ T WarpInclusiveSum(T x) {
  const int lane = threadIdx.x & 31;
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const T other = __shfl_up_sync(kFullWarp, x, distance);
    if (lane >= distance) x += other;
  }
  return x;
}
// In two instructions a step: the shuffle itself says whether there was such a lane.
template <>
__device__ __forceinline__ uint32_t WarpInclusiveSum(uint32_t x) {
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    asm("{\n"
        ".reg .pred p;\n"
        ".reg .b32 other;\n"
        "shfl.sync.up.b32 other|p, %0, %1, 0, 0xffffffff;\n"
        "@p add.u32 %0, %0, other;\n"
        "}"
        : "+r"(x)
        : "r"(distance));
  }
  return x;
}

// What the warps before this one have in `totals`, and in *all what all have. Every
// lane calls it after a barrier that follows the writing of `totals`.
__device__ __forceinline__ uint32_t SumBeforeWarp(const uint32_t* totals,
                                                  uint32_t* all) {
  const int lane = threadIdx.x & 31;
  const int warp = threadIdx.x / 32;
  const uint32_t total = lane < kWarps ? totals[lane] : 0u;
  *all = __reduce_add_sync(kFullWarp, total);
  return __reduce_add_sync(kFullWarp, lane < warp ? total : 0u);
}

// The exclusive sum over the threads of a CTA, and in *all the sum. One barrier;
// `totals` must not be in use, nor be written again before another barrier. (Measured
// on the H200 with 1024 threads: 0.3 us, and 0.9 us with the block scan of CUB.)
__device__ __forceinline__ uint32_t ExclusiveSum(uint32_t x, uint32_t* totals,
                                                 uint32_t* all) {
  const uint32_t sum = WarpInclusiveSum(x);
  if ((threadIdx.x & 31) == 31) totals[threadIdx.x / 32] = sum;
  __syncthreads();
  return SumBeforeWarp(totals, all) + sum - x;
}

__device__ __forceinline__ void ClearBins(const Cta& cta) {
  reinterpret_cast<uint2*>(cta.bins())[threadIdx.x] = make_uint2(0, 0);
}

// Brings the shared memory to rest, once the next barrier has been passed.
__device__ __forceinline__ void Rest(const Cta& cta) {
  ClearBins(cta);
  if (threadIdx.x == 0) cta.scratch().num_few = 0;
}

// Starts to collect the extremes of the keys that this CTA is going to meet. A barrier
// must follow before NoteExtremes.
__device__ __forceinline__ void ResetExtremes(const Cta& cta) {
  if (threadIdx.x == 0) {
    cta.scratch().min_key = 0xFFFFFFFFu;
    cta.scratch().max_key = 0;
  }
}

__device__ __forceinline__ void NoteExtremes(const Cta& cta, uint32_t min_key,
                                             uint32_t max_key) {
  min_key = __reduce_min_sync(kFullWarp, min_key);
  max_key = __reduce_max_sync(kFullWarp, max_key);
  if ((threadIdx.x & 31) == 0) {
    atomicMin(&cta.scratch().min_key, min_key);
    atomicMax(&cta.scratch().max_key, max_key);
  }
}

// Reading -----------------------------------------------------------------------------

// What fills a place that has no column: a NaN, and the least key of all, if widened.
inline constexpr uint32_t kNoWord = 0xFFFFFFFFu;
template <typename Bits>
__device__ __forceinline__ uint32_t LeastKey() {
  return KeyOf(Widen<Bits>(static_cast<Bits>(kNoWord)));
}

// All scores of a launch, of which rows are read.
template <typename Bits>
struct Scores {
  const Bits* begin;
  const Bits* end;
};

// The columns of a row, or of a chunk of it, as aligned vectors of kBytes. The first and
// the last may hold other columns as well; those are masked.
template <typename Bits, int kBytes = 16>
struct Vectors {
  static constexpr uint32_t kPerVector = kBytes / sizeof(Bits);

  const Bits* data;  // vector 0
  Columns columns;
  uint32_t column;  // the first of vector 0; modulo 2^32, it may be before column 0
  uint32_t size;    // vectors that hold a column
  uint32_t first_whole;  // the vectors that hold nothing else
  uint32_t num_whole;
  uint32_t first_inside;  // the vectors that hold nothing but scores
  uint32_t num_inside;

  __device__ Vectors(const Scores<Bits>& scores, const Bits* row, Columns columns_)
      : columns(columns_) {
    const Bits* first = row + columns.start;
    const uint32_t before =
        static_cast<uint32_t>(reinterpret_cast<uintptr_t>(first) / sizeof(Bits)) %
        kPerVector;
    const uint32_t reach = before + columns.stop - columns.start;
    data = first - before;
    column = columns.start - before;
    size = columns.stop > columns.start ? (reach + kPerVector - 1) / kPerVector : 0;
    first_whole = before > 0 ? 1 : 0;
    num_whole = max(reach / kPerVector, first_whole) - first_whole;
    first_inside = data < scores.begin ? 1 : 0;
    const bool last_inside = scores.end - data >= int64_t{size} * kPerVector;
    num_inside = max(size - (last_inside ? 0 : 1), first_inside) - first_inside;
    if (size == 0) num_inside = 0;
  }

  __device__ __forceinline__ uint4 Load(uint32_t i) const {
    static_assert(kBytes == 16);
    uint4 vector = make_uint4(kNoWord, kNoWord, kNoWord, kNoWord);
    if (i - first_inside < num_inside) {
      vector = __ldg(reinterpret_cast<const uint4*>(data) + i);
    }
    return vector;
  }

  __device__ __forceinline__ bool Whole(uint32_t i) const {
    return i - first_whole < num_whole;
  }

  // Word w of vector i, which is not whole: kNoWord wherever there is no column, and the
  // columns that Load has not dared to read.
  __device__ __forceinline__ uint32_t Masked(uint32_t i, int w, uint32_t word) const {
    const bool inside = i - first_inside < num_inside;
    constexpr int kPerWord = 4 / sizeof(Bits);
#pragma unroll
    for (int h = 0; h < kPerWord; ++h) {
      const uint32_t e = i * kPerVector + w * kPerWord + h;
      const uint32_t mask = kPerWord == 1 ? kNoWord : 0xFFFFu << (16 * h);
      if (column + e - columns.start >= columns.stop - columns.start) {
        word |= mask;
      } else if (!inside) {
        word = (word & ~mask) | static_cast<uint32_t>(data[e]) << (16 * h);
      }
    }
    return word;
  }
};

// Columns in the registers of a CTA, so many of each thread. The columns of a warp are
// contiguous.
inline constexpr uint32_t kPerThread = 16;
inline constexpr uint32_t kTileColumns = kThreads * kPerThread;

template <typename Bits, int kColumns = kPerThread, bool kSideBySide = false>
struct Tile {
  static constexpr int kPerVector = 16 / sizeof(Bits);
  static constexpr int kVectors = kColumns / kPerVector;  // of a thread
  static constexpr uint32_t kTileVectors = kThreads * kVectors;

  uint4 vectors[kVectors];
  uint32_t column;  // the first of vector 0 of thread 0; modulo 2^32
  uint32_t start;   // the first column of the chunk
  bool busy;        // this warp has a column

  // Vector u of this thread.
  static __device__ __forceinline__ uint32_t VectorOf(int u) {
    if (kSideBySide) return threadIdx.x * kVectors + u;
    return (threadIdx.x / 32 * kVectors + u) * 32 + (threadIdx.x & 31);
  }

  __device__ uint32_t Start() const { return start; }

  // Whether all vectors from `first` on hold nothing but scores.
  static __device__ __forceinline__ bool Inside(const Vectors<Bits>& from,
                                                uint32_t first) {
    return first >= from.first_inside &&
           first + kTileVectors <= from.first_inside + from.num_inside;
  }

  // Says which columns it has: those of the vectors from `first` on.
  __device__ __forceinline__ void Place(const Vectors<Bits>& from, uint32_t first) {
    start = from.columns.start;
    column = from.column + first * kPerVector;
    busy = first + threadIdx.x / 32 * (32 * kVectors) < from.size;
  }
  __device__ __forceinline__ void Load(const Vectors<Bits>& from, uint32_t first) {
    Place(from, first);
    if (Inside(from, first)) {
      const uint4* mine =
          reinterpret_cast<const uint4*>(from.data) + (first + VectorOf(0));
#pragma unroll
      for (int u = 0; u < kVectors; ++u) vectors[u] = __ldg(mine + 32 * u);
    } else {
#pragma unroll
      for (int u = 0; u < kVectors; ++u) vectors[u] = from.Load(first + VectorOf(u));
    }
  }

  // The whole of a row of whole vectors, before its window is known.
  __device__ __forceinline__ void LoadRow(const Bits* row, uint32_t n) {
    start = column = 0;
    const uint4* vector = reinterpret_cast<const uint4*>(row);
#pragma unroll
    for (int u = 0; u < kVectors; ++u) {
      vectors[u] = make_uint4(kNoWord, kNoWord, kNoWord, kNoWord);
      if (VectorOf(u) < n / kPerVector) vectors[u] = __ldg(vector + VectorOf(u));
    }
    busy = VectorOf(0) - (threadIdx.x & 31) < n / kPerVector;
  }
  // What LoadRow leaves to do: only columns of the window are left.
  __device__ __forceinline__ void Restrict(Columns window, uint32_t n) {
    if (window.stop - window.start == n) return;
    start = window.start;
#pragma unroll
    for (int u = 0; u < kVectors; ++u) {
      uint32_t words[4] = {vectors[u].x, vectors[u].y, vectors[u].z, vectors[u].w};
#pragma unroll
      for (int e = 0; e < kPerVector; ++e) {
        if (ColumnAt(u * kPerVector + e) - window.start >= window.stop - window.start) {
          words[e / (kPerVector / 4)] |=
              sizeof(Bits) == 4 ? kNoWord : 0xFFFFu << (16 * (e % 2));
        }
      }
      vectors[u] = make_uint4(words[0], words[1], words[2], words[3]);
    }
  }

  // Whether all vectors from `first` on hold nothing but columns.
  static __device__ __forceinline__ bool Whole(const Vectors<Bits>& from,
                                               uint32_t first) {
    return first >= from.first_whole &&
           first + kTileVectors <= from.first_whole + from.num_whole;
  }
  // What Load leaves to do: to be called when the vectors have arrived.
  __device__ __forceinline__ void Mask(const Vectors<Bits>& from, uint32_t first) {
    if (Whole(from, first)) return;
#pragma unroll
    for (int u = 0; u < kVectors; ++u) {
      const uint32_t i = first + VectorOf(u);
      if (i < from.size && !from.Whole(i)) {
        vectors[u].x = from.Masked(i, 0, vectors[u].x);
        vectors[u].y = from.Masked(i, 1, vectors[u].y);
        vectors[u].z = from.Masked(i, 2, vectors[u].z);
        vectors[u].w = from.Masked(i, 3, vectors[u].w);
      }
    }
  }

  // Word e of vector u; both are constants.
  __device__ __forceinline__ uint32_t Word(int u, int e) const {
    return WordIn<Bits>(vectors[u], e);
  }

  // Word i of this thread, which need not be a constant.
  __device__ __forceinline__ uint32_t WordAt(int i) const {
    uint32_t word = 0;
#pragma unroll
    for (int u = 0; u < kVectors; ++u) {
#pragma unroll
      for (int e = 0; e < kPerVector; ++e) {
        if (i == u * kPerVector + e) word = Word(u, e);
      }
    }
    return word;
  }
  __device__ uint32_t ColumnAt(int i) const {
    return column + VectorOf(i / kPerVector) * kPerVector + i % kPerVector;
  }
  // f(word) for all words, of which only those of Valid() count.
  static constexpr int kCount = kColumns;
  template <typename F>
  __device__ __forceinline__ void ForAll(F&& f) const {
    ForEach([&](uint32_t word, int) { f(word); });
  }
  __device__ __forceinline__ uint32_t Valid() const { return 0xFFFFFFFFu; }

  // f(word, its number among those of this thread, a constant).
  template <typename F>
  __device__ __forceinline__ void ForEach(F&& f) const {
    if (!busy) return;
#pragma unroll
    for (int u = 0; u < kVectors; ++u) {
#pragma unroll
      for (int e = 0; e < kPerVector; ++e) f(Word(u, e), u * kPerVector + e);
    }
  }
};

// Other words that can be selected from. Each thread calls f(word, place) for its share of
// them; ColumnAt(place) differs from word to word, and is the word's column if it has one.
// Start() is such that a place without a column is behind all others from there on, modulo
// 2^32.

struct ListWords {  // of entries
  const uint64_t* list;
  uint32_t count;

  __device__ uint32_t Start() const { return 0; }
  __device__ uint32_t ColumnAt(uint32_t place) const {
    return EntryColumn(list[place]);
  }

  template <typename F>
  __device__ __forceinline__ void ForEach(F&& f) const {
    constexpr uint32_t kBatch = 4;  // loads in flight; with 8 the kernels spill more
    for (uint32_t base = threadIdx.x; base < count; base += kBatch * kThreads) {
      uint32_t word[kBatch];
#pragma unroll
      for (uint32_t j = 0; j < kBatch; ++j) {
        const uint32_t i = base + j * kThreads;
        if (i < count) word[j] = reinterpret_cast<const uint32_t*>(list)[2 * i + 1];
      }
#pragma unroll
      for (uint32_t j = 0; j < kBatch; ++j) {
        const uint32_t i = base + j * kThreads;
        if (i < count) f(word[j], i);
      }
    }
  }
};

struct PlainWords {  // side by side, of the columns from `start` on
  const uint32_t* words;
  uint32_t count;
  uint32_t start;

  __device__ uint32_t Start() const { return 0; }
  __device__ uint32_t ColumnAt(uint32_t place) const { return start + place; }

  template <typename F>
  __device__ __forceinline__ void ForEach(F&& f) const {
#pragma unroll 4
    for (uint32_t i = threadIdx.x; i < count; i += kThreads) f(words[i], i);
  }
};

template <typename Bits>
struct ChunkWords {  // of a chunk in memory
  const Bits* data;
  uint32_t count;
  uint32_t start;

  __device__ uint32_t Start() const { return 0; }
  __device__ uint32_t ColumnAt(uint32_t place) const { return start + place; }

  template <typename F>
  __device__ __forceinline__ void ForEach(F&& f) const {
#pragma unroll 8
    for (uint32_t i = threadIdx.x; i < count; i += kThreads) {
      f(Widen<Bits>(__ldg(data + i)), i);
    }
  }
};

// The exact select --------------------------------------------------------------------

// The key of the `rank`-th largest word, how many words are above it, how many reach it,
// and, if known, the column of the last of those that belong to the `rank` largest.
struct Cut {
  static constexpr uint32_t kUnknown = 0xFFFFFFFFu;

  uint32_t key;
  uint32_t above;
  uint32_t reached;
  uint32_t column = kUnknown;
};

// The pair of bins that a thread looks at: the first threads those at the top.
__device__ __forceinline__ uint32_t PairOfBins() { return kThreads - 1 - threadIdx.x; }

// The bin where the `rank`-th largest of the words counted falls. `mine`: the two bins of
// PairOfBins. Two barriers.
__device__ __forceinline__ Bin FindBin(const Cta& cta, uint32_t rank, uint2 mine) {
  static_assert(kNumBins == 2 * kThreads);
  const uint32_t lane = threadIdx.x & 31;
  const uint32_t warp = threadIdx.x / 32;
  uint32_t* totals = cta.scratch().bin_totals;
  // 1. Warp w sums up the w-th 64 bins from the top.
  const uint32_t total = __reduce_add_sync(kFullWarp, mine.x + mine.y);
  if (lane == 0) totals[warp] = total;
  __syncthreads();
  // 2. The warp where the rank falls finds the bin among its own.
  const uint32_t of_lane = lane < kWarps ? totals[lane] : 0;
  const uint32_t before = __reduce_add_sync(kFullWarp, lane < warp ? of_lane : 0);
  if (before < rank && rank <= before + total) {
    const uint32_t reached = before + WarpInclusiveSum(mine.x + mine.y);
    const uint32_t above_lower = reached - mine.x;
    const uint32_t above_upper = above_lower - mine.y;
    if (above_upper < rank && rank <= reached) {
      const bool upper = above_lower >= rank;
      cta.scratch().bin = {2 * PairOfBins() + (upper ? 1 : 0),
                           upper ? above_upper : above_lower, upper ? mine.y : mine.x};
    }
  }
  __syncthreads();
  return cta.scratch().bin;
}

// The same for the words counted in the bins. Three barriers; before the first, the bins
// need not be complete.
__device__ __forceinline__ Bin FindBin(const Cta& cta, uint32_t rank) {
  __syncthreads();
  return FindBin(cta, rank, reinterpret_cast<const uint2*>(cta.bins())[PairOfBins()]);
}

// The few words that are left to compare, `inside` <= kFew of them, which are in scratch
// as composites: how many are larger than each, in `ranks`. Two barriers.
__device__ __forceinline__ void RankPairs(const Cta& cta, uint32_t inside) {
  Cta::Scratch& scratch = cta.scratch();
  const uint32_t lane = threadIdx.x & 31;
  const uint32_t warp = threadIdx.x / 32;
  if (warp == 0) {
    if (lane >= inside) scratch.few[lane] = 0;
    scratch.ranks[lane] = 0;
  }
  __syncthreads();
  Rest(cta);
  // Each warp compares two with all. No two are equal.
  static_assert(kFew == 2 * kWarps);
  const uint64_t one = scratch.few[lane];
  if (2 * warp < inside) {
    const ulonglong2 two = *reinterpret_cast<const ulonglong2*>(&scratch.few[2 * warp]);
    atomicAdd(&scratch.ranks[lane], (two.x > one ? 1 : 0) + (two.y > one ? 1 : 0));
  }
  __syncthreads();
}

// The same for up to kSome words, with which the list begins, and which it has room for
// twice: their ranks follow them. Two barriers.
__device__ __forceinline__ void RankSome(const Cta& cta, uint32_t inside) {
  __syncthreads();
  Rest(cta);
  // Each thread compares one with all.
  const uint64_t* some = cta.list();
  if (threadIdx.x < inside) {
    const uint64_t one = some[threadIdx.x];
    uint32_t rank = 0;
#pragma unroll 8
    for (uint32_t i = 0; i < inside; ++i) rank += some[i] > one ? 1 : 0;
    reinterpret_cast<uint32_t*>(cta.list() + inside)[threadIdx.x] = rank;
  }
  __syncthreads();
}

// The end of a select: the `rank`-th largest of the words of which is_candidate says so,
// `inside` <= kFew of them. `above` others are above all of them.
template <typename Words, typename IsCandidate>
__device__ __forceinline__ Cut RankFew(const Cta& cta, const Words& words,
                                       uint32_t rank, uint32_t above, uint32_t inside,
                                       IsCandidate&& is_candidate) {
  Cta::Scratch& scratch = cta.scratch();
  const uint32_t lane = threadIdx.x & 31;
  // 1. Collect them. A thread hardly ever has two.
  uint32_t mine = 0;
  uint32_t last_word = 0;
  int last_place = 0;
  words.ForEach([&](uint32_t word, int place) {
    if (is_candidate(word)) {
      ++mine;
      last_word = word;
      last_place = place;
    }
  });
  if (mine > 0) {
    uint32_t at = atomicAdd(&scratch.num_few, mine);
    if (mine == 1) {
      scratch.few[at] =
          Composite(KeyOf(last_word), words.ColumnAt(last_place) - words.Start());
    } else {
      words.ForEach([&](uint32_t word, int place) {
        if (is_candidate(word)) {
          scratch.few[at++] =
              Composite(KeyOf(word), words.ColumnAt(place) - words.Start());
        }
      });
    }
  }
  // 2. Compare all pairs.
  RankPairs(cta, inside);
  const uint64_t one = scratch.few[lane];
  // 3. Every warp by itself, a lane for each.
  const bool valid = lane < inside;
  const bool is_last = valid & (scratch.ranks[lane] == rank - 1);
  const int source = __ffs(__ballot_sync(kFullWarp, is_last)) - 1;
  const uint32_t key = CompositeKey(one);
  const uint32_t cut_key = __shfl_sync(kFullWarp, key, source);
  return {cut_key, above + __popc(__ballot_sync(kFullWarp, valid & (key > cut_key))),
          above + __popc(__ballot_sync(kFullWarp, valid & (key >= cut_key))),
          words.Start() + __shfl_sync(kFullWarp, CompositeColumn(one), source)};
}

// Bins of a range of keys [low, high], low < high: `low` by itself, where a plateau often
// is, and the rest in bins of equal width.
struct KeyBins {
  static constexpr int kLogBins = 10;
  static_assert(kNumBins == 1 << kLogBins);

  uint32_t low;
  uint32_t span;
  int shift;

  // 2^log_bins of them: kNumBins or fewer.
  __device__ KeyBins(uint32_t low_, uint32_t high, int log_bins = kLogBins)
      : low(low_), span(high - low_) {
    shift = max(32 - __clz(static_cast<int>(span)) - log_bins, 0);
    if ((span - 1) >> shift >= (1u << log_bins) - 1) ++shift;
  }
  __device__ bool Has(uint32_t key) const { return key - low <= span; }
  __device__ uint32_t operator()(uint32_t key) const {
    return key == low ? 0 : ((key - low - 1) >> shift) + 1;
  }
  // The keys of a bin.
  __device__ void Narrow(uint32_t bin, uint32_t* first, uint32_t* last) const {
    const uint32_t width = bin == 0 ? 0 : (1u << shift) - 1;
    *first = low + (bin > 0 ? 1 + ((bin - 1) << shift) : 0);
    *last = *first + min(width, low + span - *first);
  }
};

// The `rank`-th largest key. Requires it to be within [low, high], `inside` words to be
// in that range, and `above` to be above it.
//
//   1. Count the words within [low, high] in bins.
//   2. From the top, find the bin where the rank falls; it is the new [low, high].
// Each round narrows the range by a factor of kNumBins: four rounds at worst. Words of
// a plateau share a bin: the hardware adds up the increments of a warp to one address.
template <typename Words>
__device__ __forceinline__ Cut SelectByKey(const Cta& cta, const Words& words,
                                           uint32_t rank, uint32_t above,
                                           uint32_t inside, uint32_t low,
                                           uint32_t high) {
  while (low < high) {
    __syncthreads();  // the bins are clear
    const KeyBins bin_of(low, high);
    words.ForEach([&](uint32_t word, int) {
      const uint32_t key = KeyOf(word);
      if (bin_of.Has(key)) atomicAdd(&cta.bins()[bin_of(key)], 1u);
    });
    const Bin bin = FindBin(cta, rank - above);
    above += bin.above;
    inside = bin.inside;
    bin_of.Narrow(bin.index, &low, &high);
    if (low < high && inside <= kFew) {
      return RankFew(cta, words, rank - above, above, inside,
                     [&](uint32_t word) { return KeyOf(word) - low <= high - low; });
    }
    ClearBins(cta);
  }
  return {low, above, above + inside};
}

// Bins of equal width by the value of words as float32. Exactness asks one thing of it:
// a larger key never has a smaller bin. Every step grows with the word, if not strictly,
// for infinities and any range too; a NaN, which has no value, goes to the bottom or to
// the top, and a range that is none puts all words into one bin.
struct ValueBins {
  float scale, offset;  // to [0, 1]
  float width, base;    // to the bins, in the lower bits of the mantissa

  // `nans_on_top`: NaNs among the words have keys above all others (else: below).
  // `num_bins`: kNumBins or a smaller power of two.
  __device__ ValueBins(float low, float high, bool nans_on_top,
                       uint32_t num_bins = kNumBins) {
    const float inverse =
        high >= low ? 1.0f / (high - low) : __uint_as_float(0x7FC00000u);
    scale = nans_on_top ? -inverse : inverse;
    offset = nans_on_top ? high * inverse : -low * inverse;
    // A mantissa of 2^21 leaves two bits behind the point, so that the bits of a sum are
    // the address of a bin's word.
    const float most = static_cast<float>(num_bins - 1);
    width = nans_on_top ? -most : most;
    base = nans_on_top ? 2097152.0f + most : 2097152.0f;
  }

  // Where a word is: the lower bits of the mantissa are those of its bin, and two more.
  __device__ __forceinline__ float Place(uint32_t word) const {
    float place;  // NaN becomes 0
    asm("fma.rn.sat.f32 %0, %1, %2, %3;"
        : "=f"(place)
        : "f"(__uint_as_float(word)), "f"(scale), "f"(offset));
    return fmaf(place, width, base);
  }
  __device__ __forceinline__ uint32_t operator()(uint32_t word) const {
    return (__float_as_uint(Place(word)) & (4 * kNumBins - 4)) / 4;
  }
  // Words whose place is beyond this are in the bin or above it.
  static __device__ float Below(uint32_t bin) {
    return __uint_as_float(__float_as_uint(2097152.0f) + 4 * bin - 1);
  }

  // For NaNs on both sides, which are to go where infinities go.
  static __device__ __forceinline__ uint32_t Any(uint32_t word) {
    return static_cast<uint32_t>(min(static_cast<int>(word), 0x7F800000));
  }
};

// The values of words, as far as they have any.
struct Range {
  float low;
  float high;
};

// The range of the values of words, or none if a NaN is above them. One barrier. `kLow`:
// one of so many words is looked at for its low end, below which may be others then.
template <int kLow = 1, typename Words>
__device__ __forceinline__ Range RangeOf(const Cta& cta, const Words& words) {
  const uint32_t lane = threadIdx.x & 31;
  const uint32_t warp = threadIdx.x / 32;
  Cta::Scratch& scratch = cta.scratch();
  float low = __uint_as_float(0x7F800000u);
  int most = -1;  // the greatest word, if one has no sign
  words.ForEach([&](uint32_t word, int i) {
    if (i % kLow == 0) low = fminf(low, __uint_as_float(word));  // passes over NaNs
    most = max(most, static_cast<int>(word));
  });
  float high = __int_as_float(most);
  if (most < 0) {
    high = __uint_as_float(0xFF800000u);
    words.ForEach(
        [&](uint32_t word, int) { high = fmaxf(high, __uint_as_float(word)); });
  }
  const uint32_t min_key = __reduce_min_sync(kFullWarp, KeyOf(__float_as_uint(low)));
  const uint32_t max_key = __reduce_max_sync(kFullWarp, KeyOf(__float_as_uint(high)));
  if (lane == 0) {
    scratch.min_keys[warp] = min_key;
    scratch.max_keys[warp] = max_key;
  }
  __syncthreads();
  const uint32_t one = lane % kWarps;
  return {__uint_as_float(WordOf(__reduce_min_sync(kFullWarp, scratch.min_keys[one]))),
          __uint_as_float(WordOf(__reduce_max_sync(kFullWarp, scratch.max_keys[one])))};
}

// The words in `bin` crowd: the rest of the select, by key.
template <typename Words>
__device__ __noinline__ Cut SelectInBin(const Cta cta, const Words words, uint32_t rank,
                                        const ValueBins bin_of, const Bin bin) {
  ResetExtremes(cta);
  __syncthreads();  // also: the words are there
  ClearBins(cta);
  uint32_t min_key = 0xFFFFFFFFu;
  uint32_t max_key = 0;
  words.ForEach([&](uint32_t word, int) {
    if (bin_of(word) == bin.index) {
      min_key = min(min_key, KeyOf(word));
      max_key = max(max_key, KeyOf(word));
    }
  });
  NoteExtremes(cta, min_key, max_key);
  __syncthreads();
  return SelectByKey(cta, words, rank, bin.above, bin.inside, cta.scratch().min_key,
                     cta.scratch().max_key);
}

// The `rank`-th largest key, or a key that `rank` to rank + slack words reach. So above <
// rank <= reached. Requires 1 <= rank <= the number of words.
//
// One round by value, which nearly always leaves few words to compare. If the words
// crowd in a bin, the rest is done by key, with the words in shared memory: there
// `in_memory()` puts them, and says where. What is in registers does not survive that;
// `restore()` is called afterwards.
template <typename Words, typename InMemory, typename Restore>
__device__ __forceinline__ Cut SelectByValue(const Cta& cta, const Words& words,
                                             uint32_t rank, uint32_t slack,
                                             const Range& range, bool nans_on_top,
                                             InMemory&& in_memory, Restore&& restore) {
  const ValueBins bin_of(range.low, range.high, nans_on_top);
  words.ForEach([&](uint32_t word, int) { atomicAdd(&cta.bins()[bin_of(word)], 1u); });
  const Bin bin = FindBin(cta, rank);
  if (slack > 0 && bin.above + bin.inside <= rank + slack) {
    Rest(cta);
    const float at = static_cast<float>(bin.index) * (1.0f / (kNumBins - 1));
    const float value = fmaf(range.high - range.low, at, range.low);
    return {KeyOf(__float_as_uint(value)), bin.above, bin.above + bin.inside};
  }
  if (bin.inside <= kFew) {
    return RankFew(cta, words, rank - bin.above, bin.above, bin.inside,
                   [&](uint32_t word) { return bin_of(word) == bin.index; });
  }
  const Cut cut = SelectInBin(cta, in_memory(), rank, bin_of, bin);
  restore();
  return cut;
}

// Collects the signs of numbers, one behind the other: each takes one instruction.
struct Signs {
  uint32_t bits = 0;

  __device__ __forceinline__ void Add(float number) {
    bits = __funnelshift_l(__float_as_uint(number), bits, 1);
  }
  // Bit i for number i, of `count`.
  __device__ __forceinline__ uint32_t Get(int count) const {
    return __brev(bits) >> (32 - count);
  }
};

// Of the words of a thread, which it holds in registers, those above a bin, and those
// above or in it: bit i stands for word i.
struct Marks {
  uint32_t above;
  uint32_t reached;

  __device__ uint32_t Inside() const { return reached & ~above; }
};

// Those of Words::kCount words, in one read.
template <typename Words>
__device__ __forceinline__ Marks MarksOf(const Words& words, const ValueBins& bin_of,
                                         uint32_t bin) {
  const float below_above = ValueBins::Below(bin + 1);
  const float below = ValueBins::Below(bin);
  Signs above;
  Signs reached;
  words.ForAll([&](uint32_t word) {
    const float place = bin_of.Place(word);
    above.Add(below_above - place);
    reached.Add(below - place);
  });
  const uint32_t valid = words.Valid();
  return {above.Get(Words::kCount) & valid, reached.Get(Words::kCount) & valid};
}

// Puts the marked words into `few`, as composites of their columns from Start() on, in any
// order. Returns where the first of this thread is.
template <typename Words>
__device__ __forceinline__ uint32_t CollectMarked(const Cta& cta, const Words& words,
                                                  uint32_t marked, uint64_t* few) {
  if (marked == 0) return 0;
  const uint32_t first = atomicAdd(&cta.scratch().num_few, __popc(marked));
  uint32_t at = first;
#pragma unroll 1
  for (; marked != 0; marked &= marked - 1) {
    const int i = __ffs(marked) - 1;
    few[at++] = Composite(KeyOf(words.WordAt(i)), words.ColumnAt(i) - words.Start());
  }
  return first;
}

// Those of them that are among the `wanted` largest. `ranks`: of the few.
__device__ __forceinline__ uint32_t SelectedOf(uint32_t marked, const uint32_t* ranks,
                                               uint32_t first, uint32_t wanted) {
  uint32_t selected = 0;
#pragma unroll 1
  for (; marked != 0; marked &= marked - 1) {
    if (ranks[first++] < wanted) selected |= marked & (0 - marked);
  }
  return selected;
}

// Which of the words of this thread are among the `rank` largest of all, whose `bin` has
// been found and has no more than kFew, or than RankSome takes if `kListFree`: bit i for
// word i. What is above the bin and what is in it is marked in one read.
template <bool kListFree, typename Words>
__device__ __forceinline__ uint32_t MarkSelected(const Cta& cta, const Words& words,
                                                 uint32_t rank, const ValueBins& bin_of,
                                                 const Bin& bin) {
  const Marks marks = MarksOf(words, bin_of, bin.index);
  const uint32_t inside = marks.Inside();
  const uint32_t wanted = rank - bin.above;
  if (kListFree && bin.inside > kFew) {
    const uint32_t first = CollectMarked(cta, words, inside, cta.list());
    RankSome(cta, bin.inside);
    const uint32_t* ranks = reinterpret_cast<uint32_t*>(cta.list() + bin.inside);
    return marks.above | SelectedOf(inside, ranks, first, wanted);
  }
  Cta::Scratch& scratch = cta.scratch();
  const uint32_t first = CollectMarked(cta, words, inside, scratch.few);
  RankPairs(cta, bin.inside);
  return marks.above | SelectedOf(inside, scratch.ranks, first, wanted);
}

// Compaction --------------------------------------------------------------------------

// Writes an entry to shared memory at `address`, if a bit of `mask` is set and there is
// room, and moves on if the bit is set. Never a branch.
__device__ __forceinline__ void StoreEntryIf(uint32_t mask, uint32_t bit,
                                             uint32_t& address, uint32_t limit,
                                             uint32_t word, uint32_t column) {
  asm volatile(
      "{\n"
      ".reg .pred q, p;\n"
      ".reg .b32 t;\n"
      "and.b32 t, %1, %2;\n"
      "setp.ne.u32 q, t, 0;\n"
      "setp.lt.and.u32 p, %0, %3, q;\n"
      "@p st.shared.v2.u32 [%0], {%5, %4};\n"
      "@q add.u32 %0, %0, 8;\n"
      "}"
      : "+r"(address)
      : "r"(mask), "r"(bit), "r"(limit), "r"(word), "r"(column)
      : "memory");
}

// The columns of a tile that pass: bit i for word i.
template <typename Tile, typename Passes>
__device__ __forceinline__ uint32_t MaskOf(const Tile& tile, Passes&& passes) {
  uint32_t mask = 0;
  tile.ForEach([&](uint32_t word, int i) {
    if (passes(word, tile.ColumnAt(i))) mask |= 1u << i;
  });
  return mask;
}

// The columns of a tile that a mask has, counted. All lanes of a warp, no barrier.
template <typename Tile>
struct Counted {
  static constexpr int kVectors = Tile::kVectors;
  static constexpr int kPerVector = Tile::kPerVector;
  // The counts of the vectors are side by side in one word. A field holds the sum over a
  // warp, up to 32 * kPerVector.
  static constexpr int kField = 32 / kVectors;
  static_assert(32 * kPerVector < 1ll << kField);

  uint32_t mask;
  uint32_t mine;
  uint32_t sum;      // up to this lane
  uint32_t of_warp;  // of all lanes

  static __device__ __forceinline__ uint32_t Field(uint32_t packed, int u) {
    return kVectors == 1 ? packed : packed >> (u * kField) & ((1u << kField % 32) - 1);
  }

  __device__ __forceinline__ explicit Counted(uint32_t mask_) : mask(mask_) {
    if constexpr (kVectors == 1) {
      mine = __popc(mask);
    } else if constexpr (kVectors == 4 && kPerVector == 2) {
      mine = mask - (mask >> 1 & 0x55);
      mine = (mine | mine << 12) & 0x000F000F;
      mine = (mine | mine << 6) & 0x03030303;
    } else if constexpr (kVectors * kPerVector == 16) {
      mine = mask - (mask >> 1 & 0x5555);
      mine = (mine & 0x3333) + (mine >> 2 & 0x3333);
      if constexpr (kPerVector == 4) {
        mine = (mine | mine << 8) & 0x00FF00FF;
        mine = (mine | mine << 4) & 0x0F0F0F0F;
      } else {
        mine = (mine & 0x0F0F) + (mine >> 4 & 0x0F0F);
        mine = (mine | mine << 8) & 0x00FF00FF;
      }
    } else {
      static_assert(kVectors == 2);
      mine = __popc(mask & ((1 << kPerVector) - 1)) | __popc(mask >> kPerVector) << 16;
    }
    sum = WarpInclusiveSum(mine);
    of_warp = __shfl_sync(kFullWarp, sum, 31);
  }

  // Of the warp.
  __device__ __forceinline__ uint32_t Total() const {
    uint32_t total = 0;
#pragma unroll
    for (int u = 0; u < kVectors; ++u) total += Field(of_warp, u);
    return total;
  }

  // Writes them as entries in column order to to[position], ..., as far as to[room - 1].
  __device__ __forceinline__ void Write(const Tile& tile, uint64_t* to, uint32_t room,
                                        uint32_t position) const {
    if (of_warp == 0) return;
    const uint32_t list = static_cast<uint32_t>(__cvta_generic_to_shared(to));
    const uint32_t limit = list + 8 * room;
#pragma unroll
    for (int u = 0; u < kVectors; ++u) {
      if (Field(of_warp, u) > 0) {
        uint32_t address = list + 8 * (position + Field(sum, u) - Field(mine, u));
#pragma unroll
        for (int e = 0; e < kPerVector; ++e) {
          const int i = u * kPerVector + e;
          StoreEntryIf(mask, 1u << i, address, limit, tile.Word(u, e),
                       tile.ColumnAt(i));
        }
        position += Field(of_warp, u);
      }
    }
  }
};

// Writes the columns of a tile that a mask has, as entries in column order, to to[count],
// ..., as far as to[room - 1], and returns count plus their number. One barrier. In turns:
// whoever uses totals[turn] again has passed the barrier of the next call.
template <typename Tile>
__device__ __forceinline__ uint32_t CompactTile(const Cta& cta, const Tile& tile,
                                                int turn, uint32_t count, uint64_t* to,
                                                uint32_t room, uint32_t mask) {
  const Counted<Tile> counted(mask);
  uint32_t* totals = cta.scratch().totals[turn];
  totals[threadIdx.x / 32] = counted.Total();  // all lanes the same
  __syncthreads();
  uint32_t all;
  counted.Write(tile, to, room, count + SumBeforeWarp(totals, &all));
  return count + all;
}

// Writes the columns of a chunk that pass, as entries in column order, to to[0], ..., as far
// as to[room - 1], until more than `enough` have passed; returns how many did, up to and
// with the tile where that happened. Each tile is on its way, through registers, while the
// one before is looked at; `tile` is the chunk's first.
template <typename Bits, typename Passes>
__device__ __forceinline__ uint32_t CompactChunk(const Cta& cta,
                                                 const Vectors<Bits>& chunk,
                                                 Tile<Bits> tile, uint64_t* to,
                                                 uint32_t room, uint32_t enough,
                                                 Passes&& passes) {
  constexpr uint32_t kTileVectors = Tile<Bits>::kTileVectors;
  uint32_t count = 0;
  int turn = 0;
  for (uint32_t base = 0; base < chunk.size && count <= enough;
       base += kTileVectors, turn ^= 1) {
    tile.Mask(chunk, base);
    const uint32_t mask = MaskOf(tile, passes);
    Tile<Bits> next;
    next.Load(chunk, base + kTileVectors);
    count = CompactTile(cta, tile, turn, count, to, room, mask);
    tile = next;
  }
  __syncthreads();
  return count;
}

// The tiles of a chunk on their way through shared memory, in kStages places behind the
// list: first Start, then for each tile Take, look, and Next. What is on its way takes no
// registers; and as few columns of a tile pass, each is fetched by its place in it.
//
// The L2 cache is told to drop what has been read before anything else, so samples stay
// there, which were drawn before and are read again with the tiles, and what belongs to
// others.
//
// Each warp is by itself: of a tile it has 2 KiB, 64 bytes a lane, which its lanes copy as
// neighbours do. The 16 bytes with number v of a lane lie at v ^ (lane / 2 % 4) of its 64,
// where lanes that read together meet no bank twice.
//   - A place is read when what was copied there has come: the wait says so to the lane
//     that copied it, and the barrier of the warp behind it to the others.
//   - A place goes to another tile when all lanes have read it: the barrier of the warp in
//     Next says so.
template <typename Bits, int kStages>
struct Stream {
  static constexpr int kColumns = 64 / sizeof(Bits);  // of a thread
  using Part = Tile<Bits, kColumns, true>;
  static constexpr uint32_t kTileVectors = Part::kTileVectors;
  static_assert(kTileVectors * sizeof(uint4) == kStageBytes);

  uint32_t own;     // the first 16 bytes of this lane
  uint32_t copies;  // where it copies to
  uint32_t place;   // of the next tile, from the first on
  uint64_t policy;  // of the L2 cache: nobody reads a tile again

  __device__ __forceinline__ explicit Stream(const Cta& cta) : place(0) {
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    const uint32_t lane = threadIdx.x & 31;
    const uint32_t warp = static_cast<uint32_t>(__cvta_generic_to_shared(cta.list())) +
                          8 * cta.capacity + threadIdx.x / 32 * (32 * 64);
    own = warp + lane * 64 + lane / 2 % 4 * 16;
    copies = warp + lane / 4 * 64 + (lane % 4 ^ lane / 8) * 16;
  }

  __device__ __forceinline__ void Copy(uint32_t to, const uint4* from) const {
    asm volatile(
        "cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;" ::"r"(to),
        "l"(from), "l"(policy)
        : "memory");
  }

  // Asks for the tile of the vectors from `first` on.
  __device__ __forceinline__ void Ask(const Vectors<Bits>& chunk, uint32_t first,
                                      uint32_t at) const {
    if (first < chunk.size) {
      const uint32_t mine =
          first + threadIdx.x / 32 * (32 * Part::kVectors) + (threadIdx.x & 31);
      const uint4* data = reinterpret_cast<const uint4*>(chunk.data) + mine;
      const uint32_t to = copies + at;
      if (Part::Inside(chunk, first)) {
#pragma unroll
        for (int u = 0; u < Part::kVectors; ++u) Copy(to + u * 512, data + u * 32);
      } else {
#pragma unroll 1
        for (int u = 0; u < Part::kVectors; ++u) {
          if (mine + u * 32 - chunk.first_inside < chunk.num_inside) {
            Copy(to + u * 512, data + u * 32);
          } else {
            asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(to + u * 512),
                         "r"(kNoWord)
                         : "memory");
          }
        }
      }
    }
    asm volatile("cp.async.commit_group;" ::: "memory");  // one a tile, if empty
  }

  template <int kFrom, int kTo>
  __device__ __forceinline__ void Start(const Vectors<Bits>& chunk) const {
#pragma unroll
    for (int stage = kFrom; stage < kTo; ++stage) {
      Ask(chunk, stage * kTileVectors, stage * static_cast<uint32_t>(kStageBytes));
    }
  }

  // The tile of the vectors from `first` on, the next.
  __device__ __forceinline__ void Take(const Vectors<Bits>& chunk, uint32_t first,
                                       Part* part) const {
    asm volatile("cp.async.wait_group %0;" ::"n"(kStages - 1) : "memory");
    __syncwarp();
    part->Place(chunk, first);
#pragma unroll
    for (int u = 0; u < Part::kVectors; ++u) {
      uint4& vector = part->vectors[u];
      asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(vector.x), "=r"(vector.y), "=r"(vector.z), "=r"(vector.w)
                   : "r"((own + place) ^ (u * 16))
                   : "memory");
    }
    if (part->Whole(chunk, first)) return;
    part->Mask(chunk, first);
#pragma unroll
    for (int u = 0; u < Part::kVectors; ++u) {
      const uint4& vector = part->vectors[u];
      asm volatile(
          "st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"((own + place) ^ (u * 16)),
          "r"(vector.x), "r"(vector.y), "r"(vector.z), "r"(vector.w)
          : "memory");
    }
  }
  // Word i of this thread's part of it.
  __device__ __forceinline__ uint32_t WordAt(uint32_t i) const {
    uint32_t word;
    const uint32_t at = (own + place) ^ (i * static_cast<uint32_t>(sizeof(Bits)));
    if constexpr (sizeof(Bits) == 4) {
      asm volatile("ld.shared.u32 %0, [%1];" : "=r"(word) : "r"(at) : "memory");
      return word;
    } else {
      uint16_t half;
      asm volatile("ld.shared.u16 %0, [%1];" : "=h"(half) : "r"(at) : "memory");
      return Widen(half);
    }
  }
  // Its place is free, and goes to another.
  __device__ __forceinline__ void Next(const Vectors<Bits>& chunk, uint32_t first) {
    __syncwarp();
    Ask(chunk, first + kStages * kTileVectors, place);
    place += kStageBytes;
    if (place == kStages * kStageBytes) place = 0;
  }
  __device__ __forceinline__ void End() const {
    asm volatile("cp.async.wait_all;" ::: "memory");
  }
};

// The columns of a tile whose keys exceed `floor`: the highest bit for the first, to bit 0.
//
// The sign of a difference says it: the order of floats is that of their keys, zeros
// included, unless one is a NaN.
template <typename Part>
__device__ __forceinline__ uint32_t MaskBeyond(const Part& part, uint32_t floor) {
  const float limit = __uint_as_float(WordOf(floor));
  Signs signs;
  float squares = 0;  // NaN if a difference is
  part.ForEach([&](uint32_t word, int) {
    const float difference = limit - __uint_as_float(word);
    squares = fmaf(difference, difference, squares);
    signs.Add(difference);
  });
  if (squares != squares) {
    const Beyond beyond(floor);
    signs.bits = 0;
    part.ForEach([&](uint32_t word, int) { signs.Add(beyond(word) ? -1.0f : 1.0f); });
  }
  return signs.bits;
}

// CompactChunk for columns whose keys exceed `floor`, from a stream that was started.
template <typename Bits, int kStages>
__device__ __forceinline__ uint32_t CompactStream(const Cta& cta,
                                                  const Vectors<Bits>& chunk,
                                                  Stream<Bits, kStages>& stream,
                                                  uint64_t* to, uint32_t room,
                                                  uint32_t enough, uint32_t floor) {
  using Part = typename Stream<Bits, kStages>::Part;
  constexpr uint32_t kLast = Stream<Bits, kStages>::kColumns - 1;
  const uint32_t list = static_cast<uint32_t>(__cvta_generic_to_shared(to));
  uint32_t count = 0;
  int turn = 0;
  for (uint32_t base = 0; base < chunk.size && count <= enough;
       base += Part::kTileVectors, turn ^= 1) {
    Part part;
    stream.Take(chunk, base, &part);
    uint32_t mask = MaskBeyond(part, floor);
    const uint32_t mine = __popc(mask);
    uint32_t* totals = cta.scratch().totals[turn];
    const uint32_t sum = WarpInclusiveSum(mine);
    if ((threadIdx.x & 31) == 31) totals[threadIdx.x / 32] = sum;
    __syncthreads();
    uint32_t all;
    uint32_t position = count + SumBeforeWarp(totals, &all) + sum - mine;
    const uint32_t column = part.ColumnAt(0);
#pragma unroll 1
    for (; mask != 0; ++position) {
      const uint32_t bit = 31 - __clz(static_cast<int>(mask));
      mask ^= 1u << bit;
      const uint32_t i = kLast ^ bit;
      if (position < room) {
        asm volatile("st.shared.v2.u32 [%0], {%2, %1};" ::"r"(list + 8 * position),
                     "r"(stream.WordAt(i)), "r"(column + i)
                     : "memory");
      }
    }
    count += all;
    stream.Next(chunk, base);
  }
  stream.End();
  __syncthreads();
  return count;
}

// Writes an entry to shared memory, if so. Never a branch.
__device__ __forceinline__ void StoreEntry(bool store, uint64_t* to, uint64_t entry) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.u32 p, %0, 0;\n"
      "@p st.shared.u64 [%1], %2;\n"
      "}" ::"r"(static_cast<uint32_t>(store)),
      "r"(static_cast<uint32_t>(__cvta_generic_to_shared(to))), "l"(entry)
      : "memory");
}

// Entries that can be compacted: slot i < Size() holds one if Valid(i).

struct ListEntries {
  const uint64_t* list;
  uint32_t count;

  __device__ uint32_t Size() const { return count; }
  __device__ bool Valid(uint32_t) const { return true; }
  __device__ uint64_t Get(uint32_t i) const { return list[i]; }
};

// Calls write(passes, position, entry) for entries, with the positions of those that pass
// in their order. One barrier for each kThreads * kBatch entries, before the writing;
// `write` may overwrite entries up to the one it is called for.
template <typename Entries, typename Passes, typename Write>
__device__ __forceinline__ void CompactEntries(const Cta& cta, const Entries& entries,
                                               Passes&& passes, Write&& write) {
  constexpr int kBatch = 8;  // neighbours of 32 entries
  const uint32_t lane = threadIdx.x & 31;
  const uint32_t warp = threadIdx.x / 32;
  const uint32_t size = entries.Size();
  uint32_t count = 0;
  int turn = 0;
  for (uint32_t base = 0; base < size; base += kBatch * kThreads, turn ^= 1) {
    uint64_t entry[kBatch];
    unsigned passing[kBatch];
    uint32_t total = 0;
    const uint32_t first = base + warp * kBatch * 32 + lane;
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      const uint32_t i = first + j * 32;
      if (i < size && entries.Valid(i)) entry[j] = entries.Get(i);
    }
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      const uint32_t i = first + j * 32;
      const bool valid = i < size && entries.Valid(i);
      passing[j] = __ballot_sync(
          kFullWarp, valid & passes(EntryWord(entry[j]), EntryColumn(entry[j])));
      total += __popc(passing[j]);
    }
    cta.scratch().totals[turn][warp] = total;  // all lanes the same
    __syncthreads();
    uint32_t all;
    uint32_t position = count + SumBeforeWarp(cta.scratch().totals[turn], &all);
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      write((passing[j] >> lane & 1) != 0,
            position + __popc(passing[j] & ((1u << lane) - 1)), entry[j]);
      position += __popc(passing[j]);
    }
    count += all;
  }
}

// What exactly the selected pass: words beyond the key of the cut, and those that equal
// it in the columns [start, start + reach].
struct Threshold {
  Beyond beyond;
  uint32_t tie;
  uint32_t start;
  uint32_t reach;

  __device__ Threshold(uint32_t key, Columns columns)
      : beyond(key),
        tie(WordOf(key)),
        start(columns.start),
        reach(columns.stop - 1 - columns.start) {}

  __device__ bool operator()(uint32_t word, uint32_t column) const {
    return beyond(word) | ((word == tie) & (column - start <= reach));  // no branch
  }
};

// The column of the `wanted`-th of the entries that equal `tie`.
template <typename Entries>
__device__ __noinline__ uint32_t ColumnOfTie(const Cta cta, const Entries entries,
                                             uint32_t tie, uint32_t wanted) {
  CompactEntries(
      cta, entries, [&](uint32_t word, uint32_t) { return word == tie; },
      [&](bool passes, uint32_t position, uint64_t entry) {
        if (passes && position == wanted - 1) cta.scratch().column = EntryColumn(entry);
      });
  __syncthreads();
  return cta.scratch().column;
}

// Moves the `rank` largest of entries, whose cut is known, to the front of the list, in
// column order.
template <typename Entries>
__device__ __forceinline__ void KeepSelected(const Cta& cta, const Entries& entries,
                                             const Cut& cut, uint32_t rank,
                                             Columns columns) {
  Threshold threshold(cut.key, columns);
  if (cut.reached > rank) {  // not all ties
    const uint32_t column =
        cut.column != Cut::kUnknown
            ? cut.column
            : ColumnOfTie(cta, entries, threshold.tie, rank - cut.above);
    threshold.reach = column - columns.start;
  }
  uint64_t* list = cta.list();
  CompactEntries(cta, entries, threshold,
                 [&](bool passes, uint32_t position, uint64_t entry) {
                   StoreEntry(passes, list + position, entry);
                 });
  __syncthreads();
}

// Filter ------------------------------------------------------------------------------

// What passes the filter: keys above `floor`. If `strict`, columns whose key is `floor`
// itself count as ties; else they are of no interest.
struct Filter {
  uint32_t floor;
  bool strict;
  Range range;  // where survivors are to be expected
};

// How a row is sampled: the same in every CTA that asks. It depends on the row's window
// only.
//
// At least `rank` of the samples reach the threshold, and rank exceeds what k columns
// would put there on average by 6 standard deviations; neighbours, which may be alike,
// are sampled together. (Rounding is of no interest here.)
struct Sampling {
  static constexpr uint32_t kGroup = kSampleGroup;

  uint32_t log_groups;  // of kGroup neighbouring columns
  uint32_t rank;
  float columns_a_sample;

  __device__ uint32_t Groups() const { return 1u << log_groups; }
  __device__ uint32_t Samples() const { return kGroup << log_groups; }

  // Columns that `reached` of the samples stand for, at most.
  __device__ float ColumnsFor(float reached) const {
    return (reached + kMargin * __fsqrt_rn(reached)) * columns_a_sample;
  }

  JAX_TOPK_HOST_DEVICE Sampling(uint32_t length, uint32_t k, uint32_t log_groups_)
      : log_groups(log_groups_) {
    const float samples = static_cast<float>(kGroup << log_groups);
    columns_a_sample = static_cast<float>(length) / samples;
    const float mean = static_cast<float>(k) / columns_a_sample;
    rank = static_cast<uint32_t>(
        fminf(mean + kMargin * sqrtf(mean) + kLeastMargin, samples));
  }
};

// The words of a sample, in registers: `count`, and some kNoWord.
struct SampleWords {
  static constexpr uint32_t kGroups = kPerThread / Sampling::kGroup;

  uint32_t words[kPerThread];
  uint32_t groups;  // a power of two

  __device__ uint32_t Start() const { return 0; }
  __device__ uint32_t ColumnAt(int i) const { return i * kThreads + threadIdx.x; }

  template <typename F>
  __device__ __forceinline__ void ForEach(F&& f) const {
#pragma unroll
    for (uint32_t j = 0; j < kGroups; ++j) {
      if (j * kThreads < groups) {
#pragma unroll
        for (uint32_t e = 0; e < Sampling::kGroup; ++e) {
          f(words[j * Sampling::kGroup + e],
            static_cast<int>(j * Sampling::kGroup + e));
        }
      }
    }
  }
};

// Where the groups of a sample are: one in each of Groups() equal parts of the row, at a
// place within the part that a hash of its number gives, so that there is no stride that a
// pattern could meet. They are aligned to their size, of 32 bytes at most, which memory
// reads at once.
template <typename Bits>
struct SamplePlaces {
  const Bits* first;   // column of the row that a group may begin with
  uint32_t num_whole;  // groups that the row holds
  uint32_t shift;      // log2 of those of the sample

  __device__ SamplePlaces(const Scores<Bits>& scores, const Bits* row, Columns columns,
                          const Sampling& sampling)
      : shift(sampling.log_groups) {
    constexpr int kGroupBytes = Sampling::kGroup * sizeof(Bits);
    const Vectors<Bits, kGroupBytes> vectors(scores, row, columns);
    first = vectors.data + vectors.first_whole * Sampling::kGroup;
    num_whole = vectors.num_whole;
  }

  // Group i.
  __device__ __forceinline__ const Bits* operator()(uint32_t i) const {
    // Its place as a fraction of the row, times 2^32.
    const uint32_t jitter = i * 2654435761u;
    const uint32_t fraction = shift > 0 ? i << (32 - shift) | jitter >> shift : jitter;
    const uint32_t place = __umulhi(fraction, num_whole);
    return first + uint64_t{place} * Sampling::kGroup;
  }
};

template <typename Bits>
__device__ __forceinline__ void DrawSample(const Scores<Bits>& scores, const Bits* row,
                                           Columns columns, const Sampling& sampling,
                                           SampleWords* sample) {
  const SamplePlaces<Bits> places(scores, row, columns, sampling);
  constexpr uint32_t kPerVector = Vectors<Bits>::kPerVector;
  sample->groups = sampling.Groups();
#pragma unroll
  for (uint32_t j = 0; j < SampleWords::kGroups; ++j) {
    uint32_t* words = &sample->words[j * Sampling::kGroup];
    const uint32_t i = j * kThreads + threadIdx.x;
    if (i < sample->groups) {
      const uint4* group = reinterpret_cast<const uint4*>(places(i));
#pragma unroll
      for (uint32_t v = 0; v < Sampling::kGroup / kPerVector; ++v) {
        const uint4 vector = __ldcg(group + v);
#pragma unroll
        for (uint32_t e = 0; e < kPerVector; ++e) {
          words[v * kPerVector + e] = WordIn<Bits>(vector, e);
        }
      }
    } else {
#pragma unroll
      for (uint32_t e = 0; e < Sampling::kGroup; ++e) words[e] = kNoWord;
    }
  }
}

// Fetches into the L2 cache what DrawSample is going to read of a row.
template <typename Bits>
__device__ __forceinline__ void FetchSample(const Scores<Bits>& scores, const Bits* row,
                                            Columns columns, const Sampling& sampling) {
  const SamplePlaces<Bits> places(scores, row, columns, sampling);
  for (uint32_t i = threadIdx.x; i < sampling.Groups(); i += kThreads) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(places(i)));
  }
}

// A filter that about 1.3 to 2 k columns of a row pass. Leaves the list in disarray.
template <typename Bits, typename Restore>
__device__ __forceinline__ Filter SampleFilter(const Cta& cta, const Sampling& sampling,
                                               const SampleWords& sample,
                                               Restore&& restore) {
  const Range range = RangeOf(cta, sample);
  const uint32_t slack = max(sampling.rank / 8, 1u);
  const auto in_memory = [&] {
    uint32_t* words = reinterpret_cast<uint32_t*>(cta.list());
    sample.ForEach([&](uint32_t word, int i) {
      const uint32_t group = i / Sampling::kGroup * kThreads + threadIdx.x;
      const uint32_t at = group * Sampling::kGroup + i % Sampling::kGroup;
      if (group < sample.groups) words[at] = word;
    });
    return PlainWords{words, sampling.Samples(), 0};
  };
  const Cut cut = SelectByValue(cta, sample, sampling.rank, slack, range, false,
                                in_memory, restore);
  // If more columns would reach the threshold than fit in the list, they equal it: leave
  // those out.
  const bool strict =
      cut.key <= LeastKey<Bits>() ||
      sampling.ColumnsFor(static_cast<float>(cut.reached)) > cta.capacity;
  const uint32_t floor = strict ? cut.key : cut.key - 1;
  return {floor, strict, {__uint_as_float(WordOf(floor)), range.high}};
}

// Reduction ---------------------------------------------------------------------------

// What a chunk was reduced to: `survivors` entries of the list in column order, and from
// list[ties_at] on `ties` entries in column order. `exact`: they are the k largest of the
// chunk.
struct Reduced {
  uint32_t survivors;
  uint32_t ties;
  uint32_t ties_at;
  bool exact;
};

// Columns of a chunk whose key exceeds `floor`, into the list. Returns their number; if
// that is above the capacity, the list is of no use. Requires floor >= LeastKey.
template <typename Bits, int kStages>
__device__ __forceinline__ uint32_t FilterChunk(const Cta& cta,
                                                const Vectors<Bits>& chunk,
                                                Stream<Bits, kStages>& stream,
                                                uint32_t floor) {
  return CompactStream(cta, chunk, stream, cta.list(), cta.capacity, cta.capacity,
                       floor);
}
template <typename Bits>
__device__ __forceinline__ uint32_t FilterChunk(const Cta& cta,
                                                const Vectors<Bits>& chunk,
                                                const Tile<Bits>& first,
                                                uint32_t floor) {
  const Beyond beyond(floor);
  return CompactChunk(cta, chunk, first, cta.list(), cta.capacity, cta.capacity,
                      [&](uint32_t word, uint32_t) { return beyond(word); });
}

// The first `wanted` columns of a chunk whose key is `key`, into the list from position
// `at` on. Returns how many there were.
template <typename Bits>
__device__ __noinline__ uint32_t CollectTies(const Cta cta, const Vectors<Bits> chunk,
                                             uint32_t key, uint32_t wanted,
                                             uint32_t at) {
  if (wanted == 0) return 0;
  const Columns columns = chunk.columns;
  const uint32_t tie = WordOf(key);
  Tile<Bits> first;
  first.Load(chunk, 0);
  const uint32_t found = CompactChunk(
      cta, chunk, first, cta.list() + at, wanted, wanted - 1,
      [&](uint32_t word, uint32_t column) {
        return word == tie && column - columns.start < columns.stop - columns.start;
      });
  return min(found, wanted);
}

// The k largest of a chunk of at least k columns, without a sample, in as many reads as
// it takes. Slow: nothing that is common comes here.
template <typename Bits>
__device__ __noinline__ Reduced SelectExactly(const Cta cta, const Vectors<Bits> chunk,
                                              uint32_t k) {
  const Columns columns = chunk.columns;
  const Bits* first_score = chunk.data + (columns.start - chunk.column);
  const ChunkWords<Bits> words = {first_score, columns.stop - columns.start,
                                  columns.start};
  const uint32_t key = SelectByKey(cta, words, k, 0, 0, 0, 0xFFFFFFFFu).key;
  Tile<Bits> first;
  first.Load(chunk, 0);
  __syncthreads();
  const uint32_t survivors = FilterChunk(cta, chunk, first, key);  // fewer than k
  const uint32_t ties = CollectTies(cta, chunk, key, k - survivors, survivors);
  return {survivors, ties, survivors, true};
}

// One read of a chunk. Whatever belongs to the k largest of the row is in the list, if
// at least k columns of the row pass the filter (or, if it is strict, reach its floor):
//   - all survivors of the chunk if they fit, or exactly its own k largest;
//   - fewer than k survivors and a strict filter: the first ties, up to k together.
// `ties_at`: where ties go, at least; the list has room for k more there.
// `first`: a stream that was started, or the first tile.
template <typename Bits, typename First>
__device__ __forceinline__ Reduced ReduceChunk(const Cta& cta,
                                               const Vectors<Bits>& chunk, First& first,
                                               uint32_t k, const Filter& filter,
                                               uint32_t ties_at) {
  const uint32_t survivors = FilterChunk(cta, chunk, first, filter.floor);
  if (survivors > cta.capacity) return SelectExactly(cta, chunk, k);
  Reduced reduced = {survivors, 0, max(ties_at, survivors), false};
  if (filter.strict && survivors < k) {
    reduced.ties =
        CollectTies(cta, chunk, filter.floor, k - survivors, reduced.ties_at);
  }
  return reduced;
}

// Up to kListTile entries of the list, in the registers of a CTA. The entries of a warp
// are contiguous.
struct ListTile {
  static constexpr int kPerVector = 2;
  static constexpr int kVectors = 4;  // of a thread

  uint64_t entries[kVectors * kPerVector];
  uint32_t count;  // of this warp

  // Of entry i of this thread, among those of its warp.
  static __device__ __forceinline__ uint32_t PlaceOf(int i) {
    return (i / kPerVector * 32 + (threadIdx.x & 31)) * kPerVector + i % kPerVector;
  }

  __device__ __forceinline__ ListTile(const uint64_t* list, uint32_t size) {
    constexpr uint32_t kOfWarp = 32 * kVectors * kPerVector;
    const uint32_t first = threadIdx.x / 32 * kOfWarp;
    count = min(size - min(first, size), kOfWarp);
#pragma unroll
    for (int u = 0; u < kVectors; ++u) {
      entries[u * kPerVector] = entries[u * kPerVector + 1] = 0;
      if (PlaceOf(u * kPerVector) < count) {  // the last vector may be half full
        const ulonglong2 two = *reinterpret_cast<const ulonglong2*>(
            list + first + PlaceOf(u * kPerVector));
        entries[u * kPerVector] = two.x;
        entries[u * kPerVector + 1] = two.y;
      }
    }
  }

  static constexpr int kCount = kVectors * kPerVector;
  template <typename F>
  __device__ __forceinline__ void ForAll(F&& f) const {
#pragma unroll
    for (int i = 0; i < kCount; ++i) f(EntryWord(entries[i]));
  }
  __device__ __forceinline__ uint32_t Valid() const {
    uint32_t valid = (1u << kCount) - 1;
    if (count < 32 * kCount) {
      valid = 0;
#pragma unroll
      for (int i = 0; i < kCount; ++i) valid |= PlaceOf(i) < count ? 1u << i : 0u;
    }
    return valid;
  }

  __device__ uint32_t Word(int u, int e) const {
    return EntryWord(entries[u * kPerVector + e]);
  }
  __device__ uint64_t At(int i) const {
    uint64_t entry = 0;
#pragma unroll
    for (int j = 0; j < kVectors * kPerVector; ++j) {
      if (i == j) entry = entries[j];
    }
    return entry;
  }
  __device__ uint32_t WordAt(int i) const { return EntryWord(At(i)); }
  __device__ uint32_t ColumnAt(int i) const { return EntryColumn(At(i)); }
  __device__ uint32_t Start() const { return 0; }
  template <typename F>
  __device__ __forceinline__ void ForEach(F&& f) const {
#pragma unroll
    for (int i = 0; i < kVectors * kPerVector; ++i) {
      if (PlaceOf(i) < count) f(EntryWord(entries[i]), i);
    }
  }
};
inline constexpr uint32_t kListTile =
    kThreads * ListTile::kVectors * ListTile::kPerVector;

// Leaves in the list the k largest of its first `count` >= k entries, in column order.
// `kInRegisters`: that is where it has them if they are not too many. (Measured on the
// H200: `row`, 256 x 32768 in 19.9 us for 20.4 us; but `split`, 32 x 131072 in 16.9 us for
// 16.0 us, whose last CTA alone comes here.)
template <bool kInRegisters>
__device__ __noinline__ void SelectInList(const Cta cta, uint32_t count, uint32_t k,
                                          const Range range, Columns columns) {
  if (count == k) return;
  const ListWords words = {cta.list(), count};
  if (kInRegisters && count <= kListTile) {
    // Like SelectResident.
    const ListTile tile(cta.list(), count);
    const ValueBins bin_of(range.low, range.high, true);
    tile.ForEach([&](uint32_t word, int) { atomicAdd(&cta.bins()[bin_of(word)], 1u); });
    const Bin bin = FindBin(cta, k);
    if (bin.inside <= kFew) {
      const uint32_t mask = MarkSelected<false>(cta, tile, k, bin_of, bin);
      CompactTile(cta, tile, 0, 0, cta.list(), k, mask);
      __syncthreads();
      return;
    }
    const Cut cut = SelectInBin(cta, words, k, bin_of, bin);
    KeepSelected(cta, ListEntries{cta.list(), count}, cut, k, columns);
    return;
  }
  const Cut cut =
      SelectByValue(cta, words, k, 0, range, true, [&] { return words; }, [] {});
  KeepSelected(cta, ListEntries{cta.list(), count}, cut, k, columns);
}

// Calls write(position, entry) for the survivors of a list and then for its ties. `write`
// may overwrite entries up to the one it is called for.
template <typename Write>
__device__ void Join(const Cta& cta, const Reduced& reduced, Write&& write) {
  const uint32_t count = reduced.survivors + reduced.ties;
  const uint32_t skipped = reduced.ties_at - reduced.survivors;
  for (uint32_t base = 0; base < count; base += kThreads) {
    const uint32_t i = base + threadIdx.x;
    uint64_t entry = 0;
    if (i < count) entry = cta.list()[i < reduced.survivors ? i : i + skipped];
    __syncthreads();
    if (i < count) write(i, entry);
  }
}

// The same, but with both merged into column order, and without overwriting.
template <typename Write>
__device__ void Merge(const Cta& cta, const Reduced& reduced, Write&& write) {
  const uint64_t* survivors = cta.list();
  const uint64_t* ties = cta.list() + reduced.ties_at;
  for (uint32_t i = threadIdx.x; i < reduced.survivors + reduced.ties; i += kThreads) {
    const bool tie = i >= reduced.survivors;
    const uint32_t own = tie ? i - reduced.survivors : i;
    const uint64_t entry = tie ? ties[own] : survivors[own];
    // How many of the others come before.
    const uint64_t* others = tie ? survivors : ties;
    uint32_t low = 0;
    uint32_t high = tie ? reduced.survivors : reduced.ties;
    while (low < high) {
      const uint32_t middle = (low + high) / 2;
      if (EntryColumn(others[middle]) < EntryColumn(entry)) {
        low = middle + 1;
      } else {
        high = middle;
      }
    }
    write(own + low, entry);
  }
}

// Output ------------------------------------------------------------------------------

// Sorts list[0 .. size), size a power of two, in descending order: a bitonic network,
// the same time for every input.
__device__ inline void SortDescending(uint64_t* list, uint32_t size) {
  __syncthreads();
  for (uint32_t run = 2; run <= size; run *= 2) {
    for (uint32_t stride = run / 2; stride > 0; stride /= 2) {
      // A warp exchanges within its own 64 entries as long as the stride is below that.
      if (stride >= 32) {
        __syncthreads();
      } else {
        __syncwarp();
      }
      for (uint32_t i = threadIdx.x; i < size / 2; i += kThreads) {
        const uint32_t left = 2 * i - (i & (stride - 1));
        const uint64_t a = list[left];
        const uint64_t b = list[left + stride];
        if ((a < b) == ((left & run) == 0)) {
          list[left] = b;
          list[left + stride] = a;
        }
      }
    }
  }
  __syncthreads();
}

// Calls write(position, word, column) for list[0 .. count) by descending value. Leaves
// the list in disarray.
//
//   1. Count the entries in kNumBins buckets of equal width, the largest first; sum up.
//      The least key has the last bucket for itself: it may be a plateau's.
//   2. Deal them to the buckets, one behind the other, behind the list.
//   3. Rank each within its bucket. If the last is crowded, its entries are in order as
//      they come.
// If another bucket is crowded, or the list has no room for as many again, sort instead:
// slower, but the same for every input.
template <typename Write>
__device__ __noinline__ void ForEachByValue(const Cta cta, uint32_t count,
                                            const Write write) {
  constexpr int kBatch = 4;  // entries of a thread at a time
  Cta::Scratch& scratch = cta.scratch();
  uint64_t* list = cta.list();
  const auto for_each = [&](const uint64_t* from, auto&& f) {
    for (uint32_t base = threadIdx.x; base < count; base += kBatch * kThreads) {
      uint64_t one[kBatch];
#pragma unroll
      for (int j = 0; j < kBatch; ++j) {
        if (base + j * kThreads < count) one[j] = from[base + j * kThreads];
      }
#pragma unroll
      for (int j = 0; j < kBatch; ++j) {
        if (base + j * kThreads < count) f(base + j * kThreads, one[j]);
      }
    }
  };
  const auto write_composite = [&](uint32_t position, uint64_t composite) {
    write(position, WordOf(CompositeKey(composite)), CompositeColumn(composite));
  };

  // 1.
  ResetExtremes(cta);
  ClearBins(cta);
  if (threadIdx.x == 0) scratch.most = 0;
  __syncthreads();
  uint32_t min_key = 0xFFFFFFFFu;
  uint32_t max_key = 0;
  for_each(list, [&](uint32_t i, uint64_t entry) {
    const uint32_t key = KeyOf(EntryWord(entry));
    min_key = min(min_key, key);
    max_key = max(max_key, key);
    list[i] = Composite(key, EntryColumn(entry));  // its own
  });
  NoteExtremes(cta, min_key, max_key);
  __syncthreads();
  constexpr uint32_t kLast = kNumBins - 1;
  const uint32_t least = scratch.min_key;
  const uint32_t greatest = scratch.max_key;
  // Buckets 0 to kLast - 1 for the keys above the least, or one for each key.
  const uint32_t span = greatest - least;
  const uint32_t scale =
      span < kLast ? 0 : static_cast<uint32_t>((uint64_t{kLast} << 32) / (span + 1ull));
  const auto bucket_of = [&](uint64_t composite) {
    const uint32_t below = greatest - CompositeKey(composite);
    return below == span ? kLast : scale == 0 ? below : __umulhi(below, scale);
  };
  for_each(list, [&](uint32_t, uint64_t composite) {
    atomicAdd(&cta.bins()[bucket_of(composite)], 1u);
  });
  __syncthreads();
  uint2* pairs = reinterpret_cast<uint2*>(cta.bins());
  const uint2 inside = pairs[threadIdx.x];
  const uint32_t but_last = threadIdx.x == kThreads - 1 ? 0 : inside.y;
  const uint32_t most = __reduce_max_sync(kFullWarp, max(inside.x, but_last));
  if ((threadIdx.x & 31) == 0) atomicMax(&scratch.most, most);
  uint32_t all;
  const uint32_t begin = ExclusiveSum(inside.x + inside.y, scratch.totals[0], &all);
  pairs[threadIdx.x] = make_uint2(begin, begin + inside.x);
  __syncthreads();

  if (scratch.most > kFewInBucket || 2 * count > cta.capacity) {
    uint32_t size = 1;
    while (size < count) size *= 2;
    for (uint32_t i = count + threadIdx.x; i < size; i += kThreads) list[i] = 0;
    SortDescending(list, size);
    for_each(list, write_composite);
    return;
  }

  const uint32_t before_last = cta.bins()[kLast];
  const bool crowd = count - before_last > kFewInBucket;
  if (crowd) {
    CompactEntries(
        cta, ListEntries{list, count},
        [&](uint32_t key, uint32_t) { return key == least; },
        [&](bool passes, uint32_t position, uint64_t composite) {
          if (passes) write_composite(before_last + position, composite);
        });
  }

  // 2. Afterwards bins[b] is where bucket b ends and bucket b + 1 begins.
  uint64_t* dealt = list + count;
  for_each(list, [&](uint32_t, uint64_t composite) {
    const uint32_t bucket = bucket_of(composite);
    if (crowd && bucket == kLast) return;
    dealt[atomicAdd(&cta.bins()[bucket], 1u)] = composite;
  });
  __syncthreads();
  if (crowd) count = before_last;

  // 3.
  for_each(dealt, [&](uint32_t, uint64_t composite) {
    const uint32_t bucket = bucket_of(composite);
    const uint32_t ends = cta.bins()[bucket];
    uint32_t rank = bucket == 0 ? 0 : cta.bins()[bucket - 1];
#pragma unroll 4
    for (uint32_t other = rank; other < ends; ++other) {
      rank += dealt[other] > composite ? 1 : 0;
    }
    write_composite(rank, composite);
  });
}

// Where the answer of a row goes.
template <typename Bits>
struct RowOutput {
  Bits* values;      // [k]
  int32_t* indices;  // [k]

  __device__ RowOutput(const TopKParams& params, int64_t row)
      : values(static_cast<Bits*>(params.values) + row * params.k),
        indices(params.indices + row * params.k) {
    // Keeps the compiler from computing them anew at every write.
    asm volatile("" : "+l"(values), "+l"(indices));
  }

  __device__ __forceinline__ void operator()(uint32_t slot, uint32_t word,
                                             uint32_t column) const {
    values[slot] = Narrow<Bits>(word);
    indices[slot] = static_cast<int32_t>(column);
  }
};

// Turns the `kept` columns that were written into slots, if there is a page table. A pass
// of its own, since registers are dear where the columns are written.
template <typename Bits>
__device__ __forceinline__ void EmitSlots(const TopKParams& params, int64_t row,
                                          uint32_t kept) {
  if (params.page_table == nullptr) return;
  __syncthreads();  // all columns are written
  const RowOutput<Bits> out(params, row);
  for (uint32_t i = threadIdx.x; i < kept; i += kThreads) {
    out.indices[i] = RowIndex(params, row, out.indices[i]);
  }
}

// Writes the list's first `kept` entries to the slots of the answer from `first` on.
template <typename Bits>
__device__ __forceinline__ void EmitByColumn(const Cta& cta, const TopKParams& params,
                                             int64_t row, uint32_t first,
                                             uint32_t kept) {
  const RowOutput<Bits> out(params, row);
  if (params.page_table != nullptr) {
    // Slots in place of columns; the loop below gives each thread the same entries.
#pragma unroll 4
    for (uint32_t i = threadIdx.x; i < kept; i += kThreads) {
      const uint64_t entry = cta.list()[i];
      const int32_t slot = RowIndex(params, row, EntryColumn(entry));
      cta.list()[i] = Entry(EntryWord(entry), static_cast<uint32_t>(slot));
    }
  }
  constexpr uint32_t kBatch = 4;
  for (uint32_t base = threadIdx.x; base < kept; base += kBatch * kThreads) {
    uint64_t entry[kBatch];
#pragma unroll
    for (uint32_t j = 0; j < kBatch; ++j) {
      const uint32_t i = base + j * kThreads;
      if (i < kept) entry[j] = cta.list()[i];
    }
#pragma unroll
    for (uint32_t j = 0; j < kBatch; ++j) {
      const uint32_t i = base + j * kThreads;
      if (i < kept) out(first + i, EntryWord(entry[j]), EntryColumn(entry[j]));
    }
  }
}

// Writes the answer of a row: the list's first `kept` entries, by column as they are or
// by value, and the padding beyond. `kMaySort`: false in kernels for answers by column
// only, to which the sort would cost registers.
template <typename Bits, bool kMaySort>
__device__ __forceinline__ void EmitRow(const Cta& cta, const TopKParams& params,
                                        int64_t row, uint32_t kept) {
  const RowOutput<Bits> out(params, row);
  if (kMaySort && params.sorted) {
    ForEachByValue(cta, kept, out);
  } else {
    EmitByColumn<Bits>(cta, params, row, 0, kept);
  }
  for (uint32_t i = kept + threadIdx.x; i < params.k; i += kThreads) {
    out.values[i] = static_cast<Bits>(PadBits(params.type));
    out.indices[i] = -1;
  }
  if (kMaySort && params.sorted) EmitSlots<Bits>(params, row, kept);
}

// Rows --------------------------------------------------------------------------------

template <typename Bits>
struct Row {
  Scores<Bits> scores;
  const Bits* data;  // column 0
  Columns columns;

  __device__ Row(const TopKParams& params, int64_t row) {
    scores.begin = static_cast<const Bits*>(params.scores);
    scores.end = scores.begin + params.rows * params.n;
    data = scores.begin + row * params.n;
    const Window window = RowWindow(params, row);
    columns = {static_cast<uint32_t>(window.start), static_cast<uint32_t>(window.stop)};
  }

  __device__ uint32_t Length() const { return columns.stop - columns.start; }
  __device__ Vectors<Bits> Of(Columns some) const {
    return Vectors<Bits>(scores, data, some);
  }
  // Whether a CTA can keep the columns in its registers, and in its list.
  __device__ bool Resident(uint32_t capacity) const {
    return Length() <= capacity && Of(columns).size <= Tile<Bits>::kTileVectors;
  }
};

// How several CTAs cut a row into chunks of equal size: of whole vectors, and no smaller
// than pays.
struct Cutting {
  uint32_t size;   // of a chunk
  uint32_t count;  // of chunks

  JAX_TOPK_HOST_DEVICE Cutting(int64_t length, int64_t ctas, int64_t min_size) {
    constexpr int64_t kAlign = 16;
    const int64_t share = (length + ctas - 1) / ctas;
    const int64_t wished = share > min_size ? share : min_size;
    size = static_cast<uint32_t>((wished + kAlign - 1) / kAlign * kAlign);
    count = static_cast<uint32_t>((length + size - 1) / size);
  }

  __device__ Columns ChunkOf(Columns columns, uint32_t one) const {
    const uint32_t first = min(columns.start + one * size, columns.stop);
    return {first, min(first + size, columns.stop)};
  }
};

// The columns of others that may lie in the first vector of a row, at most: none if all
// rows are of whole vectors, and none of them starts elsewhere.
inline int64_t ColumnsBeside(const TopKParams& params, bool has_starts) {
  const int64_t per_vector = params.type == ScoreType::kF32 ? 4 : 8;
  const bool aligned = !has_starts && params.n % per_vector == 0 &&
                       reinterpret_cast<uintptr_t>(params.scores) % 16 == 0;
  return aligned ? 0 : per_vector - 1;
}

// What is the same for all rows of a launch whose window is all of the row. (The divisions
// and roots of the others take a while.)
struct WholeRows {
  Sampling sampling;
  Cutting cutting;
  bool aligned;  // rows are of whole vectors

  WholeRows(const TopKParams& params, const Plan& plan)
      : sampling(static_cast<uint32_t>(params.n), static_cast<uint32_t>(params.k),
                 LogGroups(plan.num_samples)),
        cutting(params.n, plan.ctas_per_row, plan.min_chunk),
        aligned(ColumnsBeside(params, false) == 0) {}

  static uint32_t LogGroups(int64_t samples) {
    uint32_t log = 0;
    while (2 * int64_t{Sampling::kGroup} << log <= samples) ++log;
    return log;
  }
};

// The answer of a row whose window `columns` is in a tile, and else kNoWord. `load` puts
// it there again.
template <bool kMaySort, typename Bits, typename Load>
__device__ __forceinline__ void SelectResident(const Cta& cta, const TopKParams& params,
                                               int64_t row, Columns columns,
                                               Tile<Bits>& tile, Load&& load) {
  const uint32_t length = columns.stop - columns.start;
  const uint32_t kept = min(length, static_cast<uint32_t>(params.k));
  const auto keep = [&](int turn, uint32_t mask) {
    CompactTile(cta, tile, turn, 0, cta.list(), kept, mask);
    __syncthreads();
  };
  if (length == kept) {
    keep(0, MaskOf(tile, Threshold(LeastKey<Bits>(), columns)));
    EmitRow<Bits, kMaySort>(cta, params, row, kept);
    return;
  }

  // Like SelectByValue, but what is selected is marked, for there is no list.
  const Range range = RangeOf<4>(cta, tile);
  const ValueBins bin_of(range.low, range.high, false);
  tile.ForEach([&](uint32_t word, int) { atomicAdd(&cta.bins()[bin_of(word)], 1u); });
  const Bin bin = FindBin(cta, kept);
  // (Of 8192 normal scores more than kFew share a bin in one row of 200. But in one call of
  // four such a row is among 64, and the call takes as long as its slowest.)
  if (bin.inside <= min(kSome, max(kFew, cta.capacity / 2))) {
    keep(0, MarkSelected<true>(cta, tile, kept, bin_of, bin));
  } else {
    uint32_t* words = reinterpret_cast<uint32_t*>(cta.list());
    tile.ForEach([&](uint32_t word, int i) {
      const uint32_t at = tile.ColumnAt(i) - columns.start;
      if (at < length) words[at] = word;
    });
    Cut cut =
        SelectInBin(cta, PlainWords{words, length, columns.start}, kept, bin_of, bin);
    load();
    Threshold threshold(cut.key, columns);
    if (cut.reached > kept) {
      if (cut.column == Cut::kUnknown) {
        // Which is the last of the ties that are selected?
        const Threshold all = threshold;
        threshold.beyond = Beyond(0xFFFFFFFFu);
        keep(0, MaskOf(tile, threshold));
        cut.column = EntryColumn(cta.list()[kept - cut.above - 1]);
        threshold.beyond = all.beyond;
        __syncthreads();
      }
      threshold.reach = cut.column - columns.start;
    }
    keep(1, MaskOf(tile, threshold));
  }
  EmitRow<Bits, kMaySort>(cta, params, row, kept);
}

// The same for a row whose columns fit in a tile.
template <bool kMaySort, typename Bits>
__device__ __forceinline__ void SelectResident(const Cta& cta, const TopKParams& params,
                                               int64_t row, const Row<Bits>& entries) {
  const Vectors<Bits> vectors = entries.Of(entries.columns);
  Tile<Bits> tile;
  const auto load = [&] {
    tile.Load(vectors, 0);
    tile.Mask(vectors, 0);
  };
  load();
  SelectResident<kMaySort>(cta, params, row, entries.columns, tile, load);
}

// The answer of a row.
//
// `chunk` is what this CTA reads of a row that is not resident: all of it, unless it
// shares the row with others. Then `prepare()` is called early, while there is time, and
// `meet(&reduced, filter)` hands over what the chunk was reduced to; it returns false if
// another CTA answers, and else leaves in the list and in `reduced` what the chunks of
// all were reduced to.
template <bool kMaySort, bool kInRegisters, int kStages, typename Bits,
          typename Prepare, typename Meet>
__device__ __forceinline__ void SelectRow(const Cta& cta, const TopKParams& params,
                                          int64_t row, const Row<Bits>& entries,
                                          Columns chunk, const WholeRows& whole,
                                          uint32_t ties_at, Prepare&& prepare,
                                          Meet&& meet) {
  const uint32_t k = static_cast<uint32_t>(params.k);
  Rest(cta);
  if (entries.Resident(cta.capacity)) {
    SelectResident<kMaySort>(cta, params, row, entries);
    return;
  }

  const uint32_t length = entries.Length();
  const Sampling sampling = length == params.n
                                ? whole.sampling
                                : Sampling(length, k, whole.sampling.log_groups);
  SampleWords sample;
  DrawSample(entries.scores, entries.data, entries.columns, sampling, &sample);
  const Vectors<Bits> vectors = entries.Of(chunk);
  Filter filter;
  Reduced reduced;
  if constexpr (kStages > 0) {
    // Asking for all at once would hold up the sample.
    Stream<Bits, kStages> stream(cta);
    stream.template Start<0, kFewStages>(vectors);
    prepare();
    filter = SampleFilter<Bits>(cta, sampling, sample, [] {});
    stream.template Start<kFewStages, kStages>(vectors);
    reduced = ReduceChunk(cta, vectors, stream, k, filter, ties_at);
  } else {
    Tile<Bits> first;
    first.Load(vectors, 0);
    prepare();
    filter = SampleFilter<Bits>(cta, sampling, sample, [&] { first.Load(vectors, 0); });
    reduced = ReduceChunk(cta, vectors, first, k, filter, ties_at);
  }
  if (!meet(&reduced, filter)) return;
  if (reduced.survivors + reduced.ties < k) {  // the sample was too high
    reduced = SelectExactly(cta, entries.Of(entries.columns), k);
  }
  if (reduced.ties == 0) {
    SelectInList<kInRegisters>(cta, reduced.survivors, k, filter.range,
                               entries.columns);
  } else if (kMaySort && params.sorted) {
    Join(cta, reduced,
         [&](uint32_t position, uint64_t entry) { cta.list()[position] = entry; });
  } else {
    const RowOutput<Bits> out(params, row);
    Merge(cta, reduced, [&](uint32_t position, uint64_t entry) {
      out(position, EntryWord(entry), EntryColumn(entry));
    });
    EmitSlots<Bits>(params, row, k);
    return;
  }
  EmitRow<Bits, kMaySort>(cta, params, row, k);
}

}  // namespace jax_topk
