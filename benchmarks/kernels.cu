// SPDX-License-Identifier: Apache-2.0
//
// Times the CUDA kernels by themselves, with the plan that the handlers would use.
//
//   build/kernels                         every cell, the planned implementation
//   build/kernels --quick                 a few of them
//   build/kernels --implementations all   also those that the planner did not choose
//   build/kernels --help                  the other switches
//
// A call's time is that of a CUDA graph of 20 calls, divided by 20: the median of 9
// replays. No score is in the L2 cache when it is read: the calls of a graph take turns
// with batches of more than 400 MB, or do not share any, and before each replay a
// buffer of several times the L2 is read. Before a cell is timed its answer is
// compared, in every bit, with a sort on the host, with outputs and workspace poisoned
// beforehand; and after it the answer of the last replay.
//
// Beside each cell stands the time in which a kernel that does nothing else reads as
// many bytes on all SMs, measured in the same way: the best of several geometries.

#include <cuda_runtime.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <functional>
#include <map>
#include <string>
#include <tuple>
#include <type_traits>
#include <vector>

#include "../ffi/top_k.h"

namespace jax_topk {
namespace {

constexpr int64_t kColdBytes = 400 << 20;  // what is read between two reads of a score
constexpr int kCalls = 20;                 // in a graph

void Check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(error));
  std::exit(1);
}
#define CHECK(call) Check(call, #call)

// Implementations ---------------------------------------------------------------------

Device CurrentDevice() {
  int sms, bytes, major, minor;
  CHECK(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, 0));
  CHECK(cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, 0));
  CHECK(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0));
  CHECK(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, 0));
  CHECK(PrepareRowTopK(bytes));
  CHECK(PrepareSplitTopK(bytes));
  int cluster_size = 0;
  if (10 * major + minor >= kMinClusterCapability) {
    CHECK(PrepareClusterTopK(bytes));
    CHECK(LargestCluster(bytes, &cluster_size));
  }
  return {Platform::kCuda, 10 * major + minor, sms, bytes, cluster_size};
}

cudaError_t Launch(const TopKParams& params, const Plan& plan, void* workspace,
                   cudaStream_t stream) {
  static uint64_t tags = 0;
  switch (plan.implementation) {
    case Implementation::kRow:
      return LaunchRowTopK(params, plan, stream);
    case Implementation::kSplit:
      return LaunchSplitTopK(params, plan, workspace, plan.workspace_bytes_per_row,
                             uint64_t{0x7FF4} << 48 | ++tags << 16, stream);
    case Implementation::kCluster:
      return LaunchClusterTopK(params, plan, stream);
    default:
      return cudaErrorNotSupported;
  }
}

// The kernels come last among the planner's names.
std::vector<Implementation> Kernels() {
  std::vector<Implementation> kernels;
  for (int i = static_cast<int>(Implementation::kRow);; ++i) {
    const auto kernel = static_cast<Implementation>(i);
    if (*Name(kernel) == '\0') return kernels;
    kernels.push_back(kernel);
  }
}

// Inputs ------------------------------------------------------------------------------

enum Scores {
  kNormal,
  kNarrow,   // 1 + 0.01 u
  kPlateau,  // relu(normal - 3): the k-th value is 0
  kRelu,     // half of the scores are 0
  kAllEqual,
  kAscending,
  kDescending,
  kSawtooth,  // ramps of 1024 columns
  kTies,      // groups of four equal scores
  kBits,      // every bit pattern, NaNs too
  kOutlier,   // a few scores of 1e30
  kRecent,    // the best are in the last sixteenth of the row
  kTwoValues,
  kEvery32nd,    // the best are in every 32nd column
  kLatePlateau,  // 4 % of equal scores at the end of the row, half of them selected
  kSampleHigh,   // the best are in half of the groups that `row` and `split` sample
  kSampleLow,    // the least are the columns that they sample
  kNumScores,
};

constexpr const char* kScoresNames[kNumScores] = {
    "normal",     "narrow",     "plateau",      "relu",        "all-equal", "ascending",
    "descending", "sawtooth",   "ties-of-four", "random-bits", "outliers",  "recent",
    "two-values", "every-32nd", "late-plateau", "sample-high", "sample-low"};

enum Lengths {
  kFull,
  kUniform,      // in 1..n
  kBimodal,      // half of the rows up to n / 32, the others from n - n / 32
  kMostlyShort,  // 90 % up to n / 32, the others full
  kOnly4096,
  kNumLengths,
};

constexpr const char* kLengthsNames[kNumLengths] = {"full", "uniform", "bimodal",
                                                    "mostly-short", "4096"};

__host__ __device__ uint64_t Hash(uint64_t x) {  // splitmix64
  x += 0x9E3779B97F4A7C15ull;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
  return x ^ (x >> 31);
}

__device__ float Uniform(uint64_t hash) { return (hash >> 40) * 0x1p-24f; }

