// SPDX-License-Identifier: Apache-2.0
//
// What one CTA does with (a chunk of) a row. Shared by every CUDA kernel; nothing here
// knows of other CTAs.
//
// The idea: find a safe threshold from a sample, read the row once keeping what passes,
// select exactly among the few kept, put them in order.
//
//   SampleThreshold  a key that about 1.3 to 2 k columns of the row reach
//   ReduceChunk      one read: the survivors into shared memory. If the sample misled
//                    (more survive than fit), the exact select over the chunk itself
//   SelectThreshold  the exact select: the composite that exactly `rank` entries reach
//   EmitRow          the selected in their final order, and the padding
//
// Exactness never rests on the sample: a threshold decides only how many survive, and
// whoever counts fewer than k or more than fit takes the exact path over the scores.
//
// Plateaus. Many columns may equal the threshold (sums of ReLUs are often exactly 0). If
// the sample shows that they would not fit, the filter is strict: only larger keys
// survive, and the ties still missing are read off from the row's start, in column order,
// stopping as soon as there are enough.
//
// All functions are called by the whole CTA. Unless said otherwise they begin and end with
// nothing pending: shared memory that they return is visible to every thread.

#pragma once

#include <cstdint>
#include <cub/block/block_scan.cuh>

#include "top_k.h"

namespace jax_topk {

inline constexpr unsigned kFullWarp = 0xFFFFFFFFu;
// Entries of a bin that are ranked by comparing all pairs.
inline constexpr int kFewEntries = 256;
// Likewise for the selected columns of one bucket, by one thread each.
inline constexpr uint32_t kFewInBucket = 64;

// The shared memory of a CTA, carved out of its dynamic allocation in this order:
// scratch, bins, list, order (plan.h: SharedMemoryBytes).
template <int kThreads>
struct Cta {
  using Scan = cub::BlockScan<uint32_t, kThreads, cub::BLOCK_SCAN_WARP_SCANS>;

  struct Scratch {
    typename Scan::TempStorage scan;
    uint64_t composite;   // result of ranking few entries
    uint32_t bin;         // the bin where the wanted rank falls,
    uint32_t above;       // entries in larger bins,
    uint32_t inside;      // entries in it
    uint32_t count;       // entries appended to a list
    uint32_t min_key;     // of the entries appended
    uint32_t max_key;
    uint32_t flag;
  };
  static_assert(sizeof(Scratch) <= kScratchBytes);

  Scratch* scratch;
  uint32_t* bins;   // [kNumBins]
  uint64_t* list;   // [capacity] composites
  uint16_t* order;  // [k] positions in list
  uint32_t capacity;

  __device__ Cta(void* shared, uint32_t capacity_) : capacity(capacity_) {
    char* bytes = static_cast<char*>(shared);
    scratch = reinterpret_cast<Scratch*>(bytes);
    bins = reinterpret_cast<uint32_t*>(bytes + kScratchBytes);
    list = reinterpret_cast<uint64_t*>(bytes + kScratchBytes + 4 * kNumBins);
    order = reinterpret_cast<uint16_t*>(list + capacity);
  }
};

// Entries that the exact select can read: Get(i) is false where slot i holds none.

struct ListEntries {
  const uint64_t* list;
  uint32_t count;

  __device__ int64_t Size() const { return count; }
  __device__ bool Get(int64_t i, uint64_t* composite) const {
    *composite = list[i];
    return true;
  }
};

struct SampleEntries {
  const uint32_t* keys;
  uint32_t count;

  __device__ int64_t Size() const { return count; }
  __device__ bool Get(int64_t i, uint64_t* composite) const {
    *composite = Composite(keys[i], static_cast<uint32_t>(i));
    return true;
  }
};

template <typename Bits>
struct RowEntries {
  const Bits* row;  // column 0
  Window window;

