// SPDX-License-Identifier: Apache-2.0
//
// What one CTA does with (a chunk of) a row. Shared by every CUDA kernel; nothing here
// knows of other CTAs.
//
// The idea: find a safe threshold from a sample, read the row once keeping what passes,
// select exactly among the few kept.
//
//   SampleThreshold  a filter that about 1.3 to 2 k columns of the row pass
//   ReduceChunk      one read: the survivors into shared memory, in column order; if
//                    more survive than fit, SelectExactly on the chunk
//   SelectWord       the exact select, of 32-bit words
//   SelectThreshold  by it, the composite that exactly `rank` entries reach
//   EmitRow          the selected in their final order
//
// Exactness never rests on the sample: a threshold decides only how many survive, and
// whoever counts fewer than k or more than fit takes the exact path over the scores.
//
// Plateaus. Many columns may equal the threshold (sums of ReLUs are often exactly 0).
// If the sample shows that they would not fit, the filter is strict: only larger keys
// survive, and the ties still missing are read off from the row's start, in column
// order, stopping as soon as there are enough.
//
// Lists are kept in column order from the start, so that the answer in index order
// needs no sort.
//
// All functions are called by the whole CTA. Unless said otherwise, shared memory that
// they leave behind is visible to every thread when they return.

#pragma once

#include <cstdint>

#include "top_k.h"

namespace jax_topk {

inline constexpr int kWarps = kThreads / 32;
inline constexpr unsigned kFullWarp = 0xFFFFFFFFu;
// Entries of a bucket of the sort that are ranked by comparing all pairs.
inline constexpr uint32_t kFewInBucket = 64;

extern __shared__ __align__(16) char dynamic_shared_memory[];

// The shared memory of a CTA, carved out of its dynamic allocation in this order:
// scratch, bins, list, order (plan.h: SharedMemoryBytes). Offsets, not pointers: they
// are constants, and cost no registers.
struct Cta {
  struct Scratch {
    uint32_t totals[2][kWarps];  // sums of the warps, in turns
    uint32_t bin;                // the bin where the wanted rank falls,
    uint32_t above;              // entries in larger bins,
    uint32_t inside;             // entries in it
    uint32_t count;              // entries appended, or the like
    uint32_t min_key;            // extremes of the keys met
    uint32_t max_key;
    uint32_t flag;
  };
  static_assert(sizeof(Scratch) <= kScratchBytes);

  uint32_t capacity;

  __device__ Scratch& scratch() const {
    return *reinterpret_cast<Scratch*>(dynamic_shared_memory);
  }
  __device__ uint32_t* bins() const {  // [kNumBins]
    return reinterpret_cast<uint32_t*>(dynamic_shared_memory + kScratchBytes);
  }
  __device__ uint64_t* list() const {  // [capacity] composites
    return reinterpret_cast<uint64_t*>(dynamic_shared_memory + kScratchBytes +
                                       kNumBins * sizeof(uint32_t));
  }
  __device__ uint16_t* order() const {  // [k] positions in list
    return reinterpret_cast<uint16_t*>(list() + capacity);
  }
};

// Columns [start, stop). Below 2^31, so that sums with the threads of a CTA fit.
struct Columns {
  uint32_t start;
  uint32_t stop;
};

// Entries that can be selected from: slot i holds one if Valid(i).

struct ListEntries {
  const uint64_t* list;
  uint32_t count;

  __device__ uint32_t Size() const { return count; }
  __device__ bool Valid(uint32_t) const { return true; }
  __device__ uint64_t Get(uint32_t i) const { return list[i]; }
  __device__ uint32_t Key(uint32_t i) const {  // the upper half of a composite
    return reinterpret_cast<const uint32_t*>(list)[2 * i + 1];
  }
};

template <typename Bits>
struct RowEntries {
  const Bits* row;  // column 0
  Columns columns;

  __device__ uint32_t KeyAt(uint32_t column) const {
    return OrderedKey<Bits>(__ldg(row + column));
  }
  __device__ uint32_t Size() const { return columns.stop - columns.start; }
  __device__ bool Valid(uint32_t) const { return true; }
  __device__ uint32_t Key(uint32_t i) const { return KeyAt(columns.start + i); }
  __device__ uint64_t Get(uint32_t i) const {
    return Composite(Key(i), columns.start + i);
  }
};

// The 32-bit words that SelectWord compares: slot i holds one if Get(i, &word).

struct SampleWords {
  const uint32_t* keys;
  uint32_t count;