__device__ float Normal(uint64_t hash) {
  const float radius = sqrtf(-2 * logf(Uniform(hash) + 0x1p-25f));
  return radius * cospif(2 * ((hash & 0xFFFFFF) * 0x1p-24f));
}

// Which group of a sample of 2048, 4096 or 8192 scores of a row the column is in, or -1
// (DrawSample in select.cuh).
__device__ int64_t GroupAt(int64_t column, int64_t n) {
  const int64_t place = column / kSampleGroup;
  const int64_t places = n / kSampleGroup;
  for (int log_groups = 8; log_groups <= 10; ++log_groups) {
    const int64_t guess = (place << log_groups) / places;
    for (int64_t i = guess; i <= guess + 1; ++i) {
      const int64_t jitter = (static_cast<uint32_t>(i) * 2654435761u) >> 16;
      if ((i * places + (jitter * places >> 16)) >> log_groups == place) return i;
    }
  }
  return -1;
}

__global__ void Fill(void* to, int64_t count, int64_t n, ScoreType type, Scores scores,
                     uint64_t seed) {
  const int64_t stride = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count;
       i += stride) {
    const int64_t column = i % n;
    const uint64_t hash = Hash(i * 3 + seed);
    float x = Normal(hash);
    switch (scores) {
      case kNarrow:
        x = 1 + 0.01f * Uniform(hash);
        break;
      case kPlateau:
        x = fmaxf(x - 3, 0);
        break;
      case kRelu:
        x = fmaxf(x, 0);
        break;
      case kAllEqual:
        x = 1.2345f;
        break;
      case kAscending:
        x = column * 0.37f;
        break;
      case kDescending:
        x = column * -0.37f;
        break;
      case kSawtooth:
        x = column % 1024 * 0.37f;
        break;
      case kTies:
        x = Normal(Hash(i / 4 + seed));
        break;
      case kBits:
        x = __uint_as_float(static_cast<uint32_t>(hash));
        break;
      case kOutlier:
        x = (hash >> 32 & 0xFFFF) == 5 ? 1e30f : x;
        break;
      case kRecent:
        x += column >= n - n / 16 ? 8 : 0;
        break;
      case kTwoValues:
        x = 1 + (hash & 1);
        break;
      case kEvery32nd:
        x = column % 32 == 7 ? 5 + 0.01f * x : 0.5f * x;
        break;
      case kLatePlateau:
        x = column > n - n / 25 ? 1 : 0.5f * Uniform(hash);
        break;
      case kSampleHigh:
        x += column % kSampleGroup == 0 && GroupAt(column, n) % 2 == 0 ? 100 : 0;
        break;
      case kSampleLow:
        x -= GroupAt(column, n) >= 0 ? 100 : 0;
        break;
      default:
        break;
    }
    const uint32_t bits = __float_as_uint(x);
    if (type == ScoreType::kF32) {
      static_cast<uint32_t*>(to)[i] = bits;
    } else {  // bfloat16, cut off
      static_cast<uint16_t*>(to)[i] = static_cast<uint16_t>(bits >> 16);
    }
  }
}

// One problem of the benchmark.
struct Cell {
  const char* group;
  int64_t rows, n, k;
  ScoreType type = ScoreType::kF32;
  bool sorted = false;
  Scores scores = kNormal;
  Lengths lengths = kFull;

  int64_t ScoreBytes() const { return type == ScoreType::kF32 ? 4 : 2; }
  const char* Dtype() const { return type == ScoreType::kF32 ? "f32" : "bf16"; }
  const char* Order() const { return sorted ? "value" : "index"; }

  std::vector<int32_t> RowLengths() const {
    std::vector<int32_t> of_rows(rows);
    for (int64_t row = 0; row < rows; ++row) {
      const int64_t few = n / 32;
      const int64_t hash = Hash(row + 1) >> 1;
      int64_t length = n;
      if (lengths == kUniform) length = 1 + hash % n;
      if (lengths == kBimodal) length = row % 2 ? 1 + hash % few : n - hash % few;
      if (lengths == kMostlyShort) length = row % 10 == 3 ? n : 1 + hash % few;
      if (lengths == kOnly4096) length = 4096;
      of_rows[row] = static_cast<int32_t>(length);
    }
    return of_rows;
  }
};

// Timing ------------------------------------------------------------------------------

template <int kUnroll>
__global__ void Read(const uint4* from, int64_t count, uint32_t* sink) {
  const int64_t stride = int64_t{gridDim.x} * blockDim.x;
  uint32_t all = 0;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count;
       i += kUnroll * stride) {
    uint4 vectors[kUnroll];
#pragma unroll
    for (int j = 0; j < kUnroll; ++j) {
      vectors[j] = i + j * stride < count ? __ldg(from + i + j * stride) : uint4{};
    }
#pragma unroll
    for (int j = 0; j < kUnroll; ++j) {
      all |= vectors[j].x ^ vectors[j].y ^ vectors[j].z ^ vectors[j].w;
    }
  }
  if (all == 0x12345678) *sink = all;  // so that nothing of it is optimised away
}

