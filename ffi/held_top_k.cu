// SPDX-License-Identifier: Apache-2.0
//
// `cluster`, where the registers of a cluster hold a row: each CTA has a chunk of it, and
// selects what is its part of the answer. No sample, no filter, no list of survivors.
//
// Protocol of the kernel, one row a cluster:
//   1. The CTAs cut the row's window into chunks of equal size. A row that one CTA can keep
//      whole is the leader's alone: it answers and nobody meets.
//   2. Each CTA loads its chunk, and a few words of the row, the same in all CTAs, of which
//      a range is guessed in which the k-th largest may be.
//   3. Each counts its chunk in bins over that range, and sends the bins to all. Now all know
//      the bin of the k-th largest, and how many columns each of the others has above it
//      and in it.
//   4. If few are in the bin, all send them to all, and each CTA compares them. If many are,
//      all send the extremes of their keys in it to all, and count again, in bins of keys
//      between those, until few are left, or all are equal: then the first columns count.
//   5. Each CTA has marked what is selected of its chunk, and knows how many columns are
//      selected in the chunks before. It writes its part of the answer. If the answer is
//      by value, it sends it to the leader instead, who sorts.
// All that is sent goes to mailboxes (cluster.cuh). Three of them: two in turns for what all
// send to all, and one of the leader for the answer.
//
// Why it holds.
//   - All CTAs of a cluster are resident together, so they may wait for each other; and what
//     each of them sends and expects agrees, since it depends on the row's window, and on
//     bins and extremes that all have.
//   - Nobody sends to a CTA before it has its mailboxes (barrier 0), nor after it has ended:
//     it has had from all whatever all send to all, and the leader awaits the answer.
//   - No phase is completed by what belongs to another, and nothing is overwritten that is
//     still read. Bins are sent in every other turn at most, and so are extremes and few
//     words. What all send in turn t + 2 goes where that of turn t went; but whoever sends
//     it has had that of turn t + 1 from all, and each sends that behind a barrier, when
//     all its threads have read what came in turn t. The leader's list is written by others
//     behind its own columns, when it has sent what they needed to know their place; the
//     ties that it counts there are no more than its own columns.

#include <cooperative_groups.h>

#include "cluster.cuh"

namespace jax_topk {
namespace {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

// Words that are ranked by comparing all pairs.
constexpr uint32_t kFewOfCluster = 64;

// What a CTA has from all CTAs of its cluster, and what it makes of it. Behind the list.
struct Shared {
  uint64_t few[kFewOfCluster];       // from all: composites
  uint64_t own_few[kFewOfCluster];   // those of this CTA
  uint64_t ranges[kMaxClusterSize];  // from all: extremes of keys
  uint32_t ranks[kFewOfCluster];     // of the few
  uint32_t above[kMaxClusterSize];   // of each CTA: words above the bin,
  uint32_t inside[kMaxClusterSize];  // and in it
};
static_assert(sizeof(Shared) <= kExchangeScratchBytes);

// A bin where the k-th largest of a row is: words above it, and in it.
struct Found {
  uint32_t bin = 0;
  uint32_t above = 0;
  uint32_t inside = 0;
};

// All send to all, again and again: what the CTAs of a cluster exchange.
struct Exchange {
  uint32_t mine;
  uint32_t size;
  uint32_t shared;  // the offset of Shared in shared memory
  uint32_t met = 0;

  __device__ Exchange(const Cta& cta, uint32_t mine_, uint32_t size_)
      : mine(mine_), size(size_) {
    const uint32_t list = static_cast<uint32_t>(kScratchBytes + 4 * kNumBins);
    shared = (list + 8 * cta.capacity + 15) & ~15u;
  }

  __device__ Shared& Memory() const {
    return *reinterpret_cast<Shared*>(dynamic_shared_memory + shared);
  }

  // The bins that are counted: the fewer the more there is to send.
  __device__ int LogBins() const {
    return KeyBins::kLogBins - (size > kMostWithAllBins ? 1 : 0);
  }
  __device__ uint32_t NumBins() const { return 1u << LogBins(); }
  // Those of all, [size][NumBins()], each with 16 bits.
  __device__ uint16_t* Bins() const {
    char* bins = dynamic_shared_memory + shared + kExchangeScratchBytes;
    return reinterpret_cast<uint16_t*>(bins);
  }

  // The mailbox whose turn it is, told to wait for `bytes`.
  struct Turn {
    uint32_t mailbox;
    uint32_t parity;

