// SPDX-License-Identifier: Apache-2.0
//
// How the CTAs of a cluster send words to each other: by asynchronous stores into each
// other's shared memory, which a mailbox of the receiver (an mbarrier) counts in bytes when
// they are there. A mailbox goes from phase to phase: one is complete when the receiver has
// said how many bytes it expects and as many have come. To wait for a phase acquires what
// was sent in it. Compute capability 9.0 and newer.

#pragma once

#include "select.cuh"

namespace jax_topk {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

__device__ __forceinline__ uint32_t ClusterIndex() {
  uint32_t index;
  asm("mov.u32 %0, %%clusterid.x;" : "=r"(index));
  return index;
}

// Remote shared memory ------------------------------------------------------------------

__device__ __forceinline__ uint32_t SharedAddress(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// The same place in the shared memory of another CTA of the cluster.
__device__ __forceinline__ uint32_t AddressIn(uint32_t rank, uint32_t address) {
  uint32_t remote;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(rank));
  return remote;
}

// Stores that the mailbox of the receiving CTA counts, in bytes, when they are there.
__device__ __forceinline__ void Send(uint32_t to, uint32_t word, uint32_t mailbox) {
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, "
      "[%2];" ::"r"(to),
      "r"(word), "r"(mailbox)
      : "memory");
}
__device__ __forceinline__ void Send(uint32_t to, uint64_t entry, uint32_t mailbox) {
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b64 [%0], %1, "
      "[%2];" ::"r"(to),
      "l"(entry), "r"(mailbox)
      : "memory");
}

__device__ __forceinline__ void Send(uint32_t to, uint4 words, uint32_t mailbox) {
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], "
      "{%1, %2, %3, %4}, [%5];" ::"r"(to),
      "r"(words.x), "r"(words.y), "r"(words.z), "r"(words.w), "r"(mailbox)
      : "memory");
}

// One thread says how many bytes this phase of a mailbox waits for. They may have come.
__device__ __forceinline__ void Expect(uint32_t mailbox, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(mailbox),
               "r"(bytes)
               : "memory");
}

// Returns when a phase is complete: acquires what was sent.
__device__ __forceinline__ void Await(uint32_t mailbox, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "again:\n"
      "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%0], %1;\n"
      "@!p bra again;\n"
      "}" ::"r"(mailbox),
      "r"(parity)
      : "memory");
}

// The mailboxes of this CTA. The first half of barrier 0, whose second half comes before
// anything is sent: cluster.barrier_wait().
__device__ __forceinline__ void PrepareMailboxes(const Cta& cta) {
  if (threadIdx.x == 0) {
    for (uint64_t& mailbox : cta.scratch().mailboxes) {
      asm volatile(
          "mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(SharedAddress(&mailbox))
          : "memory");
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  // Relaxed: it publishes the mailboxes, which the fence has released.
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}

#endif

// The host's side ----------------------------------------------------------------------

// Before the first launch of a kernel: as much shared memory as the device grants, and
// clusters of more than 8 CTAs.
template <typename... Params>
cudaError_t PrepareForClusters(void (*kernel)(Params...), int64_t bytes) {
  const cudaError_t error = cudaFuncSetAttribute(
      kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes));
  if (error != cudaSuccess) return error;
  return cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed,
                              1);
}

// A cluster for each row.
template <typename... Params, typename... Args>
cudaError_t LaunchClusters(const Plan& plan, cudaStream_t stream,
                           void (*kernel)(Params...), const Args&... args) {
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {static_cast<unsigned>(plan.ctas_per_row), 1, 1};
  cudaLaunchConfig_t config = {};
  config.gridDim = static_cast<unsigned>(plan.grid);
  config.blockDim = kThreads;
  config.dynamicSmemBytes = plan.shared_memory_bytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kernel, args...);
}

}  // namespace jax_topk