// Microseconds of a call.
struct Time {
  double median, least, most;
};

// The GPU: memory for batches of scores, and a stopwatch.
class Gpu {
 public:
  Gpu(int replays, bool flush) : replays_(replays), flush_(flush) {
    size_t free_bytes, total_bytes;
    CHECK(cudaMemGetInfo(&free_bytes, &total_bytes));
    arena_bytes_ = std::min<int64_t>(free_bytes / 10 * 8, int64_t{6} << 30);
    CHECK(cudaMalloc(&arena_, arena_bytes_));
    CHECK(cudaMalloc(&others_, kOtherBytes));
    CHECK(cudaMemset(arena_, 0, arena_bytes_));
    CHECK(cudaMemset(others_, 0, kOtherBytes));
    CHECK(cudaDeviceGetAttribute(&num_sms_, cudaDevAttrMultiProcessorCount, 0));
    CHECK(cudaStreamCreate(&stream_));
    CHECK(cudaEventCreate(&begin_));
    CHECK(cudaEventCreate(&end_));
    for (int i = 0; i < 1000; ++i) ReadOthers();  // until the clocks are up
    CHECK(cudaDeviceSynchronize());
  }

  uint8_t* arena() const { return static_cast<uint8_t*>(arena_); }

  // How many batches of `bytes`, of which `touched` are read, keep each other out of
  // the L2 cache: at most one for each call, as a replay begins without any. Zero: the
  // memory is too small.
  int64_t Batches(int64_t bytes, int64_t touched) const {
    const int64_t wanted = std::min<int64_t>(kColdBytes / touched + 1, kCalls);
    return wanted * bytes <= arena_bytes_ ? wanted : 0;
  }

  // `launch(call, stream)` for each call of a graph.
  template <typename F>
  Time Measure(F launch) {
    cudaGraph_t graph;
    cudaGraphExec_t replay;
    CHECK(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal));
    for (int call = 0; call < kCalls; ++call) launch(call, stream_);
    CHECK(cudaStreamEndCapture(stream_, &graph));
    CHECK(cudaGraphInstantiate(&replay, graph, 0));
    CHECK(cudaGraphUpload(replay, stream_));
    std::vector<double> times;
    for (int i = 0; i < 2 + replays_; ++i) {
      // Keeps the GPU busy while the replay is being launched, too.
      if (flush_) ReadOthers();
      CHECK(cudaEventRecord(begin_, stream_));
      CHECK(cudaGraphLaunch(replay, stream_));
      CHECK(cudaEventRecord(end_, stream_));
      CHECK(cudaStreamSynchronize(stream_));
      float milliseconds;
      CHECK(cudaEventElapsedTime(&milliseconds, begin_, end_));
      if (i >= 2) times.push_back(milliseconds * 1e3 / kCalls);
    }
    CHECK(cudaGraphExecDestroy(replay));
    CHECK(cudaGraphDestroy(graph));
    std::sort(times.begin(), times.end());
    return {times[times.size() / 2], times.front(), times.back()};
  }

  // The time to read `bytes` with all SMs; 0 if the memory is too small.
  double ReadMicroseconds(int64_t bytes) {
    double& best = read_[bytes];
    const int64_t step = plan_internal::RoundUp(bytes, 256);
    const int64_t batches = Batches(step, bytes);
    if (best != 0 || batches == 0) return best;
    const int64_t count = plan_internal::CeilDiv(bytes, sizeof(uint4));
    const auto measure = [&](auto read, int unroll) {
      for (int threads : {256, 512, 1024}) {
        for (int per_sm : {1, 2}) {
          const int64_t most = per_sm * num_sms_;
          const int64_t useful = plan_internal::CeilDiv(count, threads);
          // Threads with fewer loads than they have room for: a smaller `unroll`.
          if (unroll > 1 && count < most * threads * (unroll / 2)) continue;
          const int grid = static_cast<int>(std::min(most, useful));
          const Time time = Measure([&](int call, cudaStream_t stream) {
            const uint8_t* from = arena() + call % batches * step;
            read<<<grid, threads, 0, stream>>>(reinterpret_cast<const uint4*>(from),
                                               count, static_cast<uint32_t*>(others_));
          });
          if (best == 0 || time.median < best) best = time.median;
        }
      }
    };
    measure(Read<1>, 1);
    measure(Read<4>, 4);
    measure(Read<8>, 8);
    return best;
  }

 private:
  static constexpr int64_t kOtherBytes = 256 << 20;

  // Twice: by the time it has ended the CPU has launched what comes next.
  void ReadOthers() {
    for (int i = 0; i < 2; ++i) {
      Read<4><<<2 * num_sms_, 1024, 0, stream_>>>(static_cast<const uint4*>(others_),
                                                  kOtherBytes / sizeof(uint4),
                                                  static_cast<uint32_t*>(others_));
    }
  }

  int replays_;
  bool flush_;
  int num_sms_;
  void* arena_;
  int64_t arena_bytes_;
  void* others_;
  cudaStream_t stream_;
  cudaEvent_t begin_, end_;
  std::map<int64_t, double> read_;
};