  __device__ int64_t Size() const { return window.stop - window.start; }
  __device__ bool Get(int64_t i, uint64_t* composite) const {
    const int64_t column = window.start + i;
    *composite = Composite(OrderedKey<Bits>(__ldg(row + column)),
                           static_cast<uint32_t>(column));
    return true;
  }
};

// Calls f(valid, composite) for every slot; all threads of a warp call it together.
template <int kThreads, typename Entries, typename F>
__device__ __forceinline__ void ForEach(const Entries& entries, F&& f) {
  constexpr int kBatch = 4;  // loads in flight
  const int64_t size = entries.Size();
  for (int64_t base = 0; base < size; base += kBatch * kThreads) {
    uint64_t composite[kBatch];
    bool valid[kBatch];
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      const int64_t i = base + j * kThreads + threadIdx.x;
      composite[j] = 0;
      valid[j] = i < size && entries.Get(i, &composite[j]);
    }
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      if (base + j * kThreads < size) f(valid[j], composite[j]);
    }
  }
}

// bins[bin] += 1 for every valid thread. Entries of a plateau share a bin: the warp adds
// its first bin once, or the hardware would serialise 32 additions to one address.
__device__ __forceinline__ void CountInBins(uint32_t* bins, uint32_t bin, bool valid) {
  const unsigned active = __ballot_sync(kFullWarp, valid);
  if (active == 0) return;
  const int leader = __ffs(active) - 1;
  const uint32_t leader_bin = __shfl_sync(kFullWarp, bin, leader);
  const unsigned same = __ballot_sync(kFullWarp, valid && bin == leader_bin);
  if (!valid) return;
  if (bin != leader_bin) {
    atomicAdd(&bins[bin], 1u);
  } else if ((threadIdx.x & 31) == leader) {
    atomicAdd(&bins[bin], static_cast<uint32_t>(__popc(same)));
  }
}

// A position in a list for every valid thread: one addition to *count a warp.
__device__ __forceinline__ uint32_t Append(uint32_t* count, bool valid) {
  const unsigned mask = __ballot_sync(kFullWarp, valid);
  if (mask == 0) return 0;
  const unsigned lane = threadIdx.x & 31;
  uint32_t base = 0;
  if (lane == 0) base = atomicAdd(count, static_cast<uint32_t>(__popc(mask)));
  base = __shfl_sync(kFullWarp, base, 0);
  return base + __popc(mask & ((1u << lane) - 1));
}

template <int kThreads>
__device__ __forceinline__ void ClearBins(const Cta<kThreads>& cta) {
  for (int i = threadIdx.x; i < kNumBins; i += kThreads) cta.bins[i] = 0;
}

// Starts to collect the extremes of the keys that this CTA is going to meet. A barrier
// must follow before NoteExtremes.
template <int kThreads>
__device__ __forceinline__ void ResetExtremes(const Cta<kThreads>& cta) {
  if (threadIdx.x == 0) {
    cta.scratch->min_key = 0xFFFFFFFFu;
    cta.scratch->max_key = 0;
  }
}

template <int kThreads>
__device__ __forceinline__ void NoteExtremes(const Cta<kThreads>& cta, uint32_t min_key,
                                             uint32_t max_key) {
  min_key = __reduce_min_sync(kFullWarp, min_key);
  max_key = __reduce_max_sync(kFullWarp, max_key);
  if ((threadIdx.x & 31) == 0) {
    atomicMin(&cta.scratch->min_key, min_key);
    atomicMax(&cta.scratch->max_key, max_key);
  }
}

