// SPDX-License-Identifier: Apache-2.0
//
// The Python face of the extension: the FFI handlers as capsules, the planner, and what
// the build holds. Imports without a driver; touches no device.

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <string>

#include "plan.h"
#include "xla/ffi/api/c_api.h"

#ifndef JAX_TOPK_CUDA_VERSION
#define JAX_TOPK_CUDA_VERSION ""
#endif
#ifndef JAX_TOPK_CUDA_ARCHITECTURES
#define JAX_TOPK_CUDA_ARCHITECTURES ""
#endif

namespace nb = nanobind;

extern "C" XLA_FFI_Error* JaxTopKCpu(XLA_FFI_CallFrame* call_frame);
extern "C" XLA_FFI_Error* JaxTopKPagedCpu(XLA_FFI_CallFrame* call_frame);
#ifdef JAX_TOPK_CUDA
extern "C" XLA_FFI_Error* JaxTopKRow(XLA_FFI_CallFrame* call_frame);
extern "C" XLA_FFI_Error* JaxTopKSplit(XLA_FFI_CallFrame* call_frame);
extern "C" XLA_FFI_Error* JaxTopKCluster(XLA_FFI_CallFrame* call_frame);
extern "C" XLA_FFI_Error* JaxTopKPagedRow(XLA_FFI_CallFrame* call_frame);
extern "C" XLA_FFI_Error* JaxTopKPagedSplit(XLA_FFI_CallFrame* call_frame);
extern "C" XLA_FFI_Error* JaxTopKPagedCluster(XLA_FFI_CallFrame* call_frame);
#endif

namespace jax_topk {
namespace {

using Handler = XLA_FFI_Error*(XLA_FFI_CallFrame*);

nb::capsule Capsule(Handler* handler) {
  return nb::capsule(reinterpret_cast<void*>(handler));
}

// Platform to target name to handler, as jax.ffi.register_ffi_target takes them. The
// suffix of a name counts incompatible changes of its operands and attributes.
nb::dict Registrations() {
  nb::dict cpu;
  cpu["jax_topk_cpu_v1"] = Capsule(JaxTopKCpu);
  cpu["jax_topk_paged_cpu_v1"] = Capsule(JaxTopKPagedCpu);
  nb::dict platforms;
  platforms["cpu"] = cpu;
#ifdef JAX_TOPK_CUDA
  nb::dict cuda;
  cuda["jax_topk_row_v1"] = Capsule(JaxTopKRow);
  cuda["jax_topk_split_v1"] = Capsule(JaxTopKSplit);
  cuda["jax_topk_cluster_v1"] = Capsule(JaxTopKCluster);
  cuda["jax_topk_paged_row_v1"] = Capsule(JaxTopKPagedRow);
  cuda["jax_topk_paged_split_v1"] = Capsule(JaxTopKPagedSplit);
  cuda["jax_topk_paged_cluster_v1"] = Capsule(JaxTopKPagedCluster);
  platforms["CUDA"] = cuda;
#endif
  return platforms;
}

nb::dict BuildInfo() {
  nb::dict info;
  info["version"] = JAX_TOPK_VERSION;
  info["cuda"] = JAX_TOPK_CUDA_VERSION;
  info["cuda_architectures"] = JAX_TOPK_CUDA_ARCHITECTURES;
  info["ffi_api"] =
      std::to_string(XLA_FFI_API_MAJOR) + "." + std::to_string(XLA_FFI_API_MINOR);
  return info;
}

constexpr Implementation kImplementations[] = {
    Implementation::kXla, Implementation::kCpu, Implementation::kRow,
    Implementation::kSplit, Implementation::kCluster};

// Whether the build has code for clusters: for an architecture that knows them, or for
// some without a number (native, all).
bool HasClusters() {
  int64_t number = 0;
  bool any = false;
  for (const char* c = JAX_TOPK_CUDA_ARCHITECTURES; *c != '\0'; ++c) {
    const bool digit = *c >= '0' && *c <= '9';
    any |= digit;
    number = digit ? 10 * number + (*c - '0') : 0;
    if (number >= kMinClusterCapability) return true;
  }
  return !any;
}

Plan PlanFromPython(int64_t rows, int64_t n, int64_t k, const std::string& dtype,
                    const std::string& platform, int64_t compute_capability,
                    int64_t num_sms, int64_t shared_memory_bytes,
                    const std::string& implementation, nb::sequence geometry) {
  Problem problem = {rows, n, k, ScoreType::kOther};
  if (dtype == "float32") problem.type = ScoreType::kF32;
  if (dtype == "bfloat16") problem.type = ScoreType::kBF16;
  if (dtype == "float16") problem.type = ScoreType::kF16;

  Device device = {Platform::kOther, compute_capability, num_sms, shared_memory_bytes};
  if (platform == "cpu") device.platform = Platform::kCpu;
  if (platform == "cuda") device.platform = Platform::kCuda;
  if (!HasClusters()) device.cluster_size = -1;

  Implementation requested = Implementation::kNone;
  for (Implementation one : kImplementations) {
    if (implementation == Name(one)) requested = one;
  }
  if (!implementation.empty() && requested == Implementation::kNone) {
    throw nb::value_error(
        ("no implementation is named '" + implementation + "'").c_str());
  }

  int64_t fields[kGeometryFields] = {};
  const size_t given = nb::len(geometry);
  if (given != 0 && given != kGeometryFields) {
    throw nb::value_error(
        "geometry has 5 numbers: ctas_per_row, capacity, num_samples, "
        "registers, ctas_per_sm");
  }
  for (size_t i = 0; i < given; ++i) fields[i] = nb::cast<int64_t>(geometry[i]);
  return MakePlan(problem, device, requested,
                  {fields[0], fields[1], fields[2], fields[3], fields[4]});
}

}  // namespace
}  // namespace jax_topk