// One cell ----------------------------------------------------------------------------

class Bench {
 public:
  // Requires that gpu.Batches(..) is not zero.
  Bench(const Cell& cell, Gpu* gpu) : cell_(cell), gpu_(*gpu) {
    lengths_ = cell.RowLengths();
    for (int64_t length : lengths_) touched_ += length * cell.ScoreBytes();
    // Aligned, as XLA's buffers are.
    batch_bytes_ = plan_internal::RoundUp(cell.rows * cell.n * cell.ScoreBytes(), 256);
    batches_ = gpu_.Batches(batch_bytes_, touched_);
    for (int64_t i = 0; i < batches_; ++i) {
      Fill<<<2048, 256>>>(Batch(i), cell.rows * cell.n, cell.n, cell.type, cell.scores,
                          Hash(i + cell.n));
    }
    params_ = {};
    params_.rows = cell.rows;
    params_.n = cell.n;
    params_.k = cell.k;
    params_.sorted = cell.sorted;
    params_.type = cell.type;
    params_.values = Allocate(cell.rows * cell.k * cell.ScoreBytes());
    params_.indices = static_cast<int32_t*>(Allocate(cell.rows * cell.k * 4));
    if (cell.lengths != kFull) {
      int32_t* lengths = static_cast<int32_t*>(Allocate(cell.rows * 4));
      CHECK(cudaMemcpy(lengths, lengths_.data(), cell.rows * 4, cudaMemcpyDefault));
      params_.lengths = lengths;
    }
    CHECK(cudaDeviceSynchronize());
  }

  ~Bench() {
    for (void* one : allocated_) cudaFree(one);
  }

  bool fits() const { return batches_ > 0; }
  int64_t touched_bytes() const { return touched_; }

  // False if an answer is wrong.
  bool Run(const Plan& plan, Time* time) {
    const int64_t bytes =
        std::max<int64_t>(plan.workspace_bytes_per_row * cell_.rows, 16);
    void* workspace = Allocate(bytes);
    CHECK(cudaMemset(workspace, 0x5A, bytes));
    const auto launch = [&](int call, cudaStream_t stream) {
      TopKParams params = params_;
      params.scores = Batch(call % batches_);
      CHECK(Launch(params, plan, workspace, stream));
    };
    Poison();
    launch(0, nullptr);
    CHECK(cudaDeviceSynchronize());
    if (!Right(0)) return false;
    Poison();
    *time = gpu_.Measure(launch);
    return Right((kCalls - 1) % batches_);
  }

 private:
  void* Batch(int64_t i) const { return gpu_.arena() + i * batch_bytes_; }

  void* Allocate(int64_t bytes) {
    void* memory;
    CHECK(cudaMalloc(&memory, bytes));
    allocated_.push_back(memory);
    return memory;
  }

  void Poison() {
    const int64_t slots = cell_.rows * cell_.k;
    CHECK(cudaMemset(params_.values, 0x5A, slots * cell_.ScoreBytes()));
    CHECK(cudaMemset(params_.indices, 0x5A, slots * 4));
  }

  // Element `offset` + i of `from`, for i < count, widened to 32 bits.
  std::vector<uint32_t> Bits(const void* from, int64_t offset, int64_t count) const {
    const int64_t size = cell_.ScoreBytes();
    std::vector<uint8_t> bytes(count * size);
    CHECK(cudaMemcpy(bytes.data(), static_cast<const uint8_t*>(from) + offset * size,
                     count * size, cudaMemcpyDefault));
    std::vector<uint32_t> bits(count);
    for (int64_t i = 0; i < count; ++i) {
      std::memcpy(&bits[i], &bytes[i * size], size);
    }
    return bits;
  }

  // Whether the answer for a batch is right, in up to eight rows from first to last.
  bool Right(int64_t batch) const {
    const int64_t most = std::clamp<int64_t>((4 << 20) / cell_.n, 2, 8);
    const int64_t rows = std::min(cell_.rows, most);
    for (int64_t i = 0; i < rows; ++i) {
      if (!RowRight(batch, i * (cell_.rows - 1) / std::max<int64_t>(rows - 1, 1))) {
        return false;
      }
    }
    return true;
  }

