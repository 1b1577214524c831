// SPDX-License-Identifier: Apache-2.0
//
// Times the CUDA kernels by themselves, with the plan that the handlers would use.
//
//   make bench                     decode and prefill shapes
//   make bench ARGS=distributions  inputs that are hard for other kernels
//
// A call's time is that of a CUDA graph of 20 calls, divided by 20: the median of 9
// replays. The calls take turns with enough batches to exceed 400 MB, so that no score is
// in the L2 cache when it is read. Before anything is timed the answer is compared, in
// every bit, with a sort on the host, with outputs and workspace poisoned beforehand.

#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <vector>

#include "../ffi/top_k.h"

namespace jax_topk {
namespace {

void Check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(error));
  std::exit(1);
}
#define CHECK(call) Check(call, #call)

// Inputs ------------------------------------------------------------------------------

enum Distribution {
  kNormal,
  kNarrow,   // 1 + 0.01 u
  kPlateau,  // relu(normal - 3): the k-th value is 0
  kRelu,     // half of the scores are 0
  kAllEqual,
  kAscending,
  kDescending,
  kTies,     // groups of four equal scores
  kBits,     // every bit pattern, NaNs too
  kOutlier,  // a few scores of 1e30
  kRecent,   // the best are in the last sixteenth of the row
  kTwoValues,
  kEvery32nd,    // the best are in every 32nd column
  kLatePlateau,  // 4 % of equal scores at the end of the row, half of them selected
  kDistributions,
};

constexpr const char* kNames[kDistributions] = {
    "normal",    "narrow range", "plateau",      "relu",        "all equal",
    "ascending", "descending",   "ties of four", "random bits", "outliers",
    "recent",    "two values",   "every 32nd",   "late plateau"};

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

__global__ void Fill(uint8_t* scores, int64_t count, int64_t n, bool wide,
                     Distribution distribution, uint64_t seed) {
  const int64_t stride = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count;
       i += stride) {
    const int64_t column = i % n;
    const uint64_t hash = Hash(i * 3 + seed);
    float x = Normal(hash);
    switch (distribution) {
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
      default:
        break;
    }
    const uint32_t bits = __float_as_uint(x);
    if (wide) {
      reinterpret_cast<uint32_t*>(scores)[i] = bits;
    } else {  // bfloat16, cut off
      reinterpret_cast<uint16_t*>(scores)[i] = static_cast<uint16_t>(bits >> 16);
    }
  }
}

// One problem -------------------------------------------------------------------------

struct Case {
  int64_t rows, n, k;
  bool wide = true;  // float32; otherwise bfloat16
  bool sorted = false;
  Distribution distribution = kNormal;
};

Device CurrentDevice() {
  int sms, bytes, major, minor;
  CHECK(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, 0));
  CHECK(cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, 0));
  CHECK(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0));
  CHECK(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, 0));
  CHECK(PrepareRowTopK(bytes));
  CHECK(PrepareSplitTopK(bytes));
  return {Platform::kCuda, 10 * major + minor, sms, bytes};
}

class Bench {
 public:
  Bench(const Case& one, const Device& device) : case_(one) {
    const int64_t bytes = one.rows * one.n * ScoreBytes();
    const int64_t sets = std::clamp<int64_t>((400 << 20) / bytes + 1, 1, kCalls);
    for (int64_t i = 0; i < sets; ++i) {
      batches_.push_back(Allocate(bytes));
      Fill<<<2048, 256>>>(static_cast<uint8_t*>(batches_.back()), one.rows * one.n,
                          one.n, one.wide, one.distribution, Hash(i + one.n));
    }
    params_ = {};
    params_.rows = one.rows;
    params_.n = one.n;
    params_.k = one.k;
    params_.sorted = one.sorted;
    params_.type = one.wide ? ScoreType::kF32 : ScoreType::kBF16;
    params_.values = Allocate(one.rows * one.k * 4);
    params_.indices = static_cast<int32_t*>(Allocate(one.rows * one.k * 4));
    plan_ = MakePlan({one.rows, one.n, one.k, params_.type}, device);
    workspace_bytes_ = std::max<int64_t>(plan_.workspace_bytes_per_row * one.rows, 16);
    workspace_ = Allocate(workspace_bytes_);
    CHECK(cudaDeviceSynchronize());
  }