  __device__ uint32_t Size() const { return count; }
  __device__ bool Get(uint32_t i, uint32_t* word) const {
    *word = keys[i];
    return true;
  }
};

template <typename Entries>
struct KeyWords {
  Entries entries;

  __device__ uint32_t Size() const { return entries.Size(); }
  __device__ bool Get(uint32_t i, uint32_t* word) const {
    if (!entries.Valid(i)) return false;
    *word = entries.Key(i);
    return true;
  }
};

// The lower halves of the composites with a given key: small columns are large words.
template <typename Entries>
struct ColumnWords {
  Entries entries;
  uint32_t key;

  __device__ uint32_t Size() const { return entries.Size(); }
  __device__ bool Get(uint32_t i, uint32_t* word) const {
    if (!entries.Valid(i)) return false;
    const uint64_t composite = entries.Get(i);
    *word = static_cast<uint32_t>(composite);
    return CompositeKey(composite) == key;
  }
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

// What the warps before this one have in `totals`, and in *all what all have. Every
// lane calls it after a barrier that follows the writing of `totals`.
__device__ __forceinline__ uint32_t SumBeforeWarp(const uint32_t* totals,
                                                  uint32_t* all) {
  const int lane = threadIdx.x & 31;
  const int warp = threadIdx.x / 32;
  const uint32_t sum = WarpInclusiveSum(lane < kWarps ? totals[lane] : 0u);
  *all = __shfl_sync(kFullWarp, sum, 31);
  const uint32_t before = __shfl_sync(kFullWarp, sum, warp > 0 ? warp - 1 : 0);
  return warp > 0 ? before : 0;
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
  for (int i = threadIdx.x; i < kNumBins; i += kThreads) cta.bins()[i] = 0;
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

// A word, how many words are above it, and how many reach it.
struct Cut {
  uint32_t word;
  uint32_t above;
  uint32_t reached;
};

// The exact select: the `rank`-th largest word, or a word that `rank` to rank + slack
// words reach. So above < rank <= reached.
//
// Requires 1 <= rank <= the words within [low, high], and no word above high.
//
//   1. Count the words within [low, high] in bins: `low` by itself, where a plateau often
//      is, and the rest in bins of equal width.
//   2. From the top, find the bin where the rank falls; it is the new [low, high].
//      Done if no more than the slack of its words are unwanted, or if it is one word.
//
// Each round narrows the range by a factor of kNumBins: four rounds at worst. Words of
// a plateau share a bin: the hardware adds up the increments of a warp to one address.
template <typename Words>
__device__ Cut SelectWord(const Cta& cta, const Words& words, uint32_t rank,
                          uint32_t slack, uint32_t low, uint32_t high) {
  constexpr int kBinBits = 10;
  static_assert(kNumBins == 1 << kBinBits);
  constexpr int kBinsPerThread = kNumBins / kThreads;
  constexpr int kBatch = 4;  // loads in flight
  Cta::Scratch& scratch = cta.scratch();
  const uint32_t size = words.Size();
  uint32_t above = 0;  // words beyond `high`

  while (true) {
    // 1. `bins` is complete at the second barrier.
    const uint32_t span = high - low;
    int shift = max(32 - __clz(static_cast<int>(span)) - kBinBits, 0);
    if (span > 0 && (span - 1) >> shift >= kNumBins - 1) ++shift;
    const auto bin_of = [&](uint32_t word) {
      return word == low ? 0 : ((word - low - 1) >> shift) + 1;
    };
    ClearBins(cta);
    __syncthreads();
    for (uint32_t base = threadIdx.x; base < size; base += kBatch * kThreads) {
      uint32_t word[kBatch];
      bool valid[kBatch];
#pragma unroll
      for (int j = 0; j < kBatch; ++j) {
        const uint32_t i = base + j * kThreads;
        valid[j] = i < size && words.Get(i, &word[j]);
      }
#pragma unroll
      for (int j = 0; j < kBatch; ++j) {
        if (valid[j] && word[j] - low <= span) {
          atomicAdd(&cta.bins()[bin_of(word[j])], 1u);
        }
      }
    }
    __syncthreads();

    // 2. Thread t owns the t-th group of bins from the top.
    uint32_t inside[kBinsPerThread];
    uint32_t sum = 0;
    const int top = kNumBins - 1 - static_cast<int>(threadIdx.x) * kBinsPerThread;
#pragma unroll
    for (int j = 0; j < kBinsPerThread; ++j) sum += inside[j] = cta.bins()[top - j];
    uint32_t all;
    uint32_t before = above + ExclusiveSum(sum, scratch.totals[0], &all);
#pragma unroll
    for (int j = 0; j < kBinsPerThread; ++j) {
      if (before < rank && rank <= before + inside[j]) {
        scratch.bin = top - j;
        scratch.above = before;
        scratch.inside = inside[j];
      }
      before += inside[j];
    }
    __syncthreads();
    above = scratch.above;
    const uint32_t reached = above + scratch.inside;
    const uint32_t bin = scratch.bin;
    const uint32_t width = bin == 0 ? 0 : (1u << shift) - 1;
    if (bin > 0) low += 1 + ((bin - 1) << shift);
    if (high - low > width) high = low + width;
    if (reached <= rank + slack || low == high) return {low, above, reached};
  }
}

// The composite that exactly `rank` entries reach: no two are equal. Requires the keys
// to be within [low, high] and the columns within `columns`.
template <typename Entries>
__device__ uint64_t SelectThreshold(const Cta& cta, const Entries& entries,
                                    uint32_t rank, uint32_t low, uint32_t high,
                                    Columns columns) {
  const Cut key = SelectWord(cta, KeyWords<Entries>{entries}, rank, 0, low, high);
  if (key.reached == rank) return Composite(key.word, 0xFFFFFFFFu);
  // It falls between entries of one key.
  const ColumnWords<Entries> words = {entries, key.word};
  const Cut column =
      SelectWord(cta, words, rank - key.above, 0, ~(columns.stop - 1), ~columns.start);
  return Composite(key.word, ~column.word);
}

// Calls write(position, composite) for the entries that reach `threshold`, in the order
// of the entries. `write` may overwrite entries up to the one it is called for.
template <typename Entries, typename Write>
__device__ void Compact(const Cta& cta, const Entries& entries, uint64_t threshold,
                        Write&& write) {
  constexpr int kBatch = 4;  // neighbours of 32 entries
  const uint32_t lane = threadIdx.x & 31;
  const uint32_t warp = threadIdx.x / 32;
  const uint32_t size = entries.Size();
  uint32_t count = 0;
  int turn = 0;
  __syncthreads();  // `totals` may have been in use
  for (uint32_t base = 0; base < size; base += kBatch * kThreads, turn ^= 1) {
    uint64_t composite[kBatch];
    unsigned passing[kBatch];
    uint32_t total = 0;
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      const uint32_t i = base + (warp * kBatch + j) * 32 + lane;
      const bool valid = i < size && entries.Valid(i);
      if (valid) composite[j] = entries.Get(i);
      passing[j] = __ballot_sync(kFullWarp, valid && composite[j] >= threshold);
      total += __popc(passing[j]);
    }
    if (lane == 0) cta.scratch().totals[turn][warp] = total;
    __syncthreads();
    uint32_t all;
    uint32_t position = count + SumBeforeWarp(cta.scratch().totals[turn], &all);
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      if ((passing[j] >> lane & 1) != 0) {
        write(position + __popc(passing[j] & ((1u << lane) - 1)), composite[j]);
      }
      position += __popc(passing[j]);
    }
    count += all;
  }
  __syncthreads();
}

// Every column of a chunk that fits, into the list; notes the extremes.
template <typename Bits>
__device__ void LoadChunk(const Cta& cta, const RowEntries<Bits>& chunk) {
  constexpr int kBatch = 8;  // loads in flight
  const uint32_t size = chunk.Size();
  const uint32_t start = chunk.columns.start;
  ResetExtremes(cta);
  uint32_t min_key = 0xFFFFFFFFu;
  uint32_t max_key = 0;
  for (uint32_t base = threadIdx.x; base < size; base += kBatch * kThreads) {
    uint32_t key[kBatch];
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      const uint32_t i = base + j * kThreads;
      if (i < size) key[j] = chunk.Key(i);
    }
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      const uint32_t i = base + j * kThreads;
      if (i < size) {
        min_key = min(min_key, key[j]);
        max_key = max(max_key, key[j]);
        cta.list()[i] = Composite(key[j], start + i);
      }
    }
  }
  __syncthreads();
  NoteExtremes(cta, min_key, max_key);
  __syncthreads();
}