  bool RowRight(int64_t batch, int64_t row) const {
    const int64_t k = cell_.k;
    const auto scores = Bits(Batch(batch), row * cell_.n, lengths_[row]);
    const auto values = Bits(params_.values, row * k, k);
    std::vector<int32_t> indices(k);
    CHECK(cudaMemcpy(indices.data(), params_.indices + row * k, k * sizeof(int32_t),
                     cudaMemcpyDefault));
    std::vector<uint64_t> best(scores.size());
    for (size_t column = 0; column < best.size(); ++column) {
      const uint32_t key = cell_.type == ScoreType::kF32
                               ? OrderedKey<uint32_t>(scores[column])
                               : OrderedKey<uint16_t>(scores[column]);
      best[column] = Composite(key, static_cast<uint32_t>(column));
    }
    const int64_t count = std::min<int64_t>(k, best.size());
    std::partial_sort(best.begin(), best.begin() + count, best.end(), std::greater<>());
    best.resize(count);
    if (!cell_.sorted) {
      std::sort(best.begin(), best.end(), [](uint64_t a, uint64_t b) {
        return CompositeColumn(a) < CompositeColumn(b);
      });
    }
    for (int64_t slot = 0; slot < k; ++slot) {
      const int64_t column = slot < count ? int64_t{CompositeColumn(best[slot])} : -1;
      const uint32_t score = slot < count ? scores[column] : PadBits(cell_.type);
      if (indices[slot] != column || values[slot] != score) return false;
    }
    return true;
  }

  Cell cell_;
  Gpu& gpu_;
  TopKParams params_;
  std::vector<int32_t> lengths_;
  int64_t touched_ = 0;  // bytes of the scores within the rows' lengths
  int64_t batch_bytes_;
  int64_t batches_;
  std::vector<void*> allocated_;
};

// Which cells -------------------------------------------------------------------------

struct Options {
  std::vector<std::string> cells, implementations, dtype, order, scores, lengths;
  std::vector<int64_t> k, rows, n, geometry;
  std::string json;
  int replays = 9;
  bool quick = false, list = false, no_flush = false;
};

template <typename T, typename U>
bool Among(const std::vector<T>& wanted, const U& one) {
  return wanted.empty() || std::find(wanted.begin(), wanted.end(), one) != wanted.end();
}

std::vector<Cell> AllCells(const Options& options) {
  constexpr ScoreType kTypes[] = {ScoreType::kF32, ScoreType::kBF16};
  std::vector<Cell> cells;
  // A shape in the order of columns and by value, and in bfloat16.
  const auto add = [&](const Cell& cell) {
    for (int variant = 0; variant < (options.quick ? 1 : 3); ++variant) {
      cells.push_back(cell);
      cells.back().sorted = variant == 1;
      if (variant == 2) cells.back().type = ScoreType::kBF16;
    }
  };
  for (int64_t k : {2048, 512}) {
    for (int64_t rows : {1, 4, 8, 32, 64, 256}) {
      for (int64_t n : {8192, 32768, 131072, 524288, 1048576}) {
        if (k == 2048 || n == 32768 || n == 131072) add({"decode", rows, n, k});
      }
    }
  }
  for (int64_t rows : {1024, 4096}) {
    for (int64_t n : {8192, 32768, 131072}) add({"prefill", rows, n, 2048});
  }
  for (int64_t k : {8, 64, 128}) {
    for (int64_t rows : {1, 8, 64}) add({"small-k", rows, 131072, k});
  }
  for (ScoreType type : kTypes) {
    for (int64_t rows : {1, 8, 64}) {
      cells.push_back({"ragged", rows, 4096, 2048, type});
      cells.push_back({"ragged", rows, 1 << 20, 2048, type, false, kNormal, kOnly4096});
    }
    for (int64_t rows : {8, 64, 256}) {
      for (Lengths lengths : {kFull, kUniform, kBimodal, kMostlyShort}) {
        cells.push_back({"ragged", rows, 131072, 2048, type, false, kNormal, lengths});
      }
    }
    for (int scores = 0; scores < kNumScores; ++scores) {
      for (int64_t rows : {1, 8, 64}) {
        cells.push_back(
            {"hard", rows, 131072, 2048, type, false, static_cast<Scores>(scores)});
      }
    }
  }
  if (Among(options.cells, "grid") && !options.cells.empty()) {
    for (int64_t k : options.k) {
      for (int64_t rows : options.rows) {
        for (int64_t n : options.n) {
          if (k > n) continue;
          for (ScoreType type : kTypes) {
            for (bool sorted : {false, true}) {
              cells.push_back({"grid", rows, n, k, type, sorted});
            }
          }
        }
      }
    }
  }
  return cells;
}

auto Fields(const Cell& cell) {
  return std::make_tuple(cell.rows, cell.n, cell.k, cell.type, cell.sorted, cell.scores,
                         cell.lengths);
}

