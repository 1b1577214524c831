// SPDX-License-Identifier: Apache-2.0
//
// `split`: several CTAs a row, which meet in the row state (row_state.cuh). Any device;
// few and long rows.
//
// Protocol of the kernel, per row:
//   1. The CTAs of a row cut its window into chunks of equal size. A row that one CTA can
//      load whole is that CTA's alone: it answers and nobody touches the row state.
//   2. Each CTA draws the same sample of the row, so that all find the same filter.
//   3. Each reads its chunk once and reduces it to at most k composites: its survivors,
//      or the k largest of them, and the ties that may still be wanted.
//   4. Each publishes them in the row state and arrives. All but the last CTA leave.
//   5. The last gathers what was published, selects exactly, writes in order, pads. If
//      fewer than k columns were published (the sample was too high) it selects from the
//      row itself; if more than fit, from the row state.
// A barrier separates the rows of a CTA.

#include "row_state.cuh"
#include "select.cuh"

namespace jax_topk {
namespace {

constexpr int kThreads = 1024;

// The survivors in the row state, as entries of the exact select.
struct PublishedEntries {
  RowState state;
  uint32_t ctas;

  __device__ int64_t Size() const { return ctas * state.k; }
  __device__ bool Get(int64_t i, uint64_t* composite) const {
    const int64_t cta = i / state.k;
    const int64_t slot = i - cta * state.k;
    if (slot >= RowState::Survivors(state.counts[cta])) return false;
    *composite = state.slots[i];
    return true;
  }
};

// Phases 3 and 4 up to the arrival.
template <typename Bits>
__device__ void PublishChunk(const Cta<kThreads>& cta, const RowEntries<Bits>& chunk,
                             uint32_t k, Filter filter, const RowState& state,
                             uint32_t mine) {
  const Reduced reduced = ReduceChunk(cta, chunk, k, filter);
  uint64_t* slots = state.Slots(mine);
  uint32_t survivors = reduced.survivors;
  if (survivors <= k) {
    const uint32_t count = survivors + reduced.ties;
    for (uint32_t i = threadIdx.x; i < count; i += kThreads) slots[i] = cta.list[i];
  } else {
    const uint64_t threshold = SelectInList(cta, survivors, k, filter.floor,
                                            cta.scratch->max_key, chunk.window);
    if (threadIdx.x == 0) cta.scratch->count = 0;
    __syncthreads();
    ForEach<kThreads>(ListEntries{cta.list, survivors},
                      [&](bool valid, uint64_t composite) {
                        valid = valid && composite >= threshold;
                        const uint32_t slot = Append(&cta.scratch->count, valid);
                        if (valid) slots[slot] = composite;
                      });
    survivors = k;
  }
  if (threadIdx.x == 0) {
    state.counts[mine] = RowState::PackCount(survivors, reduced.ties);
  }
}

// Phase 5, after the acquire of the last arrival.
template <typename Bits>
__device__ void FinishRow(const Cta<kThreads>& cta, const TopKParams& params, int64_t row,
                          const RowEntries<Bits>& entries, const RowState& state,
                          uint32_t ctas) {
  const uint32_t k = static_cast<uint32_t>(params.k);
  // The first warps sum up the counts: thread c knows what lies before CTA c.
  const uint32_t count = threadIdx.x < ctas ? state.counts[threadIdx.x] : 0;
  uint32_t before_survivors;
  uint32_t before_ties;
  uint32_t survivors;
  uint32_t ties;
  using Scan = typename Cta<kThreads>::Scan;
  Scan(cta.scratch->scan)
      .ExclusiveSum(RowState::Survivors(count), before_survivors, survivors);
  __syncthreads();
  Scan(cta.scratch->scan).ExclusiveSum(RowState::Ties(count), before_ties, ties);

  if (survivors + ties < k) {
    __syncthreads();
    SelectExactly(cta, entries, k);
    EmitRow<kThreads, Bits>(cta, params, row, entries.window, k, 0, k);
    return;
  }
  if (survivors > cta.capacity) {
    __syncthreads();
    const PublishedEntries published = {state, ctas};
    const uint64_t threshold =
        SelectThreshold(cta, published, k, 0, ~uint64_t{0}, entries.window);
    Collect(cta, published, threshold);
    EmitRow<kThreads, Bits>(cta, params, row, entries.window, k, 0, k);
    return;
  }

  // Offsets by CTA, for all threads: the bins are free.
  const uint32_t wanted_ties = survivors < k ? k - survivors : 0;
  if (threadIdx.x < ctas) {
    cta.bins[3 * threadIdx.x] = count;
    cta.bins[3 * threadIdx.x + 1] = before_survivors;
    cta.bins[3 * threadIdx.x + 2] = before_ties;
  }
  static_assert(3 * kMaxCtasPerRow <= kNumBins);
  ResetExtremes(cta);
  __syncthreads();
  // As many threads for each CTA's slots as there are.
  uint32_t team = kThreads;
  while (team * ctas > kThreads) team /= 2;
  const uint32_t cta_of_team = threadIdx.x / team;
  uint32_t min_key = 0xFFFFFFFFu;
  uint32_t max_key = 0;
  if (cta_of_team < ctas) {
    const uint64_t* slots = state.Slots(cta_of_team);
    const uint32_t of_cta = cta.bins[3 * cta_of_team];
    uint64_t* to = cta.list + cta.bins[3 * cta_of_team + 1];
    const uint32_t here = RowState::Survivors(of_cta);
#pragma unroll 4
    for (uint32_t i = threadIdx.x % team; i < here; i += team) {
      const uint64_t composite = slots[i];
      min_key = min(min_key, CompositeKey(composite));
      max_key = max(max_key, CompositeKey(composite));
      to[i] = composite;
    }
    const uint32_t skipped = cta.bins[3 * cta_of_team + 2];
    for (uint32_t i = threadIdx.x % team;
         i < RowState::Ties(of_cta) && skipped + i < wanted_ties; i += team) {
      cta.list[survivors + skipped + i] = slots[here + i];
    }
  }
  NoteExtremes(cta, min_key, max_key);
  __syncthreads();
  const uint32_t gathered = survivors + wanted_ties;
  const uint64_t threshold =
      SelectInList(cta, gathered, k, cta.scratch->min_key, cta.scratch->max_key,
                   entries.window);
  EmitRow<kThreads, Bits>(cta, params, row, entries.window, gathered, threshold, k);
}

template <typename Bits>
__global__ void __launch_bounds__(kThreads, 1)
    SplitTopK(const TopKParams params, uint32_t capacity, uint32_t max_samples,
              uint32_t ctas_per_row, uint32_t min_chunk, const Workspace workspace) {
  extern __shared__ __align__(16) char shared[];
  const Cta<kThreads> cta(shared, capacity);
  const uint32_t k = static_cast<uint32_t>(params.k);
  const uint32_t mine = blockIdx.x % ctas_per_row;
  const int64_t rows_at_once = gridDim.x / ctas_per_row;
  for (int64_t row = blockIdx.x / ctas_per_row; row < params.rows; row += rows_at_once) {
    const Window window = RowWindow(params, row);
    const int64_t length = window.stop - window.start;
    // 1. Chunks of whole vectors, no smaller than pays.
    constexpr int64_t kAlign = 16;
    const int64_t wished = max((length + ctas_per_row - 1) / ctas_per_row,
                               static_cast<int64_t>(min_chunk));
    const int64_t chunk = (wished + kAlign - 1) / kAlign * kAlign;
    const uint32_t ctas = static_cast<uint32_t>((length + chunk - 1) / chunk);
    if (length <= capacity || ctas == 1) {
      if (mine == 0) {
        SelectRow<kThreads, Bits>(cta, params, row, window, max_samples);
        __syncthreads();
      }
      continue;
    }
    if (mine >= ctas) continue;

    // 2.
    const RowEntries<Bits> entries = {
        static_cast<const Bits*>(params.scores) + row * params.n, window};
    const Filter filter = SampleThreshold(cta, entries, k, max_samples);
    // 3.
    const int64_t first = window.start + mine * chunk;
    const RowEntries<Bits> part = {entries.row,
                                   {first, min(first + chunk, window.stop)}};
    const RowState state(workspace, row, k);
    PublishChunk(cta, part, k, filter, state, mine);
    // 4. and 5.
    if (state.Arrive(workspace.tag, ctas, &cta.scratch->flag)) {
      FinishRow(cta, params, row, entries, state, ctas);
    }
    __syncthreads();
  }
}

using Kernel = void (*)(const TopKParams, uint32_t, uint32_t, uint32_t, uint32_t,
                        const Workspace);

Kernel KernelFor(ScoreType type) {
  return type == ScoreType::kF32 ? SplitTopK<uint32_t> : SplitTopK<uint16_t>;
}

}  // namespace

cudaError_t PrepareSplitTopK(int64_t bytes) {
  for (ScoreType type : {ScoreType::kF32, ScoreType::kBF16}) {
    const cudaError_t error = cudaFuncSetAttribute(
        KernelFor(type), cudaFuncAttributeMaxDynamicSharedMemorySize,
        static_cast<int>(bytes));
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

cudaError_t LaunchSplitTopK(const TopKParams& params, const Plan& plan, void* workspace,
                            int64_t workspace_bytes_per_row, uint64_t tag,
                            cudaStream_t stream) {
  KernelFor(params.type)<<<static_cast<unsigned>(plan.grid), kThreads,
                           plan.shared_memory_bytes, stream>>>(
      params, static_cast<uint32_t>(plan.capacity),
      static_cast<uint32_t>(plan.num_samples), static_cast<uint32_t>(plan.ctas_per_row),
      static_cast<uint32_t>(plan.min_chunk),
      Workspace{static_cast<char*>(workspace), workspace_bytes_per_row,
                WorkspaceHeaderBytes(plan.ctas_per_row), tag});
  return cudaGetLastError();
}

}  // namespace jax_topk