    __device__ void Wait() const { Await(mailbox, parity); }
  };
  __device__ Turn Next(const Cta& cta, uint32_t bytes) {
    const Turn turn = {SharedAddress(&cta.scratch().mailboxes[met & 1]), met >> 1 & 1};
    ++met;
    if (threadIdx.x == 0) Expect(turn.mailbox, bytes);
    return turn;
  }

  // The bins of all, when all threads of this CTA have counted.
  __device__ const uint16_t* ShareBins(const Cta& cta) {
    const Turn turn = Next(cta, size * NumBins() * sizeof(uint16_t));
    __syncthreads();
    const uint32_t vectors = NumBins() / 8;  // of eight bins
    const uint32_t vector = threadIdx.x & (vectors - 1);
    const uint4* bins = reinterpret_cast<const uint4*>(cta.bins()) + 2 * vector;
    const uint4 low = bins[0];
    const uint4 high = bins[1];
    const uint4 packed = make_uint4(low.x | low.y << 16, low.z | low.w << 16,
                                    high.x | high.y << 16, high.z | high.w << 16);
    uint16_t* all = Bins();
    const uint32_t to = SharedAddress(all + mine * NumBins() + 8 * vector);
    for (uint32_t first = threadIdx.x - vector; first < size * vectors;
         first += kThreads) {
      // Not all to one.
      const uint32_t rank = ((first >> (LogBins() - 3)) + mine) & (size - 1);
      Send(AddressIn(rank, to), packed, AddressIn(rank, turn.mailbox));
    }
    turn.Wait();
    return all;
  }

  // The extremes of the keys of all CTAs, of which this one has [min_key, max_key].
  __device__ void ShareExtremes(const Cta& cta, uint32_t* min_key, uint32_t* max_key) {
    const Turn turn = Next(cta, size * sizeof(uint64_t));
    uint64_t* ranges = Memory().ranges;
    const uint32_t lane = threadIdx.x & 31;
    if (threadIdx.x < size) {
      Send(AddressIn(threadIdx.x, SharedAddress(&ranges[mine])),
           static_cast<uint64_t>(*max_key) << 32 | *min_key,
           AddressIn(threadIdx.x, turn.mailbox));
    }
    turn.Wait();
    const uint64_t range = ranges[lane & (size - 1)];
    *min_key = __reduce_min_sync(kFullWarp, static_cast<uint32_t>(range));
    *max_key = __reduce_max_sync(kFullWarp, static_cast<uint32_t>(range >> 32));
  }

  // `count` composites, `before` behind those of earlier CTAs, to all: all `sum` of them.
  __device__ void ShareFew(const Cta& cta, uint32_t before, uint32_t count,
                           uint32_t sum) {
    const Turn turn = Next(cta, sum * sizeof(uint64_t));
    const uint32_t i = threadIdx.x % kFewOfCluster;
    if (i < count) {
      const uint64_t one = Memory().own_few[i];
      const uint32_t to = SharedAddress(&Memory().few[before + i]);
      for (uint32_t rank = threadIdx.x / kFewOfCluster; rank < size;
           rank += kThreads / kFewOfCluster) {
        Send(AddressIn(rank, to), one, AddressIn(rank, turn.mailbox));
      }
    }
    turn.Wait();
  }

  // Compares each of `inside` <= kFewOfCluster composites from all with all others. One
  // barrier.
  __device__ void RankFew(uint32_t inside) const {
    constexpr uint32_t kTeam = kThreads / kFewOfCluster;  // threads for each
    const Shared& memory = Memory();
    const uint32_t one = threadIdx.x / kTeam;
    if (threadIdx.x / 32 * (32 / kTeam) < inside) {
      const uint64_t composite = memory.few[one];
      uint32_t rank = 0;
#pragma unroll 1
      for (uint32_t other = threadIdx.x % kTeam; other < inside; other += kTeam) {
        rank += memory.few[other] > composite ? 1 : 0;
      }
#pragma unroll
      for (uint32_t distance = 1; distance < kTeam; distance *= 2) {
        rank += __shfl_xor_sync(kFullWarp, rank, distance);
      }
      if (threadIdx.x % kTeam == 0) Memory().ranks[one] = rank;
    }
    __syncthreads();
  }
  // How many of those from `first` to `stop` are among the `wanted` largest.
  __device__ uint32_t SelectedFew(uint32_t first, uint32_t stop,
                                  uint32_t wanted) const {
    uint32_t selected = 0;
#pragma unroll 1
    for (uint32_t i = first + (threadIdx.x & 31); __any_sync(kFullWarp, i < stop);
         i += 32) {
      const bool is = i < stop && Memory().ranks[i] < wanted;
      selected += __popc(__ballot_sync(kFullWarp, is));
    }
    return selected;
  }