std::vector<Cell> WantedCells(const Options& options) {
  const std::vector<std::string> quick = {"decode", "prefill"};
  const auto& groups = options.quick && options.cells.empty() ? quick : options.cells;
  std::vector<Cell> cells;
  for (const Cell& cell : AllCells(options)) {
    // A problem of several groups is timed once.
    const bool known = std::any_of(cells.begin(), cells.end(), [&](const Cell& other) {
      return Fields(other) == Fields(cell);
    });
    if (!known && Among(groups, cell.group) && Among(options.k, cell.k) &&
        Among(options.rows, cell.rows) && Among(options.n, cell.n) &&
        Among(options.dtype, cell.Dtype()) && Among(options.order, cell.Order()) &&
        Among(options.scores, kScoresNames[cell.scores]) &&
        Among(options.lengths, kLengthsNames[cell.lengths])) {
      cells.push_back(cell);
    }
  }
  return cells;
}

// A plan to time, and whether it is what the planner wants.
struct Candidate {
  Plan plan;
  bool planned;
};

std::vector<Candidate> Candidates(const Cell& cell, const Device& device,
                                  const Options& options) {
  Geometry geometry;
  static_assert(std::is_trivially_copyable_v<Geometry> &&
                sizeof geometry == kGeometryFields * sizeof(int64_t));
  std::memcpy(static_cast<void*>(&geometry), options.geometry.data(),
              options.geometry.size() * sizeof(int64_t));
  const auto plan = [&](Implementation requested) {
    return MakePlan({cell.rows, cell.n, cell.k, cell.type}, device, requested,
                    geometry);
  };
  const Plan chosen = plan(Implementation::kNone);
  const auto wanted = [&](const std::string& name) {
    const auto& names = options.implementations;
    return !names.empty() && Among(names, name);
  };
  std::vector<Candidate> candidates;
  for (Implementation kernel : Kernels()) {
    if (kernel == chosen.implementation) {
      if (options.implementations.empty() || wanted("planned") || wanted("all") ||
          wanted(Name(kernel))) {
        candidates.push_back({chosen, options.geometry.empty()});
      }
    } else if (wanted("all") || wanted(Name(kernel))) {
      const Plan forced = plan(kernel);
      if (forced.implementation == kernel) candidates.push_back({forced, false});
    }
  }
  return candidates;
}

constexpr const char kHelp[] =
    "Times the CUDA kernels of jax_topk; each answer is checked.\n"
    "  --quick                  decode and prefill in float32, by index\n"
    "  --cells A,B              decode, prefill, small-k, ragged, hard; or grid: the\n"
    "                           product of --k, --rows and --n\n"
    "  --implementations A,B    planned (default), all, or names\n"
    "  --k, --rows, --n A,B     cells with these numbers only\n"
    "  --dtype f32,bf16         cells of these only\n"
    "  --order index,value      cells of these only (value: sorted=True)\n"
    "  --scores, --lengths A,B  cells of these only, such as plateau and uniform\n"
    "  --geometry A,B,..        a plan given by hand (Geometry in ffi/plan.h)\n"
    "  --replays N              of each graph, whose median counts (9)\n"
    "  --no-flush               leave in the L2 what the replay before left there\n"
    "  --json PATH              append a line of JSON for each measurement\n"
    "  --list                   print the cells, run nothing\n";

[[noreturn]] void Usage(const std::string& problem) {
  std::fprintf(stderr, "kernels: %s\n%s", problem.c_str(), kHelp);
  std::exit(2);
}

Options Parse(int argc, char** argv) {
  Options options;
  std::vector<int64_t> replays;
  const std::map<std::string, std::vector<std::string>*> words = {
      {"--cells", &options.cells},   {"--implementations", &options.implementations},
      {"--dtype", &options.dtype},   {"--order", &options.order},
      {"--scores", &options.scores}, {"--lengths", &options.lengths}};
  const std::map<std::string, std::vector<int64_t>*> numbers = {
      {"--k", &options.k},
      {"--rows", &options.rows},
      {"--n", &options.n},
      {"--geometry", &options.geometry},
      {"--replays", &replays}};
  const std::map<std::string, bool*> flags = {{"--quick", &options.quick},
                                              {"--list", &options.list},
                                              {"--no-flush", &options.no_flush}};
  for (int i = 1; i < argc; ++i) {
    const std::string name = argv[i];
    if (const auto flag = flags.find(name); flag != flags.end()) {
      *flag->second = true;
      continue;
    }
    if (name == "--help") {
      std::printf("%s", kHelp);
      std::exit(0);
    }
    if (i + 1 == argc) Usage(name + " is no switch, or lacks its argument");
    const std::string text = argv[++i];
    if (name == "--json") {
      options.json = text;
      continue;
    }
    for (size_t from = 0; from <= text.size();) {
      const size_t to = std::min(text.find(',', from), text.size());
      const std::string item = text.substr(from, to - from);
      from = to + 1;
      if (const auto list = words.find(name); list != words.end()) {
        list->second->push_back(item);
      } else if (const auto list = numbers.find(name); list != numbers.end()) {
        char* end;
        list->second->push_back(std::strtoll(item.c_str(), &end, 10));
        if (item.empty() || *end != '\0') Usage(item + " is no number");
      } else {
        Usage(name + " is no switch");
      }
    }
  }
  if (options.geometry.size() > kGeometryFields) Usage("too many numbers");
  if (!replays.empty()) {
    options.replays = static_cast<int>(std::max<int64_t>(replays[0], 1));
  }
  return options;
}