  ~Bench() {
    for (void* one : allocated_) cudaFree(one);
  }

  const Plan& plan() const { return plan_; }

  // Whether the answers of the first rows are right, whatever the memory held before.
  bool Right() {
    const int64_t k = case_.k;
    const int64_t rows = std::min<int64_t>(case_.rows, 4);
    CHECK(cudaMemset(params_.values, 0x5A, case_.rows * k * ScoreBytes()));
    CHECK(cudaMemset(params_.indices, 0x5A, case_.rows * k * 4));
    CHECK(cudaMemset(workspace_, 0x5A, workspace_bytes_));
    Launch(0, nullptr);
    CHECK(cudaDeviceSynchronize());
    std::vector<uint8_t> scores(rows * case_.n * ScoreBytes());
    std::vector<uint8_t> values(rows * k * ScoreBytes());
    std::vector<int32_t> indices(rows * k);
    Copy(&scores, batches_[0]);
    Copy(&values, params_.values);
    Copy(&indices, params_.indices);
    const auto bits = [&](const std::vector<uint8_t>& bytes, int64_t i) -> uint32_t {
      uint32_t wide = 0;
      std::memcpy(&wide, bytes.data() + i * ScoreBytes(), ScoreBytes());
      return wide;
    };
    for (int64_t row = 0; row < rows; ++row) {
      std::vector<uint64_t> best(case_.n);
      for (int64_t column = 0; column < case_.n; ++column) {
        const uint32_t score = bits(scores, row * case_.n + column);
        const uint32_t key =
            case_.wide ? OrderedKey<uint32_t>(score) : OrderedKey<uint16_t>(score);
        best[column] = Composite(key, static_cast<uint32_t>(column));
      }
      std::partial_sort(best.begin(), best.begin() + k, best.end(), std::greater<>());
      best.resize(k);
      if (!case_.sorted) {
        std::sort(best.begin(), best.end(), [](uint64_t a, uint64_t b) {
          return CompositeColumn(a) < CompositeColumn(b);
        });
      }
      for (int64_t slot = 0; slot < k; ++slot) {
        const int64_t column = CompositeColumn(best[slot]);
        if (indices[row * k + slot] != column) return false;
        const uint32_t score = bits(scores, row * case_.n + column);
        if (bits(values, row * k + slot) != score) return false;
      }
    }
    return true;
  }

  double Microseconds() {
    cudaStream_t stream;
    cudaGraph_t graph;
    cudaGraphExec_t replay;
    cudaEvent_t begin, end;
    CHECK(cudaStreamCreate(&stream));
    CHECK(cudaEventCreate(&begin));
    CHECK(cudaEventCreate(&end));
    CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    for (int call = 0; call < kCalls; ++call) Launch(call % batches_.size(), stream);
    CHECK(cudaStreamEndCapture(stream, &graph));
    CHECK(cudaGraphInstantiate(&replay, graph, 0));
    std::vector<float> times;
    for (int i = 0; i < 2 + kReplays; ++i) {
      CHECK(cudaEventRecord(begin, stream));
      CHECK(cudaGraphLaunch(replay, stream));
      CHECK(cudaEventRecord(end, stream));
      CHECK(cudaStreamSynchronize(stream));
      float milliseconds;
      CHECK(cudaEventElapsedTime(&milliseconds, begin, end));
      if (i >= 2) times.push_back(milliseconds);
    }
    std::sort(times.begin(), times.end());
    CHECK(cudaGraphExecDestroy(replay));
    CHECK(cudaGraphDestroy(graph));
    CHECK(cudaEventDestroy(begin));
    CHECK(cudaEventDestroy(end));
    CHECK(cudaStreamDestroy(stream));
    return times[times.size() / 2] * 1000.0 / kCalls;
  }

 private:
  static constexpr int kCalls = 20;
  static constexpr int kReplays = 9;

  int64_t ScoreBytes() const { return case_.wide ? 4 : 2; }

  void* Allocate(int64_t bytes) {
    void* memory;
    CHECK(cudaMalloc(&memory, bytes));
    allocated_.push_back(memory);
    return memory;
  }

