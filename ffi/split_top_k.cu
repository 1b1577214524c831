// SPDX-License-Identifier: Apache-2.0
//
// `split`: several CTAs a row, which meet in the row state (row_state.cuh). Any device;
// few and long rows.
//
// Protocol of the kernel, one row for as many CTAs as the grid has in x:
//   1. The CTAs of a row cut its window into chunks of equal size. A row that one CTA
//      can load whole is that CTA's alone: it answers and nobody touches the row state.
//   2. Each CTA installs the tag in the row state and draws the same sample of the row,
//      so that all find the same filter.
//   3. Each reads its chunk once and reduces it to at most k entries: its survivors,
//      or the k largest of them, and the ties that may still be wanted.
//   4. Each publishes them in the row state and arrives. All but the last CTA leave.
//   5. The last gathers what was published, selects exactly, writes in order, pads. If
//      fewer than k columns were published (the sample was too high) it selects from
//      the row itself; if more than fit, from the row state.

#include <algorithm>

#include "row_state.cuh"
#include "select.cuh"

namespace jax_topk {
namespace {

// The survivors in the row state, as entries and as words to select from.
struct PublishedEntries {
  RowState state;
  uint32_t ctas;

  __device__ uint32_t Size() const { return ctas * state.k; }
  __device__ bool Valid(uint32_t i) const {
    return i % state.k < RowState::Survivors(state.counts[i / state.k]);
  }
  __device__ uint64_t Get(uint32_t i) const { return state.slots[i]; }