// Output ------------------------------------------------------------------------------

std::string FirstLine(const char* command) {
  char line[256] = "";
  if (FILE* pipe = popen(command, "r")) {
    if (std::fgets(line, sizeof line, pipe) == nullptr) line[0] = '\0';
    pclose(pipe);
  }
  line[std::strcspn(line, "\n")] = '\0';
  return line;
}

// Prints what all of this ran on, as text and as JSON. The fields of JSON that are
// words have no character to escape.
void PrintMachine(Gpu* gpu, const Options& options, double* read_gbps, FILE* json) {
  cudaDeviceProp properties;
  CHECK(cudaGetDeviceProperties(&properties, 0));
  int khz, l2_bytes, memory_khz, bus_bits, driver_cuda;
  CHECK(cudaDeviceGetAttribute(&khz, cudaDevAttrClockRate, 0));
  CHECK(cudaDeviceGetAttribute(&l2_bytes, cudaDevAttrL2CacheSize, 0));
  CHECK(cudaDeviceGetAttribute(&memory_khz, cudaDevAttrMemoryClockRate, 0));
  CHECK(cudaDeviceGetAttribute(&bus_bits, cudaDevAttrGlobalMemoryBusWidth, 0));
  CHECK(cudaDriverGetVersion(&driver_cuda));
  const std::string driver = FirstLine(
      "nvidia-smi -i 0 --query-gpu=driver_version --format=csv,noheader 2>/dev/null");
  const std::string commit = FirstLine("git rev-parse --short HEAD 2>/dev/null");
  char date[32];
  const std::time_t now = std::time(nullptr);
  std::strftime(date, sizeof date, "%Y-%m-%d", std::gmtime(&now));
  const double pin_gbps = 2.0 * memory_khz * bus_bits / 8 / 1e6;
  int64_t large = int64_t{2} << 30;
  while (gpu->Batches(large, large) == 0) large /= 2;
  *read_gbps = large / gpu->ReadMicroseconds(large) / 1e3;
  std::printf(
      "%s, %d SMs, %.0f MHz at most, L2 of %.0f MB; driver %s (CUDA %d.%d), compiled "
      "with CUDA %d.%d\n"
      "read bandwidth: %.0f GB/s measured over %lld MiB, %.0f GB/s by clock and bus\n",
      properties.name, properties.multiProcessorCount, khz / 1e3, l2_bytes / 1e6,
      driver.c_str(), driver_cuda / 1000, driver_cuda % 1000 / 10,
      CUDART_VERSION / 1000, CUDART_VERSION % 1000 / 10, *read_gbps,
      static_cast<long long>(large >> 20), pin_gbps);
  if (json == nullptr) return;
  std::fprintf(json,
               "{\"record\": \"machine\", \"date\": \"%s\", \"commit\": \"%s\", "
               "\"gpu\": \"%s\", "
               "\"sms\": %d, \"max_mhz\": %.0f, \"l2_bytes\": %d, \"driver\": \"%s\", "
               "\"driver_cuda\": \"%d.%d\", \"cuda\": \"%d.%d\", \"read_gbps\": %.1f, "
               "\"pin_gbps\": %.1f, \"calls\": %d, \"replays\": %d, \"flushed\": %s}\n",
               date, commit.c_str(), properties.name, properties.multiProcessorCount,
               khz / 1e3, l2_bytes, driver.c_str(), driver_cuda / 1000,
               driver_cuda % 1000 / 10, CUDART_VERSION / 1000,
               CUDART_VERSION % 1000 / 10, *read_gbps, pin_gbps, kCalls,
               options.replays, options.no_flush ? "false" : "true");
}

void PrintHeader() {
  std::printf("%-7s %5s %5s %8s %-5s %-5s %-12s %-12s %-8s %4s %9s %6s %7s %7s\n",
              "cells", "k", "rows", "n", "dtype", "order", "scores", "lengths",
              "kernel", "CTAs", "us", "GB/s", "share", "x read");
}

