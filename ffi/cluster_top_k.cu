// SPDX-License-Identifier: Apache-2.0
//
// `cluster`: the CTAs of a thread block cluster share a row, and meet in the shared memory
// of one of them, the leader. No workspace. Compute capability 9.0 and newer.
//
// This kernel filters rows that are too long for the registers of a cluster; what those
// can hold is for held_top_k.cu.
//
// Protocol of the kernel, one row a cluster:
//   1. The CTAs of the cluster cut the row's window into chunks of equal size. A row that
//      one CTA can keep whole is the leader's alone: it answers and nobody meets.
//   2. Each CTA draws the same sample of the row, so that all find the same filter, reads
//      its chunk once, and keeps its survivors, and the ties that may still be wanted.
//   3. Each sends their numbers to every CTA of the cluster, and waits for those of all.
//   4. Now all know where the survivors of each belong in the row's list, and send them
//      there, to the leader's shared memory. The leader waits for them.
//   5. The leader selects exactly, writes in order, pads. If what survived is fewer than k
//      or more than fits, nobody sends, and it selects from the row itself.
// Numbers and entries go to a mailbox each (cluster.cuh).
//
// Why it holds.
//   - All CTAs of a cluster are resident together: the hardware starts them so, or not at
//     all. So they may wait for each other, and what each of them sends and expects agrees:
//     whether a row is met for depends on the row's window, and whether entries are sent on
//     the numbers that all have.
//   - Nobody sends to a CTA before it has its mailboxes (barrier 0: the fence releases
//     them, the wait acquires), nor after it has ended: it waits for the numbers of all,
//     and the leader for all entries.
//   - Nothing is overwritten that is still read. The leader's list is written by others
//     when it has sent its numbers, so after it has filtered; and never where its own
//     survivors are, nor, as its ties lie from position k on and are wanted only if fewer
//     than k columns survive, where its ties are.

#include <cooperative_groups.h>

#include "cluster.cuh"

namespace jax_topk {
namespace {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

// A number that no CTA counts: what it kept is not all that survived.
constexpr uint32_t kIncomplete = 0xFFFFFFFFu;

// Steps 3 and 4, of CTA `mine` of `size`. False for all but the leader, or what the leader
// has in its list.
__device__ bool Meet(const Cta& cta, uint32_t mine, uint32_t size, uint32_t k,
                     Reduced* reduced) {
  const uint32_t lane = threadIdx.x & 31;
  uint32_t* counts = cta.scratch().counts;
  const uint32_t for_numbers = SharedAddress(&cta.scratch().mailboxes[0]);
  const uint32_t for_entries = SharedAddress(&cta.scratch().mailboxes[1]);

  // 3. Survivors in the lower half of a word, ties in the upper.
  if (threadIdx.x == 0) Expect(for_numbers, size * sizeof(uint32_t));
  if (threadIdx.x < size) {
    Send(AddressIn(threadIdx.x, SharedAddress(&counts[mine])),
         reduced->exact ? kIncomplete : reduced->ties << 16 | reduced->survivors,
         AddressIn(threadIdx.x, for_numbers));
  }
  Await(for_numbers, 0);

  static_assert(kMaxClusterSize <= 32);
  const uint32_t count = lane < size ? counts[lane] : 0;
  const bool incomplete = __any_sync(kFullWarp, count == kIncomplete);
  const uint32_t survivors = count & 0xFFFF;
  const uint32_t ties = count >> 16;
  const uint32_t all_survivors = __reduce_add_sync(kFullWarp, survivors);
  const uint32_t all_ties = __reduce_add_sync(kFullWarp, ties);
  if (incomplete || all_survivors + all_ties < k || all_survivors > cta.capacity) {
    *reduced = {0, 0, 0, false};
    return mine == 0;
  }

  // 4.
  const uint32_t wanted = all_survivors < k ? k - all_survivors : 0;
  if (mine > 0) {
    const bool before = lane < mine;
    const uint32_t at = __reduce_add_sync(kFullWarp, before ? survivors : 0);
    const uint32_t ties_at = __reduce_add_sync(kFullWarp, before ? ties : 0);
    const uint32_t list = AddressIn(0, SharedAddress(cta.list()));
    const uint32_t box = AddressIn(0, for_entries);
    for (uint32_t i = threadIdx.x; i < reduced->survivors; i += kThreads) {
      Send(list + 8 * (at + i), cta.list()[i], box);
    }
    const uint32_t sent = min(reduced->ties, wanted - min(ties_at, wanted));
    for (uint32_t i = threadIdx.x; i < sent; i += kThreads) {
      Send(list + 8 * (k + ties_at + i), cta.list()[reduced->ties_at + i], box);
    }
    return false;
  }
  const uint32_t own = reduced->survivors + min(reduced->ties, wanted);
  if (threadIdx.x == 0) Expect(for_entries, 8 * (all_survivors + wanted - own));
  Await(for_entries, 0);
  *reduced = {all_survivors, wanted, k, false};
  return true;
}

#endif

template <typename Bits, bool kMaySort, int kStages>
__global__ void __launch_bounds__(kThreads, 1)
    ClusterTopK(const TopKParams params, uint32_t capacity, const WholeRows whole,
                uint32_t ctas_per_row, uint32_t min_chunk) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  const Cta cta = {capacity};
  const auto cluster = cooperative_groups::this_cluster();
  const uint32_t mine = cluster.block_rank();
  const int64_t row = ClusterIndex();
  const uint32_t k = static_cast<uint32_t>(params.k);

