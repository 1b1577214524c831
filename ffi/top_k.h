// SPDX-License-Identifier: Apache-2.0
//
// What a selection is given: the one parameter struct of all implementations, the
// window of a row, the layout of the workspace, and the launchers of the CUDA kernels.
// Knows neither XLA nor Python.

#pragma once

#include <cstdint>

#include "ordered_key.h"
#include "plan.h"

#ifdef JAX_TOPK_CUDA
#include <cuda_runtime_api.h>
#endif

namespace jax_topk {

struct TopKParams {
  const void* scores;      // [rows, n], of `type`
  const int32_t* lengths;  // [rows]; null: every row reaches to column n
  const int32_t* starts;   // [rows]; null: every row starts at column 0
  void* values;            // [rows, k], of `type`
  int32_t* indices;        // [rows, k]
  int64_t rows;
  int64_t n;
  int64_t k;
  ScoreType type;
  bool sorted;  // by value; otherwise by ascending index
};

// The columns [start, stop) that a row offers, within [0, n].
struct Window {
  int64_t start;
  int64_t stop;
};

// Lengths and starts are data and hold anything (padding rows of a sharded batch hold
// garbage): as signed 64-bit numbers the window is [start, start + length) cut with
// [0, n], and a negative length is an empty row.
JAX_TOPK_HOST_DEVICE Window RowWindow(const TopKParams& params, int64_t row) {
  const auto clamp = [](int64_t x, int64_t low, int64_t high) {
    return x < low ? low : x > high ? high : x;
  };
  const int64_t start = params.starts == nullptr ? 0 : params.starts[row];
  Window window;
  window.start = clamp(start, 0, params.n);
  window.stop = params.n;
  if (params.lengths != nullptr) {
    const int64_t length = params.lengths[row];
    window.stop = clamp(start + (length > 0 ? length : 0), window.start, params.n);
  }
  return window;
}

// -inf, which fills the slots beyond a short window.
JAX_TOPK_HOST_DEVICE uint32_t PadBits(ScoreType type) {
  return type == ScoreType::kF32    ? 0xFF800000u
         : type == ScoreType::kBF16 ? 0xFF80u
                                    : 0xFC00u;
}

#ifdef JAX_TOPK_CUDA

// One CTA a row.
cudaError_t LaunchRowTopK(const TopKParams& params, const Plan& plan,
                          cudaStream_t stream);

// Several CTAs a row (row_state.cuh). `workspace` is [rows, workspace_bytes_per_row] of
// arbitrary bytes, `tag` a value of the upper 48 bits that no earlier launch has used.
cudaError_t LaunchSplitTopK(const TopKParams& params, const Plan& plan, void* workspace,
                            int64_t workspace_bytes_per_row, uint64_t tag,
                            cudaStream_t stream);

// Lifts the limit on dynamic shared memory of every kernel to `bytes` on the current
// device. To be called once per device, before its first launch.
cudaError_t PrepareRowTopK(int64_t bytes);
cudaError_t PrepareSplitTopK(int64_t bytes);

#endif  // JAX_TOPK_CUDA

}  // namespace jax_topk