// An asterisk: not what the planner wants. The share is that of the read bandwidth, and
// the last column the time over that of a read. `time` is 0 where the answer was wrong.
void Print(const Cell& cell, const Candidate& one, int64_t bytes, const Time& time,
           double read_us, double read_gbps, FILE* json) {
  const Plan& plan = one.plan;
  const auto wide = [](int64_t x) { return static_cast<long long>(x); };
  std::printf(
      "%-7s %5lld %5lld %8lld %-5s %-5s %-12s %-12s %-8s %4lld ", cell.group,
      wide(cell.k), wide(cell.rows), wide(cell.n), cell.Dtype(), cell.Order(),
      kScoresNames[cell.scores], kLengthsNames[cell.lengths],
      (std::string(Name(plan.implementation)) + (one.planned ? "" : "*")).c_str(),
      wide(plan.ctas_per_row));
  if (time.median > 0) {
    const double gbps = bytes / time.median / 1e3;
    std::printf("%9.2f %6.0f %6.1f%% %7.2f\n", time.median, gbps,
                100 * gbps / read_gbps, time.median / read_us);
  } else {
    std::printf("%9s\n", "WRONG");
  }
  std::fflush(stdout);
  if (json == nullptr) return;
  std::fprintf(
      json,
      "{\"record\": \"kernel\", \"cells\": \"%s\", \"k\": %lld, \"rows\": %lld, "
      "\"n\": %lld, \"dtype\": \"%s\", \"order\": \"%s\", \"scores\": \"%s\", "
      "\"lengths\": \"%s\", \"implementation\": \"%s\", \"planned\": %s, "
      "\"ctas_per_row\": %lld, \"grid\": %lld, \"threads\": %lld, \"capacity\": %lld, "
      "\"bytes\": %lld, "
      "\"right\": %s, \"us\": %.3f, \"least_us\": %.3f, \"most_us\": %.3f, "
      "\"read_us\": %.3f}\n",
      cell.group, wide(cell.k), wide(cell.rows), wide(cell.n), cell.Dtype(),
      cell.Order(), kScoresNames[cell.scores], kLengthsNames[cell.lengths],
      Name(plan.implementation), one.planned ? "true" : "false",
      wide(plan.ctas_per_row), wide(plan.grid), wide(plan.num_threads),
      wide(plan.capacity), wide(bytes), time.median > 0 ? "true" : "false", time.median,
      time.least, time.most, read_us);
  std::fflush(json);
}

class Progress {
 public:
  void Show(size_t done, size_t all, const Cell& cell) {
    const auto now = std::chrono::steady_clock::now();
    const bool terminal = isatty(2) && !isatty(1);
    if (now - shown_ < std::chrono::seconds(terminal ? 0 : 5)) return;
    shown_ = now;
    std::fprintf(stderr, "%skernels: %zu of %zu cells, %.0f s (%s)%s",
                 terminal ? "\r" : "", done, all,
                 std::chrono::duration<double>(now - start_).count(), cell.group,
                 terminal ? "\033[K" : "\n");
  }

 private:
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
  std::chrono::steady_clock::time_point shown_ = start_;
};

int Main(int argc, char** argv) {
  const Options options = Parse(argc, argv);
  const std::vector<Cell> cells = WantedCells(options);
  if (cells.empty()) Usage("no cell is like that");
  if (options.list) {
    for (const Cell& cell : cells) {
      std::printf("%-7s k=%lld %lld x %lld %s %s %s %s\n", cell.group,
                  static_cast<long long>(cell.k), static_cast<long long>(cell.rows),
                  static_cast<long long>(cell.n), cell.Dtype(), cell.Order(),
                  kScoresNames[cell.scores], kLengthsNames[cell.lengths]);
    }
    return 0;
  }
  FILE* json = nullptr;
  if (!options.json.empty()) {
    json = std::fopen(options.json.c_str(), "a");
    if (json == nullptr) Usage(options.json + " cannot be written");
  }
  const Device device = CurrentDevice();
  Gpu gpu(options.replays, !options.no_flush);
  double read_gbps;
  PrintMachine(&gpu, options, &read_gbps, json);
  PrintHeader();
  Progress progress;
  bool all_right = true;
  for (size_t i = 0; i < cells.size(); ++i) {
    const Cell& cell = cells[i];
    progress.Show(i, cells.size(), cell);
    const std::vector<Candidate> candidates = Candidates(cell, device, options);
    if (candidates.empty()) continue;
    Bench bench(cell, &gpu);
    if (!bench.fits()) {
      std::fprintf(stderr, "kernels: %lld x %lld takes more memory than there is\n",
                   static_cast<long long>(cell.rows), static_cast<long long>(cell.n));
      continue;
    }
    std::vector<Time> times;
    for (const Candidate& one : candidates) {
      Time time = {};
      if (!bench.Run(one.plan, &time)) {
        time = {};
        all_right = false;
      }
      times.push_back(time);
    }
    const double read_us = gpu.ReadMicroseconds(bench.touched_bytes());
    for (size_t j = 0; j < candidates.size(); ++j) {
      Print(cell, candidates[j], bench.touched_bytes(), times[j], read_us, read_gbps,
            json);
    }
  }
  return all_right ? 0 : 1;
}

}  // namespace
}  // namespace jax_topk

int main(int argc, char** argv) { return jax_topk::Main(argc, argv); }