  // The bin where the k-th largest of all falls, of the words that this CTA and the others
  // have counted in their bins. `found`: the bin that was found before and that they were
  // counted in anew, or {}.
  __device__ Found Find(const Cta& cta, uint32_t k, Found found) {
    const uint32_t lane = threadIdx.x & 31;
    const uint32_t warp = threadIdx.x / 32;
    const uint32_t num_bins = NumBins();
    const uint16_t* bins = ShareBins(cta);
    uint2 pair = make_uint2(0, 0);
    const bool one = num_bins < kNumBins;  // a bin for each thread, else two
#pragma unroll 4
    for (uint32_t i = 0; i < size; ++i) {
      const uint16_t* of_it = bins + i * num_bins;
      const uint32_t word =
          one ? of_it[PairOfBins()]
              : reinterpret_cast<const uint32_t*>(of_it)[PairOfBins()];
      pair.x += word & 0xFFFF;
      pair.y += word >> 16;
    }
    Bin bin = FindBin(cta, k - found.above, pair);
    if (one) bin.index /= 2;
    // Each warp looks at the bins of one CTA. Their sums have 16 bits too.
    static_assert(kMaxHeldColumns * kThreads < 1 << 16 && kMaxClusterSize <= kWarps);
    if (warp < size) {
      const uint32_t at = bin.index / 2;  // the word where it is
      const uint16_t* of_it = bins + warp * num_bins;
      uint32_t sums = 0;
#pragma unroll 1
      for (uint32_t i = lane; i < num_bins / 8; i += 32) {
        const uint4 four = reinterpret_cast<const uint4*>(of_it)[i];
        sums += 4 * i > at ? four.x : 0;
        sums += 4 * i + 1 > at ? four.y : 0;
        sums += 4 * i + 2 > at ? four.z : 0;
        sums += 4 * i + 3 > at ? four.w : 0;
      }
      sums = __reduce_add_sync(kFullWarp, sums);
      if (lane == 0) {
        uint32_t above = (sums & 0xFFFF) + (sums >> 16);
        if (bin.index % 2 == 0) above += of_it[bin.index + 1];
        if (found.inside > 0) above += Memory().above[warp];
        Memory().above[warp] = above;
        Memory().inside[warp] = of_it[bin.index];
      }
    }
    return {bin.index, found.above + bin.above, bin.inside};
  }
};

// A row that the registers of a cluster hold ------------------------------------------

// The columns of a chunk, in the registers of a CTA: kColumns of each thread, in tiles.
template <typename Bits, int kColumns>
struct Tiles {
  static constexpr int kOfTile = kColumns < 16 ? kColumns : 16;
  static constexpr int kTiles = kColumns / kOfTile;
  static constexpr uint32_t kOfWarp = 32 * kOfTile;  // columns of a tile

  Tile<Bits, kOfTile> tiles[kTiles];
  Columns columns;
  uint32_t start;  // of the row

  __device__ __forceinline__ void Load(const Vectors<Bits>& from) {
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      tiles[t].Load(from, t * Tile<Bits, kOfTile>::kTileVectors);
    }
  }
  __device__ __forceinline__ void Mask(const Vectors<Bits>& from) {
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      tiles[t].Mask(from, t * Tile<Bits, kOfTile>::kTileVectors);
    }
  }

  __device__ uint32_t Start() const { return start; }
  __device__ uint32_t ColumnAt(int i) const {
    return tiles[0].ColumnAt(i % kOfTile) + i / kOfTile * kThreads * kOfTile;
  }
  __device__ uint32_t WordAt(int i) const {
    uint32_t word = tiles[0].WordAt(i % kOfTile);
    if (kTiles > 1 && i >= kOfTile) word = tiles[kTiles - 1].WordAt(i % kOfTile);
    return word;
  }

