// SPDX-License-Identifier: Apache-2.0
//
// The planner: which implementation answers a problem on a device, and with what
// geometry. One pure function of static shapes and device facts; no CUDA, no XLA, no
// device access, nothing that a recorded graph could freeze wrongly.
//
// It is called at two moments. The lowering calls it with global rows and fixes the
// implementation (the FFI target) and the workspace bytes a row. The handler calls it
// with the rows it really got, on the device it really runs on, for the geometry within
// that workspace. It gates on capacities, never on the name of an architecture.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>

namespace jax_topk {

enum class ScoreType { kF32, kBF16, kF16, kOther };
enum class Platform { kCpu, kCuda, kOther };
enum class Implementation {
  kNone,     // asked for: the planner decides. In a plan: nothing fits, see `reason`
  kXla,      // the reference, in XLA's own ops
  kCpu,      // native CPU handler
  kRow,      // CUDA, one CTA a row
  kSplit,    // CUDA, several CTAs a row, through the workspace
  kCluster,  // CUDA, the CTAs of a thread block cluster a row
};

struct Problem {
  int64_t rows;
  int64_t n;
  int64_t k;
  ScoreType type;
};

// Facts of a device. Zero means unknown.
struct Device {
  Platform platform = Platform::kOther;
  int64_t compute_capability = 0;  // 80, 90, 121
  int64_t num_sms = 0;
  int64_t shared_memory_bytes = 0;  // most that one block may opt in to
  int64_t cluster_size = 0;  // CTAs of the largest cluster that it grants; -1: none
};

// A plan given by hand, for tests: bends the geometry so that small inputs reach every
// path. Zero leaves a number to the planner. No answer depends on any of them.
struct Geometry {
  int64_t ctas_per_row = 0;
  int64_t capacity = 0;
  int64_t num_samples = 0;  // and rows are sampled that a cluster could hold
  int64_t registers = 0;    // not 0: chunks are read through registers
  int64_t ctas_per_sm = 0;
};
inline constexpr int64_t kGeometryFields = 5;

struct Plan {
  Implementation implementation = Implementation::kNone;
  int64_t num_threads = 0;   // of a CTA
  int64_t ctas_per_sm = 0;   // that the registers are shared out to
  int64_t ctas_per_row = 0;  // most that share a row; short rows use fewer
  int64_t min_chunk = 0;     // columns below which a further CTA does not pay
  int64_t grid = 0;          // CTAs
  int64_t at_once = 0;       // of `row`: CTAs that all SMs have room for
  int64_t capacity = 0;      // survivors that fit in shared memory
  int64_t num_samples = 0;   // most scores sampled for the threshold
  int64_t stages = 0;        // tiles on their way in shared memory; 0: in registers
  bool held = false;         // by the registers of a cluster, where aligned
  int64_t shared_memory_bytes = 0;  // dynamic, of a CTA
  int64_t workspace_bytes_per_row = 0;
  std::string reason;  // in words
};

// What the kernels are built for ------------------------------------------------------

inline constexpr int64_t kMaxK = 4096;
inline constexpr int64_t kMaxColumns = 2147483647;
inline constexpr int64_t kMinComputeCapability = 80;
inline constexpr int64_t kMinSharedMemoryBytes = 48 << 10;
inline constexpr int kThreads = 512;            // of a CTA
inline constexpr int64_t kNumBins = 1024;       // of a histogram
inline constexpr int64_t kScratchBytes = 1024;  // what Cta::Scratch may take
// Of shared memory, that the driver keeps for each CTA.
inline constexpr int64_t kReservedBytes = 1024;
inline constexpr int64_t kSampleGroup = 8;  // neighbours that are sampled together
inline constexpr int64_t kMinSamples = 2048;
inline constexpr int64_t kMaxSamples = 8192;
// A sample that k columns reach on average reaches further down by so many standard
// deviations, and so many samples, for safety.
inline constexpr float kMargin = 6.0f;
inline constexpr float kLeastMargin = 8.0f;
// And the list has room for so many standard deviations more than the mean.
inline constexpr double kListMargin = 4.0;
inline constexpr int64_t kMaxCtasPerRow = 64;
inline constexpr int64_t kMaxClusterSize = 16;
inline constexpr int64_t kMinClusterCapability = 90;
// Tiles of a chunk that are on their way in shared memory (Stream in select.cuh).
inline constexpr int kFewStages = 2;
inline constexpr int kMostStages = 3;
inline constexpr int64_t kStageBytes = kThreads * 64;
inline constexpr int64_t kMaxHeldColumns = 32;  // of a thread, of a row that is held
inline constexpr int64_t kMaxGrid = 2147483647;
inline constexpr int64_t kMaxGridRows = 65535;  // in y; rows are y and z of a grid

// Planner thresholds ------------------------------------------------------------------

// All measured on the H200, f32, k = 2048 (benchmarks/results).

// Survivors' slots; a row of so many columns is kept whole, without a sample.
inline constexpr int64_t kCapacity = 8192;
// On longer rows a sample leaves more survivors.
inline constexpr int64_t kLongRow = 1 << 18;
inline constexpr int64_t kLongRowCapacity = 12288;
// Up to here one CTA reads a row about as fast as several can meet in the workspace.
inline constexpr int64_t kMinSplitColumns = 49152;
inline constexpr int64_t kMinChunk = 8192;
// A cluster pays as soon as one CTA cannot keep a row: one and four CTAs take 7.5 and
// 6.7 us at 1 x 10240, 7.7 and 6.5 us at 1 x 16384. Two gain less, and nothing where
// half of the SMs are busy as it is: one and two CTAs take 8.2 and 7.7 us at 32 x 16384,
// but 10.9 and 11.7 us at 64 x 32768, 14.0 and 12.9 us at 64 x 49152.
inline constexpr int64_t kMinPairColumns = 40960;
// Each CTA of a larger cluster has less to do and more to wait for: 4 and 8 CTAs take 6.5
// and 6.9 us at 1 x 16384, 7.4 and 7.1 us at 1 x 20480; 8 and 16 take 6.9 and 7.3 us at
// 1 x 32768, 7.7 and 7.5 us at 1 x 40960.
inline constexpr int64_t kMinClusterChunk = 4096;
// From here on the more CTAs that `split` can share a row among outweigh the time they
// take to meet: cluster and split take 15.7 and 16.8 us at 4 x 524288 (32768 columns a
// CTA of the cluster), 20.6 and 19.2 us at 8 x 524288 (65536).
inline constexpr int64_t kMaxClusterChunk = 32768;

// Alone on its SM a CTA gets all the registers, and more of its chunk is on the way. Two
// hide each other's barriers, which pays unless the rows are long: one and two CTAs an SM
// take 38.1 and 26.5 us at 1024 x 8192, 70.3 and 58.3 us at 1024 x 32768, but 159 and 164 us
// at 1024 x 131072; in bfloat16 128 and 113 us there.
inline constexpr int64_t kLongRowBytes = 1 << 19;

// More shared memory than this is slower, it seems because it leaves too little of an SM's
// memory to the L1 cache: 1024 x 131072 takes 159 us with 8192 slots and three tiles
// on their way, 156 us with 6144 slots, and 170 us with 8192 and four tiles; 64 x 1048576
// takes 72.8 us with 12288 slots and three tiles, and 72.0 us with two.
inline constexpr int64_t kMostStagesBytes = 176 << 10;
inline constexpr int64_t kRowCapacity = 6144;

// Columns of a chunk up to which several CTAs of a row read theirs through registers: 17.6
// us, and 18.4 us through shared memory, at 8 x 524288 (32768 columns a CTA); but 19.9 and
// 16.4 us at 64 x 131072 (65536 a CTA).
inline constexpr int64_t kMaxRegisterChunk = 32768;

// Nothing is known of the device (export, or lowering for CUDA on a host without a
// GPU): the implementation must suit any, and the handler plans the geometry anew.
inline constexpr Device kPortableDevice = {Platform::kCuda, kMinComputeCapability, 48,
                                           kMinSharedMemoryBytes};

namespace plan_internal {

inline int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }
inline int64_t RoundUp(int64_t a, int64_t b) { return CeilDiv(a, b) * b; }

inline int64_t PowerOfTwoAtLeast(int64_t x) {
  int64_t p = 1;
  while (p < x) p *= 2;
  return p;
}

inline int64_t BytesOf(ScoreType type) { return type == ScoreType::kF32 ? 4 : 2; }

inline std::string Number(int64_t x) { return std::to_string(x); }

inline std::string Columns(const Problem& problem) {
  return Number(problem.rows) + (problem.rows == 1 ? " row of " : " rows of ") +
         Number(problem.n) + " columns";
}

}  // namespace plan_internal