// What passes the filter: keys above `floor`. If `strict`, columns whose key is `floor`
// itself count as ties; else they are of no interest.
struct Filter {
  uint32_t floor;
  bool strict;
};

// A filter that about 1.3 to 2 k columns of a row pass. The same in every CTA that
// asks: it depends on the row, its window and the capacity only. Calls `meanwhile`
// while the sample is on its way.
//
// Requires columns > capacity >= k. At least `rank` of the samples reach the threshold,
// and rank exceeds what k columns would put there on average by 5 standard deviations.
template <typename Bits, typename Meanwhile>
__device__ Filter SampleThreshold(const Cta& cta, const RowEntries<Bits>& row,
                                  uint32_t k, uint32_t max_samples,
                                  Meanwhile&& meanwhile) {
  const float length = static_cast<float>(row.Size());
  // 1. As few samples as keep the survivors within the list, a power of two.
  const auto rank_among = [&](uint32_t samples) {
    const float mean = static_cast<float>(k) * static_cast<float>(samples) / length;
    return mean + 5.0f * sqrtf(mean) + 8.0f;
  };
  // Columns that `reached` of the samples stand for, five standard deviations up.
  const auto columns_for = [&](float reached, uint32_t samples) {
    return (reached + 5.0f * sqrtf(reached)) * length / static_cast<float>(samples);
  };
  uint32_t samples = min(4096u, max_samples);
  while (2 * samples <= max_samples &&
         columns_for(rank_among(samples), samples) > cta.capacity) {
    samples *= 2;
  }
  const int log_samples = 31 - __clz(samples);
  samples = 1u << log_samples;
  const uint32_t rank = min(static_cast<uint32_t>(rank_among(samples)), samples);

  // 2. One column from each of `samples` equal parts of the row, at a place within the
  //    part that a hash of its number gives: no stride that a pattern could meet.
  constexpr int kBatch = 4;  // loads in flight
  uint32_t* keys = reinterpret_cast<uint32_t*>(cta.list());
  ResetExtremes(cta);
  uint32_t min_key = 0xFFFFFFFFu;
  uint32_t max_key = 0;
  const uint64_t size = row.Size();
  for (uint32_t base = 0; base < samples; base += kBatch * kThreads) {
    uint32_t key[kBatch];
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      const uint32_t i = base + j * kThreads + threadIdx.x;
      const uint64_t jitter = (i * 2654435761u) >> 16;
      if (i < samples) {
        key[j] = row.Key(
            static_cast<uint32_t>((i * size + (jitter * size >> 16)) >> log_samples));
      }
    }
    if (base == 0) meanwhile();
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      const uint32_t i = base + j * kThreads + threadIdx.x;
      if (i < samples) {
        min_key = min(min_key, key[j]);
        max_key = max(max_key, key[j]);
        keys[i] = key[j];
      }
    }
  }
  // A better lower bound than the least sample: in each of at least `rank` groups of
  // threads the largest sample reaches the least of these largest.
  uint32_t group = 1;
  while (2 * group * rank <= kThreads && group < 32) group *= 2;
  if (group * rank <= kThreads) {
    min_key = max_key;
    for (uint32_t lane = 1; lane < group; lane *= 2) {
      min_key = max(min_key, __shfl_xor_sync(kFullWarp, min_key, lane));
    }
  }
  __syncthreads();
  NoteExtremes(cta, min_key, max_key);
  __syncthreads();

  // 3. The threshold, near enough to the rank. If more columns would reach it than fit
  //    in the list, they equal it: leave those out.
  const Cut cut = SelectWord(cta, SampleWords{keys, samples}, rank, rank / 8,
                             cta.scratch().min_key, cta.scratch().max_key);
  const bool strict = cut.word == 0 || columns_for(static_cast<float>(cut.reached),
                                                   samples) > cta.capacity;
  return {strict ? cut.word : cut.word - 1, strict};
}