  // f(word) for all words, of which only those of Valid() count.
  static constexpr int kCount = kColumns;
  template <typename F>
  __device__ __forceinline__ void ForAll(F&& f) const {
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
#pragma unroll
      for (int i = 0; i < kOfTile; ++i) {
        constexpr int kPerVector = Tile<Bits, kOfTile>::kPerVector;
        f(ValueBins::Any(tiles[t].Word(i / kPerVector, i % kPerVector)));
      }
    }
  }
  __device__ __forceinline__ uint32_t Valid() const {
    uint32_t valid = 0;
    ForEach([&](uint32_t, int i) { valid |= 1u << i; });
    return valid;
  }

  // f(word, number among those of this thread), of all that have a column.
  template <typename F>
  __device__ __forceinline__ void ForEach(F&& f) const {
    const uint32_t size = columns.stop - columns.start;
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      const Tile<Bits, kOfTile>& tile = tiles[t];
      const uint32_t first = tile.column + threadIdx.x / 32 * kOfWarp - columns.start;
      if (size >= kOfWarp && first <= size - kOfWarp) {
        tile.ForEach([&](uint32_t word, int i) { f(word, t * kOfTile + i); });
      } else {
        tile.ForEach([&](uint32_t word, int i) {
          if (tile.ColumnAt(i) - columns.start < size) f(word, t * kOfTile + i);
        });
      }
    }
  }

  // Those that are marked, in column order, into the list; no more than `room`.
  __device__ __forceinline__ void Keep(const Cta& cta, uint32_t mask,
                                       uint32_t room) const {
    uint32_t count = 0;
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      count = CompactTile(cta, tiles[t], t & 1, count, cta.list(), room,
                          mask >> (t * kOfTile) & 0xFFFF);
    }
    __syncthreads();
  }
  // What passes.
  template <typename Passes>
  __device__ __forceinline__ uint32_t MaskOf(Passes&& passes) const {
    uint32_t mask = 0;
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      mask |= jax_topk::MaskOf(tiles[t], passes) << (t * kOfTile);
    }
    return mask;
  }
};

// A range in which the k-th largest of a row probably lies, from a word of each thread, the
// same in every CTA: somewhat more than from the least of the largest of groups, of which
// each probably has one of the k, to the largest of all. If it is elsewhere that costs time.
// One barrier.
__device__ __forceinline__ Range GuessRange(const Cta& cta, uint32_t word,
                                            uint32_t length, uint32_t k) {
  const uint32_t lane = threadIdx.x & 31;
  Cta::Scratch& scratch = cta.scratch();
  // Neither NaNs nor infinities.
  const bool finite = (word & 0x7F800000u) != 0x7F800000u;
  uint32_t key = finite ? KeyOf(word) : 0;
  const uint32_t max_key = __reduce_max_sync(kFullWarp, key);
  for (uint32_t group = 1; group < 32 && 4 * group * k <= length; group *= 2) {
    key = max(key, __shfl_xor_sync(kFullWarp, key, group));
  }
  const uint32_t min_key = __reduce_min_sync(kFullWarp, key > 0 ? key : 0xFFFFFFFFu);
  if (lane == 0) {
    scratch.min_keys[threadIdx.x / 32] = min_key;
    scratch.max_keys[threadIdx.x / 32] = max_key;
  }
  __syncthreads();
  const uint32_t low = __reduce_min_sync(kFullWarp, scratch.min_keys[lane % kWarps]);
  const uint32_t high = __reduce_max_sync(kFullWarp, scratch.max_keys[lane % kWarps]);
  const Range range = {__uint_as_float(WordOf(low)), __uint_as_float(WordOf(high))};
  const float margin = 0.5f * (range.high - range.low);
  return {range.low - margin, range.high + margin};
}