// The exact select: a composite that exactly `rank` entries reach.
//
// Requires 1 <= rank <= the entries within [low, high], no entry above high, no two equal
// entries, and every column within `columns`.
//
//   1. Count the entries within [low, high] in bins of equal width.
//   2. From the top, find the bin where the rank falls; it is the new [low, high]. Done if
//      all its entries are wanted.
//   3. Few entries in it: compare all pairs. Else again from 1.
//
// Each round narrows the range by a factor of kNumBins, so that 64 bits take seven rounds
// at worst and two in general; within one key the range is that of the columns.
template <int kThreads, typename Entries>
__device__ uint64_t SelectThreshold(const Cta<kThreads>& cta, const Entries& entries,
                                    uint32_t rank, uint64_t low, uint64_t high,
                                    Window columns) {
  constexpr int kBinBits = 10;
  static_assert(kNumBins == 1 << kBinBits);
  constexpr int kBinsPerThread = kNumBins / kThreads;
  typename Cta<kThreads>::Scratch& scratch = *cta.scratch;

  while (true) {
    // 1. `bins` is complete at the second barrier.
    const int shift = max(64 - __clzll(static_cast<long long>(high - low)) - kBinBits, 0);
    ClearBins(cta);
    __syncthreads();
    ForEach<kThreads>(entries, [&](bool valid, uint64_t composite) {
      valid = valid && composite >= low && composite <= high;
      CountInBins(cta.bins, static_cast<uint32_t>((composite - low) >> shift), valid);
    });
    __syncthreads();

    // 2. Thread t owns the t-th group of bins from the top.
    uint32_t inside[kBinsPerThread];
    uint32_t sum = 0;
    const int top = kNumBins - 1 - static_cast<int>(threadIdx.x) * kBinsPerThread;
#pragma unroll
    for (int j = 0; j < kBinsPerThread; ++j) sum += inside[j] = cta.bins[top - j];
    uint32_t above;
    typename Cta<kThreads>::Scan(scratch.scan).ExclusiveSum(sum, above);
#pragma unroll
    for (int j = 0; j < kBinsPerThread; ++j) {
      if (above < rank && rank <= above + inside[j]) {
        scratch.bin = top - j;
        scratch.above = above;
        scratch.inside = inside[j];
        scratch.count = 0;
      }
      above += inside[j];
    }
    __syncthreads();
    const uint32_t found = scratch.inside;
    rank -= scratch.above;
    low += static_cast<uint64_t>(scratch.bin) << shift;
    const uint64_t width = (uint64_t{1} << shift) - 1;
    if (high - low > width) high = low + width;
    if (found == rank) return low;
    if (CompositeKey(low) == CompositeKey(high)) {
      const uint32_t key = CompositeKey(low);
      low = max(low, Composite(key, static_cast<uint32_t>(columns.stop - 1)));
      high = min(high, Composite(key, static_cast<uint32_t>(columns.start)));
    }

    // 3. The bins have been read (barrier above) and their memory holds the few.
    if (found <= kFewEntries) {
      uint64_t* few = reinterpret_cast<uint64_t*>(cta.bins);
      static_assert(kFewEntries * sizeof(uint64_t) <= kNumBins * sizeof(uint32_t));
      ForEach<kThreads>(entries, [&](bool valid, uint64_t composite) {
        if (valid && composite >= low && composite <= high) {
          few[atomicAdd(&scratch.count, 1u)] = composite;
        }
      });
      __syncthreads();
      constexpr int kGroup = kThreads / kFewEntries;  // threads that rank one entry
      const uint32_t mine = threadIdx.x / kGroup;
      const uint64_t composite = mine < found ? few[mine] : 0;
      uint32_t larger = 0;
      for (uint32_t j = threadIdx.x % kGroup; j < found; j += kGroup) {
        larger += few[j] > composite;
      }
#pragma unroll
      for (int lane = 1; lane < kGroup; lane *= 2) {
        larger += __shfl_xor_sync(kFullWarp, larger, lane);
      }
      if (mine < found && larger == rank - 1 && threadIdx.x % kGroup == 0) {
        scratch.composite = composite;
      }
      __syncthreads();
      return scratch.composite;
    }
  }
}

// Appends the entries that reach `threshold` to the empty list; the caller knows that they
// fit. Ends with a barrier.
template <int kThreads, typename Entries>
__device__ void Collect(const Cta<kThreads>& cta, const Entries& entries,
                        uint64_t threshold) {
  if (threadIdx.x == 0) cta.scratch->count = 0;
  __syncthreads();
  ForEach<kThreads>(entries, [&](bool valid, uint64_t composite) {
    valid = valid && composite >= threshold;
    const uint32_t position = Append(&cta.scratch->count, valid);
    if (valid) cta.list[position] = composite;
  });
  __syncthreads();
}

// The k largest of a chunk, without a sample, in as many reads as it takes.
template <int kThreads, typename Bits>
__device__ void SelectExactly(const Cta<kThreads>& cta, const RowEntries<Bits>& chunk,
                              uint32_t k) {
  const uint64_t threshold =
      SelectThreshold(cta, chunk, k, 0, ~uint64_t{0}, chunk.window);
  Collect(cta, chunk, threshold);
}