  template <typename T>
  static void Copy(std::vector<T>* to, const void* from) {
    CHECK(cudaMemcpy(to->data(), from, to->size() * sizeof(T), cudaMemcpyDefault));
  }

  void Launch(size_t batch, cudaStream_t stream) {
    static uint64_t tags = 0;
    params_.scores = batches_[batch];
    if (plan_.implementation == Implementation::kSplit) {
      CHECK(LaunchSplitTopK(params_, plan_, workspace_, plan_.workspace_bytes_per_row,
                            uint64_t{0x7FF4} << 48 | ++tags << 16, stream));
    } else {
      CHECK(LaunchRowTopK(params_, plan_, stream));
    }
  }

  Case case_;
  TopKParams params_;
  Plan plan_;
  int64_t workspace_bytes_;
  void* workspace_;
  std::vector<void*> batches_;
  std::vector<void*> allocated_;
};

double Time(const Case& one, const Device& device, Plan* plan = nullptr) {
  Bench bench(one, device);
  if (!bench.Right()) {
    std::fprintf(stderr, "wrong answer: %s, %lld x %lld, k = %lld\n",
                 kNames[one.distribution], static_cast<long long>(one.rows),
                 static_cast<long long>(one.n), static_cast<long long>(one.k));
    std::exit(1);
  }
  if (plan != nullptr) *plan = bench.plan();
  return bench.Microseconds();
}

void Shapes(const Device& device) {
  std::printf("%5s %5s %8s   %-6s %5s   %8s %8s   %8s %8s\n", "k", "rows", "n",
              "kernel", "CTAs", "f32 us", "GB/s", "sorted", "bf16 us");
  std::vector<Case> cases;
  for (int64_t k : {2048, 512}) {
    for (int64_t rows : {1, 4, 8, 32, 64, 256}) {
      for (int64_t n : {8192, 32768, 131072, 524288, 1048576}) {
        if (k == 2048 || n == 32768 || n == 131072) cases.push_back({rows, n, k});
      }
    }
  }
  for (int64_t rows : {1024, 4096}) {
    for (int64_t n : {8192, 32768, 131072}) cases.push_back({rows, n, 2048});
  }
  for (Case one : cases) {
    Plan plan;
    const double f32 = Time(one, device, &plan);
    one.sorted = true;
    const double sorted = Time(one, device);
    one.sorted = one.wide = false;
    const double bf16 = Time(one, device);
    std::printf("%5lld %5lld %8lld   %-6s %5lld   %8.1f %8.0f   %8.1f %8.1f\n",
                static_cast<long long>(one.k), static_cast<long long>(one.rows),
                static_cast<long long>(one.n), Name(plan.implementation),
                static_cast<long long>(plan.ctas_per_row), f32,
                one.rows * one.n * 4e-3 / f32, sorted, bf16);
    std::fflush(stdout);
  }
}

void Distributions(const Device& device) {
  std::printf("n = 131072, k = 2048, us a call\n%-14s", "");
  for (const char* column : {"1 f32", "bf16", "8 f32", "bf16", "64 f32", "bf16"}) {
    std::printf(" %8s", column);
  }
  for (int i = 0; i < kDistributions; ++i) {
    std::printf("\n%-14s", kNames[i]);
    for (int64_t rows : {1, 8, 64}) {
      for (bool wide : {true, false}) {
        const Case one = {rows, 131072, 2048,
                          wide, false,  static_cast<Distribution>(i)};
        std::printf(" %8.1f", Time(one, device));
      }
    }
    std::fflush(stdout);
  }
  std::printf("\n");
}

}  // namespace
}  // namespace jax_topk

int main(int argc, char** argv) {
  cudaDeviceProp properties;
  jax_topk::Check(cudaGetDeviceProperties(&properties, 0), "cudaGetDeviceProperties");
  std::printf("%s, %d SMs, CUDA %d.%d\n", properties.name,
              properties.multiProcessorCount, CUDART_VERSION / 1000,
              CUDART_VERSION % 1000 / 10);
  const jax_topk::Device device = jax_topk::CurrentDevice();
  if (argc > 1 && std::strcmp(argv[1], "distributions") == 0) {
    jax_topk::Distributions(device);
  } else {
    jax_topk::Shapes(device);
  }
}
