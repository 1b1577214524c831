// SPDX-License-Identifier: Apache-2.0
//
// The order in which scores are selected, as integers.
//
// A score becomes a `key`: an unsigned image of its bits that grows with IEEE total
// order (-NaN < -inf < ... < -0 < +0 < ... < +inf < +NaN). A key and a column become a
// `composite`, a 64-bit integer that no two columns of a row share: larger composites
// are selected first, and among equal keys the smaller column has the larger composite.
// Both maps are bijections, so a composite gives back the exact bits of the score.

#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define JAX_TOPK_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define JAX_TOPK_HOST_DEVICE inline
#endif

namespace jax_topk {

// `Bits` is uint32_t for float32 and uint16_t for bfloat16 and float16, whose keys fill
// the low 16 bits.
template <typename Bits>
JAX_TOPK_HOST_DEVICE uint32_t OrderedKey(Bits bits) {
  static_assert(sizeof(Bits) == 2 || sizeof(Bits) == 4);
  constexpr uint32_t kAll = sizeof(Bits) == 4 ? 0xFFFFFFFFu : 0xFFFFu;
  constexpr uint32_t kSign = kAll ^ (kAll >> 1);
  const uint32_t wide = bits;
  return (wide & kSign) != 0 ? wide ^ kAll : wide ^ kSign;
}

// The score's bits back from its key.
template <typename Bits>
JAX_TOPK_HOST_DEVICE Bits ScoreBits(uint32_t key) {
  constexpr uint32_t kAll = sizeof(Bits) == 4 ? 0xFFFFFFFFu : 0xFFFFu;
  constexpr uint32_t kSign = kAll ^ (kAll >> 1);
  return static_cast<Bits>((key & kSign) != 0 ? key ^ kSign : key ^ kAll);
}

JAX_TOPK_HOST_DEVICE uint64_t Composite(uint32_t key, uint32_t column) {
  return static_cast<uint64_t>(key) << 32 | static_cast<uint32_t>(~column);
}

JAX_TOPK_HOST_DEVICE uint32_t CompositeKey(uint64_t composite) {
  return static_cast<uint32_t>(composite >> 32);
}

JAX_TOPK_HOST_DEVICE uint32_t CompositeColumn(uint64_t composite) {
  return ~static_cast<uint32_t>(composite);
}

}  // namespace jax_topk