// Every column of a chunk that fits, into the list; notes the extremes.
template <int kThreads, typename Bits>
__device__ void LoadChunk(const Cta<kThreads>& cta, const RowEntries<Bits>& chunk) {
  constexpr int kBatch = 8;  // loads in flight
  const int size = static_cast<int>(chunk.Size());
  const Bits* scores = chunk.row + chunk.window.start;
  const uint32_t start = static_cast<uint32_t>(chunk.window.start);
  ResetExtremes(cta);
  __syncthreads();
  uint32_t min_key = 0xFFFFFFFFu;
  uint32_t max_key = 0;
  for (int base = 0; base < size; base += kBatch * kThreads) {
    Bits bits[kBatch];
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      const int i = base + j * kThreads + threadIdx.x;
      if (i < size) bits[j] = __ldg(scores + i);
    }
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      const int i = base + j * kThreads + threadIdx.x;
      if (i < size) {
        const uint32_t key = OrderedKey<Bits>(bits[j]);
        min_key = min(min_key, key);
        max_key = max(max_key, key);
        cta.list[i] = Composite(key, start + i);
      }
    }
  }
  NoteExtremes(cta, min_key, max_key);
  __syncthreads();
}

// What passes the filter: keys above `floor`. If `strict`, columns whose key is `floor`
// itself count as ties; else they are of no interest.
struct Filter {
  uint32_t floor;
  bool strict;
};

// A filter that about 1.3 to 2 k columns of a row pass. The same in every CTA that asks:
// it depends on the row, its window and the capacity only.
//
// Requires columns > capacity >= k. At least `rank` of the samples reach the threshold, and
// rank exceeds what k columns would put there on average by five standard deviations.
template <int kThreads, typename Bits>
__device__ Filter SampleThreshold(const Cta<kThreads>& cta, const RowEntries<Bits>& row,
                                  uint32_t k, uint32_t max_samples) {
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
  samples = 1u << (31 - __clz(samples));
  const int log_samples = 31 - __clz(samples);
  const uint32_t rank = min(static_cast<uint32_t>(rank_among(samples)), samples);

  // 2. One column from each of `samples` equal parts of the row, at a place within the
  //    part that a hash of its number gives: no stride that a pattern could meet.
  uint32_t* keys = reinterpret_cast<uint32_t*>(cta.list);
  ResetExtremes(cta);
  if (threadIdx.x == 0) cta.scratch->count = 0;
  __syncthreads();
  uint32_t min_key = 0xFFFFFFFFu;
  uint32_t max_key = 0;
  const uint64_t size = row.Size();
#pragma unroll 4
  for (uint32_t i = threadIdx.x; i < samples; i += kThreads) {
    const uint64_t jitter = (i * 2654435761u) >> 16;
    const uint64_t column =
        row.window.start + ((i * size + (jitter * size >> 16)) >> log_samples);
    const uint32_t key = OrderedKey<Bits>(__ldg(row.row + column));
    min_key = min(min_key, key);
    max_key = max(max_key, key);
    keys[i] = key;
  }
  NoteExtremes(cta, min_key, max_key);
  __syncthreads();

  // 3. The threshold, and how many samples reach it.
  const SampleEntries entries = {keys, samples};
  const uint64_t low = Composite(cta.scratch->min_key, 0xFFFFFFFFu);
  const uint64_t high = Composite(cta.scratch->max_key, 0);
  const uint32_t threshold = CompositeKey(
      SelectThreshold(cta, entries, rank, low, high, {0, static_cast<int64_t>(samples)}));
  if (threadIdx.x == 0) cta.scratch->count = 0;
  __syncthreads();
  uint32_t reached = 0;
  for (uint32_t i = threadIdx.x; i < samples; i += kThreads) {
    reached += keys[i] >= threshold;
  }
  reached = __reduce_add_sync(kFullWarp, reached);
  if ((threadIdx.x & 31) == 0) atomicAdd(&cta.scratch->count, reached);
  __syncthreads();
  reached = cta.scratch->count;
  // Nobody appends before everybody has read: ReduceChunk begins with a barrier.

  // 4. The samples beyond `rank` that reach the threshold all equal it. If so many columns
  //    would not fit, leave them out.
  const bool strict =
      threshold == 0 ||
      (reached > rank &&
       columns_for(static_cast<float>(reached), samples) > cta.capacity);
  return {strict ? threshold : threshold - 1, strict};
}