inline const char* Name(Implementation implementation) {
  switch (implementation) {
    case Implementation::kXla:
      return "xla";
    case Implementation::kCpu:
      return "cpu";
    case Implementation::kRow:
      return "row";
    case Implementation::kSplit:
      return "split";
    case Implementation::kCluster:
      return "cluster";
    case Implementation::kNone:
      break;
  }
  return "";
}

// Dynamic shared memory of a CTA: scratch, bins, and the list of survivors (select.cuh).
inline int64_t SharedMemoryBytes(int64_t capacity) {
  return kScratchBytes + 4 * kNumBins + 8 * capacity;
}

// What the CTAs of a cluster exchange lies behind the list (held_top_k.cu): bins of 16
// bits of each CTA, and some that is smaller.
inline constexpr int64_t kExchangeScratchBytes = 2048;
inline constexpr int64_t kMostWithAllBins = 8;  // CTAs; more count half as many bins
inline int64_t ExchangeBytes(int64_t cluster) {
  const int64_t bins = cluster > kMostWithAllBins ? kNumBins / 2 : kNumBins;
  return 2 * cluster * bins + kExchangeScratchBytes;
}

// Workspace of a row: arrival word, a count and k entries a CTA (row_state.cuh).
inline int64_t WorkspaceHeaderBytes(int64_t ctas_per_row) {
  return plan_internal::RoundUp(8 + 4 * ctas_per_row, 16);
}

