// SPDX-License-Identifier: Apache-2.0
//
// The CPU implementation: the FFI handler of target jax_topk_cpu_v1 and all it needs.
//
// A row is answered in four phases; the first three are one read of the row in the
// common case, and exact whatever the sample says.
//
//   1. Sample. A few thousand scores, one from each stratum of the window, give a
//      threshold that a little more than k scores of the row should reach.
//   2. Filter. Tile by tile, scores whose key reaches the threshold are appended to the
//      list of survivors as composites (key, column), in ascending column. The
//      threshold only ever rises, and only by what the list itself proves:
//        - It holds k survivors: a later score equal to the first threshold loses
//          to all of them, so from here on scores must be greater. That is why a
//          plateau (a row full of zeros, say) costs k slots and no more.
//        - It is full: all but its k largest are dropped, and later scores must beat
//        the
//          least of these.
//   3. Fewer than k survivors (the sample misled): filter again with no threshold,
//   which
//      by the two rules above is exact for every row, and slower by a bounded factor.
//   4. Select and order. Of the survivors the k largest composites are kept, still in
//      ascending column: the answer, if not `sorted`. Otherwise a stable sort by key
//      follows. Slots beyond a short window are padded.
//
// Rows are dealt to the threads of XLA's pool (see ParallelFor). If there are too few
// of them, long rows are cut into chunks that share the row's threshold and are
// filtered side by side; their survivors, chunk after chunk, are again in ascending
// column.

#include <algorithm>
#include <atomic>
#include <cmath>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <new>
#include <numeric>
#include <utility>
#include <vector>

#include "operands.h"
#include "ordered_key.h"
#include "top_k.h"
#include "xla/ffi/api/ffi.h"

namespace jax_topk {
namespace {

namespace ffi = ::xla::ffi;

// Columns filtered between two looks at the list of survivors. Also its slack: a tile
// may pass in full.
constexpr int64_t kTile = 1024;
// Rows that offer fewer columns are not sampled.
constexpr int64_t kMinSampledColumns = 1024;
constexpr int64_t kMaxSamples = 8192;
// Columns below which another thread costs more than it saves.
constexpr int64_t kColumnsPerThread = 16384;
constexpr int64_t kColumnsPerChunk = 131072;

// --- Lists ---------------------------------------------------------------------------

// Composites in ascending column. Memory is not initialised: most of it is never
// touched.
struct List {
  std::unique_ptr<uint64_t[]> items;
  int64_t capacity = 0;
  int64_t size = 0;