// Appends the columns of a chunk whose key exceeds `floor` to the list, from position 0;
// scratch->count counts all of them, those beyond the capacity are dropped. Notes the
// extremes. Ends with a barrier.
template <int kThreads, typename Bits>
__device__ void FilterChunk(const Cta<kThreads>& cta, const RowEntries<Bits>& chunk,
                            uint32_t floor) {
  constexpr int kPerVector = 16 / sizeof(Bits);
  constexpr int kUnroll = 4;  // vectors in flight
  constexpr int kPerThread = kUnroll * kPerVector;
  static_assert(kPerThread <= 32, "the passing columns of a thread are a bit mask");
  constexpr int64_t kTile = int64_t{kThreads} * kUnroll;

  if (threadIdx.x == 0) cta.scratch->count = 0;
  ResetExtremes(cta);
  __syncthreads();

  const unsigned lane = threadIdx.x & 31;
  uint32_t max_key = 0;
  // The columns column(0), column(1), ... of the set bits of `passing`, in every lane.
  const auto append = [&](uint32_t passing, auto column) {
    if (!__any_sync(kFullWarp, passing != 0)) return;
    const uint32_t mine = __popc(passing);
    uint32_t sum = mine;
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      const uint32_t other = __shfl_up_sync(kFullWarp, sum, distance);
      if (lane >= distance) sum += other;
    }
    uint32_t base = 0;
    if (lane == 31) base = atomicAdd(&cta.scratch->count, sum);
    uint32_t position = __shfl_sync(kFullWarp, base, 31) + sum - mine;
    while (passing != 0) {
      const int bit = __ffs(passing) - 1;
      passing &= passing - 1;
      // Read again (from L1): a register array cannot be indexed by `bit`.
      const int64_t at = column(bit);
      const uint32_t key = OrderedKey<Bits>(__ldg(chunk.row + at));
      max_key = max(max_key, key);
      if (position < cta.capacity) {
        cta.list[position] = Composite(key, static_cast<uint32_t>(at));
      }
      ++position;
    }
  };

  // The chunk as 16-byte vectors between a head and a tail of less than a vector each.
  const Bits* first = chunk.row + chunk.window.start;
  const int64_t size = chunk.Size();
  const int64_t misaligned =
      static_cast<int64_t>(reinterpret_cast<uintptr_t>(first) / sizeof(Bits) % kPerVector);
  const int64_t head = min((kPerVector - misaligned) % kPerVector, size);
  const int64_t num_vectors = (size - head) / kPerVector;
  const int64_t tail = head + num_vectors * kPerVector;  // its first column
  const uint4* vectors = reinterpret_cast<const uint4*>(first + head);

  for (int64_t base = 0; base < num_vectors; base += kTile) {
    uint4 loaded[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int64_t i = base + u * kThreads + threadIdx.x;
      loaded[u] = make_uint4(0, 0, 0, 0);
      if (i < num_vectors) loaded[u] = __ldg(vectors + i);
    }
    uint32_t passing = 0;
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const uint32_t words[4] = {loaded[u].x, loaded[u].y, loaded[u].z, loaded[u].w};
      uint32_t of_vector = 0;
#pragma unroll
      for (int e = 0; e < kPerVector; ++e) {
        uint32_t key;
        if constexpr (sizeof(Bits) == 4) {
          key = OrderedKey<Bits>(words[e]);
        } else {
          key = OrderedKey<Bits>(static_cast<Bits>(words[e / 2] >> (16 * (e % 2))));
        }
        of_vector |= (key > floor ? 1u : 0u) << e;
      }
      if (base + u * kThreads + threadIdx.x < num_vectors) {
        passing |= of_vector << (u * kPerVector);
      }
    }
    append(passing, [&](int bit) {
      const int64_t vector = base + (bit / kPerVector) * kThreads + threadIdx.x;
      return chunk.window.start + head + vector * kPerVector + bit % kPerVector;
    });
  }
  // Head and tail together have fewer than 32 columns: one a lane of the first warp.
  if (threadIdx.x < 32) {
    const int64_t offset = lane < head ? lane : tail + (lane - head);
    const bool inside = offset < size;
    const bool passes =
        inside && OrderedKey<Bits>(__ldg(first + offset)) > floor;
    append(passes ? 1u : 0u, [&](int) { return chunk.window.start + offset; });
  }
  NoteExtremes(cta, 0xFFFFFFFFu, max_key);
  __syncthreads();
}

