// SPDX-License-Identifier: Apache-2.0
//
// The CPU implementation: the FFI handlers of targets jax_topk_cpu_v1 and
// jax_topk_paged_cpu_v1, and all they need.
//
// A row is answered in four phases. In the common case they read it once; they are
// exact whatever the sample says.
//
//   1. Sample. A few thousand scores, one from each stratum of the window, give a
//      threshold that somewhat more than k scores of the row should reach.
//   2. Filter. Tile by tile, scores whose key reaches the threshold are appended to the
//      survivors as composites, in ascending column. The threshold only ever rises, and
//      only to what the survivors themselves prove:
//        - There are k of them: a later score that equals the first threshold is behind
//          all of them, so from here on scores must be greater. This is why a plateau
//          (a row full of zeros, say) takes k slots and no more.
//        - Their slots are full: all but the k largest are rejected, and later scores
//          must be greater than the least of these.
//   3. Repeat, if fewer than k survived because the sample misled: filter with no
//      threshold to begin with, which the two rules above make exact on every row.
//   4. Select and order. The k largest composites, still in ascending column, are the
//      answer if it is not `sorted`; otherwise a stable sort by key follows. Slots
//      beyond a short window are padded.
//
// The worst inputs (a misleading sample, then ascending scores, so that everything
// passes and is rejected later) take about 10 times as long as a row of random scores.
//
// Rows are dealt to the threads of XLA's pool (ParallelFor). Where they are too few for
// that, long rows are cut into chunks, which are filtered side by side with the row's
// threshold: their survivors, chunk after chunk, are in ascending column again.

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <new>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#ifdef __SSE2__
#include <emmintrin.h>
#endif

#include "operands.h"
#include "ordered_key.h"
#include "top_k.h"
#include "xla/ffi/api/ffi.h"

namespace jax_topk {
namespace {

namespace ffi = ::xla::ffi;

// Columns filtered between two looks at the survivors.
constexpr int64_t kTile = 1024;
// Windows of fewer columns are not sampled.
constexpr int64_t kMinSampledColumns = 256;
constexpr int kMinSamplesLog2 = 7;
constexpr int kMaxSamplesLog2 = 13;
// Work is counted in columns read; to select and order one item takes as long as to
// read this many.
constexpr int64_t kWorkPerSelected = 16;
// Work that pays for waking another thread: about 15 us.
constexpr int64_t kWorkPerThread = 65536;
// Rows of four chunks or more are cut: one thread alone reads them in 300 us.
constexpr int64_t kColumnsPerChunk = 262144;

// --- Memory --------------------------------------------------------------------------

// Composites, in ascending column unless said otherwise.
struct List {
  std::unique_ptr<uint64_t[]> items;
  int64_t capacity = 0;
  int64_t size = 0;

  void Reserve(int64_t wanted) {
    if (wanted <= capacity) return;
    Release();                          // before more is asked for
    items.reset(new uint64_t[wanted]);  // not initialised: most of it is never touched
    capacity = wanted;
  }