// The answer of a row whose chunks the CTAs of a cluster have in their registers.
//
// Like SelectResident, with the bins of all CTAs in place of those of one, and with a
// guessed range in place of the range: there is no need to wait for one.
template <bool kMaySort, int kColumns, typename Bits>
__device__ __forceinline__ void SelectTogether(const Cta& cta, const TopKParams& params,
                                               int64_t row, const Row<Bits>& entries,
                                               Columns chunk, Exchange& exchange) {
  const uint32_t lane = threadIdx.x & 31;
  const uint32_t k = static_cast<uint32_t>(params.k);
  const uint32_t mine = exchange.mine;
  const uint32_t length = entries.Length();
  Shared& memory = exchange.Memory();

  // 2. Four neighbours from each of kThreads / 4 equal parts, and the chunk.
  constexpr uint32_t kParts = kThreads / 4;
  constexpr int kLogParts = 7;
  static_assert(kParts == 1 << kLogParts);
  const uint32_t part = threadIdx.x / 4;
  const uint32_t fraction = part << (32 - kLogParts) | part * 2654435761u >> kLogParts;
  const uint32_t place = __umulhi(fraction, length - 3) + (threadIdx.x & 3);
  const uint32_t sample =
      Widen<Bits>(__ldg(entries.data + entries.columns.start + place));
  const Vectors<Bits> vectors = entries.Of(chunk);
  Tiles<Bits, kColumns> words;
  words.columns = chunk;
  words.start = entries.columns.start;
  words.Load(vectors);
  Rest(cta);
  PrepareMailboxes(cta);

  // 3. Bins of all.
  const Range range = GuessRange(cta, sample, length, k);
  const ValueBins bin_of(range.low, range.high, false, exchange.NumBins());
  words.Mask(vectors);
  words.ForEach([&](uint32_t word, int) {
    atomicAdd(&cta.bins()[bin_of(ValueBins::Any(word))], 1u);
  });
  cooperative_groups::this_cluster().barrier_wait();
  Found together = exchange.Find(cta, k, {});

  Marks marks = {0, 0};
  uint32_t low = 0;
  uint32_t high = 0;
  if (together.inside <= kFewOfCluster) {
    marks = MarksOf(words, bin_of, together.bin);
  } else {
    // Words crowd in the bin: the rest by key.
    uint32_t min_key = 0xFFFFFFFFu;
    uint32_t max_key = 0;
    words.ForEach([&](uint32_t word, int) {
      if (bin_of(ValueBins::Any(word)) == together.bin) {
        min_key = min(min_key, KeyOf(word));
        max_key = max(max_key, KeyOf(word));
      }
    });
    while (true) {
      ResetExtremes(cta);
      ClearBins(cta);
      __syncthreads();
      NoteExtremes(cta, min_key, max_key);
      __syncthreads();
      low = cta.scratch().min_key;
      high = cta.scratch().max_key;
      exchange.ShareExtremes(cta, &low, &high);
      if (low == high) break;
      const KeyBins key_bin_of(low, high, exchange.LogBins());
      words.ForEach([&](uint32_t word, int) {
        const uint32_t key = KeyOf(word);
        if (key_bin_of.Has(key)) atomicAdd(&cta.bins()[key_bin_of(key)], 1u);
      });
      together = exchange.Find(cta, k, together);
      key_bin_of.Narrow(together.bin, &low, &high);
      if (low == high || together.inside <= kFewOfCluster) break;
      min_key = 0xFFFFFFFFu;
      max_key = 0;
      words.ForEach([&](uint32_t word, int) {
        const uint32_t key = KeyOf(word);
        if (key - low <= high - low) {
          min_key = min(min_key, key);
          max_key = max(max_key, key);
        }
      });
    }
    words.ForEach([&](uint32_t word, int i) {
      const uint32_t key = KeyOf(word);
      if (key > high) marks.above |= 1u << i;
      if (key >= low) marks.reached |= 1u << i;
    });
  }

  // 4. Which of those inside are selected, and how many columns are, here and before.
  const uint32_t wanted = k - together.above;  // of those inside
  const bool few = together.inside <= kFewOfCluster;
  const uint32_t first =
      CollectMarked(cta, words, few ? marks.Inside() : 0, memory.own_few);
  __syncthreads();
  const uint32_t above_it = lane < exchange.size ? memory.above[lane] : 0;
  const uint32_t inside_it = lane < exchange.size ? memory.inside[lane] : 0;
  const uint32_t above = __reduce_add_sync(kFullWarp, lane < mine ? above_it : 0);
  const uint32_t before = __reduce_add_sync(kFullWarp, lane < mine ? inside_it : 0);
  const uint32_t inside = memory.inside[mine];
  uint32_t mask = marks.above;
  uint32_t own;     // of those inside, selected
  uint32_t behind;  // so many in the CTAs before
  if (few) {
    exchange.ShareFew(cta, before, inside, together.inside);
    exchange.RankFew(together.inside);
    behind = exchange.SelectedFew(0, before, wanted);
    own = exchange.SelectedFew(before, before + inside, wanted);
    mask |= SelectedOf(marks.Inside(), memory.ranks + before, first, wanted);
  } else {
    behind = min(before, wanted);
    own = min(wanted - behind, inside);
    if (own == inside) {
      mask |= marks.Inside();
    } else if (own > 0) {
      words.Keep(cta, marks.Inside(), own);
      const uint32_t last = EntryColumn(cta.list()[own - 1]);
      mask |= marks.Inside() &
              words.MaskOf([&](uint32_t, uint32_t column) { return column <= last; });
      __syncthreads();
    }
  }
  own += memory.above[mine];

  // 5.
  words.Keep(cta, mask, own);
  if (kMaySort && params.sorted) {
    // By value: the leader, with the entries of all in its list.
    const uint32_t mailbox = SharedAddress(&cta.scratch().mailboxes[2]);
    if (mine > 0) {
      const uint32_t list = AddressIn(0, SharedAddress(cta.list() + above + behind));
      for (uint32_t i = threadIdx.x; i < own; i += kThreads) {
        Send(list + 8 * i, cta.list()[i], AddressIn(0, mailbox));
      }
    } else {
      if (threadIdx.x == 0) Expect(mailbox, 8 * (k - own));
      Await(mailbox, 0);
      EmitRow<Bits, true>(cta, params, row, k);
    }
  } else {
    EmitByColumn<Bits>(cta, params, row, above + behind, own);
  }
}