// The keys of a 16-byte vector of scores, in place: one a word, or two.
template <typename Bits>
__device__ __forceinline__ void VectorToKeys(uint4& vector) {
  const auto to_keys = [](uint32_t word) {
    if constexpr (sizeof(Bits) == 4) {
      return OrderedKey<Bits>(word);
    } else {
      const uint32_t negative = (word >> 15 & 0x00010001u) * 0xFFFFu;
      return word ^ (negative | 0x80008000u);
    }
  };
  vector = make_uint4(to_keys(vector.x), to_keys(vector.y), to_keys(vector.z),
                      to_keys(vector.w));
}

// Key e of a vector of keys; e is a constant.
template <typename Bits>
__device__ __forceinline__ uint32_t KeyOfVector(const uint4& keys, int e) {
  const uint32_t words[4] = {keys.x, keys.y, keys.z, keys.w};
  if constexpr (sizeof(Bits) == 4) {
    return words[e];
  } else {
    return e % 2 == 0 ? words[e / 2] & 0xFFFFu : words[e / 2] >> 16;
  }
}

// The columns of a chunk whose key exceeds `floor`, into the list, in column order.
// Notes the extremes. Returns their number; if that is above the capacity, the list is
// of no use.
//
// Tile by tile: every warp counts what passes in its part of the tile; one barrier;
// every warp sums up the counts before its own and writes. Meanwhile the next tile is
// on its way.
template <typename Bits>
__device__ uint32_t FilterChunk(const Cta& cta, const RowEntries<Bits>& chunk,
                                uint32_t floor) {
  constexpr int kPerVector = 16 / sizeof(Bits);
  constexpr int kUnroll = 16 / kPerVector;  // vectors of a lane in a tile
  constexpr uint32_t kTile = kThreads * kUnroll;
  // The counts of the kUnroll vectors of a lane, side by side in one word; their sums
  // over a warp, up to 32 * kPerVector, must not run over.
  constexpr int kField = 32 / kUnroll;
  static_assert(32 * kPerVector < 1 << kField);
  const auto field = [](uint32_t packed, int u) {
    return packed >> (u * kField) & ((1u << kField) - 1);
  };

  const uint32_t lane = threadIdx.x & 31;
  const uint32_t warp = threadIdx.x / 32;
  uint32_t count = 0;
  uint32_t max_key = 0;

  // The chunk as 16-byte vectors between a head and a tail of less than a vector each.
  const Columns columns = chunk.columns;
  const uintptr_t first = reinterpret_cast<uintptr_t>(chunk.row + columns.start);
  const uint32_t misaligned = static_cast<uint32_t>(first / sizeof(Bits)) % kPerVector;
  const uint32_t head =  // where the vectors begin
      min(columns.start + (kPerVector - misaligned) % kPerVector, columns.stop);
  const uint32_t num_vectors = (columns.stop - head) / kPerVector;
  const uint32_t tail = head + num_vectors * kPerVector;  // where they end
  const uint4* vectors = reinterpret_cast<const uint4*>(chunk.row + head);

  // Head and tail: every warp looks, so that all know the count, and the first writes.
  const auto filter_edge = [&](uint32_t from, uint32_t to) {
    const uint32_t column = from + lane;
    const uint32_t key = column < to ? chunk.KeyAt(column) : 0;
    const unsigned mask = __ballot_sync(kFullWarp, key > floor);
    const uint32_t position = count + __popc(mask & ((1u << lane) - 1));
    if (key > floor && warp == 0 && position < cta.capacity) {
      cta.list()[position] = Composite(key, column);
    }
    max_key = max(max_key, key);
    count += __popc(mask);
  };

  __syncthreads();  // the list and the scratch may have been in use
  ResetExtremes(cta);
  filter_edge(columns.start, head);

  const auto vector_of = [&](uint32_t base, int u) {
    return base + (warp * kUnroll + u) * 32 + lane;
  };
  uint4 next[kUnroll];
  const auto load = [&](uint32_t base) {
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const uint32_t i = vector_of(base, u);
      if (i < num_vectors) next[u] = __ldg(vectors + i);
    }
  };
  load(0);
  int turn = 0;
  for (uint32_t base = 0; base < num_vectors; base += kTile, turn ^= 1) {
    uint4 keys[kUnroll];
    uint32_t mine = 0;
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      keys[u] = next[u];
      VectorToKeys<Bits>(keys[u]);
      // A key of 0 passes no filter.
      if (vector_of(base, u) >= num_vectors) keys[u] = make_uint4(0, 0, 0, 0);
      uint32_t passing = 0;
#pragma unroll
      for (int e = 0; e < kPerVector; ++e) {
        passing += KeyOfVector<Bits>(keys[u], e) > floor ? 1 : 0;
      }
      mine |= passing << (u * kField);
    }
    load(base + kTile);

    const uint32_t sum = WarpInclusiveSum(mine);
    const uint32_t of_warp = __shfl_sync(kFullWarp, sum, 31);
    uint32_t total = 0;
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) total += field(of_warp, u);
    // In turns: whoever writes totals[turn] again has passed the barrier of the next
    // tile, where everybody has read it.
    if (lane == 0) cta.scratch().totals[turn][warp] = total;
    __syncthreads();
    uint32_t all;
    uint32_t position = count + SumBeforeWarp(cta.scratch().totals[turn], &all);
    count += all;
    if (count > cta.capacity) break;
    if (total > 0) {
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        uint32_t at = position + field(sum, u) - field(mine, u);
        const uint32_t column = head + vector_of(base, u) * kPerVector;
#pragma unroll
        for (int e = 0; e < kPerVector; ++e) {
          const uint32_t key = KeyOfVector<Bits>(keys[u], e);
          if (key > floor) {
            cta.list()[at] = Composite(key, column + e);
            max_key = max(max_key, key);
            ++at;
          }
        }
        position += field(of_warp, u);
      }
    }
  }
  filter_edge(tail, columns.stop);
  if (num_vectors == 0) __syncthreads();  // the extremes have been reset
  NoteExtremes(cta, floor, max_key);
  __syncthreads();
  return count;
}