  __device__ uint32_t Start() const { return 0; }
  __device__ uint32_t ColumnAt(uint32_t place) const { return EntryColumn(Get(place)); }
  template <typename F>
  __device__ void ForEach(F&& f) const {
    for (uint32_t i = threadIdx.x; i < Size(); i += kThreads) {
      if (Valid(i)) f(EntryWord(Get(i)), i);
    }
  }
};

// Phase 4, up to the arrival: what a chunk was reduced to, as at most k survivors in
// column order and the ties that may still be wanted.
__device__ void Publish(const Cta& cta, const RowState& state, uint32_t mine,
                        Columns columns, Reduced reduced, const Filter& filter) {
  uint64_t* slots = state.Slots(mine);
  uint32_t count = reduced.survivors + reduced.ties;
  if (reduced.exact) {
    Merge(cta, reduced,
          [slots](uint32_t position, uint64_t entry) { slots[position] = entry; });
    reduced.survivors = count;
    reduced.ties = 0;
  } else {
    if (count > state.k) {
      SelectInList<false>(cta, count, state.k, filter.range, columns);
      count = reduced.survivors = state.k;
    }
    for (uint32_t i = threadIdx.x; i < count; i += kThreads) slots[i] = cta.list()[i];
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
  constexpr uint32_t kAhead = 8;
  uint32_t team = kThreads;
  while (team * ctas > kThreads) team /= 2;
  const uint32_t of_team = threadIdx.x / team;
  const uint32_t in_team = threadIdx.x % team;
  const uint32_t of_teams = 4 * kAhead * team;  // slots of a CTA left to its team
  uint64_t read[kAhead];
#pragma unroll
  for (uint32_t j = 0; j < kAhead; ++j) {
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

  if (survivors + ties < k) return {0, 0, 0, false};  // the row has to be read again
  if (survivors > cta.capacity) {
    const PublishedEntries published = {state, ctas};
    const Cut cut = SelectByKey(cta, published, k, 0, 0, 0, 0xFFFFFFFFu);
    KeepSelected(cta, published, cut, k, columns);
    return {k, 0, k, true};
  }

  const uint32_t wanted_ties = survivors < k ? k - survivors : 0;
  uint64_t* list = cta.list();
  const bool upper = of_team >= 32;  // the same for all lanes of a warp
  const uint64_t count = __shfl_sync(kFullWarp, upper ? counts[1] : counts[0], of_team);
  const uint64_t sum = __shfl_sync(kFullWarp, upper ? sums[1] : sums[0], of_team);
  const uint32_t here = of_team < ctas ? static_cast<uint32_t>(count) : 0;
  uint64_t* to = list + (static_cast<uint32_t>(sum) - here);
#pragma unroll
  for (uint32_t j = 0; j < kAhead; ++j) {
    const uint32_t i = in_team + j * team;
    if (i < here) to[i] = read[j];
  }
#pragma unroll 4
  for (uint32_t i = in_team + kAhead * team; i < min(here, of_teams); i += team) {
    to[i] = state.Slots(of_team)[i];
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
        list[static_cast<uint32_t>(before_one) + i] = slots[i];
      }
      const uint32_t skipped = static_cast<uint32_t>(before_one >> 32);
      const uint32_t stop = min(static_cast<uint32_t>(count_of_one >> 32),
                                wanted_ties - min(skipped, wanted_ties));
#pragma unroll 4
      for (uint32_t i = threadIdx.x; i < stop; i += kThreads) {
        list[survivors + skipped + i] = slots[num_survivors + i];
      }
    }
  }
  __syncthreads();
  return {survivors, wanted_ties, survivors, false};
}

template <typename Bits, int kStages>
__global__ void __launch_bounds__(kThreads, 1)
    SplitTopK(const TopKParams params, uint32_t capacity, const WholeRows whole,
              uint32_t min_chunk, const Workspace workspace) {
  const Cta cta = {capacity};
  const uint32_t mine = blockIdx.x;
  const int64_t row = int64_t{blockIdx.z} * gridDim.y + blockIdx.y;
  if (row >= params.rows) return;
  // 1.
  const Row<Bits> entries(params, row);
  const uint32_t length = entries.Length();
  Cutting cutting = whole.cutting;
  if (length != params.n) cutting = Cutting(length, gridDim.x, min_chunk);
  if (entries.Resident(capacity)) cutting.count = 1;
  if (mine >= cutting.count) return;

  // 2. to 5.
  const Columns columns = cutting.ChunkOf(entries.columns, mine);
  const auto state = [&] {
    return RowState(workspace, row, static_cast<uint32_t>(params.k));
  };
  uint64_t seen = 0;
  const auto install = [&] {
    if (cutting.count > 1) seen = state().Install(workspace.tag);
  };
  const auto meet = [&](Reduced* reduced, const Filter& filter) {
    if (cutting.count == 1) return true;
    Publish(cta, state(), mine, columns, *reduced, filter);
    const bool last =
        state().Arrive(workspace.tag, seen, cutting.count, &cta.scratch().flag);
    if (last) *reduced = Gather(cta, state(), cutting.count, entries.columns);
    return last;
  };
  SelectRow<true, false, kStages>(cta, params, row, entries, columns, whole, 0, install,
                                  meet);
}

using Kernel = void (*)(const TopKParams, uint32_t, const WholeRows, uint32_t,
                        const Workspace);

template <typename Bits>
Kernel KernelOf(int64_t stages) {
  return stages == 0            ? SplitTopK<Bits, 0>
         : stages == kFewStages ? SplitTopK<Bits, kFewStages>
                                : SplitTopK<Bits, kMostStages>;
}

Kernel KernelFor(ScoreType type, int64_t stages) {
  return type == ScoreType::kF32 ? KernelOf<uint32_t>(stages)
                                 : KernelOf<uint16_t>(stages);
}

}  // namespace

cudaError_t PrepareSplitTopK(int64_t bytes) {
  for (ScoreType type : {ScoreType::kF32, ScoreType::kBF16}) {
    for (int stages : {0, kFewStages, kMostStages}) {
      const cudaError_t error = cudaFuncSetAttribute(
          KernelFor(type, stages), cudaFuncAttributeMaxDynamicSharedMemorySize,
          static_cast<int>(bytes));
      if (error != cudaSuccess) return error;
    }
  }
  return cudaSuccess;
}

cudaError_t LaunchSplitTopK(const TopKParams& params, const Plan& plan, void* workspace,
                            int64_t workspace_bytes_per_row, uint64_t tag,
                            cudaStream_t stream) {
  const int64_t y = std::min(params.rows, kMaxGridRows);
  const dim3 grid(static_cast<unsigned>(plan.ctas_per_row), static_cast<unsigned>(y),
                  static_cast<unsigned>((params.rows + y - 1) / y));
  KernelFor(params.type,
            plan.stages)<<<grid, kThreads, plan.shared_memory_bytes, stream>>>(
      params, static_cast<uint32_t>(plan.capacity), WholeRows(params, plan),
      static_cast<uint32_t>(plan.min_chunk),
      Workspace{static_cast<char*>(workspace), workspace_bytes_per_row,
                WorkspaceHeaderBytes(plan.ctas_per_row), tag});
  return cudaGetLastError();
}

}  // namespace jax_topk