  // 1.
  const Row<Bits> entries(params, row);
  const uint32_t length = entries.Length();
  Cutting cutting = whole.cutting;
  if (length != params.n) cutting = Cutting(length, ctas_per_row, min_chunk);
  const bool alone = cutting.count <= 1 || entries.Resident(capacity);
  if (alone && mine > 0) return;

  // 2. to 5.
  const auto prepare = [&] {
    if (!alone) PrepareMailboxes(cta);
  };
  const auto meet = [&](Reduced* reduced, const Filter&) {
    if (alone) return true;
    cluster.barrier_wait();
    return Meet(cta, mine, ctas_per_row, k, reduced);
  };
  SelectRow<kMaySort, true, kStages>(cta, params, row, entries,
                                     cutting.ChunkOf(entries.columns, mine), whole, k,
                                     prepare, meet);
#endif
}

using Kernel = void (*)(const TopKParams, uint32_t, const WholeRows, uint32_t,
                        uint32_t);

template <typename Bits, bool kMaySort>
Kernel KernelOf(int64_t stages) {
  return stages == 0            ? ClusterTopK<Bits, kMaySort, 0>
         : stages == kFewStages ? ClusterTopK<Bits, kMaySort, kFewStages>
                                : ClusterTopK<Bits, kMaySort, kMostStages>;
}

Kernel KernelFor(ScoreType type, bool may_sort, int64_t stages) {
  if (type == ScoreType::kF32) {
    return may_sort ? KernelOf<uint32_t, true>(stages)
                    : KernelOf<uint32_t, false>(stages);
  }
  return may_sort ? KernelOf<uint16_t, true>(stages)
                  : KernelOf<uint16_t, false>(stages);
}

}  // namespace

cudaError_t PrepareClusterTopK(int64_t bytes) {
  const cudaError_t held = PrepareHeldTopK(bytes);
  if (held != cudaSuccess) return held;
  for (ScoreType type : {ScoreType::kF32, ScoreType::kBF16}) {
    for (bool may_sort : {false, true}) {
      for (int stages : {0, kFewStages, kMostStages}) {
        const cudaError_t error =
            PrepareForClusters(KernelFor(type, may_sort, stages), bytes);
        if (error != cudaSuccess) return error;
      }
    }
  }
  return cudaSuccess;
}

cudaError_t LargestCluster(int64_t bytes, int* ctas) {
  *ctas = -1;
  // The driver may have compiled this kernel from code for older devices, where it is empty.
  cudaFuncAttributes attributes;
  const Kernel kernel = KernelFor(ScoreType::kF32, true, kMostStages);
  const cudaError_t error = cudaFuncGetAttributes(&attributes, kernel);
  if (error != cudaSuccess || attributes.ptxVersion < kMinClusterCapability)
    return error;
  cudaLaunchConfig_t config = {};
  config.gridDim = static_cast<unsigned>(kMaxClusterSize);
  config.blockDim = kThreads;
  config.dynamicSmemBytes = static_cast<size_t>(bytes);
  return cudaOccupancyMaxPotentialClusterSize(ctas, kernel, &config);
}

cudaError_t LaunchClusterTopK(const TopKParams& params, const Plan& plan,
                              cudaStream_t stream) {
  if (Held(params, plan)) return LaunchHeldTopK(params, plan, stream);
  return LaunchClusters(
      plan, stream, KernelFor(params.type, params.sorted, plan.stages), params,
      static_cast<uint32_t>(plan.capacity), WholeRows(params, plan),
      static_cast<uint32_t>(plan.ctas_per_row), static_cast<uint32_t>(plan.min_chunk));
}

}  // namespace jax_topk