// The first `wanted` columns of a chunk whose key is `key`, in column order, into the
// list from position `at`. Returns how many there were.
template <typename Bits>
__device__ uint32_t CollectTies(const Cta& cta, const RowEntries<Bits>& chunk,
                                uint32_t key, uint32_t wanted, uint32_t at) {
  constexpr int kPerThread = 8;  // neighbouring columns
  uint32_t found = 0;
  int turn = 0;
  __syncthreads();  // `totals` may have been in use
  for (uint32_t base = chunk.columns.start; base < chunk.columns.stop && found < wanted;
       base += kThreads * kPerThread, turn ^= 1) {
    const uint32_t first = base + threadIdx.x * kPerThread;
    uint32_t ties = 0;
#pragma unroll
    for (int j = 0; j < kPerThread; ++j) {
      const bool inside = first + j < chunk.columns.stop;
      if (inside && chunk.KeyAt(first + j) == key) ties |= 1u << j;
    }
    uint32_t all;
    uint32_t position =
        found + ExclusiveSum(__popc(ties), cta.scratch().totals[turn], &all);
    for (; ties != 0 && position < wanted; ties &= ties - 1, ++position) {
      cta.list()[at + position] = Composite(key, first + __ffs(ties) - 1);
    }
    found += all;
  }
  __syncthreads();
  return min(found, wanted);
}

