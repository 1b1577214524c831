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

  // Null: indices are columns. Otherwise rows [i * rows_per_table, (i + 1) *
  // rows_per_table) share table i of [tables, pages], and column c becomes the slot
  // table[c / page_size] * page_stride + c % page_size. Rows are below 2^32 then.
  const int32_t* page_table;
  int64_t pages;
  uint32_t rows_per_table;
  uint32_t page_size;
  uint32_t page_stride;  // page_size, or 1 if the table holds slots, not pages
  int64_t unpaged;       // the last columns of each row, which no page holds
};

// The columns [start, stop) that a row offers, within [0, n].
struct Window {
  int64_t start;
  int64_t stop;
};

// Lengths and starts are data and hold anything (padding rows of a sharded batch hold
// garbage): as signed 64-bit numbers the window is [start, start + length) cut with
// [0, n], and a negative length is an empty row. A column that no page holds is outside
// every window, so that nobody reads past a page table.
JAX_TOPK_HOST_DEVICE Window RowWindow(const TopKParams& params, int64_t row) {
  const int64_t end = params.n - params.unpaged;
  if (params.starts == nullptr && params.lengths == nullptr) return {0, end};
  const auto clamp = [](int64_t x, int64_t low, int64_t high) {
    return x < low ? low : x > high ? high : x;
  };
  const int64_t start = params.starts == nullptr ? 0 : params.starts[row];
  Window window;
  window.start = clamp(start, 0, end);
  window.stop = end;
  if (params.lengths != nullptr) {
    const int64_t length = params.lengths[row];
    window.stop = clamp(start + (length > 0 ? length : 0), window.start, end);
  }
  return window;
}

// What a row answers for a column: the column, or its slot in paged memory. A page is
// data and holds anything: the slot wraps around, as int32 does in XLA.
JAX_TOPK_HOST_DEVICE int32_t RowIndex(const TopKParams& params, int64_t row,
                                      uint32_t column) {
  if (params.page_table == nullptr) return static_cast<int32_t>(column);
  const int64_t table = static_cast<uint32_t>(row) / params.rows_per_table;
  const uint32_t page = column / params.page_size;
  const int32_t entry = params.page_table[table * params.pages + page];
  return static_cast<int32_t>(static_cast<uint32_t>(entry) * params.page_stride +
                              (column - page * params.page_size));
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

// The CTAs of a cluster a row.
cudaError_t LaunchClusterTopK(const TopKParams& params, const Plan& plan,
                              cudaStream_t stream);

// The same for rows that the registers of a cluster hold, of which the caller has asked.
bool Held(const TopKParams& params, const Plan& plan);
cudaError_t LaunchHeldTopK(const TopKParams& params, const Plan& plan,
                           cudaStream_t stream);

// Lifts the limit on dynamic shared memory of every kernel to `bytes` on the current
// device. To be called once per device, before its first launch.
cudaError_t PrepareRowTopK(int64_t bytes);
cudaError_t PrepareSplitTopK(int64_t bytes);
cudaError_t PrepareClusterTopK(int64_t bytes);
cudaError_t PrepareHeldTopK(int64_t bytes);

// CTAs of the largest cluster that the current device, prepared, grants; -1: none.
cudaError_t LargestCluster(int64_t bytes, int* ctas);

#endif  // JAX_TOPK_CUDA

}  // namespace jax_topk