  void Release() {
    items.reset();
    capacity = 0;
  }
};

// What a thread works with, and the lists that it lends to others when it cuts rows
// into chunks. They outlive the call only to save the page faults of fresh memory,
// which would take as long as reading a few hundred thousand columns: nothing is read
// that was not written for the same row, and what is unusually large is given back.
struct Scratch {
  List lists[2];
  List& survivors = lists[0];
  List& spare = lists[1];
  std::vector<uint32_t> samples;
};

Scratch& ThreadScratch() {
  static thread_local Scratch scratch;
  return scratch;
}

std::vector<List>& ThreadChunkLists() {
  static thread_local std::vector<List> lists;
  return lists;
}

// Gives back what exceeds 1 MiB in all.
template <typename Lists>
void Trim(Lists& lists) {
  constexpr int64_t kKeptItems = 1 << 17;
  int64_t kept = 0;
  for (List& list : lists) {
    kept += list.capacity;
    if (kept > kKeptItems) list.Release();
  }
}

// --- Select and order ----------------------------------------------------------------

// The k-th largest of size >= k items, which it overwrites. Each step deals the
// candidates to bins that divide their range evenly, and goes on with the bin where
// rank k falls. No branch depends on an item, and a step narrows the range at least
// 2^(kBinBits - 1) times, whatever is in it.
template <typename T>
T KthLargest(T* items, int64_t size, int64_t k) {
  constexpr int kBinBits = 9;
  constexpr int64_t kFewItems = 64;
  while (size > kFewItems) {
    T low = items[0];
    T high = items[0];
    for (int64_t i = 1; i < size; ++i) {
      low = std::min(low, items[i]);
      high = std::max(high, items[i]);
    }
    int shift = 0;
    while ((high - low) >> shift >> kBinBits != 0) ++shift;
    const auto bin_of = [&](T item) { return (item - low) >> shift; };
    // Four histograms in turn: neighbours often share a bin, and an increment must not
    // wait for the one before.
    uint32_t histogram[1 << kBinBits][4] = {};
    for (int64_t i = 0; i < size; ++i) ++histogram[bin_of(items[i])][i % 4];
    T bin = bin_of(high);
    for (;; --bin) {
      const uint32_t* parts = histogram[bin];
      const int64_t in_bin = int64_t{parts[0]} + parts[1] + parts[2] + parts[3];
      if (in_bin >= k) break;
      k -= in_bin;
    }
    if (shift == 0) return low + bin;
    int64_t kept = 0;
    for (int64_t i = 0; i < size; ++i) {
      const T item = items[i];
      items[kept] = item;
      kept += bin_of(item) == bin;
    }
    size = kept;
  }
  std::nth_element(items, items + k - 1, items + size, std::greater<>());
  return items[k - 1];
}

// Keeps the k largest of k or more, in their order, and returns the least of them.
uint64_t KeepLargest(int64_t k, List& list, List& spare) {
  spare.Reserve(list.size);
  uint64_t* items = list.items.get();
  std::copy_n(items, list.size, spare.items.get());
  const uint64_t least = KthLargest(spare.items.get(), list.size, k);
  int64_t kept = 0;
  for (int64_t i = 0; i < list.size; ++i) {
    const uint64_t item = items[i];
    items[kept] = item;
    kept += item >= least;
  }
  list.size = kept;
  return least;
}

// Orders by descending key, and equal keys by ascending column.
void SortByKey(List& list, List& spare) {
  constexpr int kDigitBits = 8;
  constexpr int kNumBins = 1 << kDigitBits;
  constexpr int kNumDigits = 32 / kDigitBits;
  constexpr int64_t kFewItems = 192;  // which a comparison sort orders sooner
  if (list.size <= kFewItems) {
    std::sort(list.items.get(), list.items.get() + list.size, std::greater<>());
    return;
  }
  // From the last digit to the first; each pass leaves equal digits as they stand, and
  // so in the end equal keys.
  spare.Reserve(list.size);
  const auto digit = [](uint64_t item, int which) {
    return kNumBins - 1 - (CompositeKey(item) >> (which * kDigitBits)) % kNumBins;
  };
  uint32_t histogram[kNumDigits][kNumBins] = {};
  for (int64_t i = 0; i < list.size; ++i) {
    for (int d = 0; d < kNumDigits; ++d) ++histogram[d][digit(list.items[i], d)];
  }
  for (int d = 0; d < kNumDigits; ++d) {
    uint32_t* bins = histogram[d];
    if (bins[digit(list.items[0], d)] == list.size) continue;  // all alike
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
  uint64_t key = 0;       // 0 lets everything pass
  int64_t survivors = 0;  // how many scores are expected to reach it
};

template <typename Bits>
Threshold SampleThreshold(const Bits* row, Window window, int64_t k, Scratch& scratch) {
  const int64_t length = window.stop - window.start;
  const Threshold none = {0, length};
  if (length < kMinSampledColumns || k >= length) return none;
  // A sample in 8 columns of short rows, in 256 of long ones. Fewer samples need a wider
  // margin and leave more survivors; more of them take longer to read and to order.
  const auto columns_per_sample = [](int log2) -> int64_t {
    return log2 < 10 ? 8 : 256;
  };
  int log2 = kMinSamplesLog2;
  while (log2 < kMaxSamplesLog2 && columns_per_sample(log2) << log2 < length) ++log2;
  const int64_t num_samples = int64_t{1} << log2;
  // About m of the k largest are among the samples, with a standard deviation of
  // sqrt(m) at most. If `rank` of them are, fewer than k scores reach the threshold:
  // probability below 1e-6, and below 1e-2 if neighbours are always alike.
  const double m = static_cast<double>(k) * num_samples / length;
  const int64_t rank = static_cast<int64_t>(m + 5 * std::sqrt(m) + 4);
  if (rank > num_samples * 3 / 4) return none;

  std::vector<uint32_t>& samples = scratch.samples;
  samples.resize(num_samples);
  // Samples are taken in runs, as most of their cost is cache misses.
  constexpr int kRun = 4;
  const int64_t span = length - (kRun - 1);
  for (int64_t i = 0; i < num_samples; i += kRun) {
    // Anywhere in the stratum, lest the runs keep step with a period of the scores.
    const int64_t within = (i + 1) * 0x9E3779B97F4A7C15u >> 32;  // of 2^32
    const Bits* run =
        row + window.start + ((i * span + kRun * (within * span >> 32)) >> log2);
    for (int j = 0; j < kRun; ++j) samples[i + j] = run[j];
  }
  for (uint32_t& sample : samples) sample = OrderedKey(static_cast<Bits>(sample));
  return {KthLargest(samples.data(), num_samples, rank), rank * length >> log2};
}

// --- Phase 2: the filter -------------------------------------------------------------

// passes[i] = 0xFF if the key of scores[i] is `least` or more, 0 otherwise. Most of the
// time of a long row is spent here; compilers turn the loop into vector code, once for
// each instruction set below.
template <typename Bits>
__attribute__((always_inline)) inline void MarkTile(const Bits* scores, int64_t size,
                                                    Bits least, uint8_t* passes) {
  for (int64_t i = 0; i < size; ++i) {
    passes[i] = static_cast<Bits>(OrderedKey(scores[i])) >= least ? 0xFF : 0;
  }
}

template <typename Bits>
using Mark = void (*)(const Bits*, int64_t, Bits, uint8_t*);

template <typename Bits>
void MarkPortable(const Bits* scores, int64_t size, Bits least, uint8_t* passes) {
  MarkTile(scores, size, least, passes);
}

#ifdef __x86_64__
template <typename Bits>
__attribute__((target("avx2"))) void MarkAvx2(const Bits* scores, int64_t size,
                                              Bits least, uint8_t* passes) {
  MarkTile(scores, size, least, passes);
}

template <typename Bits>
__attribute__((target("avx512f,avx512bw,avx512vl"))) void MarkAvx512(const Bits* scores,
                                                                     int64_t size,
                                                                     Bits least,
                                                                     uint8_t* passes) {
  MarkTile(scores, size, least, passes);
}
#endif

template <typename Bits>
Mark<Bits> BestMark() {
#ifdef __x86_64__
  if (__builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl")) {
    return MarkAvx512<Bits>;
  }
  if (__builtin_cpu_supports("avx2")) return MarkAvx2<Bits>;
#endif
  return MarkPortable<Bits>;
}

// Bit i: passes[i], of 64.
inline uint64_t PassBits(const uint8_t* passes) {
  uint64_t bits = 0;
#ifdef __SSE2__
  for (int i = 0; i < 64; i += 16) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(passes + i));
    bits |= static_cast<uint64_t>(_mm_movemask_epi8(bytes)) << i;
  }
#else
  for (int i = 0; i < 64; i += 8) {
    uint64_t bytes;
    std::memcpy(&bytes, passes + i, 8);
    // Little-endian. The multiplication moves bit 0 of byte j to bit 56 + j.
    bits |= ((bytes & 0x0101010101010101u) * 0x0102040810204080u >> 56) << i;
  }
#endif
  return bits;
}

// Lists what survives of the columns [window.start, window.stop) of a row.
template <typename Bits>
void Filter(const Bits* row, Window window, int64_t k, Threshold threshold, List& list,
            List& spare) {
  static const Mark<Bits> mark = BestMark<Bits>();
  constexpr uint64_t kLargestKey = static_cast<Bits>(~Bits{0});
  // Enough for the survivors if the sample is right. If not, each time that they are
  // full frees as many as it keeps. The list is looked at after each tile, which may
  // pass whole.
  const int64_t full = std::min(window.stop - window.start,
                                2 * std::max(k, threshold.survivors) + 4 * kTile);
  list.Reserve(full + kTile);
  list.size = 0;
  uint64_t least = threshold.key;
  alignas(64) uint8_t passes[kTile];
  for (int64_t tile = window.start; tile < window.stop; tile += kTile) {
    if (least > kLargestKey) return;  // no key can pass any more
    const int64_t size = std::min(kTile, window.stop - tile);
    mark(row + tile, size, static_cast<Bits>(least), passes);
    std::fill(passes + size, passes + (size + 63) / 64 * 64, 0);
    uint64_t* end = list.items.get() + list.size;
    for (int64_t block = 0; block < size; block += 64) {
      // Memory would idle while survivors are listed: ask for the next tile.
      const int64_t next = std::min(tile + kTile + block, window.stop - 1);
      for (size_t line = 0; line < sizeof(Bits); ++line) {
        __builtin_prefetch(reinterpret_cast<const char*>(row + next) + 64 * line);
      }
      for (uint64_t bits = PassBits(passes + block); bits != 0; bits &= bits - 1) {
        const int64_t column = tile + block + __builtin_ctzll(bits);
        *end++ = Composite(OrderedKey(row[column]), static_cast<uint32_t>(column));
      }
    }
    list.size = end - list.items.get();
    if (list.size > full) {
      least = std::max(least, uint64_t{CompositeKey(KeepLargest(k, list, spare))} + 1);
    } else if (list.size >= k) {
      least = std::max(least, threshold.key + 1);
    }
  }
}

// --- A row ---------------------------------------------------------------------------

template <typename Bits>
const Bits* RowScores(const TopKParams& params, int64_t row) {
  return static_cast<const Bits*>(params.scores) + row * params.n;
}

// Phases 3 and 4, with the survivors in `scratch`.
template <typename Bits>
void Finish(const TopKParams& params, int64_t row, Scratch& scratch) {
  const int64_t k = params.k;
  const Window window = RowWindow(params, row);
  List& list = scratch.survivors;
  if (list.size < std::min(k, window.stop - window.start)) {
    Filter(RowScores<Bits>(params, row), window, k, {}, list, scratch.spare);
  }
  if (list.size > k) KeepLargest(k, list, scratch.spare);
  if (params.sorted) SortByKey(list, scratch.spare);

  Bits* values = static_cast<Bits*>(params.values) + row * k;
  int32_t* indices = params.indices + row * k;
  for (int64_t i = 0; i < list.size; ++i) {
    values[i] = ScoreBits<Bits>(CompositeKey(list.items[i]));
    indices[i] = RowIndex(params, row, CompositeColumn(list.items[i]));
  }
  std::fill(values + list.size, values + k, static_cast<Bits>(PadBits(params.type)));
  std::fill(indices + list.size, indices + k, -1);
}

template <typename Bits>
void SelectRow(const TopKParams& params, int64_t row, Scratch& scratch) {
  const Bits* scores = RowScores<Bits>(params, row);
  const Window window = RowWindow(params, row);
  const Threshold threshold = SampleThreshold(scores, window, params.k, scratch);
  Filter(scores, window, params.k, threshold, scratch.survivors, scratch.spare);
  Finish<Bits>(params, row, scratch);
}

// --- Threads -------------------------------------------------------------------------

using Body = std::function<void(int64_t item, Scratch& scratch)>;

// Runs body(item, scratch of the thread) for the items 0 to num_items - 1, on the
// caller and up to num_threads - 1 threads of XLA's pool. False if memory ran out.
//
// The caller may itself be a thread of that pool, and the others may be busy for ever.
// So nobody waits for a helper to start: the caller claims items like everybody, and
// when none is left it waits only for helpers that have claimed one, which therefore
// run, and wait for nobody. A helper that starts later finds nothing to claim and
// touches only the shared state, which lives as long as the last of them.
bool ParallelFor(ffi::ThreadPool& pool, int64_t num_threads, int64_t num_items,
                 const Body& body) {
  struct State {
    const Body* body;  // valid while an item is claimed and not done
    int64_t num_items;
    std::atomic<int64_t> next{0};
    std::atomic<bool> out_of_memory{false};
    std::mutex mutex;
    std::condition_variable all_done;
    std::atomic<int64_t> num_done{0};  // changes under `mutex` only

    void Work() {
      int64_t num_claimed = 0;
      for (;; ++num_claimed) {
        const int64_t item = next.fetch_add(1, std::memory_order_relaxed);
        if (item >= num_items) break;
        try {
          (*body)(item, ThreadScratch());
        } catch (const std::bad_alloc&) {
          out_of_memory.store(true, std::memory_order_relaxed);
        }
      }
      if (num_claimed == 0) return;
      Trim(ThreadScratch().lists);
      // What the body wrote is published too.
      const std::lock_guard<std::mutex> lock(mutex);
      if (num_done.fetch_add(num_claimed) + num_claimed == num_items) {
        all_done.notify_all();
      }
    }
  };
  const auto state = std::make_shared<State>();
  state->body = &body;
  state->num_items = num_items;
  try {
    for (int64_t i = 1; i < std::min(num_threads, num_items); ++i) {
      pool.Schedule([state] { state->Work(); });
    }
  } catch (const std::bad_alloc&) {
    // Fewer helpers, then: those that run already rely on `body`.
  }
  state->Work();
  const auto finished = [&] { return state->num_done.load() == num_items; };
  // A helper at work is mostly done sooner than a thread that sleeps would wake.
  using Clock = std::chrono::steady_clock;
  const Clock::time_point deadline = Clock::now() + std::chrono::microseconds(50);
  while (!finished() && Clock::now() < deadline) {
  }
  std::unique_lock<std::mutex> lock(state->mutex);
  state->all_done.wait(lock, finished);
  return !state->out_of_memory.load(std::memory_order_relaxed);
}

// Phase 1 of every row, then phase 2 of every chunk, then the rest of every row.
template <typename Bits>
bool SelectInChunks(const TopKParams& params, int64_t num_chunks, int64_t num_threads,
                    ffi::ThreadPool& pool) {
  std::vector<Threshold> thresholds(params.rows);
  std::vector<List>& lists = ThreadChunkLists();  // the caller's, in the bodies too
  const size_t num_lists = params.rows * num_chunks;
  if (lists.size() < num_lists) lists.resize(num_lists);

  const Body sample = [&](int64_t row, Scratch& scratch) {
    thresholds[row] = SampleThreshold(RowScores<Bits>(params, row),
                                      RowWindow(params, row), params.k, scratch);
    thresholds[row].survivors /= num_chunks;
  };
  const Body filter = [&](int64_t item, Scratch& scratch) {
    const int64_t row = item / num_chunks;
    const int64_t chunk = item % num_chunks;
    const Window window = RowWindow(params, row);
    const int64_t length = window.stop - window.start;
    const Window part = {window.start + length * chunk / num_chunks,
                         window.start + length * (chunk + 1) / num_chunks};
    Filter(RowScores<Bits>(params, row), part, params.k, thresholds[row], lists[item],
           scratch.spare);
  };
  const Body finish = [&](int64_t row, Scratch& scratch) {
    const List* parts = &lists[row * num_chunks];
    int64_t size = 0;
    for (int64_t c = 0; c < num_chunks; ++c) size += parts[c].size;
    List& all = scratch.survivors;
    all.Reserve(size);
    all.size = size;
    uint64_t* end = all.items.get();
    for (int64_t c = 0; c < num_chunks; ++c) {
      end = std::copy_n(parts[c].items.get(), parts[c].size, end);
    }
    Finish<Bits>(params, row, scratch);
  };
  const bool done = ParallelFor(pool, num_threads, params.rows, sample) &&
                    ParallelFor(pool, num_threads, params.rows * num_chunks, filter) &&
                    ParallelFor(pool, num_threads, params.rows, finish);
  Trim(lists);
  return done;
}

template <typename Bits>
bool Select(const TopKParams& params, ffi::ThreadPool& pool) {
  const int64_t rows = params.rows;
  // What there is to do follows the windows, not the width.
  int64_t work = kWorkPerSelected * rows * params.k;
  int64_t longest = 0;
  for (int64_t row = 0; row < rows; ++row) {
    const Window window = RowWindow(params, row);
    work += window.stop - window.start;
    longest = std::max(longest, window.stop - window.start);
  }
  // 0 in the pool, or 1: the caller alone.
  const int64_t num_threads =
      std::max<int64_t>(std::min(work / kWorkPerThread, pool.num_threads()), 1);
  if (num_threads > 1 && rows < 2 * num_threads && longest >= 4 * kColumnsPerChunk) {
    // Several items a thread, since threads start late.
    const int64_t num_chunks =
        std::clamp<int64_t>(4 * num_threads / rows, 2, longest / kColumnsPerChunk);
    return SelectInChunks<Bits>(params, num_chunks, num_threads, pool);
  }
  // Short rows go in batches, lest claiming them take the time.
  const int64_t batch = std::clamp<int64_t>(kWorkPerThread * rows / work, 1, rows);
  const Body select = [&](int64_t item, Scratch& scratch) {
    const int64_t stop = std::min((item + 1) * batch, rows);
    for (int64_t row = item * batch; row < stop; ++row) {
      SelectRow<Bits>(params, row, scratch);
    }
  };
  return ParallelFor(pool, num_threads, (rows + batch - 1) / batch, select);
}

// --- The handler ---------------------------------------------------------------------

ffi::Error Answer(ffi::ThreadPool& pool, const ffi::ErrorOr<Operands>& operands) {
  if (!operands) return operands.error();
  const TopKParams& params = operands->params;
  if (params.rows == 0) return ffi::Error::Success();
  bool done = false;
  try {
    done = params.type == ScoreType::kF32 ? Select<uint32_t>(params, pool)
                                          : Select<uint16_t>(params, pool);
  } catch (const std::bad_alloc&) {
  }
  if (done) return ffi::Error::Success();
  return ffi::Error(
      ffi::ErrorCode::kResourceExhausted,
      "jax_topk: expected host memory for " + std::to_string(params.rows) +
          " rows of " + std::to_string(params.n) +
          " columns and k = " + std::to_string(params.k) + ", got std::bad_alloc");
}

ffi::Error CpuTopK(ffi::ThreadPool pool, ffi::RemainingArgs args,
                   ffi::RemainingRets rets, int64_t k, bool has_lengths,
                   bool has_starts, bool sorted) {
  return Answer(pool, DecodeOperands(args, rets, k, has_lengths, has_starts, sorted,
                                     /*has_workspace=*/false));
}

ffi::Error PagedCpuTopK(ffi::ThreadPool pool, ffi::RemainingArgs args,
                        ffi::RemainingRets rets, int64_t k, bool has_lengths,
                        bool has_starts, bool sorted, int64_t page_size,
                        int64_t page_stride) {
  const Paging paging = {page_size, page_stride};
  return Answer(pool, DecodeOperands(args, rets, k, has_lengths, has_starts, sorted,
                                     /*has_workspace=*/false, &paging));
}

auto Binding() {
  return ffi::Ffi::Bind()
      .Ctx<ffi::ThreadPool>()
      .RemainingArgs()
      .RemainingRets()
      .Attr<int64_t>("k")
      .Attr<bool>("has_lengths")
      .Attr<bool>("has_starts")
      .Attr<bool>("sorted");
}

auto PagedBinding() {
  return Binding().Attr<int64_t>("page_size").Attr<int64_t>("page_stride");
}

}  // namespace
}  // namespace jax_topk

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxTopKCpu, jax_topk::CpuTopK, jax_topk::Binding());
XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxTopKPagedCpu, jax_topk::PagedCpuTopK,
                              jax_topk::PagedBinding());