// What a chunk was reduced to: `survivors` composites in column order, then `ties`
// composites in column order. `exact`: they are the k largest of the chunk.
struct Reduced {
  uint32_t survivors;
  uint32_t ties;
  bool exact;
};

// The k largest of a chunk of at least k columns, without a sample, in as many reads as
// it takes. Slow: nothing that is common comes here.
template <typename Bits>
__device__ Reduced SelectExactly(const Cta cta, const RowEntries<Bits> chunk,
                                 uint32_t k) {
  __syncthreads();
  const uint32_t key =
      SelectWord(cta, KeyWords<RowEntries<Bits>>{chunk}, k, 0, 0, 0xFFFFFFFFu).word;
  const uint32_t survivors = FilterChunk(cta, chunk, key);  // at most k
  return {survivors, CollectTies(cta, chunk, key, k - survivors, survivors), true};
}

// One read of a chunk. Whatever belongs to the k largest of the row is in the list, if
// at least k columns of the row pass the filter (or, if it is strict, reach its floor):
//   - all survivors of the chunk if they fit, or exactly its own k largest;
//   - fewer than k survivors and a strict filter: the first ties, up to k together.
template <typename Bits>
__device__ Reduced ReduceChunk(const Cta& cta, const RowEntries<Bits>& chunk,
                               uint32_t k, Filter filter) {
  const uint32_t survivors = FilterChunk(cta, chunk, filter.floor);
  if (survivors > cta.capacity) return SelectExactly(cta, chunk, k);
  uint32_t ties = 0;
  if (filter.strict && survivors < k) {
    ties = CollectTies(cta, chunk, filter.floor, k - survivors, survivors);
  }
  return {survivors, ties, false};
}

// The composite that exactly k of the list's first `count` >= k entries reach. The
// scratch has the extremes of their keys.
__device__ inline uint64_t SelectInList(const Cta& cta, uint32_t count, uint32_t k,
                                        Columns columns) {
  if (count == k) return 0;
  const ListEntries entries = {cta.list(), count};
  return SelectThreshold(cta, entries, k, cta.scratch().min_key, cta.scratch().max_key,
                         columns);
}

// Calls write(position, composite) for the survivors and ties of a list, merged into
// column order.
template <typename Write>
__device__ void Merge(const Cta& cta, uint32_t survivors, uint32_t ties,
                      Write&& write) {
  const uint32_t count = survivors + ties;
  for (uint32_t i = threadIdx.x; i < count; i += kThreads) {
    const uint64_t composite = cta.list()[i];
    const bool tie = i >= survivors;
    // How many of the others come before.
    uint32_t low = tie ? 0 : survivors;
    uint32_t high = tie ? survivors : count;
    while (low < high) {
      const uint32_t middle = (low + high) / 2;
      if (CompositeColumn(cta.list()[middle]) < CompositeColumn(composite)) {
        low = middle + 1;
      } else {
        high = middle;
      }
    }
    write(tie ? i - survivors + low : i + low - survivors, composite);
  }
}

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