inline int64_t WorkspaceBytesPerRow(int64_t k, int64_t ctas_per_row) {
  return plan_internal::RoundUp(
      WorkspaceHeaderBytes(ctas_per_row) + 8 * k * ctas_per_row, 16);
}

// The most CTAs a row whose workspace fits in `bytes`.
inline int64_t CtasThatFit(int64_t k, int64_t bytes) {
  int64_t ctas = std::min(kMaxCtasPerRow, bytes / (8 * k + 4));
  while (ctas > 0 && WorkspaceBytesPerRow(k, ctas) > bytes) --ctas;
  return ctas;
}

// The survivors of a row of which so many scores are sampled: on average, and hardly ever
// more than.
struct Survivors {
  double mean;
  double most;

  Survivors(int64_t n, int64_t k, int64_t samples) {
    const double columns_a_sample = static_cast<double>(n) / samples;
    const double expected = k / columns_a_sample;
    const double rank = expected + kMargin * std::sqrt(expected) + kLeastMargin;
    mean = rank * columns_a_sample;
    most = (rank + kListMargin * std::sqrt(rank)) * columns_a_sample;
  }
};

// As few samples of a row as keep those beyond its threshold within 2.5 k and the list,
// if so many do, and as the list can hold.
inline int64_t NumSamples(int64_t n, int64_t k, int64_t capacity) {
  int64_t samples = kMinSamples;
  for (; samples < kMaxSamples; samples *= 2) {
    const Survivors survivors(n, k, samples);
    if (survivors.mean <= std::max(2.0 * k, 4096.0) && survivors.most <= capacity)
      break;
  }
  return std::min(samples, 2 * capacity);
}

