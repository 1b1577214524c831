// SPDX-License-Identifier: Apache-2.0
//
// The XLA side of every handler: checks each operand and result of a call and turns
// them into TopKParams. One voice for all targets: expected ..., got ...

#pragma once

#include <algorithm>
#include <cstdint>
#include <string>

#include "top_k.h"
#include "xla/ffi/api/ffi.h"

namespace jax_topk {

struct Operands {
  TopKParams params;
  void* workspace = nullptr;  // [rows, workspace_bytes_per_row]
  int64_t workspace_bytes_per_row = 0;
};

// The attributes of a call whose last operand is a page table, as in TopKParams.
struct Paging {
  int64_t page_size;
  int64_t page_stride;
};

namespace operands_internal {

namespace ffi = ::xla::ffi;

inline std::string Text(const ffi::AnyBuffer& buffer) {
  std::string text = "dtype " + std::to_string(static_cast<int>(buffer.element_type()));
  text += " and shape [";
  const char* separator = "";
  for (int64_t dim : buffer.dimensions()) {
    text += separator + std::to_string(dim);
    separator = ", ";
  }
  return text + "]";
}

// Checks that `buffer` is dtype[batch..., last], where `batch` are the leading
// dimensions of the scores; last < 0 accepts any.
inline ffi::Error CheckBuffer(const char* name, const ffi::AnyBuffer& buffer,
                              ffi::DataType dtype, ffi::AnyBuffer::Dimensions scores,
                              int64_t last) {
  const ffi::AnyBuffer::Dimensions dims = buffer.dimensions();
  bool good = buffer.element_type() == dtype && dims.size() == scores.size();
  for (size_t i = 0; good && i + 1 < dims.size(); ++i) good = dims[i] == scores[i];
  if (good && last >= 0) good = dims[dims.size() - 1] == last;
  if (good) return ffi::Error::Success();
  return ffi::Error::InvalidArgument(
      std::string("jax_topk: expected ") + name + " of dtype " +
      std::to_string(static_cast<int>(dtype)) +
      ", the leading dimensions of the scores and a last dimension of " +
      (last >= 0 ? std::to_string(last) : std::string("any size")) + "; got " +
      Text(buffer));
}

}  // namespace operands_internal

// Decodes scores[..., n], then lengths[..., 1] and starts[..., 1] as flagged, then, if
// it is a paged call, page_table[..., pages], whose leading dimensions are the first of
// the scores'; results values[..., k], indices[..., k] and, if `has_workspace`,
// u8[..., bytes].
inline xla::ffi::ErrorOr<Operands> DecodeOperands(xla::ffi::RemainingArgs args,
                                                  xla::ffi::RemainingRets rets,
                                                  int64_t k, bool has_lengths,
                                                  bool has_starts, bool sorted,
                                                  bool has_workspace,
                                                  const Paging* paging = nullptr) {
  namespace ffi = ::xla::ffi;
  using operands_internal::CheckBuffer;
  using Unexpected = ffi::Unexpected<ffi::Error>;
  const auto invalid = [](const std::string& message) {
    return Unexpected(ffi::Error::InvalidArgument("jax_topk: " + message));
  };

  const size_t num_args = 1 + has_lengths + has_starts + (paging != nullptr);
  const size_t num_rets = 2 + has_workspace;
  if (args.size() != num_args || rets.size() != num_rets) {
    return invalid("expected " + std::to_string(num_args) + " operands and " +
                   std::to_string(num_rets) + " results, got " +
                   std::to_string(args.size()) + " and " + std::to_string(rets.size()));
  }
  const auto scores = args.get<ffi::AnyBuffer>(0);
  if (!scores) return Unexpected(scores.error());
  const ffi::AnyBuffer::Dimensions dims = scores->dimensions();
  if (dims.size() == 0) return invalid("expected scores of rank 1 or more, got rank 0");

  Operands operands;
  TopKParams& params = operands.params;
  params = {};
  params.k = k;
  params.sorted = sorted;
  params.scores = scores->untyped_data();
  params.n = dims[dims.size() - 1];
  params.rows = 1;
  for (size_t i = 0; i + 1 < dims.size(); ++i) params.rows *= dims[i];
  switch (scores->element_type()) {
    case ffi::DataType::F32:
      params.type = ScoreType::kF32;
      break;
    case ffi::DataType::BF16:
      params.type = ScoreType::kBF16;
      break;
    case ffi::DataType::F16:
      params.type = ScoreType::kF16;
      break;
    default:
      return invalid("expected scores of dtype float32, bfloat16 or float16, got " +
                     operands_internal::Text(*scores));
  }
  if (k < 1) return invalid("expected k of 1 or more, got " + std::to_string(k));
  if (!has_lengths && k > params.n) {
    return invalid("expected k of at most n = " + std::to_string(params.n) + ", got " +
                   std::to_string(k));
  }
  if (params.n > kMaxColumns) {
    return invalid("expected at most " + std::to_string(kMaxColumns) +
                   " columns, got " + std::to_string(params.n));
  }

  size_t next = 1;
  const auto per_row = [&](const char* name, bool given,
                           const int32_t** pointer) -> ffi::Error {
    if (!given) return ffi::Error::Success();
    const auto buffer = args.get<ffi::AnyBuffer>(next++);
    if (!buffer) return buffer.error();
    *pointer = static_cast<const int32_t*>(buffer->untyped_data());
    return CheckBuffer(name, *buffer, ffi::DataType::S32, dims, 1);
  };
  if (auto e = per_row("lengths", has_lengths, &params.lengths); e.failure()) {
    return Unexpected(e);
  }
  if (auto e = per_row("starts", has_starts, &params.starts); e.failure()) {
    return Unexpected(e);
  }

  if (paging != nullptr) {
    const auto table = args.get<ffi::AnyBuffer>(next++);
    if (!table) return Unexpected(table.error());
    const ffi::AnyBuffer::Dimensions shape = table->dimensions();
    bool good = table->element_type() == ffi::DataType::S32 && shape.size() > 0 &&
                shape.size() <= dims.size();
    for (size_t i = 0; good && i + 1 < shape.size(); ++i) good = shape[i] == dims[i];
    if (!good) {
      return invalid(
          "expected page_table of dtype int32 and the first of the leading dimensions "
          "of the scores, got " +
          operands_internal::Text(*table) + " for scores of " +
          operands_internal::Text(*scores));
    }
    for (int64_t number : {paging->page_size, paging->page_stride}) {
      if (number < 1 || number > kMaxColumns) {
        return invalid("expected page_size and page_stride from 1 to " +
                       std::to_string(kMaxColumns) + ", got " + std::to_string(number));
      }
    }
    constexpr int64_t kMaxRows = 4294967295;  // kernels divide in 32 bits
    if (params.rows > kMaxRows) {
      return invalid("expected at most " + std::to_string(kMaxRows) +
                     " rows with a page table, got " + std::to_string(params.rows));
    }
    params.page_table = static_cast<const int32_t*>(table->untyped_data());
    params.pages = shape[shape.size() - 1];
    params.rows_per_table = 1;
    for (size_t i = shape.size() - 1; i + 1 < dims.size(); ++i) {
      params.rows_per_table *= static_cast<uint32_t>(dims[i]);
    }
    params.page_size = static_cast<uint32_t>(paging->page_size);
    params.page_stride = static_cast<uint32_t>(paging->page_stride);
    params.unpaged = params.n - std::min(params.n, params.pages * paging->page_size);
  }

  auto values = rets.get<ffi::AnyBuffer>(0);
  if (!values) return Unexpected(values.error());
  auto indices = rets.get<ffi::AnyBuffer>(1);
  if (!indices) return Unexpected(indices.error());
  if (auto e = CheckBuffer("values", **values, scores->element_type(), dims, k);
      e.failure()) {
    return Unexpected(e);
  }
  if (auto e = CheckBuffer("indices", **indices, ffi::DataType::S32, dims, k);
      e.failure()) {
    return Unexpected(e);
  }
  params.values = (*values)->untyped_data();
  params.indices = static_cast<int32_t*>((*indices)->untyped_data());

  if (has_workspace) {
    auto workspace = rets.get<ffi::AnyBuffer>(2);
    if (!workspace) return Unexpected(workspace.error());
    if (auto e = CheckBuffer("workspace", **workspace, ffi::DataType::U8, dims, -1);
        e.failure()) {
      return Unexpected(e);
    }
    operands.workspace = (*workspace)->untyped_data();
    const ffi::AnyBuffer::Dimensions bytes = (*workspace)->dimensions();
    operands.workspace_bytes_per_row = bytes[bytes.size() - 1];
  }
  return operands;
}

}  // namespace jax_topk
