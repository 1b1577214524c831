// SPDX-License-Identifier: Apache-2.0
//
// `row`: one CTA a row. Any device; prefill, short rows, and the fallback where little
// shared memory is granted.
//
// Protocol of the kernel, per row (select.cuh has the phases):
//   1. Read the window; a row no longer than k is copied.
//   2. A row that fits is loaded whole. A longer one is sampled for a threshold and
//      read once, keeping what passes.
//   3. Select exactly among what was kept; write it in order; pad.
// A barrier separates the rows of a CTA: nothing in shared memory outlives its row.

#include "select.cuh"

namespace jax_topk {
namespace {

template <typename Bits, int kCtasPerSm>
__global__ void __launch_bounds__(kThreads, kCtasPerSm)
    RowTopK(const TopKParams params, uint32_t capacity, uint32_t max_samples) {
  const Cta cta = {capacity};
  for (int64_t row = blockIdx.x; row < params.rows; row += gridDim.x) {
    const RowEntries<Bits> entries = EntriesOf<Bits>(params, row);
    SelectRow(
        cta, params, row, entries, entries, max_samples, [] {},
        [](Reduced*) { return true; });
    __syncthreads();
  }
}

using Kernel = void (*)(const TopKParams, uint32_t, uint32_t);

Kernel KernelFor(ScoreType type, int64_t ctas_per_sm) {
  if (type == ScoreType::kF32) {
    return ctas_per_sm == 1 ? RowTopK<uint32_t, 1> : RowTopK<uint32_t, 2>;
  }
  return ctas_per_sm == 1 ? RowTopK<uint16_t, 1> : RowTopK<uint16_t, 2>;
}

}  // namespace

cudaError_t PrepareRowTopK(int64_t bytes) {
  for (ScoreType type : {ScoreType::kF32, ScoreType::kBF16}) {
    for (int64_t ctas_per_sm : {1, 2}) {
      const cudaError_t error = cudaFuncSetAttribute(
          KernelFor(type, ctas_per_sm), cudaFuncAttributeMaxDynamicSharedMemorySize,
          static_cast<int>(bytes));
      if (error != cudaSuccess) return error;
    }
  }
  return cudaSuccess;
}

cudaError_t LaunchRowTopK(const TopKParams& params, const Plan& plan,
                          cudaStream_t stream) {
  KernelFor(params.type, plan.ctas_per_sm)<<<static_cast<unsigned>(plan.grid), kThreads,
                                             plan.shared_memory_bytes, stream>>>(
      params, static_cast<uint32_t>(plan.capacity),
      static_cast<uint32_t>(plan.num_samples));
  return cudaGetLastError();
}

}  // namespace jax_topk