// `requested`: kNone lets the planner choose. `workspace_bytes_per_row`: what the
// handler got; negative at lowering, when the plan is what decides it.
inline Plan MakePlan(const Problem& problem, const Device& given,
                     Implementation requested = Implementation::kNone,
                     const Geometry& geometry = {},
                     int64_t workspace_bytes_per_row = -1) {
  using plan_internal::BytesOf;
  using plan_internal::CeilDiv;
  using plan_internal::Columns;
  using plan_internal::Number;
  using plan_internal::PowerOfTwoAtLeast;

  const auto answer = [](Implementation implementation, std::string reason) {
    Plan plan;
    plan.implementation = implementation;
    plan.reason = std::move(reason);
    return plan;
  };
  // What speaks against our own code is a refusal if that code was asked for by name,
  // and otherwise sends the problem to the reference.
  const bool chosen_here = requested == Implementation::kNone;
  const auto refuse = [&](const std::string& why) {
    return answer(chosen_here ? Implementation::kXla : Implementation::kNone, why);
  };

  if (requested == Implementation::kXla) {
    return answer(Implementation::kXla, "the reference was asked for by name");
  }
  if (problem.type == ScoreType::kOther) {
    return refuse(
        "the native implementations take float32, bfloat16 and float16 scores only");
  }
  if (problem.n > kMaxColumns) {
    return refuse("indices are int32, so a row has at most " + Number(kMaxColumns) +
                  " columns, not " + Number(problem.n));
  }
  const bool wants_cpu = requested == Implementation::kCpu;
  if (given.platform == Platform::kCpu) {
    if (!chosen_here && !wants_cpu) {
      return refuse("the CUDA kernels need a CUDA device, and this is a CPU");
    }
    return answer(Implementation::kCpu,
                  "the native handler serves every shape on a CPU");
  }
  if (given.platform != Platform::kCuda) {
    return refuse("there is native code for CPU and CUDA only");
  }
  if (wants_cpu)
    return refuse("the CPU handler needs a CPU, and this is a CUDA device");

  // CUDA from here on.
  const bool known = given.compute_capability > 0 && given.num_sms > 0 &&
                     given.shared_memory_bytes > 0;
  const Device& device = known ? given : kPortableDevice;
  if (device.compute_capability < kMinComputeCapability) {
    return refuse("the kernels need compute capability " +
                  Number(kMinComputeCapability) + " and the device has " +
                  Number(device.compute_capability));
  }
  if (problem.k > kMaxK) {
    return refuse("the kernels select at most " + Number(kMaxK) +
                  " of a row, and k is " + Number(problem.k));
  }
  if (problem.rows > kMaxGrid) {
    return refuse("the kernels take at most " + Number(kMaxGrid) + " rows, not " +
                  Number(problem.rows));
  }
  if (device.shared_memory_bytes < kMinSharedMemoryBytes) {
    return refuse("the kernels need " + Number(kMinSharedMemoryBytes) +
                  " bytes of shared memory a block and the device grants " +
                  Number(device.shared_memory_bytes));
  }
  const int64_t rows = std::max<int64_t>(problem.rows, 1);
  const int64_t n = std::max<int64_t>(problem.n, 1);
  const int64_t k = std::max<int64_t>(problem.k, 1);

  Plan plan;

  // Survivors' slots: as many as wanted, as few as the sort of k needs, never more than
  // the device grants. The least fits in kMinSharedMemoryBytes for every k up to kMaxK.
  const int64_t least = std::max<int64_t>(PowerOfTwoAtLeast(k), 64);
  const int64_t most = (device.shared_memory_bytes - SharedMemoryBytes(0)) / 8;
  int64_t wanted =
      n > kLongRow ? std::max(kLongRowCapacity, 4 * k) : std::max(kCapacity, 3 * k);
  if (geometry.capacity > 0) wanted = geometry.capacity;
  if (requested == Implementation::kCluster) wanted = std::max(wanted, 2 * k);
  plan.capacity = std::clamp(wanted, least, most) / 2 * 2;  // entries are read in pairs

  // CTAs a row: those that would idle otherwise, each with a chunk worth reading.
  const auto ctas_for = [&](int64_t of_rows) {
    int64_t spread = std::min(device.num_sms / of_rows, CeilDiv(n, kMinChunk));
    // With 33 CTAs a row four rows of 2^20 take 25.2 us, with 32 CTAs 20.3 us.
    if (spread > 8) spread = spread / 8 * 8;
    return n < kMinSplitColumns ? int64_t{1}
                                : std::clamp<int64_t>(spread, 1, kMaxCtasPerRow);
  };
  int64_t ctas = ctas_for(rows);
  plan.min_chunk = kMinChunk;

  // CTAs of a cluster: a power of two. Clusters of more than two find room side by side
  // on half of the SMs only (measured on the H200, 32768 columns: 16 rows with 4 and 8
  // CTAs each take 9.1 and 13.7 us).
  const int64_t largest_cluster =
      device.compute_capability < kMinClusterCapability || device.cluster_size < 0 ? 0
      : device.cluster_size > 0 ? std::min(device.cluster_size, kMaxClusterSize)
      // What such devices are known to grant.
      : device.shared_memory_bytes >= (200 << 10) ? kMaxClusterSize
                                                  : 8;
  // The ties of a chunk lie behind k slots (cluster_top_k.cu).
  const int64_t cluster_capacity =
      std::min(plan.capacity, most - CeilDiv(ExchangeBytes(largest_cluster), 8));
  const bool has_clusters = largest_cluster > 0 && cluster_capacity >= 2 * k;
  int64_t cluster = 1;
  while (has_clusters && 2 * cluster <= largest_cluster &&
         2 * cluster * rows <= (cluster == 1 ? device.num_sms : device.num_sms / 2) &&
         (cluster < 4 || n > cluster * kMinClusterChunk)) {
    cluster *= 2;
  }
  const bool pairs_pay = n >= kMinPairColumns || 4 * rows <= device.num_sms;
  if (n <= kCapacity || (cluster == 2 && !pairs_pay)) cluster = 1;

  if (geometry.ctas_per_row > 0) {
    ctas = std::min(geometry.ctas_per_row, kMaxCtasPerRow);
    cluster = 1;
    while (2 * cluster <= std::min(geometry.ctas_per_row, largest_cluster))
      cluster *= 2;
    plan.min_chunk = 1;
  }
  while (cluster * rows > kMaxGrid) cluster /= 2;
  const bool clustered = requested == Implementation::kCluster ||
                         (chosen_here && cluster > 1 &&
                          (CeilDiv(n, cluster) <= kMaxClusterChunk || cluster >= ctas));
  const bool split =
      requested == Implementation::kSplit || (chosen_here && !clustered && ctas > 1);

  if (clustered) {
    if (largest_cluster < 1) {
      return refuse(
          "clusters need compute capability " + Number(kMinClusterCapability) +
          " and the device has " + Number(device.compute_capability) +
          (device.cluster_size < 0 ? ", but no cluster or no code for one" : ""));
    }
    if (!has_clusters) {
      return refuse("a cluster needs " + Number(2 * k) +
                    " slots of shared memory for k = " + Number(k) +
                    " and the device has room for " + Number(cluster_capacity));
    }
    plan.implementation = Implementation::kCluster;
    plan.ctas_per_row = cluster;
    plan.capacity = cluster_capacity / 2 * 2;
    // Rows are sampled if a number of samples was given.
    plan.held = geometry.num_samples == 0 && cluster > 1 &&
                CeilDiv(n, cluster) <= kMaxHeldColumns * kThreads;
    plan.min_chunk = geometry.ctas_per_row > 0 ? 1 : kMinClusterChunk;
    plan.ctas_per_sm = 1;
    plan.grid = rows * cluster;
    plan.reason = !chosen_here
                      ? "asked for by name"
                      : Columns(problem) + " leave SMs idle with one CTA a row (" +
                            Number(device.num_sms) + " SMs), so clusters of " +
                            Number(cluster) + " CTAs share each";
  } else if (!split) {
    plan.implementation = Implementation::kRow;
    plan.ctas_per_row = 1;
    const bool is_long = n * BytesOf(problem.type) >= kLongRowBytes;
    plan.ctas_per_sm = rows <= device.num_sms || is_long ? 1 : 2;
    plan.grid = rows;
    plan.reason = !chosen_here ? "asked for by name"
                  : n < kMinSplitColumns
                      ? Number(n) + " columns are few enough for one CTA a row"
                      : Columns(problem) + " fill " + Number(device.num_sms) +
                            " SMs with one CTA a row";
  } else {
    plan.implementation = Implementation::kSplit;
    if (workspace_bytes_per_row < 0) {
      // Rows may be sharded: leave room for the CTAs that 8 times fewer rows want.
      const int64_t room =
          geometry.ctas_per_row > 0 ? ctas : std::min(ctas_for(1), 8 * ctas);
      plan.workspace_bytes_per_row = WorkspaceBytesPerRow(k, room);
    } else {
      plan.workspace_bytes_per_row = workspace_bytes_per_row;
      const int64_t fit = CtasThatFit(k, workspace_bytes_per_row);
      if (fit < 1) {
        return answer(Implementation::kNone, "a row needs " +
                                                 Number(WorkspaceBytesPerRow(k, 1)) +
                                                 " bytes of workspace and got " +
                                                 Number(workspace_bytes_per_row));
      }
      ctas = std::min(ctas, fit);
    }
    plan.ctas_per_row = ctas;
    plan.ctas_per_sm = 1;
    plan.grid = rows * ctas;
    plan.reason = !chosen_here
                      ? "asked for by name"
                      : Columns(problem) + " leave SMs idle with one CTA a row (" +
                            Number(device.num_sms) + " SMs), so " + Number(ctas) +
                            " CTAs share each";
  }
  plan.num_threads = kThreads;
  if (plan.implementation == Implementation::kRow) {
    if (geometry.ctas_per_sm > 0) {
      plan.ctas_per_sm = std::min<int64_t>(geometry.ctas_per_sm, 2);
    }
    plan.at_once = device.num_sms * plan.ctas_per_sm;
  }

  // Chunks are read through shared memory if that leaves a list as long as it would be, or
  // one that the survivors of nearly all rows fit in.
  if (plan.implementation == Implementation::kRow && plan.ctas_per_sm == 1 &&
      geometry.capacity == 0 && n > kCapacity && n <= kLongRow) {
    plan.capacity = std::min(plan.capacity, std::max({kRowCapacity, 3 * k, least}));
  }
  const int64_t granted =
      (device.shared_memory_bytes + kReservedBytes) / plan.ctas_per_sm - kReservedBytes;
  const auto slots_beside = [&](int64_t stages) {
    const int64_t bytes = std::min(granted, kMostStagesBytes) - stages * kStageBytes;
    return (bytes - SharedMemoryBytes(0)) / 64 * 8;
  };
  const bool alone = plan.ctas_per_sm == 1;
  const int64_t stages =
      alone && slots_beside(kMostStages) >= plan.capacity ? kMostStages : kFewStages;
  const bool pays =
      plan.ctas_per_row == 1 || CeilDiv(n, plan.ctas_per_row) > kMaxRegisterChunk;
  const int64_t slots = slots_beside(stages);
  if (n > kCapacity && !plan.held && pays && geometry.registers == 0 &&
      slots >= std::max(least, 2 * k) &&
      (slots >= plan.capacity ||
       slots >= Survivors(n, k, NumSamples(n, k, slots)).most)) {
    plan.stages = stages;
    plan.capacity = std::min((plan.capacity + 7) / 8 * 8, slots);
  }
  plan.shared_memory_bytes =
      SharedMemoryBytes(plan.capacity) +
      std::max(plan.stages * kStageBytes, clustered ? ExchangeBytes(cluster) : 0);
  // They may have to be put into the list.
  const int64_t most_samples = std::min(kMaxSamples, 2 * plan.capacity);
  plan.num_samples = geometry.num_samples > 0
                         ? std::clamp(geometry.num_samples, kSampleGroup, most_samples)
                         : NumSamples(n, k, plan.capacity);
  if (!known)
    plan.reason += "; the device is not known here, so this is the portable plan";
  return plan;
}

}  // namespace jax_topk
