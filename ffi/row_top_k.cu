// SPDX-License-Identifier: Apache-2.0
//
// `row`: one CTA a row. Any device; prefill, short rows, and the fallback where little
// shared memory is granted.
//
// Protocol of the kernel, one row a CTA (select.cuh has the phases):
//   1. Read the window; a row no longer than k is copied.
//   2. A row that fits is loaded whole. A longer one is sampled for a threshold and
//      read once, keeping what passes.
//   3. Select exactly among what was kept; write it in order; pad.
// If rows outnumber the CTAs that run at a time, a CTA that waits for its sample fetches
// that of the row so many behind its own into the L2 cache: by the time that another CTA
// needs it, it is there. Nobody relies on it.
// No kernel of ours loops over rows: what the compiler then computes ahead for all of them
// fills the registers, and the time of a row is that of its instructions (docs/design.md).

#include "select.cuh"

namespace jax_topk {
namespace {

constexpr int kAllResident = -1;

// `kStages`: of the stream of tiles; kAllResident: no row is too long for SelectResident.
template <typename Bits, int kCtasPerSm, int kStages, bool kMaySort>
__global__ void __launch_bounds__(kThreads, kCtasPerSm)
    RowTopK(const TopKParams params, uint32_t capacity, uint32_t at_once,
            const WholeRows whole) {
  const Cta cta = {capacity};
  const int64_t row = blockIdx.x;
  if constexpr (kStages == kAllResident) {
    const uint32_t n = static_cast<uint32_t>(params.n);
    // Where rows are of whole vectors, the row is on its way before its window is known.
    const Bits* data = static_cast<const Bits*>(params.scores) + row * params.n;
    Tile<Bits> tile;
    if (whole.aligned) tile.LoadRow(data, n);
    Rest(cta);
    const Row<Bits> entries(params, row);
    if (whole.aligned) {
      tile.Restrict(entries.columns, n);
      SelectResident<kMaySort>(cta, params, row, entries.columns, tile, [&] {
        tile.LoadRow(data, n);
        tile.Restrict(entries.columns, n);
      });
    } else {
      SelectResident<kMaySort>(cta, params, row, entries);
    }
  } else {
    const Row<Bits> entries(params, row);
    const auto fetch = [&] {
      if (row + at_once >= params.rows) return;
      const Row<Bits> later(params, row + at_once);
      if (later.Resident(capacity)) return;
      FetchSample(later.scores, later.data, later.columns, whole.sampling);
    };
    SelectRow<kMaySort, true, kStages>(cta, params, row, entries, entries.columns,
                                       whole, 0, fetch,
                                       [](Reduced*, const Filter&) { return true; });
  }
}

using Kernel = void (*)(const TopKParams, uint32_t, uint32_t, const WholeRows);

// With all the registers of an SM a CTA can afford to have the sort in its code.
template <typename Bits, int kStages>
Kernel KernelOf(int64_t ctas_per_sm, bool may_sort) {
  if (ctas_per_sm == 1) return RowTopK<Bits, 1, kStages, true>;
  return may_sort ? RowTopK<Bits, 2, kStages, true> : RowTopK<Bits, 2, kStages, false>;
}

template <typename Bits>
Kernel KernelOf(int64_t ctas_per_sm, int64_t stages, bool may_sort) {
  if (stages == kMostStages) return RowTopK<Bits, 1, kMostStages, true>;  // alone
  return stages == kAllResident ? KernelOf<Bits, kAllResident>(ctas_per_sm, may_sort)
         : stages == 0          ? KernelOf<Bits, 0>(ctas_per_sm, may_sort)
                                : KernelOf<Bits, kFewStages>(ctas_per_sm, may_sort);
}

Kernel KernelFor(ScoreType type, int64_t ctas_per_sm, int64_t stages, bool may_sort) {
  return type == ScoreType::kF32 ? KernelOf<uint32_t>(ctas_per_sm, stages, may_sort)
                                 : KernelOf<uint16_t>(ctas_per_sm, stages, may_sort);
}

// Rows that start at a vector have no need of one more than they fill.
bool AllResident(const TopKParams& params, int64_t capacity) {
  const int64_t most = kTileColumns - ColumnsBeside(params, false);
  return params.n <= std::min(most, capacity);
}

}  // namespace

cudaError_t PrepareRowTopK(int64_t bytes) {
  for (ScoreType type : {ScoreType::kF32, ScoreType::kBF16}) {
    for (int64_t ctas_per_sm : {1, 2}) {
      for (int stages : {kAllResident, 0, kFewStages, kMostStages}) {
        for (bool may_sort : {false, true}) {
          const cudaError_t error = cudaFuncSetAttribute(
              KernelFor(type, ctas_per_sm, stages, may_sort),
              cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes));
          if (error != cudaSuccess) return error;
        }
      }
    }
  }
  return cudaSuccess;
}

cudaError_t LaunchRowTopK(const TopKParams& params, const Plan& plan,
                          cudaStream_t stream) {
  const int64_t stages =
      AllResident(params, plan.capacity) ? kAllResident : plan.stages;
  KernelFor(params.type, plan.ctas_per_sm, stages,
            params.sorted)<<<static_cast<unsigned>(plan.grid), kThreads,
                             plan.shared_memory_bytes, stream>>>(
      params, static_cast<uint32_t>(plan.capacity), static_cast<uint32_t>(plan.at_once),
      WholeRows(params, plan));
  return cudaGetLastError();
}

}  // namespace jax_topk
