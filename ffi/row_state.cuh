// SPDX-License-Identifier: Apache-2.0
//
// The row state: how several CTAs hand a row to one of them, through a workspace that
// holds arbitrary bytes when the kernel starts.
//
// Workspace of a row, in this order:
//   uint64_t word            tag (upper 48 bits) and arrivals (lower 16 bits)
//   uint32_t counts[ctas]    survivors (lower half) and ties (upper half) of each CTA
//   uint64_t slots[ctas][k]  their composites; from a 16-byte boundary on
//
// Protocol.
//   1. A CTA writes its count and its slots, which no other CTA writes.
//   2. It arrives: one atomic read-modify-write that replaces the word w by (tag, a + 1),
//      where a is the arrivals of w if w carries the tag of this launch, and else 0.
//   3. The CTA whose arrival makes a + 1 equal to the CTAs of the row is the last. It
//      writes 0 to the word, reads what all have published, and answers the row.
//      All others leave.
//
// Why it holds.
//   - Nobody waits: no loop here depends on another CTA's progress but the retries of 2,
//     each of which means that another CTA's arrival succeeded. So no CTA needs another to
//     be resident, and no grid can hang.
//   - No initial value is needed: the handler draws a tag for each launch that it makes or
//     records, and whatever the word held before counts as 0 arrivals. Every row is
//     answered once, because arrivals of one launch are totally ordered (they modify one
//     word) and exactly one of them is the last.
//   - What is read was written: 1 happens before the release in 2 (block barrier, then
//     thread 0); arrivals form a release sequence, so the acquire of the last arrival
//     synchronises with all of them; 3 happens after it (thread 0, then block barrier).
//   - A replayed graph replays the tag. The cleanup in 3 leaves no word with the tag
//     behind: all CTAs of the row have arrived, so none will write the word again in this
//     launch, and the next launch is ordered after this one. Without it, a replay that
//     finds its own workspace untouched would start from a full count.
//   - Rows that a single CTA answers do not touch the word at all.
// Bytes that other code left in the workspace carry the tag with probability 2^-48 or less:
// its upper 16 bits make the word a NaN with a payload to whoever writes scores, and it is
// neither a small integer nor zero.

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
  int64_t k;

  __device__ RowState(const Workspace& workspace, int64_t row, int64_t k_) : k(k_) {
    char* bytes = workspace.bytes + row * workspace.bytes_per_row;
    word = reinterpret_cast<uint64_t*>(bytes);
    counts = reinterpret_cast<uint32_t*>(word + 1);
    slots = reinterpret_cast<uint64_t*>(bytes + workspace.header_bytes);
  }

  __device__ uint64_t* Slots(int64_t cta) const { return slots + cta * k; }

  static __device__ uint32_t PackCount(uint32_t survivors, uint32_t ties) {
    return ties << 16 | survivors;
  }
  static __device__ uint32_t Survivors(uint32_t count) { return count & 0xFFFF; }
  static __device__ uint32_t Ties(uint32_t count) { return count >> 16; }

  // Publishes what this CTA has written of the row; true in every thread of the last of
  // `ctas` CTAs, which then sees what all have published. `flag` is shared memory.
  __device__ bool Arrive(uint64_t tag, uint32_t ctas, uint32_t* flag) const {
    __syncthreads();  // the writes of all threads happen before thread 0's release
    if (threadIdx.x == 0) {
      cuda::atomic_ref<uint64_t, cuda::thread_scope_device> state(*word);
      uint64_t seen = state.load(cuda::memory_order_relaxed);  // a guess; the swap decides
      uint64_t arrivals;
      do {
        arrivals = (seen & ~kArrivals) == tag ? (seen & kArrivals) + 1 : 1;
        // Release: publishes counts and slots. Acquire: what earlier arrivals published.
      } while (!state.compare_exchange_weak(seen, tag | arrivals,
                                            cuda::memory_order_acq_rel,
                                            cuda::memory_order_relaxed));
      *flag = arrivals == ctas;
      // Cleanup. Relaxed: the next to look is a later launch.
      if (arrivals == ctas) state.store(0, cuda::memory_order_relaxed);
    }
    __syncthreads();  // thread 0's acquire happens before the reads of all threads
    return *flag != 0;
  }
};

}  // namespace jax_topk
