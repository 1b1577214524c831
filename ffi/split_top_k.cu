// SPDX-License-Identifier: Apache-2.0
//
// `split`: several CTAs a row, which meet in the row state (row_state.cuh). Any device;
// few and long rows.
//
// Protocol of the kernel, per row:
//   1. The CTAs of a row cut its window into chunks of equal size. A row that one CTA
//      can load whole is that CTA's alone: it answers and nobody touches the row state.
//   2. Each CTA installs the tag in the row state and draws the same sample of the row,
//      so that all find the same filter.
//   3. Each reads its chunk once and reduces it to at most k composites: its survivors,
//      or the k largest of them, and the ties that may still be wanted.
//   4. Each publishes them in the row state and arrives. All but the last CTA leave.
//   5. The last gathers what was published, selects exactly, writes in order, pads. If
//      fewer than k columns were published (the sample was too high) it selects from
//      the row itself; if more than fit, from the row state.
// A barrier separates the rows of a CTA.

#include "row_state.cuh"
#include "select.cuh"

namespace jax_topk {
namespace {

// The survivors in the row state, as entries of the exact select.
struct PublishedEntries {
  RowState state;
  uint32_t ctas;

  __device__ uint32_t Size() const { return ctas * state.k; }
  __device__ bool Valid(uint32_t i) const {
    return i % state.k < RowState::Survivors(state.counts[i / state.k]);
  }
  __device__ uint64_t Get(uint32_t i) const { return state.slots[i]; }
  __device__ uint32_t Key(uint32_t i) const { return CompositeKey(state.slots[i]); }
};

// Phase 4, up to the arrival: what a chunk was reduced to, as at most k survivors in
// column order and the ties that may still be wanted.
__device__ void Publish(const Cta& cta, const RowState& state, uint32_t mine,
                        Columns columns, Reduced reduced) {
  uint64_t* slots = state.Slots(mine);
  const auto publish = [slots](uint32_t slot, uint64_t composite) {
    slots[slot] = composite;
  };
  const uint32_t count = reduced.survivors + reduced.ties;
  if (reduced.exact) {
    Merge(cta, reduced.survivors, reduced.ties, publish);
    reduced = {count, 0, true};
  } else if (count <= state.k) {
    for (uint32_t i = threadIdx.x; i < count; i += kThreads) publish(i, cta.list()[i]);
  } else {
    const uint64_t threshold = SelectInList(cta, count, state.k, columns);
    Compact(cta, ListEntries{cta.list(), count}, threshold, publish);
    reduced = {state.k, 0, true};
  }
  if (threadIdx.x == 0) {
    state.counts[mine] = RowState::PackCount(reduced.survivors, reduced.ties);
  }
}

// Phase 5, after the acquire of the last arrival: what the chunks of `ctas` CTAs were
// reduced to, into the list.
__device__ Reduced Gather(const Cta& cta, const RowState& state, uint32_t ctas,
                          Columns columns) {
  const uint32_t k = state.k;
  // As many threads for each CTA's slots as there are. The first slots are read before
  // it is known how many are filled: one trip to L2 less.
  constexpr uint32_t kPerThread = 8;
  uint32_t team = kThreads;
  while (team * ctas > kThreads) team /= 2;
  const uint32_t of_team = threadIdx.x / team;
  const uint32_t in_team = threadIdx.x % team;
  const uint32_t of_teams = 4 * kPerThread * team;  // slots of a CTA left to its team
  uint64_t read[kPerThread];
#pragma unroll
  for (uint32_t j = 0; j < kPerThread; ++j) {
    read[j] = state.Slots(min(of_team, ctas - 1))[min(in_team + j * team, k - 1)];
  }

  // Every warp sums up the counts: ties in the upper half of a word, survivors in the
  // lower. Lane l has those of CTAs l and l + 32.
  static_assert(kMaxCtasPerRow <= 64);
  const uint32_t lane = threadIdx.x & 31;
  const auto count_of = [&](uint32_t one) -> uint64_t {
    const uint32_t count = one < ctas ? state.counts[one] : 0;
    return static_cast<uint64_t>(RowState::Ties(count)) << 32 |
           RowState::Survivors(count);
  };
  const uint64_t counts[2] = {count_of(lane), count_of(lane + 32)};
  uint64_t sums[2] = {WarpInclusiveSum(counts[0]), WarpInclusiveSum(counts[1])};
  sums[1] += __shfl_sync(kFullWarp, sums[0], 31);
  const uint64_t all = __shfl_sync(kFullWarp, sums[1], 31);
  const uint32_t survivors = static_cast<uint32_t>(all);
  const uint32_t ties = static_cast<uint32_t>(all >> 32);

  if (survivors + ties < k) return {0, 0, false};  // the row has to be read again
  if (survivors > cta.capacity) {
    const PublishedEntries published = {state, ctas};
    const uint64_t threshold =
        SelectThreshold(cta, published, k, 0, 0xFFFFFFFFu, columns);
    Compact(cta, published, threshold, [&](uint32_t position, uint64_t composite) {
      cta.list()[position] = composite;
    });
    return {k, 0, true};
  }

  const uint32_t wanted_ties = survivors < k ? k - survivors : 0;
  ResetExtremes(cta);
  __syncthreads();
  uint32_t min_key = 0xFFFFFFFFu;
  uint32_t max_key = 0;
  const auto take = [&](uint32_t position, uint64_t composite) {
    min_key = min(min_key, CompositeKey(composite));
    max_key = max(max_key, CompositeKey(composite));
    cta.list()[position] = composite;
  };
  const bool upper = of_team >= 32;  // the same for all lanes of a warp
  const uint64_t count = __shfl_sync(kFullWarp, upper ? counts[1] : counts[0], of_team);
  const uint64_t sum = __shfl_sync(kFullWarp, upper ? sums[1] : sums[0], of_team);
  const uint32_t here = of_team < ctas ? static_cast<uint32_t>(count) : 0;
#pragma unroll
  for (uint32_t j = 0; j < kPerThread; ++j) {
    const uint32_t i = in_team + j * team;
    if (i < here) take(static_cast<uint32_t>(sum) - here + i, read[j]);
  }
#pragma unroll 4
  for (uint32_t i = in_team + kPerThread * team; i < min(here, of_teams); i += team) {
    take(static_cast<uint32_t>(sum) - here + i, state.Slots(of_team)[i]);
  }
  // What is left where survivors crowd, and the first ties: with all threads, CTA by CTA.
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const uint64_t before = sums[half] - counts[half];
    const bool crowded = static_cast<uint32_t>(counts[half]) > of_teams;
    const bool has_ties = counts[half] >> 32 > 0 && before >> 32 < wanted_ties;
    unsigned left = __ballot_sync(kFullWarp, crowded || has_ties);
    for (; left != 0; left &= left - 1) {
      const int one = __ffs(left) - 1;
      const uint64_t* slots = state.Slots(one + 32 * half);
      const uint64_t count_of_one = __shfl_sync(kFullWarp, counts[half], one);
      const uint64_t before_one = __shfl_sync(kFullWarp, before, one);
      const uint32_t num_survivors = static_cast<uint32_t>(count_of_one);
#pragma unroll 4
      for (uint32_t i = of_teams + threadIdx.x; i < num_survivors; i += kThreads) {
        take(static_cast<uint32_t>(before_one) + i, slots[i]);
      }
      const uint32_t skipped = static_cast<uint32_t>(before_one >> 32);
      const uint32_t stop = min(static_cast<uint32_t>(count_of_one >> 32),
                                wanted_ties - min(skipped, wanted_ties));
#pragma unroll 4
      for (uint32_t i = threadIdx.x; i < stop; i += kThreads) {
        cta.list()[survivors + skipped + i] = slots[num_survivors + i];
      }
    }
  }
  NoteExtremes(cta, min_key, max_key);
  __syncthreads();
  return {survivors, wanted_ties, false};
}

template <typename Bits>
__global__ void __launch_bounds__(kThreads, 1)
    SplitTopK(const TopKParams params, uint32_t capacity, uint32_t max_samples,
              uint32_t ctas_per_row, uint32_t min_chunk, const Workspace workspace) {
  const Cta cta = {capacity};
  const uint32_t mine = blockIdx.x % ctas_per_row;
  const int64_t rows_at_once = gridDim.x / ctas_per_row;
  for (int64_t row = blockIdx.x / ctas_per_row; row < params.rows;
       row += rows_at_once) {
    // 1. Chunks of whole vectors, no smaller than pays.
    const RowEntries<Bits> entries = EntriesOf<Bits>(params, row);
    const uint32_t length = entries.Size();
    constexpr uint32_t kAlign = 16;
    const uint32_t wished = max((length + ctas_per_row - 1) / ctas_per_row, min_chunk);
    const uint32_t chunk = (wished + kAlign - 1) / kAlign * kAlign;
    const uint32_t ctas = length <= capacity ? 1 : (length + chunk - 1) / chunk;
    if (mine >= max(ctas, 1u)) continue;

    // 2. to 5.
    const uint32_t first = entries.columns.start + mine * chunk;
    const RowEntries<Bits> part = {entries.row,
                                   {first, min(first + chunk, entries.columns.stop)}};
    const auto state = [&] {
      return RowState(workspace, row, static_cast<uint32_t>(params.k));
    };
    uint64_t seen = 0;
    const auto install = [&] {
      if (ctas > 1) seen = state().Install(workspace.tag);
    };
    const auto meet = [&](Reduced* reduced) {
      if (ctas == 1) return true;
      Publish(cta, state(), mine, part.columns, *reduced);
      const bool last = state().Arrive(workspace.tag, seen, ctas, &cta.scratch().flag);
      if (last) *reduced = Gather(cta, state(), ctas, entries.columns);
      return last;
    };
    SelectRow(cta, params, row, entries, part, max_samples, install, meet);
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
