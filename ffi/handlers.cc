// SPDX-License-Identifier: Apache-2.0
//
// The CUDA handlers: where XLA's call becomes a kernel launch. Checks the operands,
// plans the geometry for the rows and the device at hand, launches, translates errors.
//
// A handler runs when XLA records a graph, not each time the graph runs: nothing here
// may depend on run-time values, allocate, or synchronise.

#include <cuda_runtime_api.h>

#include <atomic>
#include <cstdint>
#include <map>
#include <mutex>
#include <random>
#include <string>

#include "operands.h"
#include "plan.h"
#include "top_k.h"
#include "xla/ffi/api/ffi.h"

namespace jax_topk {
namespace {

namespace ffi = ::xla::ffi;

ffi::Error CudaError(const char* call, cudaError_t error) {
  return ffi::Error::Internal(std::string("jax_topk: ") + call +
                              " failed: " + cudaGetErrorName(error) + ", " +
                              cudaGetErrorString(error));
}

#define JAX_TOPK_RETURN_IF_ERROR(call)                                  \
  if (const cudaError_t error = (call); error != cudaSuccess) {         \
    return ::xla::ffi::Unexpected<ffi::Error>(CudaError(#call, error)); \
  }

// Facts of the current device. Read, and its kernels prepared, once per device:
// function attributes belong to a device, not to the process.
ffi::ErrorOr<Device> CurrentDevice() {
  static std::mutex mutex;
  static auto& devices = *new std::map<int, Device>();

  int ordinal = 0;
  JAX_TOPK_RETURN_IF_ERROR(cudaGetDevice(&ordinal));
  const std::lock_guard<std::mutex> lock(mutex);
  if (const auto found = devices.find(ordinal); found != devices.end()) {
    return found->second;
  }
  int major = 0;
  int minor = 0;
  int num_sms = 0;
  int shared_memory_bytes = 0;
  JAX_TOPK_RETURN_IF_ERROR(
      cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, ordinal));
  JAX_TOPK_RETURN_IF_ERROR(
      cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, ordinal));
  JAX_TOPK_RETURN_IF_ERROR(
      cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, ordinal));
  JAX_TOPK_RETURN_IF_ERROR(cudaDeviceGetAttribute(
      &shared_memory_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, ordinal));
  JAX_TOPK_RETURN_IF_ERROR(PrepareRowTopK(shared_memory_bytes));
  JAX_TOPK_RETURN_IF_ERROR(PrepareSplitTopK(shared_memory_bytes));
  int cluster_size = 0;
  if (10 * major + minor >= kMinClusterCapability) {
    JAX_TOPK_RETURN_IF_ERROR(PrepareClusterTopK(shared_memory_bytes));
    JAX_TOPK_RETURN_IF_ERROR(LargestCluster(shared_memory_bytes, &cluster_size));
  }
  const Device device = {Platform::kCuda, 10 * major + minor, num_sms,
                         shared_memory_bytes, cluster_size};
  devices.emplace(ordinal, device);
  return device;
}

// The upper 48 bits of a tag that no launch of this process has used. 0x7FF4 makes it a
// NaN with a payload to whoever writes scores, and neither zero nor an index.
uint64_t NextTag() {
  static std::atomic<uint32_t> next{std::random_device{}()};
  const uint64_t number = next.fetch_add(1, std::memory_order_relaxed);
  return uint64_t{0x7FF4} << 48 | number << 16;
}

ffi::Error Dispatch(Implementation implementation, cudaStream_t stream,
                    ffi::RemainingArgs args, ffi::RemainingRets rets, int64_t k,
                    bool has_lengths, bool has_starts, bool sorted,
                    ffi::Span<const int64_t> by_hand, const Paging* paging = nullptr) {
  const bool split = implementation == Implementation::kSplit;
  const auto operands =
      DecodeOperands(args, rets, k, has_lengths, has_starts, sorted, split, paging);
  if (!operands) return operands.error();
  const TopKParams& params = operands->params;
  if (by_hand.size() != kGeometryFields) {
    return ffi::Error::InvalidArgument(
        "jax_topk: expected geometry of " + std::to_string(kGeometryFields) +
        " numbers, got " + std::to_string(by_hand.size()));
  }
  const Geometry geometry = {by_hand[0], by_hand[1], by_hand[2], by_hand[3],
                             by_hand[4]};
  if (params.rows == 0) return ffi::Error::Success();  // a shard without rows

  const auto device = CurrentDevice();
  if (!device) return device.error();
  const Plan plan =
      MakePlan({params.rows, params.n, params.k, params.type}, *device, implementation,
               geometry, split ? operands->workspace_bytes_per_row : -1);
  if (plan.implementation != implementation) {
    return ffi::Error::InvalidArgument(std::string("jax_topk: '") +
                                       Name(implementation) +
                                       "' cannot run on this device: " + plan.reason);
  }
  if (split) {
    const cudaError_t error =
        LaunchSplitTopK(params, plan, operands->workspace,
                        operands->workspace_bytes_per_row, NextTag(), stream);
    if (error != cudaSuccess) return CudaError("launch of the split kernel", error);
  } else if (implementation == Implementation::kCluster) {
    const cudaError_t error = LaunchClusterTopK(params, plan, stream);
    if (error != cudaSuccess) return CudaError("launch of the cluster kernel", error);
  } else {
    const cudaError_t error = LaunchRowTopK(params, plan, stream);
    if (error != cudaSuccess) return CudaError("launch of the row kernel", error);
  }
  return ffi::Error::Success();
}

template <Implementation kImplementation>
ffi::Error TopK(cudaStream_t stream, ffi::RemainingArgs args, ffi::RemainingRets rets,
                int64_t k, bool has_lengths, bool has_starts, bool sorted,
                ffi::Span<const int64_t> geometry) {
  return Dispatch(kImplementation, stream, args, rets, k, has_lengths, has_starts,
                  sorted, geometry);
}

template <Implementation kImplementation>
ffi::Error PagedTopK(cudaStream_t stream, ffi::RemainingArgs args,
                     ffi::RemainingRets rets, int64_t k, bool has_lengths,
                     bool has_starts, bool sorted, ffi::Span<const int64_t> geometry,
                     int64_t page_size, int64_t page_stride) {
  const Paging paging = {page_size, page_stride};
  return Dispatch(kImplementation, stream, args, rets, k, has_lengths, has_starts,
                  sorted, geometry, &paging);
}

auto Binding() {
  return ffi::Ffi::Bind()
      .Ctx<ffi::PlatformStream<cudaStream_t>>()
      .RemainingArgs()
      .RemainingRets()
      .Attr<int64_t>("k")
      .Attr<bool>("has_lengths")
      .Attr<bool>("has_starts")
      .Attr<bool>("sorted")
      .Attr<ffi::Span<const int64_t>>("geometry");
}

auto PagedBinding() {
  return Binding().Attr<int64_t>("page_size").Attr<int64_t>("page_stride");
}

}  // namespace
}  // namespace jax_topk

#define JAX_TOPK_DEFINE(name)                                                     \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(                                                  \
      JaxTopK##name, jax_topk::TopK<jax_topk::Implementation::k##name>,           \
      jax_topk::Binding(), {xla::ffi::Traits::kCmdBufferCompatible});             \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(                                                  \
      JaxTopKPaged##name, jax_topk::PagedTopK<jax_topk::Implementation::k##name>, \
      jax_topk::PagedBinding(), {xla::ffi::Traits::kCmdBufferCompatible})

JAX_TOPK_DEFINE(Row);
JAX_TOPK_DEFINE(Split);
JAX_TOPK_DEFINE(Cluster);