NB_MODULE(_ffi, module) {
  using jax_topk::Plan;
  module.doc() = "Native side of jax_topk: FFI handlers, planner, build facts.";
  module.def("registrations", &jax_topk::Registrations);
  module.def("build_info", &jax_topk::BuildInfo);
  module.attr("MAX_K") = jax_topk::kMaxK;
  nb::list names;
  for (jax_topk::Implementation one : jax_topk::kImplementations) {
    names.append(jax_topk::Name(one));
  }
  module.attr("IMPLEMENTATIONS") = nb::tuple(names);

  nb::class_<Plan>(module, "Plan")
      .def_prop_ro("implementation",
                   [](const Plan& plan) { return jax_topk::Name(plan.implementation); })
      .def_ro("reason", &Plan::reason)
      .def_ro("num_threads", &Plan::num_threads)
      .def_ro("ctas_per_sm", &Plan::ctas_per_sm)
      .def_ro("ctas_per_row", &Plan::ctas_per_row)
      .def_ro("min_chunk", &Plan::min_chunk)
      .def_ro("grid", &Plan::grid)
      .def_ro("capacity", &Plan::capacity)
      .def_ro("held", &Plan::held)
      .def_ro("stages", &Plan::stages)
      .def_ro("num_samples", &Plan::num_samples)
      .def_ro("shared_memory_bytes", &Plan::shared_memory_bytes)
      .def_ro("workspace_bytes_per_row", &Plan::workspace_bytes_per_row);
  module.def("plan", &jax_topk::PlanFromPython, nb::kw_only(), nb::arg("rows"),
             nb::arg("n"), nb::arg("k"), nb::arg("dtype"), nb::arg("platform"),
             nb::arg("compute_capability") = 0, nb::arg("num_sms") = 0,
             nb::arg("shared_memory_bytes") = 0, nb::arg("implementation") = "",
             nb::arg("geometry") = nb::tuple());
}