// Calls write(position, composite) for list[0 .. count), in descending order. May leave
// the list in disarray.
//
//   1. Count the entries in kNumBins buckets of equal width, the largest first; sum up.
//   2. Scatter their list positions by bucket.
//   3. Rank each within its bucket.
// If a bucket is crowded, sort instead: slower, but the same for every input.
template <typename Write>
__device__ void ForEachByValue(const Cta& cta, uint32_t count, Write&& write) {
  constexpr int kBinBits = 10;
  constexpr int kBinsPerThread = kNumBins / kThreads;
  Cta::Scratch& scratch = cta.scratch();
  const auto for_each = [&](auto&& f) {
    for (uint32_t i = threadIdx.x; i < count; i += kThreads) f(i, cta.list()[i]);
  };

  // 1.
  __syncthreads();  // the scratch may have been in use
  ResetExtremes(cta);
  ClearBins(cta);
  if (threadIdx.x == 0) scratch.count = 0;
  __syncthreads();
  uint32_t min_key = 0xFFFFFFFFu;
  uint32_t max_key = 0;
  for_each([&](uint32_t, uint64_t composite) {
    min_key = min(min_key, CompositeKey(composite));
    max_key = max(max_key, CompositeKey(composite));
  });
  NoteExtremes(cta, min_key, max_key);
  __syncthreads();
  const uint64_t high = Composite(scratch.max_key, 0);
  const uint64_t low = Composite(scratch.min_key, 0x7FFFFFFFu);
  const int shift = max(64 - __clzll(static_cast<long long>(high - low)) - kBinBits, 0);
  const auto bucket_of = [&](uint64_t composite) {
    return static_cast<uint32_t>((high - composite) >> shift);
  };
  for_each([&](uint32_t, uint64_t composite) {
    atomicAdd(&cta.bins()[bucket_of(composite)], 1u);
  });
  __syncthreads();
  const int first = threadIdx.x * kBinsPerThread;
  uint32_t inside[kBinsPerThread];
  uint32_t sum = 0;
  uint32_t most = 0;
#pragma unroll
  for (int j = 0; j < kBinsPerThread; ++j) {
    sum += inside[j] = cta.bins()[first + j];
    most = max(most, inside[j]);
  }
  most = __reduce_max_sync(kFullWarp, most);
  if ((threadIdx.x & 31) == 0) atomicMax(&scratch.count, most);
  uint32_t all;
  uint32_t begin = ExclusiveSum(sum, scratch.totals[0], &all);
#pragma unroll
  for (int j = 0; j < kBinsPerThread; ++j) {
    cta.bins()[first + j] = begin;
    begin += inside[j];
  }
  __syncthreads();

  if (scratch.count > kFewInBucket) {
    uint32_t size = 1;
    while (size < count) size *= 2;
    for (uint32_t i = count + threadIdx.x; i < size; i += kThreads) cta.list()[i] = 0;
    SortDescending(cta.list(), size);
    for_each([&](uint32_t i, uint64_t composite) { write(i, composite); });
    return;
  }

  // 2. Afterwards bins[b] is where bucket b ends and bucket b + 1 begins.
  for_each([&](uint32_t i, uint64_t composite) {
    cta.order()[atomicAdd(&cta.bins()[bucket_of(composite)], 1u)] =
        static_cast<uint16_t>(i);
  });
  __syncthreads();

  // 3.
  for (uint32_t slot = threadIdx.x; slot < count; slot += kThreads) {
    const uint64_t composite = cta.list()[cta.order()[slot]];
    const uint32_t bucket = bucket_of(composite);
    const uint32_t ends = cta.bins()[bucket];
    uint32_t rank = bucket == 0 ? 0 : cta.bins()[bucket - 1];
    for (uint32_t other = rank; other < ends; ++other) {
      rank += cta.list()[cta.order()[other]] > composite;
    }
    write(rank, composite);
  }
}

template <typename Bits>
__device__ RowEntries<Bits> EntriesOf(const TopKParams& params, int64_t row) {
  const Window window = RowWindow(params, row);
  return {static_cast<const Bits*>(params.scores) + row * params.n,
          {static_cast<uint32_t>(window.start), static_cast<uint32_t>(window.stop)}};
}