// Appends the first `wanted` columns of a chunk whose key is `key`, in column order, to the
// list from position `at`. Returns how many there were.
template <int kThreads, typename Bits>
__device__ uint32_t CollectTies(const Cta<kThreads>& cta, const RowEntries<Bits>& chunk,
                                uint32_t key, uint32_t wanted, uint32_t at) {
  constexpr int kPerThread = 8;  // neighbouring columns
  uint32_t found = 0;
  for (int64_t base = chunk.window.start; base < chunk.window.stop && found < wanted;
       base += kThreads * kPerThread) {
    const int64_t first = base + threadIdx.x * kPerThread;
    uint32_t ties = 0;
#pragma unroll
    for (int j = 0; j < kPerThread; ++j) {
      const bool inside = first + j < chunk.window.stop;
      if (inside && OrderedKey<Bits>(__ldg(chunk.row + first + j)) == key) ties |= 1u << j;
    }
    uint32_t position;
    uint32_t total;
    typename Cta<kThreads>::Scan(cta.scratch->scan)
        .ExclusiveSum(static_cast<uint32_t>(__popc(ties)), position, total);
    position += found;
    for (; ties != 0 && position < wanted; ties &= ties - 1, ++position) {
      cta.list[at + position] =
          Composite(key, static_cast<uint32_t>(first + __ffs(ties) - 1));
    }
    found += total;
    __syncthreads();  // the scan's storage is used again
  }
  return min(found, wanted);
}

// What ReduceChunk leaves in the list: `survivors` composites, then `ties` in column order.
struct Reduced {
  uint32_t survivors;
  uint32_t ties;
};

// One read of a chunk. Whatever belongs to the k largest of the row is in the list, if at
// least k columns of the row pass the filter (or, if it is strict, reach its floor):
//   - all survivors of the chunk if they fit, or exactly its own k largest;
//   - fewer than k survivors and a strict filter: the first ties, up to k together.
template <int kThreads, typename Bits>
__device__ Reduced ReduceChunk(const Cta<kThreads>& cta, const RowEntries<Bits>& chunk,
                               uint32_t k, Filter filter) {
  __syncthreads();
  FilterChunk(cta, chunk, filter.floor);
  const uint32_t survivors = cta.scratch->count;
  __syncthreads();  // count has been read by all
  if (survivors > cta.capacity) {
    SelectExactly(cta, chunk, k);
    return {k, 0};
  }
  uint32_t ties = 0;
  if (filter.strict && survivors < k) {
    ties = CollectTies(cta, chunk, filter.floor, k - survivors, survivors);
  }
  return {survivors, ties};
}

// The composite that exactly k of the list's `count` >= k entries reach, none of which has
// a key below `min_key` or above `max_key`.
template <int kThreads>
__device__ uint64_t SelectInList(const Cta<kThreads>& cta, uint32_t count, uint32_t k,
                                 uint32_t min_key, uint32_t max_key, Window columns) {
  if (count == k) return 0;
  return SelectThreshold(cta, ListEntries{cta.list, count}, k,
                         Composite(min_key, 0xFFFFFFFFu), Composite(max_key, 0), columns);
}