  void Reserve(int64_t wanted) {
    if (wanted <= capacity) return;
    items.reset();  // before the larger one is asked for
    capacity = 0;
    items.reset(new uint64_t[wanted]);
    capacity = wanted;
  }
};

// What a thread reuses from row to row.
struct Scratch {
  List survivors;
  List spare;
  std::vector<uint32_t> samples;
};

// Keeps the k largest of the list, in their order.
void KeepLargest(int64_t k, List& list, List& spare) {
  if (list.size <= k) return;
  spare.Reserve(list.capacity);
  uint64_t* items = list.items.get();
  uint64_t* copy = spare.items.get();
  std::copy_n(items, list.size, copy);
  std::nth_element(copy, copy + k - 1, copy + list.size, std::greater<>());
  const uint64_t least = copy[k - 1];
  int64_t kept = 0;
  for (int64_t i = 0; i < list.size; ++i) {
    const uint64_t item = items[i];
    items[kept] = item;
    kept += item >= least;
  }
  list.size = kept;
}

// Orders by descending key, equal keys as they stand.
void SortByKey(List& list, List& spare) {
  constexpr int kDigitBits = 8;
  constexpr int kNumBins = 1 << kDigitBits;
  constexpr int kNumDigits = 32 / kDigitBits;
  constexpr int64_t kFewItems = 192;  // which a comparison sort orders sooner
  if (list.size <= kFewItems) {
    // Ascending column is descending composite among equal keys.
    std::sort(list.items.get(), list.items.get() + list.size, std::greater<>());
    return;
  }
  spare.Reserve(list.capacity);
  const auto digit = [](uint64_t item, int which) {
    return kNumBins - 1 - (item >> (32 + which * kDigitBits) & (kNumBins - 1));
  };
  uint32_t histogram[kNumDigits][kNumBins] = {};
  for (int64_t i = 0; i < list.size; ++i) {
    for (int d = 0; d < kNumDigits; ++d) ++histogram[d][digit(list.items[i], d)];
  }
  for (int d = 0; d < kNumDigits; ++d) {
    uint32_t* bins = histogram[d];
    if (bins[digit(list.items[0], d)] == list.size) continue;  // the same in all
    std::exclusive_scan(bins, bins + kNumBins, bins, uint32_t{0});
    const uint64_t* from = list.items.get();
    uint64_t* to = spare.items.get();
    for (int64_t i = 0; i < list.size; ++i) to[bins[digit(from[i], d)]++] = from[i];
    std::swap(list.items, spare.items);
    std::swap(list.capacity, spare.capacity);
  }
}

// --- Phase 1: the sample -------------------------------------------------------------

struct Threshold {
  uint64_t bound = 0;     // a key; 0 lets everything pass
  int64_t survivors = 0;  // about how many pass
};

template <typename Bits>
Threshold SampleThreshold(const Bits* row, Window window, int64_t k, Scratch& scratch) {
  const int64_t length = window.stop - window.start;
  const Threshold all = {0, length};
  if (length < kMinSampledColumns || k >= length) return all;
  // A sample touches a cache line that the filter wants anyway, but must be ordered;
  // few samples need a wide margin, and so leave more survivors to order.
  int log2_samples = 7;
  while ((int64_t{1} << log2_samples) < kMaxSamples &&
         (int64_t{1} << log2_samples) * (log2_samples < 10 ? 8 : 64) < length) {
    ++log2_samples;
  }
  const int64_t num_samples = int64_t{1} << log2_samples;
  // Of the row's k largest about m are sampled, with a standard deviation below
  // sqrt(m).
  const double m = static_cast<double>(k) * num_samples / length;
  const int64_t rank = static_cast<int64_t>(m + 5 * std::sqrt(m) + 8);
  if (rank > num_samples * 3 / 4) return all;

  scratch.samples.resize(num_samples);
  for (int64_t i = 0; i < num_samples; ++i) {
    // A place within the stratum that follows no period of the data: the upper bits of
    // a multiplicative hash.
    const uint64_t hash =
        static_cast<uint32_t>(i * 0x9E3779B9u ^ 0x5BD1E995u) * 0xC2B2AE3D27D4EB4Full >>
        32;
    const int64_t column =
        window.start + ((i * length + (hash * length >> 32)) >> log2_samples);
    scratch.samples[i] = OrderedKey(row[column]);
  }
  const auto at = scratch.samples.begin() + rank - 1;
  std::nth_element(scratch.samples.begin(), at, scratch.samples.end(),
                   std::greater<>());
  return {*at, rank * length >> log2_samples};
}

// --- Phase 2: the filter -------------------------------------------------------------

// passes[i] = whether the key of scores[i] reaches `bound`, as 0 or 1. All the time of
// a long row goes by here: a loop that compilers turn into vector code, once for each
// instruction set.
template <typename Bits>
#ifdef __GNUC__
__attribute__((always_inline))
#endif
inline void MarkTile(const Bits* scores, int64_t size, Bits bound, uint8_t* passes) {
  for (int64_t i = 0; i < size; ++i) {
    passes[i] = static_cast<Bits>(OrderedKey(scores[i])) >= bound;
  }
}

template <typename Bits>
using Mark = void (*)(const Bits*, int64_t, Bits, uint8_t*);

template <typename Bits>
void MarkPortable(const Bits* scores, int64_t size, Bits bound, uint8_t* passes) {
  MarkTile(scores, size, bound, passes);
}

#if defined(__x86_64__) && defined(__GNUC__)
template <typename Bits>
__attribute__((target("avx2"))) void MarkAvx2(const Bits* scores, int64_t size,
                                              Bits bound, uint8_t* passes) {
  MarkTile(scores, size, bound, passes);
}

template <typename Bits>
__attribute__((target("avx512f,avx512bw,avx512vl"))) void MarkAvx512(const Bits* scores,
                                                                     int64_t size,
                                                                     Bits bound,
                                                                     uint8_t* passes) {
  MarkTile(scores, size, bound, passes);
}

template <typename Bits>
Mark<Bits> BestMark() {
  if (__builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl")) {
    return MarkAvx512<Bits>;
  }
  return __builtin_cpu_supports("avx2") ? MarkAvx2<Bits> : MarkPortable<Bits>;
}
#else
template <typename Bits>
Mark<Bits> BestMark() {
  return MarkPortable<Bits>;
}
#endif

// Slots that let the filter run without dropping anything if the sample is right, and
// drop at least as many as it keeps if it is wrong.
int64_t Slots(int64_t k, int64_t length, int64_t survivors) {
  return std::min(length, std::max(2 * k, 2 * survivors) + 4 * kTile) + kTile;
}

// Appends what passes of the columns [window.start, window.stop), which must come after
// those in the list.
template <typename Bits>
void Filter(const Bits* row, Window window, int64_t k, Threshold threshold, List& list,
            List& spare) {
  static const Mark<Bits> mark = BestMark<Bits>();
  constexpr uint64_t kLargestKey = static_cast<Bits>(~Bits{0});
  const int64_t full =
      Slots(k, window.stop - window.start, threshold.survivors) - kTile;
  list.Reserve(full + kTile);
  list.size = 0;
  uint64_t bound = threshold.bound;
  uint8_t passes[kTile];
  for (int64_t tile = window.start; tile < window.stop; tile += kTile) {
    if (bound > kLargestKey) return;
    const int64_t size = std::min(kTile, window.stop - tile);
    mark(row + tile, size, static_cast<Bits>(bound), passes);
    uint64_t* end = list.items.get() + list.size;
    for (int64_t i = size; i < ((size + 7) & ~int64_t{7}); ++i) passes[i] = 0;
    for (int64_t i = 0; i < size; i += 8) {
      uint64_t word;
      std::memcpy(&word, passes + i, 8);
      for (; word != 0;
           word &= word - 1) {  // little-endian: the lowest bit comes first
        const int64_t column = tile + i + (__builtin_ctzll(word) >> 3);
        *end++ = Composite(OrderedKey(row[column]), static_cast<uint32_t>(column));
      }
    }
    list.size = end - list.items.get();
    if (list.size > full) {
      KeepLargest(k, list, spare);
      uint64_t least = ~uint64_t{0};
      for (int64_t i = 0; i < list.size; ++i) least = std::min(least, list.items[i]);
      bound = std::max<uint64_t>(bound, uint64_t{CompositeKey(least)} + 1);
    } else if (list.size >= k) {
      bound = std::max(bound, threshold.bound + 1);
    }
  }
}

// --- Phases 3 and 4 ------------------------------------------------------------------

// Phases 3 and 4 of a row whose survivors are in scratch.survivors.
template <typename Bits>
void Finish(const TopKParams& params, int64_t row_index, Scratch& scratch) {
  const int64_t k = params.k;
  const Bits* row = static_cast<const Bits*>(params.scores) + row_index * params.n;
  const Window window = RowWindow(params, row_index);
  const int64_t length = window.stop - window.start;
  List& list = scratch.survivors;
  if (list.size < std::min(k, length)) {
    Filter(row, window, k, {0, 0}, list, scratch.spare);
  }
  KeepLargest(k, list, scratch.spare);
  if (params.sorted) SortByKey(list, scratch.spare);

  Bits* values = static_cast<Bits*>(params.values) + row_index * k;
  int32_t* indices = params.indices + row_index * k;
  for (int64_t i = 0; i < list.size; ++i) {
    const uint64_t item = list.items[i];
    values[i] = ScoreBits<Bits>(CompositeKey(item));
    indices[i] = static_cast<int32_t>(CompositeColumn(item));
  }
  std::fill(values + list.size, values + k, static_cast<Bits>(PadBits(params.type)));
  std::fill(indices + list.size, indices + k, -1);
}

template <typename Bits>
void SelectRow(const TopKParams& params, int64_t row_index, Scratch& scratch) {
  const Bits* row = static_cast<const Bits*>(params.scores) + row_index * params.n;
  const Window window = RowWindow(params, row_index);
  const Threshold threshold = SampleThreshold(row, window, params.k, scratch);
  Filter(row, window, params.k, threshold, scratch.survivors, scratch.spare);
  Finish<Bits>(params, row_index, scratch);
}

// --- Threads -------------------------------------------------------------------------

// Runs body(item, scratch) for the items 0 .. count - 1 on the caller and on up to
// `num_threads` - 1 threads of XLA's pool; false if memory ran out.
//
// The caller may itself be a thread of that pool, and all others may be busy for ever.
// So it never waits for a helper to start: it claims items like everybody, and when
// none is left it waits only for items claimed by helpers, which are therefore running
// and wait for nobody. A helper that starts later finds nothing to claim; all it
// touches is the shared state, which lives as long as the last of them.
bool ParallelFor(ffi::ThreadPool& pool, int64_t num_threads, int64_t count,
                 const std::function<void(int64_t, Scratch&)>& body) {
  struct State {
    const std::function<void(int64_t, Scratch&)>* body;
    int64_t count;
    std::atomic<int64_t> next{0};
    std::atomic<bool> out_of_memory{false};
    std::mutex mutex;
    std::condition_variable all_done;
    int64_t done = 0;  // guarded by mutex

    void Work() {
      int64_t item = next.fetch_add(1, std::memory_order_relaxed);
      if (item >= count) return;
      int64_t finished = 0;
      {
        Scratch scratch;
        for (; item < count; item = next.fetch_add(1, std::memory_order_relaxed)) {
          try {
            (*body)(item, scratch);
          } catch (const std::bad_alloc&) {
            out_of_memory = true;
          }
          ++finished;
        }
      }
      std::lock_guard<std::mutex> lock(mutex);
      done += finished;
      if (done == count) all_done.notify_all();
    }
  };
  const auto state = std::make_shared<State>();
  state->body = &body;
  state->count = count;
  try {
    for (int64_t i = 1; i < std::min(num_threads, count); ++i) {
      pool.Schedule([state] { state->Work(); });
    }
  } catch (const std::bad_alloc&) {
    // Fewer helpers, then. Leaving now would take `body` from those that run.
  }
  state->Work();
  std::unique_lock<std::mutex> lock(state->mutex);
  state->all_done.wait(lock, [&] { return state->done == count; });
  return !state->out_of_memory;
}

// Few and long rows: phase 1 for each row, phase 2 for each chunk, the rest for each
// row.
template <typename Bits>
bool SelectInChunks(const TopKParams& params, int64_t chunks, int64_t num_threads,
                    ffi::ThreadPool& pool) {
  const auto row_of = [&](int64_t r) {
    return static_cast<const Bits*>(params.scores) + r * params.n;
  };
  std::vector<Threshold> thresholds(params.rows);
  std::vector<List> lists(params.rows * chunks);
  return ParallelFor(pool, num_threads, params.rows,
                     [&](int64_t r, Scratch& scratch) {
                       thresholds[r] = SampleThreshold(row_of(r), RowWindow(params, r),
                                                       params.k, scratch);
                       thresholds[r].survivors /= chunks;
                     }) &&
         ParallelFor(pool, num_threads, params.rows * chunks,
                     [&](int64_t item, Scratch& scratch) {
                       const int64_t r = item / chunks;
                       const int64_t chunk = item % chunks;
                       const Window window = RowWindow(params, r);
                       const int64_t length = window.stop - window.start;
                       const Window part = {
                           window.start + length * chunk / chunks,
                           window.start + length * (chunk + 1) / chunks};
                       Filter(row_of(r), part, params.k, thresholds[r], lists[item],
                              scratch.spare);
                     }) &&
         ParallelFor(pool, num_threads, params.rows, [&](int64_t r, Scratch& scratch) {
           List& all = scratch.survivors;
           const List* parts = &lists[r * chunks];
           int64_t size = 0;
           for (int64_t c = 0; c < chunks; ++c) size += parts[c].size;
           all.Reserve(size);
           all.size = 0;
           for (int64_t c = 0; c < chunks; ++c) {
             std::copy_n(parts[c].items.get(), parts[c].size,
                         all.items.get() + all.size);
             all.size += parts[c].size;
           }
           Finish<Bits>(params, r, scratch);
         });
}

template <typename Bits>
bool Select(const TopKParams& params, ffi::ThreadPool& pool) {
  // Work follows the windows, not the width.
  int64_t columns = 0;
  int64_t longest = 0;
  for (int64_t r = 0; r < params.rows; ++r) {
    const Window window = RowWindow(params, r);
    columns += window.stop - window.start;
    longest = std::max(longest, window.stop - window.start);
  }
  const int64_t work = columns + params.rows * params.k;
  const int64_t num_threads = std::clamp<int64_t>(
      work / kColumnsPerThread, 1, std::max<int64_t>(pool.num_threads(), 1));

  if (num_threads > 1 && params.rows < 2 * num_threads &&
      longest >= 2 * kColumnsPerChunk) {
    const int64_t chunks = std::min(longest / kColumnsPerChunk, num_threads);
    return SelectInChunks<Bits>(params, chunks, num_threads, pool);
  }
  // Short rows go in batches, so that claiming one is not what takes the time.
  const int64_t batch =
      std::clamp<int64_t>(kColumnsPerThread * params.rows / work, 1, params.rows);
  return ParallelFor(pool, num_threads, (params.rows + batch - 1) / batch,
                     [&](int64_t item, Scratch& scratch) {
                       const int64_t stop = std::min((item + 1) * batch, params.rows);
                       for (int64_t r = item * batch; r < stop; ++r) {
                         SelectRow<Bits>(params, r, scratch);
                       }
                     });
}

ffi::Error CpuTopK(ffi::ThreadPool pool, ffi::RemainingArgs args,
                   ffi::RemainingRets rets, int64_t k, bool has_lengths,
                   bool has_starts, bool sorted) {
  const auto operands = DecodeOperands(args, rets, k, has_lengths, has_starts, sorted,
                                       /*has_workspace=*/false);
  if (!operands) return operands.error();
  const TopKParams& params = operands->params;
  if (params.rows == 0) return ffi::Error::Success();
  bool enough_memory = false;
  try {
    enough_memory = params.type == ScoreType::kF32 ? Select<uint32_t>(params, pool)
                                                   : Select<uint16_t>(params, pool);
  } catch (const std::bad_alloc&) {
  }
  if (enough_memory) return ffi::Error::Success();
  return ffi::Error(
      ffi::ErrorCode::kResourceExhausted,
      "jax_topk: out of host memory (rows=" + std::to_string(params.rows) +
          ", n=" + std::to_string(params.n) + ", k=" + std::to_string(params.k) + ")");
}

}  // namespace
}  // namespace jax_topk

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxTopKCpu, jax_topk::CpuTopK,
                              ::xla::ffi::Ffi::Bind()
                                  .Ctx<::xla::ffi::ThreadPool>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attr<int64_t>("k")
                                  .Attr<bool>("has_lengths")
                                  .Attr<bool>("has_starts")
                                  .Attr<bool>("sorted"));
