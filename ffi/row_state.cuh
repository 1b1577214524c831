// SPDX-License-Identifier: Apache-2.0
//
// The row state: how several CTAs hand a row to one of them, through a workspace that
// holds arbitrary bytes when the kernel starts.
//
// Workspace of a row, in this order:
//   uint64_t word            tag (upper 48 bits) and arrivals (lower 16 bits)
//   uint32_t counts[ctas]    survivors (lower half) and ties (upper half) of each CTA
//   uint64_t slots[ctas][k]  their entries (select.cuh); from a 16-byte boundary on
//
// Protocol.
//   1. Install: each CTA of the row sees to it that the word carries the tag of this
//      launch: a compare-and-swap from 0, what a cleaned word holds, to (tag, 0
//      arrivals); if it meets another word without the tag, a second swap from that.
//      Whether the second succeeds does not matter.
//   2. A CTA writes its count and its slots, which no other CTA writes.
//   3. It arrives: one atomic addition of 1 to the word.
//   4. The CTA whose arrival completes the CTAs of the row is the last. It writes 0 to
//      the word, reads what all have published, and answers the row. All others leave.
//
// Why it holds.
//   - Nobody waits: there is no loop here. So no CTA needs another to be resident, and
//     no grid can hang.
//   - No initial value is needed. The handler draws a tag for each launch that it makes
//     or records. A word with another tag is changed only by a swap of 1 (additions come
//     after their own CTA's install, the cleanup after all of them), and every swap
//     installs the tag; so if a CTA's swap fails, another's has succeeded. From the end
//     of its own install on, each CTA finds the tag in the word, and the arrivals
//     counted from 0.
//   - Every row is answered once: the additions are totally ordered, and exactly one of
//     them is the last.
//   - What is read was written: 2 happens before the release in 3 (block barrier, then
//     thread 0); the additions form a release sequence, so the acquire of the last one
//     synchronises with all; 4 happens after it (thread 0, then block barrier).
//   - A replayed graph replays the tag. The cleanup in 4 leaves no word with the tag
//     behind: all CTAs of the row have arrived, so none will touch the word again in
//     this launch, and the next launch is ordered after this one. Without it, a replay
//     that finds its own workspace untouched would start from a full count.
//   - Rows that a single CTA answers do not touch the word at all.
// Bytes that other code left in the workspace carry the tag with probability 2^-48 or
// less: its upper 16 bits make the word a NaN with a payload to whoever writes scores,
// and it is neither a small integer nor zero.
//
// (An arrival that is itself a compare-and-swap loop needs no install, but the CTAs of
// a row arrive together, and each success fails all others: measured on the H200,
// 5.6 us for 8 CTAs and 10.5 us for 16, against under 1 us here.)

#pragma once

#include <cstdint>
#include <cuda/atomic>

namespace jax_topk {

// What a launch passes to its CTAs.
struct Workspace {
  char* bytes;  // [rows, bytes_per_row]
  int64_t bytes_per_row;
  int64_t header_bytes;  // in front of a row's slots
  uint64_t tag;          // lower 16 bits zero
};

struct RowState {
  static constexpr uint64_t kArrivals = 0xFFFF;

  uint64_t* word;
  uint32_t* counts;
  uint64_t* slots;
  uint32_t k;

  __device__ RowState(const Workspace& workspace, int64_t row, uint32_t k_) : k(k_) {
    char* bytes = workspace.bytes + row * workspace.bytes_per_row;
    word = reinterpret_cast<uint64_t*>(bytes);
    counts = reinterpret_cast<uint32_t*>(word + 1);
    slots = reinterpret_cast<uint64_t*>(bytes + workspace.header_bytes);
  }

  __device__ uint64_t* Slots(uint32_t cta) const { return slots + cta * k; }

  static __device__ uint32_t PackCount(uint32_t survivors, uint32_t ties) {
    return ties << 16 | survivors;
  }
  static __device__ uint32_t Survivors(uint32_t count) { return count & 0xFFFF; }
  static __device__ uint32_t Ties(uint32_t count) { return count >> 16; }

  // Step 1, the first swap. Returns what the word held: for Arrive, and not looked at
  // before, so that nobody waits for the swap.
  __device__ uint64_t Install(uint64_t tag) const {
    uint64_t seen = 0;
    if (threadIdx.x == 0) {
      // Relaxed: publishes nothing but the word, whose changes are totally ordered.
      cuda::atomic_ref<uint64_t, cuda::thread_scope_device>(*word)
          .compare_exchange_strong(seen, tag, cuda::memory_order_relaxed);
    }
    return seen;
  }

  // The rest of step 1, then steps 3 and 4. True in every thread of the last of `ctas`
  // CTAs, which then sees what all have published. `flag` is shared memory.
  __device__ bool Arrive(uint64_t tag, uint64_t seen, uint32_t ctas,
                         uint32_t* flag) const {
    __syncthreads();  // the writes of all threads happen before thread 0's release
    if (threadIdx.x == 0) {
      cuda::atomic_ref<uint64_t, cuda::thread_scope_device> state(*word);
      if (seen != 0 && (seen & ~kArrivals) != tag) {
        state.compare_exchange_strong(seen, tag, cuda::memory_order_relaxed);
      }
      // Release: publishes counts and slots. Acquire: what earlier arrivals published.
      seen = state.fetch_add(1, cuda::memory_order_acq_rel);
      const bool last = (seen & kArrivals) + 1 == ctas;
      // Cleanup. Relaxed: the next to look is a later launch.
      if (last) state.store(0, cuda::memory_order_relaxed);
      *flag = last;
    }
    __syncthreads();  // thread 0's acquire happens before the reads of all threads
    return *flag != 0;
  }
};

}  // namespace jax_topk