// Where the answer of a row goes.
template <typename Bits>
struct RowOutput {
  Bits* values;      // [k]
  int32_t* indices;  // [k]

  __device__ RowOutput(const TopKParams& params, int64_t row)
      : values(static_cast<Bits*>(params.values) + row * params.k),
        indices(params.indices + row * params.k) {}

  __device__ void operator()(uint32_t slot, uint64_t composite) const {
    values[slot] = ScoreBits<Bits>(CompositeKey(composite));
    indices[slot] = static_cast<int32_t>(CompositeColumn(composite));
  }
};

// Writes the answer of a row, in order: the survivors that reach `threshold` and the
// ties, `kept` together. Leaves the list in disarray.
template <typename Bits>
__device__ void EmitRow(const Cta& cta, const TopKParams& params, int64_t row,
                        uint32_t survivors, uint32_t ties, uint64_t threshold,
                        uint32_t kept) {
  const RowOutput<Bits> out(params, row);
  const ListEntries entries = {cta.list(), survivors};
  if (params.sorted) {
    if (survivors + ties > kept) {
      Compact(cta, entries, threshold, [&](uint32_t position, uint64_t composite) {
        cta.list()[position] = composite;
      });
    }
    ForEachByValue(cta, kept, out);
  } else if (ties > 0) {
    Merge(cta, survivors, ties, out);
  } else {
    Compact(cta, entries, threshold, out);
  }
}

// Turns the `kept` columns that were written into slots, if there is a page table. A pass
// of its own, since registers are dear where the columns are written.
template <typename Bits>
__device__ void EmitSlots(const TopKParams& params, int64_t row, uint32_t kept) {
  if (params.page_table == nullptr) return;
  __syncthreads();  // all columns are written
  const RowOutput<Bits> out(params, row);
  for (uint32_t i = threadIdx.x; i < kept; i += kThreads) {
    out.indices[i] = RowIndex(params, row, out.indices[i]);
  }
}

// Fills the slots beyond a window of `kept` columns.
template <typename Bits>
__device__ void EmitPadding(const TopKParams& params, int64_t row, uint32_t kept) {
  const RowOutput<Bits> out(params, row);
  for (uint32_t i = kept + threadIdx.x; i < params.k; i += kThreads) {
    out.values[i] = static_cast<Bits>(PadBits(params.type));
    out.indices[i] = -1;
  }
}

// The answer of a row. A barrier must follow before shared memory is used again.
//
// `chunk` is what this CTA reads of a row that it cannot load whole: all of it, unless
// it shares the row with others. Then `prepare()` is called early, while there is time,
// and `meet(&reduced)` hands over what the chunk was reduced to; it returns false if
// another CTA answers, and else leaves in the list and in `reduced` what the chunks of
// all were reduced to, and in the scratch the extremes of the keys.
template <typename Bits, typename Prepare, typename Meet>
__device__ void SelectRow(const Cta& cta, const TopKParams& params, int64_t row,
                          const RowEntries<Bits>& entries,
                          const RowEntries<Bits>& chunk, uint32_t max_samples,
                          Prepare&& prepare, Meet&& meet) {
  const uint32_t k = static_cast<uint32_t>(params.k);
  const uint32_t length = entries.Size();

  if (length <= k) {  // all of them
    if (params.sorted) {
      LoadChunk(cta, entries);
      EmitRow<Bits>(cta, params, row, length, 0, 0, length);
    } else {
      const RowOutput<Bits> out(params, row);
      for (uint32_t i = threadIdx.x; i < length; i += kThreads) {
        out(i, entries.Get(i));
      }
    }
    EmitPadding<Bits>(params, row, length);
    EmitSlots<Bits>(params, row, length);
    return;
  }

  Reduced reduced = {length, 0, false};
  if (length <= cta.capacity) {
    LoadChunk(cta, entries);
  } else {
    const Filter filter = SampleThreshold(cta, entries, k, max_samples, prepare);
    reduced = ReduceChunk(cta, chunk, k, filter);
    if (!meet(&reduced)) return;
    if (reduced.survivors + reduced.ties < k) {  // the sample was too high
      reduced = SelectExactly(cta, entries, k);
    }
  }
  uint64_t threshold = 0;
  if (reduced.ties == 0) {
    threshold = SelectInList(cta, reduced.survivors, k, entries.columns);
  }
  EmitRow<Bits>(cta, params, row, reduced.survivors, reduced.ties, threshold, k);
  EmitSlots<Bits>(params, row, k);
}

}  // namespace jax_topk