#endif

// A row that one CTA keeps whole.
template <bool kMaySort, typename Bits>
__device__ __noinline__ void SelectAlone(const Cta cta, const TopKParams& params,
                                         int64_t row, const Row<Bits> entries) {
  Rest(cta);
  SelectResident<kMaySort>(cta, params, row, entries);
}

template <typename Bits, bool kMaySort, int kColumns>
__global__ void __launch_bounds__(kThreads, 1)
    HeldTopK(const TopKParams params, uint32_t capacity, const Cutting whole,
             uint32_t ctas_per_row, uint32_t min_chunk) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  const Cta cta = {capacity};
  const int64_t row = ClusterIndex();
  const uint32_t mine = cooperative_groups::this_cluster().block_rank();
  const Row<Bits> entries(params, row);
  const uint32_t length = entries.Length();
  Cutting cutting = whole;
  if (length != params.n) cutting = Cutting(length, ctas_per_row, min_chunk);
  if (entries.Resident(capacity)) {
    if (mine == 0) SelectAlone<kMaySort>(cta, params, row, entries);
    return;
  }
  Exchange exchange(cta, mine, ctas_per_row);
  SelectTogether<kMaySort, kColumns>(cta, params, row, entries,
                                     cutting.ChunkOf(entries.columns, mine), exchange);
#endif
}

using Kernel = void (*)(const TopKParams, uint32_t, const Cutting, uint32_t, uint32_t);

template <typename Bits>
Kernel KernelOf(int64_t columns, bool may_sort) {
  if (columns <= 8)
    return may_sort ? HeldTopK<Bits, true, 8> : HeldTopK<Bits, false, 8>;
  if (columns <= 16) {
    return may_sort ? HeldTopK<Bits, true, 16> : HeldTopK<Bits, false, 16>;
  }
  return may_sort ? HeldTopK<Bits, true, 32> : HeldTopK<Bits, false, 32>;
}

Kernel KernelFor(ScoreType type, int64_t columns, bool may_sort) {
  return type == ScoreType::kF32 ? KernelOf<uint32_t>(columns, may_sort)
                                 : KernelOf<uint16_t>(columns, may_sort);
}

// Columns that a thread has to hold of any window of a row. A chunk begins where its window
// does in a vector.
int64_t HeldColumns(const TopKParams& params, const Plan& plan) {
  const Cutting cutting(params.n, plan.ctas_per_row, plan.min_chunk);
  const int64_t width = cutting.size + ColumnsBeside(params, params.starts != nullptr);
  return (width + kThreads - 1) / kThreads;
}

}  // namespace

bool Held(const TopKParams& params, const Plan& plan) {
  return plan.held && HeldColumns(params, plan) <= kMaxHeldColumns;
}

cudaError_t PrepareHeldTopK(int64_t bytes) {
  for (ScoreType type : {ScoreType::kF32, ScoreType::kBF16}) {
    for (int64_t columns : {8, 16, 32}) {
      for (bool may_sort : {false, true}) {
        const cudaError_t error =
            PrepareForClusters(KernelFor(type, columns, may_sort), bytes);
        if (error != cudaSuccess) return error;
      }
    }
  }
  return cudaSuccess;
}

cudaError_t LaunchHeldTopK(const TopKParams& params, const Plan& plan,
                           cudaStream_t stream) {
  const Cutting whole(params.n, plan.ctas_per_row, plan.min_chunk);
  return LaunchClusters(
      plan, stream, KernelFor(params.type, HeldColumns(params, plan), params.sorted),
      params, static_cast<uint32_t>(plan.capacity), whole,
      static_cast<uint32_t>(plan.ctas_per_row), static_cast<uint32_t>(plan.min_chunk));
}

}  // namespace jax_topk