// Sorts list[0 .. size), size a power of two, in descending order: a bitonic network, the
// same time for every input. Ends with a barrier.
template <int kThreads>
__device__ void SortDescending(uint64_t* list, uint32_t size) {
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

// Moves the entries that reach `threshold` to the front of the list, zeros up to `size`,
// and sorts. `by_column`: swaps the halves of a composite, so that the order is that of
// the columns.
template <int kThreads>
__device__ void SortSelected(const Cta<kThreads>& cta, uint32_t count, uint64_t threshold,
                             uint32_t kept, bool by_column) {
  const auto turned = [by_column](uint64_t x) { return by_column ? x << 32 | x >> 32 : x; };
  if (threadIdx.x == 0) cta.scratch->count = 0;
  __syncthreads();
  for (uint32_t base = 0; base < count; base += kThreads) {
    const uint32_t i = base + threadIdx.x;
    const uint64_t composite = i < count ? cta.list[i] : 0;
    const bool selected = i < count && composite >= threshold;
    __syncthreads();  // read before overwritten: never more were appended than read
    const uint32_t position = Append(&cta.scratch->count, selected);
    if (selected) cta.list[position] = turned(composite);
  }
  __syncthreads();
  uint32_t size = 1;
  while (size < kept) size *= 2;
  for (uint32_t i = kept + threadIdx.x; i < size; i += kThreads) cta.list[i] = 0;
  SortDescending<kThreads>(cta.list, size);
}

// Where the answer of a row goes.
template <typename Bits>
struct RowOutput {
  Bits* values;      // [k]
  int32_t* indices;  // [k]

  __device__ RowOutput(const TopKParams& params, int64_t row)
      : values(static_cast<Bits*>(params.values) + row * params.k),
        indices(params.indices + row * params.k) {}

  __device__ void Write(uint32_t slot, uint32_t key, uint32_t column) const {
    values[slot] = ScoreBits<Bits>(key);
    indices[slot] = static_cast<int32_t>(column);
  }
};

// Fills the slots beyond a window of `kept` columns.
template <int kThreads, typename Bits>
__device__ void EmitPadding(const TopKParams& params, int64_t row, uint32_t kept) {
  const RowOutput<Bits> out(params, row);
  for (uint32_t i = kept + threadIdx.x; i < params.k; i += kThreads) {
    out.values[i] = static_cast<Bits>(PadBits(params.type));
    out.indices[i] = -1;
  }
}

// Writes the answer of a row: the `kept` entries among list[0 .. count) that reach
// `threshold`, in order. Leaves the list in disarray.
//
// Index order without a sort: count the selected in kNumBins buckets of neighbouring
// columns; sum up; scatter their list positions by bucket; rank each within its bucket.
// Crowded buckets are sorted instead, which takes longer but always the same.
template <int kThreads, typename Bits>
__device__ void EmitRow(const Cta<kThreads>& cta, const TopKParams& params, int64_t row,
                        Window window, uint32_t count, uint64_t threshold, uint32_t kept) {
  const RowOutput<Bits> out(params, row);
  if (params.sorted) {
    SortSelected(cta, count, threshold, kept, /*by_column=*/false);
    for (uint32_t i = threadIdx.x; i < kept; i += kThreads) {
      out.Write(i, CompositeKey(cta.list[i]), CompositeColumn(cta.list[i]));
    }
    return;
  }

  constexpr int kBinBits = 10;
  constexpr int kBinsPerThread = kNumBins / kThreads;
  const uint32_t width = static_cast<uint32_t>(window.stop - window.start);
  const int shift = max(32 - __clz(static_cast<int>(width - 1)) - kBinBits, 0);
  const auto bucket_of = [&](uint64_t composite) {
    return (CompositeColumn(composite) - static_cast<uint32_t>(window.start)) >> shift;
  };
  ClearBins(cta);
  if (threadIdx.x == 0) cta.scratch->count = 0;
  __syncthreads();
  ForEach<kThreads>(ListEntries{cta.list, count}, [&](bool valid, uint64_t composite) {
    CountInBins(cta.bins, bucket_of(composite), valid && composite >= threshold);
  });
  __syncthreads();

  // bins[b]: where bucket b begins; scratch->count: the most crowded.
  const int first = threadIdx.x * kBinsPerThread;
  uint32_t inside[kBinsPerThread];
  uint32_t sum = 0;
  uint32_t most = 0;
#pragma unroll
  for (int j = 0; j < kBinsPerThread; ++j) {
    sum += inside[j] = cta.bins[first + j];
    most = max(most, inside[j]);
  }
  uint32_t begin;
  typename Cta<kThreads>::Scan(cta.scratch->scan).ExclusiveSum(sum, begin);
#pragma unroll
  for (int j = 0; j < kBinsPerThread; ++j) {
    cta.bins[first + j] = begin;
    begin += inside[j];
  }
  most = __reduce_max_sync(kFullWarp, most);
  if ((threadIdx.x & 31) == 0) atomicMax(&cta.scratch->count, most);
  __syncthreads();

  if (cta.scratch->count > kFewInBucket) {
    __syncthreads();  // count has been read by all
    SortSelected(cta, count, threshold, kept, /*by_column=*/true);
    for (uint32_t i = threadIdx.x; i < kept; i += kThreads) {
      const uint64_t turned = cta.list[i];
      out.Write(i, static_cast<uint32_t>(turned), ~static_cast<uint32_t>(turned >> 32));
    }
    return;
  }

  for (uint32_t i = threadIdx.x; i < count; i += kThreads) {
    const uint64_t composite = cta.list[i];
    if (composite >= threshold) {
      cta.order[atomicAdd(&cta.bins[bucket_of(composite)], 1u)] = static_cast<uint16_t>(i);
    }
  }
  __syncthreads();
  // Now bins[b] is where bucket b ends and bucket b + 1 begins.
  for (uint32_t slot = threadIdx.x; slot < kept; slot += kThreads) {
    const uint64_t composite = cta.list[cta.order[slot]];
    const uint32_t bucket = bucket_of(composite);
    const uint32_t begins = bucket == 0 ? 0 : cta.bins[bucket - 1];
    const uint32_t ends = cta.bins[bucket];
    uint32_t rank = begins;
    for (uint32_t other = begins; other < ends; ++other) {
      rank += CompositeColumn(cta.list[cta.order[other]]) < CompositeColumn(composite);
    }
    out.Write(rank, CompositeKey(composite), CompositeColumn(composite));
  }
}

// The whole answer of a row by one CTA. Ends with nothing pending but the next row's use
// of shared memory: a barrier must follow.
template <int kThreads, typename Bits>
__device__ void SelectRow(const Cta<kThreads>& cta, const TopKParams& params, int64_t row,
                          Window window, uint32_t max_samples) {
  const uint32_t k = static_cast<uint32_t>(params.k);
  const int64_t length = window.stop - window.start;
  const RowEntries<Bits> entries = {
      static_cast<const Bits*>(params.scores) + row * params.n, window};

  if (length <= k) {  // all of them
    const uint32_t kept = static_cast<uint32_t>(length);
    if (params.sorted) {
      LoadChunk(cta, entries);
      EmitRow<kThreads, Bits>(cta, params, row, window, kept, 0, kept);
    } else {
      const RowOutput<Bits> out(params, row);
      for (uint32_t i = threadIdx.x; i < kept; i += kThreads) {
        const uint32_t column = static_cast<uint32_t>(window.start) + i;
        out.Write(i, OrderedKey<Bits>(__ldg(entries.row + column)), column);
      }
    }
    EmitPadding<kThreads, Bits>(params, row, kept);
    return;
  }

  uint32_t count;
  uint32_t min_key;
  if (length <= cta.capacity) {
    LoadChunk(cta, entries);
    count = static_cast<uint32_t>(length);
    min_key = cta.scratch->min_key;
  } else {
    const Filter filter = SampleThreshold(cta, entries, k, max_samples);
    const Reduced reduced = ReduceChunk(cta, entries, k, filter);
    count = reduced.survivors + reduced.ties;
    if (count < k) {  // the sample was too high
      SelectExactly(cta, entries, k);
      count = k;
    }
    min_key = filter.floor;
  }
  const uint64_t threshold =
      SelectInList(cta, count, k, min_key, cta.scratch->max_key, window);
  EmitRow<kThreads, Bits>(cta, params, row, window, count, threshold, k);
}

}  // namespace jax_topk
