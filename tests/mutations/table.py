# SPDX-License-Identifier: Apache-2.0
"""The mutations: ways of being wrong, and the tests that must notice each.

A mutation is a few exact snippets of the sources with what stands there instead. Each
old snippet must occur exactly once, so that a mutation that has gone stale fails loudly
(`test_mutations.py`), and the runner (`run.py`) applies it to a copy of the sources.
"""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Mutation:
    """One way of being wrong.

    Attributes:
      name: in words with underscores.
      edits: (file, old, new), ...
      tests: ids, below tests/, of the tests that must turn red; for a variant those
        that must stay green.
      where: what the tests need: "cpu", "gpu" or "2 gpus".
      expect: "red"; "green" for a variant, which is slow or strange but right; "either"
        where real hardware hides the fault, at least at times: `why` says so.
      why: what a reader should know.
      timeout: of the tests in seconds, if less than the runner's: for those that hang.
    """

    name: str
    edits: tuple[tuple[str, str, str], ...]
    tests: tuple[str, ...]
    where: str = "gpu"
    expect: str = "red"
    why: str = ""
    timeout: int = 0


MUTATIONS: list[Mutation] = []


def _mutation(name, file, old, new, *tests, more=(), **options):
    edits = ((file, old, new), *more)
    MUTATIONS.append(Mutation(name, edits, tests, **options))


ROW_STATE = "ffi/row_state.cuh"
SELECT = "ffi/select.cuh"
SPLIT = "ffi/split_top_k.cu"
ROW = "ffi/row_top_k.cu"
CLUSTER = "ffi/cluster_top_k.cu"
HELD_ROWS = "ffi/held_top_k.cu"
MAILBOXES = "ffi/cluster.cuh"
KEYS = "ffi/ordered_key.h"
TOP_K = "ffi/top_k.h"
PLAN = "ffi/plan.h"
HANDLERS = "ffi/handlers.cc"
OPERANDS = "ffi/operands.h"
CPU = "ffi/cpu_top_k.cc"
PRIMITIVE = "jax_topk/_primitive.py"
REFERENCE = "jax_topk/_reference.py"
ARGUMENTS_PY = "jax_topk/_arguments.py"
SHARDED_PY = "jax_topk/_sharded.py"
PLAN_PY = "jax_topk/_plan.py"

BENT = "test_geometry.py::test_every_distribution_is_exact_under_a_bent_geometry"
TINY = "test_geometry.py::test_tiny_rows_under_a_bent_geometry"
ROTATING = "test_row_state.py::test_lengths_that_rotate_at_every_call"
SHORT_LONG = "test_row_state.py::test_short_rows_between_long_ones"
THOUSANDS = "test_row_state.py::test_ten_thousand_calls_in_scans"
REPLAYS = (
    "test_row_state.py::test_replays_at_unchanged_addresses_see_the_new_contents"
    "[every-call-in-a-graph]"
)
# Steps of the select. What they are bent to is in test_select.py.
LEVELS = "test_select.py::test_any_number_of_different_scores"
ZERO_LAST = "test_select.py::test_a_last_selected_of_zero_among_few_of_about_its_size"
CROWDS = "test_select.py::test_about_as_many_in_the_bin_as_are_compared"
FEW_NANS = "test_select.py::test_a_few_nans_and_infinities_that_a_sample_hardly_shows"
LEAST = "test_select.py::test_the_least_score_of_all_is_a_score"
TIES_OF_SEVERAL = "test_select.py::test_ties_that_several_ctas_contribute"
ONE_CHUNK = "test_select.py::test_all_winners_in_one_chunk"
WHOLE_TILES = "test_select.py::test_rows_about_as_long_as_a_tile"
WINDOW_TILES = "test_select.py::test_windows_about_as_long_as_a_tile"
RESIDENT = "[row-(0,0,0,0,1)]"
LISTED = "[row-(0,700,16384,0,1)]"
CLUSTERS = "[cluster-(4,2048,2048,0,0)]"
PAIRS = "[cluster-(2,1,1,0,0)]"  # whose lists overflow
LONG_ROW = (
    "test_exactness.py::test_every_distribution_is_selected_exactly_in_a_long_row"
    "[row-0-float32]"
)
# Chunks of many tiles.
MANY_TILES = "test_stream.py::test_every_distribution_is_exact_in_rows_of_many_tiles"
PLACES = "test_stream.py::test_what_passes_may_lie_at_any_place_of_a_tile"
ANY_SPECIAL = "test_stream.py::test_any_special_value_may_be_the_threshold"
FULL_LISTS = "test_stream.py::test_a_list_is_full_in_the_first_tile_or_in_any_other"
MORE_ROWS = "test_stream.py::test_more_rows_than_run_at_a_time_are_exact"
TIES_OF_SAMPLE = "test_stream.py::test_a_sample_of_ties_that_are_nowhere_else"
THREE_ON_THEIR_WAY = "[row-(0,0,0,0,1)-{}]"
TWO_ON_THEIR_WAY = "[row-(0,0,0,0,2)-{}]"
IN_REGISTERS = "[row-(0,0,0,1,1)-{}]"
ON_THEIR_WAY = "test_plan.py::test_tiles_on_their_way"
OVERFLOWING = "[split-(5,1,16,0,0)]"
SHARED = "[split-(4,256,0,0,0)]"
WORDS = "test_graphs.py::test_every_launch_leaves_arrival_words_of_zero"
HELD = "test_graphs.py::test_a_workspace_that_holds_arrival_words_of_any_launch"
EVENTS = "test_graphs.py::test_a_call_is_one_kernel_and_nothing_else"
OVER_SHARDS = "test_sharded_top_k.py::test_windows_are_in_columns_of_the_whole_row"
LARGE_OUTPUT = "test_big.py::test_more_than_2_to_31_answers"

# Row state ---------------------------------------------------------------------------

CLEANUP = "if (last) state.store(0, cuda::memory_order_relaxed);"
TAG = "return uint64_t{0x7FF4} << 48 | number << 16;"
INSTALL = " Install(uint64_t tag) const {\n"
RELEASE_BARRIER = (
    "    __syncthreads();  // the writes of all threads happen before thread 0's "
    "release\n"
)
# Nothing is read or written earlier than it is.
WAIT = (
    "for (const long long t = clock64(); clock64() - t < {};)"
    ' asm volatile("" ::: "memory");\n'
)
PUBLISH = "  uint64_t* slots = state.Slots(mine);\n"


def _delayed(which, cycles):
    return f"    if ({which}) {WAIT.format(cycles)}"


_mutation("cleanup_removed", ROW_STATE, CLEANUP, "", REPLAYS)
_mutation(
    "cleanup_removed_seen_in_the_workspace", ROW_STATE, CLEANUP, "", WORDS + SHARED
)
_mutation(
    "cleanup_by_the_first_arriver",
    ROW_STATE,
    "if (last) state.store(0",
    "if ((seen & kArrivals) == 0) state.store(0",
    ROTATING + SHARED,
)
_mutation(
    "tag_constant",
    HANDLERS,
    TAG,
    "return uint64_t{0x7FF4} << 48 | (number & 0) << 16;",
    HELD,
    why="the test leaves words of the bare pattern behind; no test can leave words of "
    "an arbitrary constant that it does not know",
)
_mutation(
    "tag_constant_and_cleanup_removed",
    HANDLERS,
    TAG,
    "return uint64_t{0x7FF4} << 48 | (number * 0 + 77) << 16;",
    THOUSANDS + SHARED,
    ROTATING + SHARED,
    more=((ROW_STATE, CLEANUP, ""),),
    why="either of the two would hide the absence of the other",
)
_mutation(
    "install_removed",
    ROW_STATE,
    INSTALL,
    INSTALL + "    return tag;\n",
    HELD,
    "test_row_state.py::test_whatever_the_memory_held_before" + SHARED,
)
_mutation(
    "install_by_a_plain_store",
    ROW_STATE,
    INSTALL,
    INSTALL
    + _delayed("blockIdx.x % 2 == 1", 60000)
    + "    if (threadIdx.x == 0) *(volatile uint64_t*)word = tag;\n"
    + "    return tag;\n",
    ROTATING + SHARED,
    why="every other CTA is held up before its install, and undoes the arrivals",
)
_mutation(
    "block_sync_before_the_release_removed",
    ROW_STATE,
    RELEASE_BARRIER,
    "",
    BENT + "[split-(2,2048,0,0,0)-unsorted]",
    THOUSANDS + SHARED,
    expect="either",
    why="warps seldom lag behind thread 0; with some held up, the next row shows it",
)
_mutation(
    "block_sync_before_the_release_removed_and_warps_held_up",
    ROW_STATE,
    RELEASE_BARRIER,
    "",
    BENT + "[split-(2,2048,0,0,0)-unsorted]",
    # In one CTA only: were all late, the last would be no earlier than what it reads.
    more=(
        (SPLIT, PUBLISH, PUBLISH + _delayed("threadIdx.x >= 32 && mine == 0", 40000)),
    ),
)
_mutation(
    "last_to_arrive_reads_before_its_barrier",
    ROW_STATE,
    "    __syncthreads();  // thread 0's acquire happens before the reads of all "
    "threads\n"
    "    return *flag != 0;",
    "    return *flag != 0;",
    ROTATING + SHARED,
)
_mutation(
    "arrival_relaxed",
    ROW_STATE,
    "state.fetch_add(1, cuda::memory_order_acq_rel)",
    "state.fetch_add(1, cuda::memory_order_relaxed)",
    THOUSANDS + SHARED,
    ROTATING + SHARED,
    expect="either",
    why="the hardware is stricter than the memory model: a block's barrier and an "
    "atomic after it seem to be enough on sm_90",
)
_mutation(
    "arrival_on_rows_that_exit_early",
    SPLIT,
    "  if (mine >= cutting.count) return;",
    "  if (mine >= cutting.count) {\n"
    "      if (threadIdx.x == 0) {\n"
    "        atomicAdd(reinterpret_cast<unsigned long long*>(\n"
    "                      workspace.bytes + row * workspace.bytes_per_row), 1ull);\n"
    "      }\n"
    "      return;\n"
    "    }",
    BENT + "[split-(64,1,33,0,0)-unsorted]",
    WORDS + SHARED,
)
_mutation(
    "one_arrival_too_few_awaited",
    ROW_STATE,
    "const bool last = (seen & kArrivals) + 1 == ctas;",
    "const bool last = (seen & kArrivals) + 2 == ctas;",
    ROTATING + SHARED,
)
_mutation(
    "unwritten_slots_read",
    SPLIT,
    "return i % state.k < RowState::Survivors(state.counts[i / state.k]);",
    "return true;",
    WORDS + OVERFLOWING,
    BENT + "[split-(3,1,0,0,0)-unsorted]",
)
_mutation(
    "crowded_chunks_cut_short",
    SPLIT,
    "i < num_survivors; i += kThreads) {",
    "i < 0; i += kThreads) {",
    "test_exactness.py::test_every_distribution_is_selected_exactly_in_a_long_row"
    "[split-36-float32]",
    "test_exactness.py::test_every_distribution_is_selected_exactly_in_a_long_row"
    "[split-39-float32]",
)
_mutation(
    "ties_of_later_ctas_not_skipped",
    SPLIT,
    "const uint32_t skipped = static_cast<uint32_t>(before_one >> 32);",
    "const uint32_t skipped = 0;",
    BENT + "[split-(2,2048,0,0,0)-unsorted]",
    BENT + "[split-(16,700,16384,0,0)-unsorted]",
)
_mutation(
    "chunks_lose_their_last_column",
    SELECT,
    "return {first, min(first + size, columns.stop)};",
    "return {first, min(first + size - 1, columns.stop)};",
    BENT + "[split-(2,2048,0,0,0)-unsorted]",
    ONE_CHUNK + CLUSTERS,
)
_mutation(
    "workspace_offset_in_32_bits",
    ROW_STATE,
    "workspace.bytes + row * workspace.bytes_per_row",
    "workspace.bytes + static_cast<int32_t>(row * workspace.bytes_per_row)",
    "test_big.py::test_more_than_2_to_31_bytes_of_workspace",
)

# The select --------------------------------------------------------------------------

_mutation(
    "survivors_above_the_capacity_dropped",
    SELECT,
    "  const uint32_t survivors = FilterChunk(cta, chunk, first, filter.floor);\n"
    "  if (survivors > cta.capacity) return SelectExactly(cta, chunk, k);",
    "  const uint32_t survivors =\n"
    "      min(FilterChunk(cta, chunk, first, filter.floor), cta.capacity);",
    BENT + "[row-(0,1,1,0,0)-unsorted]",
)
_mutation(
    "overflow_in_the_gather_ignored",
    SPLIT,
    "if (survivors > cta.capacity) {",
    "if (survivors > cta.capacity && false) {",
    BENT + "[split-(7,1024,64,0,0)-unsorted]",
    BENT + "[split-(3,1,0,0,0)-unsorted]",
)
_mutation(
    "exact_path_one_round_early",
    SELECT,
    "  while (low < high) {\n    __syncthreads();  // the bins are clear",
    "  while (high - low >= kNumBins) {\n    __syncthreads();  // the bins are clear",
    BENT + "[row-(0,1,1,0,0)-unsorted]",
)
_mutation(
    "rows_of_a_sample_too_high_unanswered",
    SELECT,
    "reduced = SelectExactly(cta, entries.Of(entries.columns), k);",
    "return;",
    BENT + "[row-(0,1,1,0,0)-unsorted]",
    why="a row that descends, of which the first eight columns are the sample",
)
_mutation(
    "bins_that_do_not_begin_behind_the_lowest_word",
    SELECT,
    "*first = low + (bin > 0 ? 1 + ((bin - 1) << shift) : 0);",
    "*first = low + (bin << shift);",
    BENT + "[row-(0,1,1,0,0)-unsorted]",
)
_mutation(
    "tie_quota_off_by_one",
    SELECT,
    "CollectTies(cta, chunk, key, k - survivors, survivors);",
    "CollectTies(cta, chunk, key, k - survivors - 1, survivors);",
    BENT + "[row-(0,1,1,0,0)-unsorted]",
)
_mutation(
    "tie_quota_of_a_strict_filter_off_by_one",
    SELECT,
    "CollectTies(cta, chunk, filter.floor, k - survivors, reduced.ties_at);",
    "CollectTies(cta, chunk, filter.floor, k - survivors, reduced.ties_at) - 1;",
    TIES_OF_SEVERAL + "[split-(2,2048,0,0,0)]",
    TIES_OF_SEVERAL + CLUSTERS,
)
_mutation(
    "tie_quota_one_too_many",
    SPLIT,
    "const uint32_t wanted_ties = survivors < k ? k - survivors : 0;",
    "const uint32_t wanted_ties = survivors < k ? k - survivors + 1 : 0;",
    BENT + "[split-(2,2048,0,0,0)-unsorted]",
    BENT + "[split-(16,700,16384,0,0)-unsorted]",
)
WRITE_A_TILE = (
    "  uint32_t all;\n"
    "  counted.Write(tile, to, room, count + SumBeforeWarp(totals, &all));\n"
)

_mutation(
    "ties_taken_in_another_order",
    SELECT,
    WRITE_A_TILE,
    "  uint32_t all;\n"
    "  const uint32_t before = SumBeforeWarp(totals, &all);\n"
    "  counted.Write(tile, to, room, count + all - counted.Total() - before);\n",
    BENT + "[row-(0,1,1,0,0)-unsorted]",
)
_mutation(
    "ties_taken_in_the_order_of_arrival",
    SELECT,
    WRITE_A_TILE,
    "  uint32_t all;\n"
    "  SumBeforeWarp(totals, &all);\n"
    "  uint32_t position = 0;\n"
    "  if ((threadIdx.x & 31) == 0) {\n"
    "    position = count + atomicAdd(&cta.scratch().most, counted.Total());\n"
    "  }\n"
    "  position = __shfl_sync(kFullWarp, position, 0);\n"
    "  counted.Write(tile, to, room, position);\n",
    BENT + "[row-(0,1,1,0,0)-unsorted]",
    more=(
        (
            SELECT,
            "  totals[threadIdx.x / 32] = counted.Total();  // all lanes the same\n",
            "  totals[threadIdx.x / 32] = counted.Total();  // all lanes the same\n"
            "  if (threadIdx.x == 0) cta.scratch().most = 0;\n",
        ),
    ),
)
_mutation(
    "threshold_greater_instead_of_at_least",
    SELECT,
    "return beyond(word) | ((word == tie) & (column - start <= reach));",
    "return beyond(word);",
    TINY + "[row-(0,1,0,0,0)]",
    BENT + "[row-(0,1,0,0,0)-unsorted]",
)
_mutation(
    "filter_lets_the_floor_pass",
    SELECT,
    "  const Beyond beyond(floor);\n  return CompactChunk(",
    "  const Beyond beyond(floor - 1);\n  return CompactChunk(",
    BENT + "[row-(0,1,1,0,0)-unsorted]",
    TIES_OF_SEVERAL + "[split-(2,2048,0,0,0)]",
)
_mutation(
    "whole_rows_beyond_the_capacity",
    SELECT,
    "return Length() <= capacity && Of(columns)",
    "return Of(columns)",
    BENT + "[row-(0,1,1,0,0)-unsorted]",
)
_mutation(
    "head_of_a_misaligned_chunk_skipped",
    SELECT,
    "if (column + e - columns.start >= columns.stop - columns.start) {",
    "if (i == 0 || column + e - columns.start >= columns.stop - columns.start) {",
    BENT + "[split-(2,2048,0,0,0)-unsorted]",
    LEVELS + RESIDENT,
)
_mutation(
    "head_reads_from_the_beginning_of_the_vector",
    SELECT,
    "if (column + e - columns.start >= columns.stop - columns.start) {",
    "if (static_cast<int32_t>(column + e - columns.stop) >= 0) {",
    "test_windows.py::test_every_distribution_is_exact_in_a_ragged_batch"
    "[row-5003-float32]",
    LEVELS + RESIDENT,
)
_mutation(
    "tail_reads_on_to_the_end_of_the_vector",
    SELECT,
    "if (column + e - columns.start >= columns.stop - columns.start) {",
    "if (static_cast<int32_t>(column + e - columns.start) < 0) {",
    "test_windows.py::test_indices_are_absolute_and_neighbours_of_the_window_are_not_seen"
    "[row-float32]",
)
_mutation(
    "edges_of_a_chunk_not_masked",
    SELECT,
    "      if (i < from.size && !from.Whole(i)) {",
    "      if (false) {",
    "test_windows.py::test_indices_are_absolute_and_neighbours_of_the_window_are_not_seen"
    "[row-float32]",
)
_mutation(
    "edges_beside_the_memory_of_the_scores_left_out",
    SELECT,
    "      } else if (!inside) {",
    "      } else if (false) {",
    "test_shapes.py::test_every_width_up_to_64_in_one_program[row]",
)
_mutation(
    "bucket_sort_of_crowded_buckets_by_value_only",
    SELECT,
    "rank += dealt[other] > composite ? 1 : 0;",
    "rank += CompositeKey(dealt[other]) > CompositeKey(composite) ? 1 : 0;",
    BENT + "[row-(0,0,0,0,1)-sorted]",
)
_mutation(
    "grid_in_y",
    ROW,
    "const int64_t row = blockIdx.x;",
    "const int64_t row = blockIdx.y;",
    "test_shapes.py::test_more_rows_than_a_grid_axis_holds[row]",
    more=(
        (
            ROW,
            "static_cast<unsigned>(plan.grid), kThreads,",
            "dim3(1, static_cast<unsigned>(plan.grid)), kThreads,",
        ),
    ),
)
_mutation(
    "split_grid_of_all_rows_in_y",
    SPLIT,
    "const int64_t y = std::min(params.rows, kMaxGridRows);",
    "const int64_t y = params.rows;",
    "test_shapes.py::test_more_rows_than_a_grid_axis_holds[split]",
)
_mutation(
    "rows_in_the_z_of_a_split_grid_forgotten",
    SPLIT,
    "const int64_t row = int64_t{blockIdx.z} * gridDim.y + blockIdx.y;",
    "const int64_t row = blockIdx.y;",
    "test_shapes.py::test_more_rows_than_a_grid_axis_holds[split]",
)
_mutation(
    "more_rows_than_a_grid_holds",
    PLAN,
    "if (problem.rows > kMaxGrid) {",
    "if (false) {",
    "test_plan.py::test_more_rows_than_a_grid_holds_go_to_the_reference",
    where="cpu",
)
_mutation(
    "more_clusters_than_a_grid_holds",
    PLAN,
    "while (cluster * rows > kMaxGrid) cluster /= 2;",
    "",
    "test_plan.py::test_clusters_can_be_asked_for_where_the_device_has_them",
    where="cpu",
)
_mutation(
    "scores_offset_in_32_bits",
    SELECT,
    "data = scores.begin + row * params.n;",
    "data = scores.begin + static_cast<int32_t>(row * params.n);",
    "test_shapes.py::test_more_than_2_to_31_scores[row]",
)
_mutation(
    "answers_offset_in_32_bits",
    SELECT,
    "values(static_cast<Bits*>(params.values) + row * params.k)",
    "values(static_cast<Bits*>(params.values) + static_cast<int32_t>(row * params.k))",
    LARGE_OUTPUT,
)

# The select by value, and what is around it ------------------------------------------

BINS_AT_REST = "  Rest(cta);\n  // Each warp compares"

_mutation(
    "nans_of_a_list_in_the_lowest_bin",
    SELECT,
    "SelectByValue(cta, words, k, 0, range, true,",
    "SelectByValue(cta, words, k, 0, range, false,",
    FEW_NANS + LISTED.replace("]", "-f32]"),
    more=(
        (
            SELECT,
            "const ValueBins bin_of(range.low, range.high, true);",
            "const ValueBins bin_of(range.low, range.high, false);",
        ),
    ),
)
_mutation(
    "nans_of_a_row_in_the_highest_bin",
    SELECT,
    "  const ValueBins bin_of(range.low, range.high, false);\n",
    "  const ValueBins bin_of(range.low, range.high, true);\n",
    BENT + "[row-(0,0,0,0,1)-sorted]",
)
_mutation(
    "range_passes_over_nans_above_it",
    SELECT,
    "  if (most < 0) {\n    high =",
    "  if (most != 0) {\n    high =",
    BENT + "[row-(0,0,0,0,1)-sorted]",
)
_mutation(
    "one_order_for_words_of_both_signs",
    SELECT,
    "flip = floor >> 31 != 0 ? 0x7FFFFFFFu : 0;",
    "flip = 0x7FFFFFFFu;",
    BENT + "[row-(0,0,0,0,1)-sorted]",
)
_mutation(
    "bins_not_cleared_after_a_sample",
    SELECT,
    "inside <= rank + slack) {\n    Rest(cta);\n",
    "inside <= rank + slack) {\n",
    BENT + "[row-(0,700,16384,0,1)-unsorted]",
)
_mutation(
    "bins_not_cleared_after_a_few_were_ranked",
    SELECT,
    BINS_AT_REST,
    "  // Each warp compares",
    LEVELS + LISTED,
    LEVELS + "[split-(2,2048,0,0,0)]",
)
_mutation(
    "bins_by_value_not_cleared_before_those_by_key",
    SELECT,
    "  __syncthreads();  // also: the words are there\n  ClearBins(cta);\n",
    "  __syncthreads();  // also: the words are there\n",
    BENT + "[row-(0,0,0,0,1)-sorted]",
)
_mutation(
    "bins_of_a_round_not_cleared_for_the_next",
    SELECT,
    "    ClearBins(cta);\n  }\n  return {low, above, above + inside};",
    "  }\n  return {low, above, above + inside};",
    LEVELS + "[row-(0,1,1,0,0)]",
)
_mutation(
    "lower_bin_of_a_pair_for_the_last_of_the_upper",
    SELECT,
    "const bool upper = above_lower >= rank;",
    "const bool upper = above_lower > rank;",
    BENT + "[row-(0,0,0,0,1)-sorted]",
)
_mutation(
    "bin_not_found_for_the_last_of_a_pair",
    SELECT,
    "if (above_upper < rank && rank <= reached) {",
    "if (above_upper < rank && rank < reached) {",
    BENT + "[row-(0,0,0,0,1)-sorted]",
)
_mutation(
    "bins_of_warps_above_counted_with_its_own",
    SELECT,
    "lane < warp ? of_lane : 0",
    "lane <= warp ? of_lane : 0",
    BENT + "[row-(0,0,0,0,1)-sorted]",
)
_mutation(
    "few_ranked_without_their_columns",
    SELECT,
    "Composite(KeyOf(last_word), words.ColumnAt(last_place) - words.Start());",
    "Composite(KeyOf(last_word), 0);",
    LEVELS + "[row-(0,1,1,0,0)]",
    LEVELS + LISTED,
)
_mutation(
    "places_without_a_column_before_all_ties",
    SELECT,
    "uint32_t Start() const { return start; }",
    "uint32_t Start() const { return 0; }",
    LEAST + "[row-(0,0,0,0,1)-f32]",
    "test_short_rows.py::test_the_least_nan_is_selected_where_columns_are_masked",
)
_mutation(
    "plateau_of_the_sort_one_place_too_early",
    SELECT,
    "if (passes) write_composite(before_last + position, composite);",
    "if (passes) write_composite(before_last + position - 1, composite);",
    BENT + "[row-(0,0,0,0,1)-sorted]",
)
_mutation(
    "more_than_few_ranked_as_few",
    SELECT,
    "  if (kListFree && bin.inside > kFew) {",
    "  if (kListFree && bin.inside > 2 * kFew) {",
    CROWDS + RESIDENT,
)
_mutation(
    "more_than_some_ranked_as_some",
    SELECT,
    "bin.inside <= min(kSome, max(kFew, cta.capacity / 2))",
    "bin.inside <= max(kFew, cta.capacity / 2)",
    BENT + "[row-(0,0,0,0,1)-unsorted]",
)
_mutation(
    "few_ranked_and_no_more",
    SELECT,
    "bin.inside <= min(kSome, max(kFew, cta.capacity / 2))",
    "bin.inside <= kFew",
    CROWDS + RESIDENT,
    LEVELS + RESIDENT,
    expect="green",
    why="the select by key that others of a crowd take",
)
_mutation(
    "ranks_of_some_where_they_are_read",
    SELECT,
    "    reinterpret_cast<uint32_t*>(cta.list() + inside)[threadIdx.x] = rank;\n",
    "    reinterpret_cast<uint32_t*>(cta.list())[threadIdx.x] = rank;\n",
    CROWDS + RESIDENT,
)
_mutation(
    "some_ranked_among_themselves_too",
    SELECT,
    "rank += some[i] > one ? 1 : 0;",
    "rank += some[i] >= one ? 1 : 0;",
    CROWDS + RESIDENT,
)
_mutation(
    "last_of_some_not_compared",
    SELECT,
    "    for (uint32_t i = 0; i < inside; ++i) rank += some[i]",
    "    for (uint32_t i = 0; i + 1 < inside; ++i) rank += some[i]",
    CROWDS + RESIDENT,
)
_mutation(
    "high_end_of_a_range_from_some_words",
    SELECT,
    "    most = max(most, static_cast<int>(word));",
    "    if (i % kLow == 0) most = max(most, static_cast<int>(word));",
    FEW_NANS + "[row-(0,0,0,0,1)-f32]",
    why="NaNs that are missed are in the lowest bin",
)
_mutation(
    "last_of_the_few_instead_of_the_rank",
    SELECT,
    "(scratch.ranks[lane] == rank - 1)",
    "(scratch.ranks[lane] == inside - 1)",
    BENT + "[row-(0,0,0,0,1)-sorted]",
    LEVELS + "[row-(0,1,1,0,0)]",
    LEVELS + LISTED,
)
_mutation(
    "sample_larger_than_the_list",
    PLAN,
    "most_samples = std::min(kMaxSamples, 2 * plan.capacity);",
    "most_samples = kMaxSamples;",
    BENT + "[row-(0,700,16384,0,1)-unsorted]",
)
_mutation(
    "warps_that_are_not_full_skipped",
    SELECT,
    "busy = first + threadIdx.x / 32 * (32 * kVectors) < from.size;",
    "busy = first + (threadIdx.x / 32 + 1) * (32 * kVectors) <= from.size;",
    BENT + "[row-(0,0,0,0,1)-sorted]",
)
_mutation(
    "only_as_many_ctas_as_run_at_a_time",
    ROW,
    "<<<static_cast<unsigned>(plan.grid), kThreads,",
    "<<<static_cast<unsigned>(std::min(plan.grid, plan.at_once)), kThreads,",
    MORE_ROWS + "[row-(0,0,0,0,1)-f32]",
)
_mutation(
    "tile_read_twice_and_the_next_never",
    SELECT,
    "next.Load(chunk, base + kTileVectors);",
    "next.Load(chunk, base);",
    MANY_TILES + IN_REGISTERS.format("f32"),
)
_mutation(
    "totals_of_warps_not_in_turns_and_a_warp_held_up",
    SELECT,
    "       base += kTileVectors, turn ^= 1) {",
    "       base += kTileVectors) {",
    MANY_TILES + IN_REGISTERS.format("f32"),
    more=(
        (
            SELECT,
            WRITE_A_TILE,
            _delayed("threadIdx.x / 32 == 7", 20000) + WRITE_A_TILE,
        ),
    ),
)
_mutation(
    "entries_beyond_the_room_written",
    SELECT,
    "const uint32_t limit = list + 8 * room;",
    "const uint32_t limit = 0xFFFFFFFFu;",
    BENT + "[row-(0,1,1,0,0)-unsorted]",
)
_mutation(
    "all_ties_of_a_list_kept",
    SELECT,
    "    threshold.reach = column - columns.start;\n  }\n",
    "    (void)column;\n  }\n",
    BENT + "[row-(0,700,16384,0,1)-unsorted]",
    LEVELS + LISTED,
)
_mutation(
    "column_of_the_last_tie_off_by_one",
    SELECT,
    "position == wanted - 1)",
    "position == wanted)",
    LEVELS + LISTED,
)
_mutation(
    "all_ties_of_a_row_kept",
    SELECT,
    "      threshold.reach = cut.column - columns.start;\n",
    "",
    BENT + "[row-(0,0,0,0,1)-sorted]",
)
_mutation(
    "last_tie_of_a_row_off_by_one",
    SELECT,
    "cta.list()[kept - cut.above - 1]",
    "cta.list()[kept - cut.above]",
    BENT + "[row-(0,0,0,0,1)-sorted]",
)
_mutation(
    "places_without_a_column_taken_for_ties",
    SELECT,
    "return word == tie && column - columns.start < columns.stop - columns.start;",
    "return word == tie;",
    LEAST + "[row-(0,700,16384,0,1)-f32]",
    LEAST + "[row-(0,1,1,0,0)-f32]",
)
_mutation(
    "ties_behind_the_survivors_in_column_order",
    SELECT,
    "    write(own + low, entry);",
    "    write(tie ? reduced.survivors + own : own, entry);",
    TIES_OF_SEVERAL + "[split-(2,2048,0,0,0)]",
)
_mutation(
    "vector_more_than_a_tile_holds",
    SELECT,
    "Of(columns).size <= Tile<Bits>::kTileVectors;",
    "Of(columns).size <= Tile<Bits>::kTileVectors + 1;",
    WINDOW_TILES + "[row-(0,9000,0,0,0)-f32]",
    WINDOW_TILES + "[cluster-(4,9000,0,0,0)-bf16]",
)
_mutation(
    "misaligned_rows_as_long_as_a_tile",
    ROW,
    "const int64_t most = kTileColumns - ColumnsBeside(params, false);",
    "const int64_t most = kTileColumns;",
    WHOLE_TILES + "[-1-row-(0,9000,0,0,0)-f32]",
    WHOLE_TILES + "[-1-row-(0,9000,0,0,0)-bf16]",
)

# Clusters ----------------------------------------------------------------------------

_mutation(
    "survivors_of_earlier_ctas_overwritten",
    CLUSTER,
    "Send(list + 8 * (at + i),",
    "Send(list + 8 * (0 * at + i),",
    LEVELS + CLUSTERS,
)
_mutation(
    "survivors_behind_those_of_later_ctas",
    CLUSTER,
    "const bool before = lane < mine;",
    "const bool before = lane <= mine;",
    LEVELS + CLUSTERS,
)
_mutation(
    "ties_of_earlier_ctas_overwritten",
    CLUSTER,
    "Send(list + 8 * (k + ties_at + i),",
    "Send(list + 8 * (k + i),",
    TIES_OF_SEVERAL + CLUSTERS,
)
_mutation(
    "ties_sought_behind_all_survivors",
    CLUSTER,
    "*reduced = {all_survivors, wanted, k, false};",
    "*reduced = {all_survivors, wanted, all_survivors, false};",
    TIES_OF_SEVERAL + CLUSTERS,
)
_mutation(
    "ties_of_the_leader_where_others_write",
    CLUSTER,
    "cutting.ChunkOf(entries.columns, mine), whole, k,",
    "cutting.ChunkOf(entries.columns, mine), whole, 0,",
    TIES_OF_SEVERAL + CLUSTERS,
)
_mutation(
    "ties_joined_as_if_next_to_the_survivors",
    SELECT,
    "const uint32_t skipped = reduced.ties_at - reduced.survivors;",
    "const uint32_t skipped = 0;",
    TIES_OF_SEVERAL + CLUSTERS,
)
_mutation(
    "chunks_that_overflow_handed_over_as_if_complete",
    CLUSTER,
    "reduced->exact ? kIncomplete : reduced->ties",
    "reduced->ties",
    ONE_CHUNK + PAIRS,
)
_mutation(
    "overflow_of_the_list_of_the_leader_ignored",
    CLUSTER,
    " || all_survivors > cta.capacity) {",
    ") {",
    LEVELS + "[cluster-(4,1,64,0,0)]",
    ONE_CHUNK + "[cluster-(4,1,64,0,0)]",
)
_mutation(
    "too_few_in_a_cluster_unnoticed",
    CLUSTER,
    "if (incomplete || all_survivors + all_ties < k ||",
    "if (incomplete ||",
    ONE_CHUNK + PAIRS,
    timeout=45,
    why="a hang: the leader waits for ties that nobody has",
)
_mutation(
    "numbers_of_a_cluster_not_awaited",
    CLUSTER,
    "  Await(for_numbers, 0);\n",
    "",
    LEVELS + CLUSTERS,
    timeout=45,
)
_mutation(
    "entries_of_a_cluster_not_awaited_and_a_cta_held_up",
    CLUSTER,
    "  Await(for_entries, 0);\n",
    "",
    LEVELS + CLUSTERS,
    more=(
        (
            CLUSTER,
            "  if (mine > 0) {\n",
            "  if (mine > 0) {\n" + _delayed("mine == 1", 200000),
        ),
    ),
    timeout=45,
)
_mutation(
    "one_entry_too_few_expected",
    CLUSTER,
    "Expect(for_entries, 8 * (all_survivors + wanted - own));",
    "Expect(for_entries, 8 * (max(all_survivors + wanted - own, 1u) - 1));",
    LEVELS + CLUSTERS,
    timeout=45,
    expect="either",
    why="wrong when the last entry is late",
)
_mutation(
    "one_entry_too_many_expected",
    CLUSTER,
    "Expect(for_entries, 8 * (all_survivors + wanted - own));",
    "Expect(for_entries, 8 * (all_survivors + wanted - own + 1));",
    LEVELS + CLUSTERS,
    timeout=45,
    why="a hang: red when the runner's patience ends",
)
_mutation(
    "others_not_awaited_to_start_and_one_held_up",
    CLUSTER,
    "    cluster.barrier_wait();\n",
    "",
    LEVELS + CLUSTERS,
    more=(
        (
            CLUSTER,
            "  const auto prepare = [&] {\n",
            "  const auto prepare = [&] {\n" + _delayed("mine == 1", 400000),
        ),
    ),
    timeout=45,
    why="numbers are sent to a mailbox that is not there yet: a hang",
)
_mutation(
    "cluster_beyond_what_the_device_grants",
    PLAN,
    "2 * cluster <= largest_cluster &&",
    "2 * cluster <= 2 * kMaxClusterSize &&",
    "test_plan.py::test_what_the_registers_of_the_largest_cluster_hold",
    "test_plan.py::test_every_problem_gets_a_plan_that_fits",
    where="cpu",
)
_mutation(
    "cluster_whose_ties_have_no_room",
    PLAN,
    "const bool has_clusters = largest_cluster > 0 && cluster_capacity >= 2 * k;",
    "const bool has_clusters = largest_cluster > 0;",
    "test_plan.py::test_a_device_without_room_for_ties_gets_no_clusters",
    where="cpu",
)

# Rows that the registers of a cluster hold -------------------------------------------

HOLDING = "[cluster-(4,1,0,0,0)]"
BENT_HELD = BENT + "[cluster-(4,1,0,0,0)-unsorted]"
SORTED_HELD = BENT + "[cluster-(4,1,0,0,0)-sorted]"
SIXTEEN_HELD = BENT + "[cluster-(16,1,0,0,0)-unsorted]"
QUOTAS = "test_held.py::test_ties_of_several_ctas_of_which_only_some_are_selected"
FEW_HELD = "test_held.py::test_about_as_many_in_the_bin_as_are_compared"
ROUNDS = "test_held.py::test_several_rounds_by_key"
SPECIALS = "test_held.py::test_specials_of_both_signs_in_every_cta"
HELD_LIMITS = (
    "test_held.py::test_rows_just_short_enough_and_just_too_long_to_be_held[{}]"
)
HELD_EXACTLY = (
    "test_held.py::test_every_distribution_is_exact_in_rows_that_are_held"
    "[{}-cluster-(2,1,0,0,0)-30011-4096]"
)
TWO_TILES = HELD_EXACTLY.format("float32")  # 32 columns a thread

# 1. to 3. Bins of all.

BINS_TURN = (
    "    const Turn turn = Next(cta, size * NumBins() * sizeof(uint16_t));\n"
    "    __syncthreads();\n"
)
FEW_TURN = "    const Turn turn = Next(cta, sum * sizeof(uint64_t));\n"

_mutation(
    "mailboxes_of_others_not_awaited_and_one_held_up",
    HELD_ROWS,
    "  cooperative_groups::this_cluster().barrier_wait();\n",
    "",
    BENT_HELD,
    more=(
        (
            HELD_ROWS,
            "  PrepareMailboxes(cta);\n",
            _delayed("mine == 1", 400000) + "  PrepareMailboxes(cta);\n",
        ),
    ),
    timeout=45,
    why="bins are sent to a mailbox that is not there yet: a hang",
)
_mutation(
    "bins_sent_before_all_threads_have_counted",
    HELD_ROWS,
    BINS_TURN,
    BINS_TURN.replace("    __syncthreads();\n", ""),
    BENT_HELD,
    more=(
        (
            HELD_ROWS,
            "  words.Mask(vectors);\n",
            "  words.Mask(vectors);\n" + _delayed("threadIdx.x / 32 == 1", 40000),
        ),
    ),
    timeout=45,
)
_mutation(
    "bins_of_one_cta_not_added",
    HELD_ROWS,
    "    for (uint32_t i = 0; i < size; ++i) {",
    "    for (uint32_t i = 1; i < size; ++i) {",
    BENT_HELD,
    timeout=45,
)
_mutation(
    "bins_of_all_not_awaited_and_a_cta_held_up",
    HELD_ROWS,
    "    turn.Wait();\n    return all;\n",
    "    return all;\n",
    BENT_HELD,
    more=((HELD_ROWS, BINS_TURN, _delayed("mine == 1", 200000) + BINS_TURN),),
    timeout=45,
)
_mutation(
    "bins_of_which_one_word_too_many_is_expected",
    HELD_ROWS,
    "Next(cta, size * NumBins() * sizeof(uint16_t));",
    "Next(cta, size * NumBins() * sizeof(uint16_t) + 4);",
    BENT_HELD,
    timeout=45,
    why="a hang: red when the runner's patience ends",
)
_mutation(
    "turns_awaited_at_one_parity_and_a_cta_held_up",
    HELD_ROWS,
    "met >> 1 & 1};",
    "0};",
    ROUNDS + HOLDING,
    more=((HELD_ROWS, BINS_TURN, _delayed("mine == 1", 200000) + BINS_TURN),),
    timeout=45,
)
_mutation(
    "twice_as_many_bins_counted_as_are_sent",
    HELD_ROWS,
    "range.high, false, exchange.NumBins());",
    "range.high, false);",
    SIXTEEN_HELD,
    timeout=45,
)
_mutation(
    "single_bins_taken_for_pairs",
    HELD_ROWS,
    "    if (one) bin.index /= 2;\n",
    "",
    SIXTEEN_HELD,
    timeout=45,
)
_mutation(
    "upper_bin_of_the_pair_not_above_the_lower",
    HELD_ROWS,
    "        if (bin.index % 2 == 0) above += of_it[bin.index + 1];\n",
    "",
    BENT_HELD,
    timeout=45,
)
_mutation(
    "nans_above_in_the_lowest_bin",
    SELECT,
    "    return static_cast<uint32_t>(min(static_cast<int>(word), 0x7F800000));\n",
    "    return word;\n",
    BENT_HELD,
    SPECIALS + HOLDING,
)
_mutation(
    "columns_outside_of_the_chunk_counted",
    HELD_ROWS,
    "if (tile.ColumnAt(i) - columns.start < size) f(word",
    "f(word",
    LEAST + "[cluster-(4,1,0,0,0)-f32]",
    timeout=45,
)
_mutation(
    "last_column_of_a_held_chunk_lost",
    HELD_ROWS,
    "if (tile.ColumnAt(i) - columns.start < size) f(word",
    "if (tile.ColumnAt(i) - columns.start + 1 < size) f(word",
    BENT_HELD,
    timeout=45,
)
_mutation(
    "guessed_range_of_one_value",
    HELD_ROWS,
    "  return {range.low - margin, range.high + margin};",
    "  return {margin, margin};",
    BENT_HELD,
    SORTED_HELD,
    ROUNDS + HOLDING,
    expect="green",
    why="all words crowd in few bins and are selected by key",
)

# 3. By key.

_mutation(
    "extremes_of_one_cta_only",
    HELD_ROWS,
    "const uint64_t range = ranges[lane & (size - 1)];",
    "const uint64_t range = ranges[mine];",
    ROUNDS + HOLDING,
    timeout=45,
)
_mutation(
    "extremes_of_all_not_awaited_and_a_cta_held_up",
    HELD_ROWS,
    "    turn.Wait();\n    const uint64_t range",
    "    const uint64_t range",
    ROUNDS + HOLDING,
    more=(
        (
            HELD_ROWS,
            "    const Turn turn = Next(cta, size * sizeof(uint64_t));\n",
            "    const Turn turn = Next(cta, size * sizeof(uint64_t));\n"
            + _delayed("mine == 1", 200000),
        ),
    ),
    timeout=45,
)
_mutation(
    "words_outside_of_the_range_counted_by_key",
    HELD_ROWS,
    "if (key_bin_of.Has(key)) atomicAdd(&cta.bins()[key_bin_of(key)], 1u);",
    "atomicAdd(&cta.bins()[min(key_bin_of(key), exchange.NumBins() - 1)], 1u);",
    ROUNDS + HOLDING,
    QUOTAS + HOLDING,
    timeout=45,
)
_mutation(
    "bins_of_a_held_row_not_cleared_for_the_next_round",
    HELD_ROWS,
    "      ResetExtremes(cta);\n      ClearBins(cta);\n",
    "      ResetExtremes(cta);\n",
    ROUNDS + HOLDING,
    timeout=45,
)
_mutation(
    "words_above_of_the_round_before_forgotten_in_each_cta",
    HELD_ROWS,
    "        if (found.inside > 0) above += Memory().above[warp];\n",
    "",
    ROUNDS + HOLDING,
    QUOTAS + HOLDING,
    timeout=45,
)
_mutation(
    "words_above_of_the_round_before_forgotten_by_all",
    HELD_ROWS,
    "return {bin.index, found.above + bin.above, bin.inside};",
    "return {bin.index, bin.above, bin.inside};",
    ROUNDS + HOLDING,
    timeout=45,
)

# 4. The few, and the ties.

_mutation(
    "few_of_a_cluster_not_awaited_and_a_cta_held_up",
    HELD_ROWS,
    "AddressIn(rank, turn.mailbox));\n      }\n    }\n    turn.Wait();\n",
    "AddressIn(rank, turn.mailbox));\n      }\n    }\n",
    FEW_HELD + HOLDING,
    more=((HELD_ROWS, FEW_TURN, FEW_TURN + _delayed("mine == 1", 200000)),),
    timeout=45,
)
_mutation(
    "one_of_the_few_too_few_expected_and_a_cta_held_up",
    HELD_ROWS,
    FEW_TURN,
    FEW_TURN.replace("sum *", "(sum - 1) *") + _delayed("mine == 1", 200000),
    BENT_HELD,
    FEW_HELD + HOLDING,
    timeout=45,
    why="wrong where that CTA has one of the few, which is not awaited then",
)
_mutation(
    "one_of_the_few_too_many_expected",
    HELD_ROWS,
    FEW_TURN,
    FEW_TURN.replace("sum *", "(sum + 1) *"),
    FEW_HELD + HOLDING,
    timeout=45,
    why="a hang: red when the runner's patience ends",
)
_mutation(
    "few_of_earlier_ctas_overwritten",
    HELD_ROWS,
    "SharedAddress(&Memory().few[before + i])",
    "SharedAddress(&Memory().few[i])",
    FEW_HELD + HOLDING,
    timeout=45,
)
_mutation(
    "few_sent_before_all_threads_have_collected",
    HELD_ROWS,
    "few ? marks.Inside() : 0, memory.own_few);\n  __syncthreads();\n",
    "few ? marks.Inside() : 0, memory.own_few);\n",
    FEW_HELD + HOLDING,
    more=(
        (
            HELD_ROWS,
            "  const uint32_t wanted = k - together.above;  // of those inside\n",
            "  const uint32_t wanted = k - together.above;  // of those inside\n"
            + _delayed("threadIdx.x / 32 == 1", 40000),
        ),
    ),
    timeout=45,
)
_mutation(
    "few_of_a_cluster_larger_than_themselves",
    HELD_ROWS,
    "rank += memory.few[other] > composite ? 1 : 0;",
    "rank += memory.few[other] >= composite ? 1 : 0;",
    FEW_HELD + HOLDING,
    timeout=45,
)
_mutation(
    "few_of_the_last_warp_not_ranked",
    HELD_ROWS,
    "if (threadIdx.x / 32 * (32 / kTeam) < inside) {",
    "if ((threadIdx.x / 32 + 1) * (32 / kTeam) <= inside) {",
    FEW_HELD + HOLDING,
    timeout=45,
)
_mutation(
    "ranks_of_the_few_of_the_first_cta",
    HELD_ROWS,
    "SelectedOf(marks.Inside(), memory.ranks + before, first, wanted);",
    "SelectedOf(marks.Inside(), memory.ranks, first, wanted);",
    FEW_HELD + HOLDING,
    timeout=45,
)
_mutation(
    "few_of_a_cluster_ranked_against_k",
    HELD_ROWS,
    "SelectedOf(marks.Inside(), memory.ranks + before, first, wanted);",
    "SelectedOf(marks.Inside(), memory.ranks + before, first, k);",
    FEW_HELD + HOLDING,
)
_mutation(
    "few_selected_before_counted_against_k",
    HELD_ROWS,
    "behind = exchange.SelectedFew(0, before, wanted);",
    "behind = exchange.SelectedFew(0, before, k);",
    FEW_HELD + HOLDING,
    timeout=45,
)
_mutation(
    "more_than_few_of_a_cluster_compared",
    HELD_ROWS,
    "  if (together.inside <= kFewOfCluster) {\n",
    "  if (together.inside <= kFewOfCluster + 1) {\n",
    FEW_HELD + HOLDING,
    more=(
        (
            HELD_ROWS,
            "const bool few = together.inside <= kFewOfCluster;",
            "const bool few = together.inside <= kFewOfCluster + 1;",
        ),
    ),
    timeout=45,
    why="of 65 in the bin, the last is never ranked; a hang if all are of one CTA",
)
_mutation(
    "ties_of_earlier_ctas_not_counted",
    HELD_ROWS,
    "    behind = min(before, wanted);\n",
    "    behind = 0;\n",
    QUOTAS + HOLDING,
    timeout=45,
)
_mutation(
    "tie_quota_of_a_held_chunk_off_by_one",
    HELD_ROWS,
    "    own = min(wanted - behind, inside);\n",
    "    own = min(max(wanted - behind, 1u) - 1, inside);\n",
    QUOTAS + HOLDING,
    timeout=45,
)
_mutation(
    "all_ties_of_a_held_chunk_taken",
    HELD_ROWS,
    "    if (own == inside) {\n",
    "    if (own <= inside) {\n",
    QUOTAS + HOLDING,
)
_mutation(
    "last_tie_of_a_held_chunk_off_by_one",
    HELD_ROWS,
    "EntryColumn(cta.list()[own - 1]);",
    "EntryColumn(cta.list()[own - 1]) - 1;",
    QUOTAS + HOLDING,
)

# 5. Each its part of the answer.

_mutation(
    "columns_above_of_earlier_ctas_forgotten",
    HELD_ROWS,
    "EmitByColumn<Bits>(cta, params, row, above + behind, own);",
    "EmitByColumn<Bits>(cta, params, row, behind, own);",
    BENT_HELD,
)
_mutation(
    "first_slot_of_a_part_of_the_answer_forgotten",
    SELECT,
    "if (i < kept) out(first + i, EntryWord(entry[j]), EntryColumn(entry[j]));",
    "if (i < kept) out(i, EntryWord(entry[j]), EntryColumn(entry[j]));",
    BENT_HELD,
)
_mutation(
    "entries_by_value_where_those_of_earlier_ctas_are",
    HELD_ROWS,
    "SharedAddress(cta.list() + above + behind)",
    "SharedAddress(cta.list() + behind)",
    SORTED_HELD,
)
_mutation(
    "entries_by_value_not_awaited_and_a_cta_held_up",
    HELD_ROWS,
    "      Await(mailbox, 0);\n",
    "",
    SORTED_HELD,
    more=(
        (
            HELD_ROWS,
            "    if (mine > 0) {\n",
            "    if (mine > 0) {\n" + _delayed("mine == 1", 200000),
        ),
    ),
    timeout=45,
)
_mutation(
    "one_entry_by_value_too_many_expected",
    HELD_ROWS,
    "Expect(mailbox, 8 * (k - own));",
    "Expect(mailbox, 8 * (k - own + 1));",
    SORTED_HELD,
    timeout=45,
    why="a hang: red when the runner's patience ends",
)
_mutation(
    "words_of_the_second_tile_taken_for_those_of_the_first",
    HELD_ROWS,
    "if (kTiles > 1 && i >= kOfTile) word =",
    "if (kTiles > 2 && i >= kOfTile) word =",
    TWO_TILES,
)
_mutation(
    "columns_of_the_second_tile_taken_for_those_of_the_first",
    HELD_ROWS,
    "tiles[0].ColumnAt(i % kOfTile) + i / kOfTile * kThreads * kOfTile;",
    "tiles[0].ColumnAt(i % kOfTile);",
    TWO_TILES,
    HELD_EXACTLY.format("bfloat16"),
    why="only where a tie is among the few",
)
_mutation(
    "marks_of_the_second_tile_with_those_of_the_first",
    HELD_ROWS,
    "{ f(word, t * kOfTile + i); });",
    "{ f(word, i); });",
    TWO_TILES,
    timeout=45,
)
_mutation(
    "selected_of_the_second_tile_dropped",
    HELD_ROWS,
    "mask >> (t * kOfTile) & 0xFFFF",
    "t > 0 ? 0 : mask & 0xFFFF",
    TWO_TILES,
    timeout=45,
)
_mutation(
    "held_rows_of_whole_vectors_only",
    HELD_ROWS,
    "cutting.size + ColumnsBeside(params, params.starts != nullptr);",
    "cutting.size;",
    HELD_LIMITS.format(8191),
    HELD_LIMITS.format(32752),
    timeout=45,
)
_mutation(
    "rows_held_that_do_not_fit_where_they_begin",
    HELD_ROWS,
    "return plan.held && HeldColumns(params, plan) <= kMaxHeldColumns;",
    "return plan.held;",
    HELD_LIMITS.format(32752),
    HELD_LIMITS.format(32768),
    timeout=45,
)
_mutation(
    "function_attribute_of_held_rows_never_set",
    CLUSTER,
    "  const cudaError_t held = PrepareHeldTopK(bytes);\n"
    "  if (held != cudaSuccess) return held;\n",
    "",
    BENT + "[cluster-(2,0,0,0,0)-unsorted]",
    BENT + "[cluster-(16,1,0,0,0)-unsorted]",
)
_mutation(
    "rows_held_that_no_registers_hold",
    PLAN,
    "CeilDiv(n, cluster) <= kMaxHeldColumns * kThreads;",
    "CeilDiv(n, cluster) <= 2 * kMaxHeldColumns * kThreads;",
    "test_plan.py::test_what_the_registers_of_the_largest_cluster_hold",
    "test_plan.py::test_rows_are_held_where_a_cluster_has_the_registers",
    where="cpu",
)
_mutation(
    "exchange_of_a_cluster_not_in_its_shared_memory",
    PLAN,
    "std::max(plan.stages * kStageBytes, clustered ? ExchangeBytes(cluster) : 0);",
    "plan.stages * kStageBytes;",
    "test_plan.py::test_clusters_can_be_asked_for_where_the_device_has_them",
    where="cpu",
)

# Marks of what is selected: in registers, for resident and for held rows.

_mutation(
    "marks_inside_with_those_above",
    SELECT,
    "return reached & ~above;",
    "return reached;",
    LEVELS + RESIDENT,
    BENT_HELD,
    timeout=45,
)
_mutation(
    "place_behind_its_few_for_their_first",
    SELECT,
    "  return first;\n}\n",
    "  return at;\n}\n",
    LEVELS + RESIDENT,
    FEW_HELD + HOLDING,
)
_mutation(
    "one_of_the_few_too_many_selected",
    SELECT,
    "if (ranks[first++] < wanted)",
    "if (ranks[first++] <= wanted)",
    LEVELS + RESIDENT,
    FEW_HELD + HOLDING,
)
_mutation(
    "marked_words_ranked_without_their_columns",
    SELECT,
    "few[at++] = Composite(KeyOf(words.WordAt(i)), words.ColumnAt(i) - words.Start());",
    "few[at++] = Composite(KeyOf(words.WordAt(i)), 0);",
    LEVELS + RESIDENT,
    FEW_HELD + HOLDING,
)
_mutation(
    "marked_words_ranked_against_k",
    SELECT,
    "  const uint32_t wanted = rank - bin.above;\n",
    "  const uint32_t wanted = rank;\n",
    LEVELS + RESIDENT,
    LEVELS + LISTED,
)
_mutation(
    "more_than_few_of_a_list_ranked_as_few",
    SELECT,
    "    const Bin bin = FindBin(cta, k);\n    if (bin.inside <= kFew) {",
    "    const Bin bin = FindBin(cta, k);\n    if (bin.inside <= 2 * kFew) {",
    LEVELS + LISTED,
)
_mutation(
    "columns_outside_of_the_window_of_a_whole_row_seen",
    SELECT,
    "    if (window.stop - window.start == n) return;\n",
    "    return;\n",
    "test_short_rows.py::test_windows_that_begin_and_end_anywhere_in_such_a_row"
    "[row-8192-float32]",
)
_mutation(
    "columns_before_the_window_of_a_whole_row_before_all_ties",
    SELECT,
    "    if (window.stop - window.start == n) return;\n    start = window.start;\n",
    "    if (window.stop - window.start == n) return;\n",
    "test_short_rows.py::test_the_least_nan_is_selected_in_rows_that_fill_whole_warps"
    "[row-512-float32]",
    "test_short_rows.py::test_the_least_nan_is_selected_in_rows_that_fill_whole_warps"
    "[row-4096-float32]",
)
_mutation(
    "last_vectors_of_a_whole_row_not_loaded",
    SELECT,
    "if (VectorOf(u) < n / kPerVector) vectors[u]",
    "if (VectorOf(u) + 1 < n / kPerVector) vectors[u]",
    "test_short_rows.py::test_rows_around_the_width_of_the_registers"
    "[row-4096-4096-float32]",
    "test_short_rows.py::test_rows_around_the_width_of_the_registers"
    "[row-8192-4096-float32]",
)
_mutation(
    "second_vector_of_a_narrow_tile_not_counted",
    SELECT,
    "__popc(mask & ((1 << kPerVector) - 1)) | __popc(mask >> kPerVector) << 16;",
    "__popc(mask & ((1 << kPerVector) - 1));",
    BENT_HELD,
    timeout=45,
)

_mutation(
    "places_of_a_list_without_an_entry_marked",
    SELECT,
    "  const uint32_t valid = words.Valid();\n",
    "  const uint32_t valid = 0xFFFFFFFFu;\n",
    ZERO_LAST + LISTED,
    why="they hold zeros, which do harm in the bin of the last selected",
)
_mutation(
    "words_at_the_lower_end_of_a_bin_below_it",
    SELECT,
    "return __uint_as_float(__float_as_uint(2097152.0f) + 4 * bin - 1);",
    "return __uint_as_float(__float_as_uint(2097152.0f) + 4 * bin);",
    BENT + "[row-(0,0,0,0,1)-sorted]",
    LEVELS + RESIDENT,
)
_mutation(
    "marks_in_reverse",
    SELECT,
    "    return __brev(bits) >> (32 - count);\n",
    "    return bits;\n",
    BENT + "[row-(0,0,0,0,1)-sorted]",
)
_mutation(
    "lanes_without_another_before_them_counted_twice",
    SELECT,
    '"@p add.u32 %0, %0, other;\\n"',
    '"add.u32 %0, %0, other;\\n"',
    BENT + "[row-(0,0,0,0,1)-sorted]",
)

# Tiles on their way in shared memory -------------------------------------------------

AT_ONCE = MANY_TILES + THREE_ON_THEIR_WAY.format("f32")
IN_PAIRS = MANY_TILES + TWO_ON_THEIR_WAY.format("f32")
WRITE_LANES = (
    "    uint32_t position = count + SumBeforeWarp(totals, &all) + sum - mine;\n"
)

_mutation(
    "one_tile_too_few_awaited",
    SELECT,
    '"n"(kStages - 1) : "memory");',
    '"n"(kStages) : "memory");',
    IN_PAIRS,
    AT_ONCE,
    expect="either",
    why="a tile that was asked for two tiles earlier is mostly there",
)
_mutation(
    "tile_overwritten_before_its_warp_has_read_it",
    SELECT,
    "    __syncwarp();\n    Ask(chunk, first + kStages * kTileVectors, place);\n",
    "    Ask(chunk, first + kStages * kTileVectors, place);\n",
    IN_PAIRS,
    AT_ONCE,
    expect="either",
    why="the compiler lets the lanes of a warp meet behind the loop before it",
)
_mutation(
    "tile_taken_that_other_lanes_have_not_awaited",
    SELECT,
    '"n"(kStages - 1) : "memory");\n    __syncwarp();\n',
    '"n"(kStages - 1) : "memory");\n',
    IN_PAIRS,
    AT_ONCE,
    expect="either",
    why="the lanes of a warp await together",
)
_mutation(
    "third_tile_never_asked_for_at_the_start",
    SELECT,
    "    stream.template Start<kFewStages, kStages>(vectors);\n",
    "",
    AT_ONCE,
    PLACES + THREE_ON_THEIR_WAY.format("f32"),
)
_mutation(
    "tile_asked_for_twice_and_the_next_never",
    SELECT,
    "Ask(chunk, first + kStages * kTileVectors, place);",
    "Ask(chunk, first + (kStages - 1) * kTileVectors, place);",
    IN_PAIRS,
    AT_ONCE,
)
_mutation(
    "tiles_always_in_the_first_place",
    SELECT,
    "Ask(chunk, first + kStages * kTileVectors, place);",
    "Ask(chunk, first + kStages * kTileVectors, 0);",
    IN_PAIRS,
    AT_ONCE,
)
_mutation(
    "places_of_tiles_without_end",
    SELECT,
    "    if (place == kStages * kStageBytes) place = 0;\n",
    "",
    IN_PAIRS,
    AT_ONCE,
)
_mutation(
    "tiles_in_place_of_the_list",
    SELECT,
    "                          8 * cta.capacity + threadIdx.x / 32 * (32 * 64);",
    "                          threadIdx.x / 32 * (32 * 64);",
    AT_ONCE,
)
_mutation(
    "vectors_of_a_lane_taken_from_where_they_are_not",
    SELECT,
    "own = warp + lane * 64 + lane / 2 % 4 * 16;",
    "own = warp + lane * 64;",
    AT_ONCE,
)
_mutation(
    "vectors_of_a_lane_copied_to_where_they_are_not_sought",
    SELECT,
    "copies = warp + lane / 4 * 64 + (lane % 4 ^ lane / 8) * 16;",
    "copies = warp + lane / 4 * 64 + lane % 4 * 16;",
    AT_ONCE,
)
_mutation(
    "tile_before_seen_behind_the_last_column",
    SELECT,
    "          } else {\n"
    '            asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};"',
    "          } else if (first == 0xFFFFFFFFu) {\n"
    '            asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};"',
    IN_PAIRS,
    AT_ONCE,
)
_mutation(
    "edges_of_a_tile_on_its_way_not_masked",
    SELECT,
    "    if (part->Whole(chunk, first)) return;\n",
    "    if (place < 0xFFFFFFFFu) return;\n",
    "test_stream.py::test_windows_begin_and_end_within_tiles"
    + THREE_ON_THEIR_WAY.format("f32"),
    PLACES + THREE_ON_THEIR_WAY.format("f32"),
)
_mutation(
    "first_tile_whole_whatever_its_first_vector",
    SELECT,
    "    return first >= from.first_whole &&\n           first + kTileVectors",
    "    return first + kTileVectors",
    "test_stream.py::test_windows_begin_and_end_within_tiles"
    + THREE_ON_THEIR_WAY.format("f32"),
    "test_stream.py::test_windows_begin_and_end_within_tiles"
    + IN_REGISTERS.format("f32"),
)
_mutation(
    "edges_beside_the_memory_of_the_scores_not_put_into_the_tile",
    SELECT,
    "    part->Mask(chunk, first);\n#pragma unroll\n",
    "    part->Mask(chunk, first);\n    if (place < 0xFFFFFFFFu) return;\n"
    "#pragma unroll\n",
    PLACES + THREE_ON_THEIR_WAY.format("f32"),
    PLACES + THREE_ON_THEIR_WAY.format("bf16"),
)
_mutation(
    "words_fetched_from_another_tile",
    SELECT,
    "const uint32_t at = (own + place) ^ (i *",
    "const uint32_t at = own ^ (i *",
    AT_ONCE,
)
_mutation(
    "words_fetched_from_the_other_half",
    SELECT,
    "const uint32_t at = (own + place) ^ (i *",
    "const uint32_t at = (own + place) ^ ((i ^ (sizeof(Bits) == 2)) *",
    MANY_TILES + THREE_ON_THEIR_WAY.format("bf16"),
)
_mutation(
    "halves_of_words_swapped",
    SELECT,
    "return e % 2 == 0 ? words[e / 2] << 16 : words[e / 2] & 0xFFFF0000u;",
    "return e % 2 == 1 ? words[e / 2] << 16 : words[e / 2] & 0xFFFF0000u;",
    MANY_TILES + THREE_ON_THEIR_WAY.format("bf16"),
    MANY_TILES + IN_REGISTERS.format("bf16"),
)
_mutation(
    "columns_of_what_passes_counted_from_the_end_of_a_lane",
    SELECT,
    '"r"(stream.WordAt(i)), "r"(column + i)',
    '"r"(stream.WordAt(i)), "r"(column + bit)',
    AT_ONCE,
)
_mutation(
    "what_passes_of_a_lane_in_reverse",
    SELECT,
    "const uint32_t bit = 31 - __clz(static_cast<int>(mask));",
    "const uint32_t bit = __ffs(static_cast<int>(mask)) - 1;",
    AT_ONCE,
    PLACES + THREE_ON_THEIR_WAY.format("f32"),
)
_mutation(
    "what_passes_of_later_lanes_where_that_of_earlier_ones_is",
    SELECT,
    "SumBeforeWarp(totals, &all) + sum - mine;",
    "SumBeforeWarp(totals, &all);",
    AT_ONCE,
    PLACES + THREE_ON_THEIR_WAY.format("f32"),
)
_mutation(
    "totals_of_a_stream_not_in_turns_and_a_warp_held_up",
    SELECT,
    "       base += Part::kTileVectors, turn ^= 1) {",
    "       base += Part::kTileVectors) {",
    AT_ONCE,
    more=(
        (
            SELECT,
            WRITE_LANES,
            _delayed("threadIdx.x / 32 == 7", 20000) + WRITE_LANES,
        ),
    ),
)
_mutation(
    "list_that_is_full_unnoticed",
    SELECT,
    "    count += all;\n    stream.Next(chunk, base);\n",
    "    count = min(count + all, enough);\n    stream.Next(chunk, base);\n",
    FULL_LISTS + "[row-(0,1,1024,0,1)-f32]",
    FULL_LISTS + "[cluster-(2,1,1024,0,0)-f32]",
    timeout=45,
)
_mutation(
    "entries_of_a_stream_beyond_the_room_written",
    SELECT,
    "      if (position < room) {\n",
    "      if (true) {\n",
    FULL_LISTS + "[row-(0,1,1024,0,2)-bf16]",
    expect="either",
    why="what is overwritten is selected exactly afterwards; red where it is not the "
    "CTA's own",
)
_mutation(
    "nans_not_noticed_by_a_stream",
    SELECT,
    "  if (squares != squares) {\n",
    "  if (false) {\n",
    ANY_SPECIAL + THREE_ON_THEIR_WAY.format("f32"),
    AT_ONCE,
)
_mutation(
    "equal_scores_above_each_other",
    SELECT,
    "const float difference = limit - __uint_as_float(word);",
    "const float difference = -(__uint_as_float(word) - limit);",
    TIES_OF_SAMPLE + "[row-(0,1,1024,0,1)-f32]",
    TIES_OF_SAMPLE + "[split-(2,1,1024,0,0)-f32]",
)
_mutation(
    "zeros_of_both_signs_the_same_to_a_stream",
    SELECT,
    "    signs.Add(difference);\n",
    "    signs.Add(__uint_as_float(word) > limit ? -1.0f : 1.0f);\n",
    ANY_SPECIAL + THREE_ON_THEIR_WAY.format("f32"),
)
_mutation(
    "exchange_or_tiles_whichever_is_less",
    PLAN,
    "std::max(plan.stages * kStageBytes, clustered ? ExchangeBytes(cluster) : 0);",
    "std::min(plan.stages * kStageBytes, clustered ? ExchangeBytes(cluster) : 0);",
    "test_plan.py::test_tiles_on_their_way_have_room_beside_a_list_that_is_long_enough",
    where="cpu",
)
_mutation(
    "tiles_beside_a_list_that_is_too_short",
    PLAN,
    "slots >= Survivors(n, k, NumSamples(n, k, slots)).most)) {",
    "slots >= least)) {",
    ON_THEIR_WAY,
    where="cpu",
)
_mutation(
    "tiles_at_any_multiple_of_an_entry",
    PLAN,
    "std::min((plan.capacity + 7) / 8 * 8, slots);",
    "std::min(plan.capacity, slots);",
    "test_plan.py::test_a_geometry_given_by_hand_still_fits",
    where="cpu",
)
_mutation(
    "list_as_long_as_without_tiles",
    PLAN,
    " / 8 * 8, slots);",
    " / 8 * 8, slots_beside(0));",
    "test_plan.py::test_tiles_on_their_way_have_room_beside_a_list_that_is_long_enough",
    where="cpu",
)
_mutation(
    "two_ctas_granted_the_shared_memory_of_one",
    PLAN,
    "(device.shared_memory_bytes + kReservedBytes) / plan.ctas_per_sm -",
    "(device.shared_memory_bytes + kReservedBytes) -",
    "test_plan.py::test_tiles_on_their_way_have_room_beside_a_list_that_is_long_enough",
    ON_THEIR_WAY,
    where="cpu",
)
_mutation(
    "three_tiles_on_their_way_for_two_ctas",
    PLAN,
    "alone && slots_beside(kMostStages)",
    "slots_beside(kMostStages)",
    "test_stream.py::test_the_rows_of_these_tests_are_read_as_they_should",
    more=((PLAN, "  const bool alone = plan.ctas_per_sm == 1;\n", ""),),
    where="cpu",
)
_mutation(
    "no_room_for_the_l1_cache",
    PLAN,
    "std::min(granted, kMostStagesBytes) - stages * kStageBytes;",
    "granted - stages * kStageBytes;",
    ON_THEIR_WAY,
    where="cpu",
)
_mutation(
    "registers_not_heeded",
    PLAN,
    "pays && geometry.registers == 0 &&",
    "pays &&",
    "test_plan.py::test_a_geometry_given_by_hand_still_fits",
    "test_stream.py::test_the_rows_of_these_tests_are_read_as_they_should",
    where="cpu",
)
_mutation(
    "short_chunks_on_their_way_in_shared_memory",
    PLAN,
    "plan.ctas_per_row == 1 || CeilDiv(n, plan.ctas_per_row) > kMaxRegisterChunk;",
    "true;",
    ON_THEIR_WAY,
    where="cpu",
)

# Order, windows, padding: shared by CPU and CUDA -------------------------------------

SIGNED_ZERO = (
    KEYS,
    "  const uint32_t wide = bits;\n  return (wide & kSign) != 0",
    "  const uint32_t wide = bits;\n  if (wide == kSign) return kSign;\n"
    "  return (wide & kSign) != 0",
)
NAN = (
    KEYS,
    "  const uint32_t wide = bits;\n  return (wide & kSign) != 0",
    "  const uint32_t wide = bits;\n"
    "  if (sizeof(Bits) == 4 && (wide & 0x7FFFFFFFu) > 0x7F800000u) return 0;\n"
    "  return (wide & kSign) != 0",
)
UNSIGNED_LENGTH = (
    TOP_K,
    "start + (length > 0 ? length : 0)",
    "start + static_cast<uint32_t>(length)",
)
START_IGNORED = (
    TOP_K,
    "clamp(start + (length > 0 ? length : 0), window.start",
    "clamp((length > 0 ? length : 0), window.start",
)
WINDOW_IN_32_BITS = (
    TOP_K,
    "start + (length > 0 ? length : 0)",
    "static_cast<int32_t>(static_cast<uint32_t>(start) + "
    "static_cast<uint32_t>(length > 0 ? length : 0))",
)
ZEROS = (
    "test_special_values.py::test_zeros_keep_their_sign_and_positive_ones_come_first"
)
NANS = (
    "test_special_values.py::"
    "test_each_special_float32_is_placed_as_the_total_order_says"
)
MINUS_ONE = "test_windows.py::test_a_length_of_minus_one_is_an_empty_row"
ALONE = "test_windows.py::test_lengths_alone_and_starts_alone"
CLAMPED = "test_windows.py::test_every_start_and_length_is_clamped"
PADDING = "test_special_values.py::test_valid_minus_infinities_come_before_padding"

for _where, _name in (("cpu", "cpu"), ("gpu", "row")):
    _suffix = f"_on_{_where}"
    _mutation(
        "minus_zero_merged_with_zero" + _suffix,
        *SIGNED_ZERO,
        f"{ZEROS}[{_name}-float32]",
        where=_where,
    )
    _mutation(
        "nan_compared_as_a_float" + _suffix, *NAN, f"{NANS}[{_name}]", where=_where
    )
    _mutation(
        "length_clamped_as_unsigned" + _suffix,
        *UNSIGNED_LENGTH,
        f"{MINUS_ONE}[{_name}]",
        where=_where,
    )
    _mutation(
        "start_ignored_in_the_bound" + _suffix,
        *START_IGNORED,
        f"{CLAMPED}[{_name}-True-7]",
        where=_where,
    )
    _mutation(
        "window_in_32_bits" + _suffix,
        *WINDOW_IN_32_BITS,
        f"{CLAMPED}[{_name}-True-7]",
        where=_where,
    )
    _mutation(
        "padding_of_bfloat16_is_finite" + _suffix,
        TOP_K,
        "? 0xFF80u",
        "? 0xFF7Fu",
        "test_shapes.py::test_k_above_the_width_is_padded_when_lengths_are_given"
        f"[{_name}-bfloat16]",
        where=_where,
    )

_mutation(
    "minus_zero_merged_with_zero_in_16_bit_words",
    SELECT,
    "    return e % 2 == 0 ? words[e / 2] << 16 : words[e / 2] & 0xFFFF0000u;",
    "    const uint32_t word =\n"
    "        e % 2 == 0 ? words[e / 2] << 16 : words[e / 2] & 0xFFFF0000u;\n"
    "    return word == 0x80000000u ? 0 : word;",
    "test_geometry.py::test_every_16_bit_distribution_is_exact_under_a_bent_geometry"
    "[row-(0,1,1,0,0)-bfloat16]",
)

# Handlers and planner ----------------------------------------------------------------

_mutation(
    "function_attribute_never_set",
    HANDLERS,
    "  JAX_TOPK_RETURN_IF_ERROR(PrepareSplitTopK(shared_memory_bytes));\n",
    "",
    "test_windows.py::test_windows_of_long_rows_that_are_shared[split]",
)
_mutation(
    "function_attribute_of_clusters_never_set",
    HANDLERS,
    "    JAX_TOPK_RETURN_IF_ERROR(PrepareClusterTopK(shared_memory_bytes));\n",
    "",
    "test_windows.py::test_windows_of_long_rows_that_are_shared[cluster]",
)
_mutation(
    "function_attribute_once_per_process",
    HANDLERS,
    "if (const auto found = devices.find(ordinal); found != devices.end()) {",
    "if (const auto found = devices.begin(); found != devices.end()) {",
    "test_concurrency.py::test_two_devices_in_one_process",
    where="2 gpus",
)
_mutation(
    "workspace_cleared_by_the_handler",
    HANDLERS,
    "  if (split) {\n",
    "  if (split) {\n"
    "    (void)cudaMemsetAsync(operands->workspace, 0,\n"
    "                    params.rows * operands->workspace_bytes_per_row, stream);\n",
    EVENTS,
)
_mutation(
    "more_ctas_than_the_workspace_holds",
    PLAN,
    "ctas = std::min(ctas, fit);",
    "",
    "test_misuse.py::test_a_small_workspace_means_fewer_ctas_and_no_less_exact",
)
_mutation(
    "plan_ignores_shared_memory",
    PLAN,
    "plan.capacity = std::clamp(wanted, least, most)",
    "plan.capacity = std::max(wanted, least)",
    "test_plan.py::test_every_problem_gets_a_plan_that_fits",
    "test_devices.py::test_a_plan_for_a_small_device_fits_there",
    where="cpu",
)
_mutation(
    "plan_without_the_least_capacity",
    PLAN,
    "plan.capacity = std::clamp(wanted, least, most)",
    "plan.capacity = std::min(wanted, most)",
    "test_plan.py::test_a_geometry_given_by_hand_still_fits",
    where="cpu",
)
_mutation(
    "workspace_for_as_many_ctas_as_there_are_sms",
    PLAN,
    ": std::min(ctas_for(1), 8 * ctas);",
    ": kMaxCtasPerRow;",
    "test_devices.py::test_a_workspace_is_for_no_more_ctas_than_have_something_to_read",
    where="cpu",
)
_mutation(
    "compute_capability_not_asked_for",
    PLAN,
    "if (device.compute_capability < kMinComputeCapability) {",
    "if (false) {",
    "test_plan.py::test_a_device_too_small_for_the_kernels_gets_the_reference",
    where="cpu",
)
_mutation(
    "leading_axes_of_operands_not_checked",
    OPERANDS,
    "good = dims[i] == scores[i];",
    "good = true;",
    "test_misuse.py::test_a_call_that_does_not_fit_is_an_error",
    where="cpu",
)
_mutation(
    "dtypes_of_operands_not_checked",
    OPERANDS,
    "bool good = buffer.element_type() == dtype && dims.size() == scores.size();",
    "bool good = dims.size() == scores.size();",
    "test_misuse.py::test_a_call_that_does_not_fit_is_an_error",
    where="cpu",
)
_mutation(
    "number_of_operands_not_checked",
    OPERANDS,
    "if (args.size() != num_args || rets.size() != num_rets) {",
    "if (args.size() < num_args || rets.size() < num_rets) {",
    "test_misuse.py::test_a_call_that_does_not_fit_is_an_error",
    where="cpu",
)
_mutation(
    "k_of_zero_accepted_by_the_handler",
    OPERANDS,
    "if (k < 1) return",
    "if (k < 0) return",
    "test_misuse.py::test_a_call_that_does_not_fit_is_an_error",
    where="cpu",
)

# The CPU handler ---------------------------------------------------------------------

_mutation(
    "cpu_threshold_raised_too_far",
    CPU,
    "least = std::max(least, threshold.key + 1);",
    "least = std::max(least, threshold.key + 2);",
    "test_exactness.py::test_every_distribution_is_selected_exactly"
    "[cpu-16411-2048-float32-unsorted]",
    "test_exactness.py::test_a_sample_that_misleads_costs_time_and_nothing_else"
    "[cpu-many-rows]",
    where="cpu",
)
_mutation(
    "cpu_misleading_sample_accepted",
    CPU,
    "if (list.size < std::min(k, window.stop - window.start)) {",
    "if (false) {",
    "test_exactness.py::test_a_sample_that_misleads_costs_time_and_nothing_else"
    "[cpu-many-rows]",
    where="cpu",
)
_mutation(
    "cpu_full_list_keeps_one_too_few",
    CPU,
    "kept += item >= least;",
    "kept += item > least;",
    "test_exactness.py::test_every_distribution_is_selected_exactly"
    "[cpu-4099-705-float32-unsorted]",
    where="cpu",
)
_mutation(
    "cpu_sort_forgets_the_highest_digit",
    CPU,
    "  for (int d = 0; d < kNumDigits; ++d) {\n    uint32_t* bins",
    "  for (int d = 0; d < kNumDigits - 1; ++d) {\n    uint32_t* bins",
    "test_exactness.py::test_every_distribution_is_selected_exactly"
    "[cpu-4099-705-float32-sorted]",
    where="cpu",
)
_mutation(
    "cpu_chunks_lose_their_last_column",
    CPU,
    "window.start + length * (chunk + 1) / num_chunks};",
    "window.start + length * (chunk + 1) / num_chunks - 1};",
    "test_shapes.py::test_columns_beyond_the_24_bits_of_a_float[cpu]",
    where="cpu",
)
_mutation(
    "cpu_tile_ends_in_the_next_row",
    CPU,
    "    std::fill(passes + size, passes + (size + 63) / 64 * 64, 0);\n",
    "",
    "test_windows.py::test_every_distribution_is_exact_in_a_ragged_batch"
    "[cpu-5003-float32]",
    where="cpu",
)

# Paged memory ------------------------------------------------------------------------

NARROW = "test_paged_top_k.py::test_columns_that_no_page_holds_are_outside_every_window"

_mutation(
    "tables_end_where_the_row_does",
    OPERANDS,
    "params.unpaged = params.n - std::min(params.n, params.pages * paging->page_size);",
    "params.unpaged = 0;",
    NARROW + "[cpu-1]",
    where="cpu",
)
_mutation(
    "each_row_has_a_table_of_its_own",
    OPERANDS,
    "params.rows_per_table *= static_cast<uint32_t>(dims[i]);",
    "(void)i;",
    "test_paged_top_k.py"
    "::test_a_table_is_shared_by_the_rows_of_the_axes_that_it_lacks[cpu-(3, 2)]",
    where="cpu",
)
_mutation(
    "page_numbers_count_pages_always",
    TOP_K,
    "static_cast<uint32_t>(entry) * params.page_stride",
    "static_cast<uint32_t>(entry) * params.page_size",
    "test_paged_top_k.py::test_offsets_are_the_first_slot_of_each_sequence[cpu]",
    where="cpu",
)
_mutation(
    "columns_on_cuda_in_place_of_slots",
    SELECT,
    "out.indices[i] = RowIndex(params, row, out.indices[i]);",
    "",
    "test_paged_top_k.py::test_every_distribution_is_exact_in_pages_of_any_size"
    "[row-True-64]",
)
_mutation(
    "columns_of_a_list_in_place_of_slots",
    SELECT,
    "const int32_t slot = RowIndex(params, row, EntryColumn(entry));",
    "const int32_t slot = static_cast<int32_t>(EntryColumn(entry));",
    "test_paged_top_k.py::test_every_distribution_is_exact_in_pages_of_any_size"
    "[row-False-64]",
)
_mutation(
    "slots_of_columns_that_are_not_written_yet",
    SELECT,
    "  __syncthreads();  // all columns are written\n",
    "",
    "test_paged_top_k.py::test_every_distribution_is_exact_in_pages_of_any_size"
    "[row-True-64]",
)
_mutation(
    "table_shared_in_an_export",
    PRIMITIVE,
    "if ctx.module_context.lowering_parameters.for_export:",
    "if False:",
    "test_paged_top_k.py::test_an_export_selects_on_one_device_and_on_eight",
    where="cpu",
)
_mutation(
    "table_shared_where_rows_are_split",
    PRIMITIVE,
    "return context.num_devices > 1",
    "return False",
    "test_paged_top_k.py::test_sharded_rows_stay_where_they_are",
    where="cpu",
)
_mutation(
    "table_of_its_own_sharding",
    PRIMITIVE,
    "tables = [_reshard(spread(x, scores), P(*spec), scores) for x in tables]",
    "pass",
    "test_paged_top_k.py::test_explicit_axes_are_in_the_type_of_the_result",
    where="cpu",
)

# jax.lax.top_k -----------------------------------------------------------------------

LAX = "test_accelerate_lax.py::"

_mutation(
    "accelerated_outside_too",
    PRIMITIVE,
    "if accelerated.value and isinstance(k, int)",
    "if isinstance(k, int)",
    LAX + "test_outside_programs_are_what_they_were_before_the_first_use",
    LAX + "test_a_compiled_function_is_compiled_again_inside_and_kept_for_outside",
    where="cpu",
)
_mutation(
    "accelerated_by_the_reference",
    PRIMITIVE,
    "        if choice.implementation in _plan.TARGETS:\n",
    "        if choice:\n",
    LAX + "test_whatever_else_lowers_as_ever",
    where="cpu",
)
_mutation(
    "accelerated_along_the_last_axis",
    PRIMITIVE,
    "scores = jnp.moveaxis(x, axis, -1)",
    "scores = x",
    LAX + "test_any_axis_is_selected_along[cpu-0]",
    where="cpu",
)
_mutation(
    "accelerated_for_good",
    "jax_topk/_accelerate.py",
    "            self._context.__exit__(*error)\n",
    "            pass\n",
    LAX + "test_it_ends_with_an_error_and_nests",
    where="cpu",
)

# Python ------------------------------------------------------------------------------

SHARDED = "test_sharding.py::test_sharded_rows_stay_where_they_are"

_mutation(
    "num_batch_dims_dropped",
    PRIMITIVE,
    'annotations = {"mhlo.frontend_attributes": num_batch_dims}',
    "annotations = {}",
    SHARDED,
    where="cpu",
)
_mutation(
    "sharding_rule_dropped",
    PRIMITIVE,
    '        annotations["sdy.sharding_rule"] = rule\n',
    "        del rule\n",
    SHARDED,
    where="cpu",
)
_mutation(
    "not_registered_as_batch_partitionable",
    PRIMITIVE,
    "    jax.ffi.register_ffi_target_as_batch_partitionable(_name)",
    "    pass",
    SHARDED,
    where="cpu",
)
_mutation(
    "manual_axes_of_the_scores_alone",
    PRIMITIVE,
    "varying = frozenset().union(*(kind.varying for kind in kinds))",
    "varying = kinds[0].varying",
    "test_sharding.py::test_gradients_of_shared_scores_with_sharded_lengths_are_summed",
    where="cpu",
)
_mutation(
    "padding_pulls_back_to_column_0",
    PRIMITIVE,
    "dvalues = jnp.where(columns < 0, 0, dvalues)",
    "pass",
    "test_ad.py::test_vjp_ignores_the_padding",
    where="cpu",
)
_mutation(
    "lengths_beyond_int32_wrap",
    ARGUMENTS_PY,
    "rows = xp.clip(rows, low, high).astype(np.int32)",
    "rows = rows.astype(np.int32)",
    "test_windows.py::test_lengths_beyond_int32_are_long_not_negative",
    where="cpu",
)
_mutation(
    "reference_ties_in_any_order",
    REFERENCE,
    "lax.sort((rank, column), dimension=-1, num_keys=2, is_stable=False)",
    "lax.sort((rank, -column), dimension=-1, num_keys=2, is_stable=False)",
    "test_ties.py::test_equal_scores_are_taken_by_ascending_index[xla-20011-512]",
    more=(
        (
            REFERENCE,
            "rank, column = rank[..., :k], column[..., :k]",
            "rank, column = rank[..., :k], -column[..., :k]",
        ),
    ),
    where="cpu",
)
_mutation(
    "reference_ranks_padding_above_minus_inf",
    REFERENCE,
    "np.array(np.iinfo(rank.dtype).max, rank.dtype))",
    "to_rank(lax.full((), pad_value(scores.dtype), scores.dtype)) - 1)",
    PADDING + "[xla]",
    where="cpu",
)
_mutation(
    "padding_of_every_shard_behind_its_candidates",
    SHARDED_PY,
    "_rotated(packed, jnp.where(goes_on, padding, 0))",
    "_rotated(packed, jnp.where(goes_on, 0 * padding, 0))",
    OVER_SHARDS + "[True-x8]",
    where="cpu",
)
_mutation(
    "groups_of_shards_begin_at_column_0",
    SHARDED_PY,
    "lax.axis_index(names[:i]) * width if i else 0",
    "0",
    OVER_SHARDS + "[True-x2-y4]",
    where="cpu",
)
_mutation(
    "distance_of_a_start_before_a_shard_overflows",
    SHARDED_PY,
    "jnp.maximum(column, offset) - offset",
    "jnp.maximum(column - offset, 0)",
    "test_sharded_top_k.py::test_lengths_alone_starts_alone_and_plain_numbers",
    where="cpu",
)
_mutation(
    "candidates_of_a_shard_by_value",
    SHARDED_PY,
    "top_k(scores, min(k, width), **local, sorted=False)",
    "top_k(scores, min(k, width), **local, sorted=True)",
    "test_sharded_top_k.py::test_the_answer_is_that_of_one_device[cpu]",
    where="cpu",
)
_mutation(
    "second_derivative_over_shards_lost",
    SHARDED_PY,
    "    values = _differentiable(names, scores, values, indices)\n",
    "",
    "test_sharded_top_k.py::test_derivatives_are_those_of_one_device",
    where="cpu",
)
_mutation(
    "answer_without_a_name",
    PRIMITIVE,
    'checkpoint_name(top_k_p.bind(*primals, **params), "top_k")',
    "top_k_p.bind(*primals, **params)",
    "test_control_flow.py"
    "::test_a_plain_checkpoint_selects_again_and_a_policy_does_not[cpu]",
    where="cpu",
)
_mutation(
    "eager_calls_not_marked_as_a_primitive",
    PRIMITIVE,
    '_evaluate.__dict__["_apply_primitive"] = True\n',
    "",
    "test_jit.py::test_nans_are_reported_where_jax_is_asked_to[cpu]",
    where="cpu",
)
_mutation(
    "answer_over_shards_without_a_name",
    SHARDED_PY,
    'checkpoint_name(answer, "top_k")',
    "answer",
    "test_sharded_top_k.py::test_a_saved_answer_is_not_gathered_again",
    where="cpu",
)
_mutation(
    "error_in_the_name_of_another_function",
    SHARDED_PY,
    'checked_k("sharded_top_k",',
    'checked_k("top_k",',
    "test_sharded_top_k.py::test_misuse_is_an_error_in_words[k_negative]",
    where="cpu",
)
_mutation(
    "attribute_renamed_and_the_target_not",
    PRIMITIVE,
    '{"k": np.int64(k), "sorted"',
    '{"size": np.int64(k), "sorted"',
    "test_export.py"
    "::test_a_target_that_keeps_its_name_keeps_its_operands_and_attributes",
    where="cpu",
)
_mutation(
    "target_of_any_version",
    PRIMITIVE,
    "target = targets[choice.implementation]",
    'target = f"jax_topk_{choice.implementation}_v1"',
    "test_jit.py::test_the_persistent_cache_serves_another_process_but_no_other_kernel",
    where="cpu",
)
_mutation(
    "width_compared_where_it_is_symbolic",
    SHARDED_PY,
    "if isinstance(n, int) and n > INT32.max:",
    "if n > INT32.max:",
    "test_export.py::test_sharded_top_k_lowers_for_any_rows_and_any_width",
    where="cpu",
)
_mutation(
    "annotation_that_does_not_hold",
    SHARDED_PY,
    "def _beyond(column: jax.Array, offset: jax.Array | int)",
    "def _beyond(column: jax.Array, offset: int)",
    "test_jit.py::test_annotations_hold_under_a_run_time_type_checker",
    where="cpu",
)
_mutation(
    "whole_rows_on_every_shard",
    SHARDED_PY,
    "    values, indices = top_k(scores, min(k, width), **local, sorted=False)\n",
    "    whole = lax.all_gather(scores, names, axis=scores.ndim - 1, tiled=True)\n"
    "    scores = lax.dynamic_slice_in_dim(whole, offset, width, -1)\n"
    "    values, indices = top_k(scores, min(k, width), **local, sorted=False)\n",
    "test_sharded_top_k.py::test_one_gather_of_k_values_and_k_indices_a_shard",
    where="cpu",
)
_mutation(
    "most_of_each_device_fact_instead_of_the_least",
    PLAN_PY,
    "least = (min(facts) for facts",
    "least = (max(facts) for facts",
    "test_devices.py::test_the_least_of_several_devices_counts",
    where="cpu",
)

# Variants: slow, and right -----------------------------------------------------------
#
# Nobody may rely on when a CTA runs. Here chosen ones are held up for long, at each
# place where another CTA could miss them.

for _which, _name in (
    ("blockIdx.x % 4 == 0", "the_first"),
    ("blockIdx.x % 4 == 3", "the_last"),
    ("blockIdx.x % 2 == 1", "every_other"),
):
    _mutation(
        f"{_name}_cta_of_a_row_delayed",
        ROW_STATE,
        INSTALL,
        INSTALL + _delayed(_which, 30000),
        ROTATING,
        SHORT_LONG,
        "test_row_state.py::test_whatever_the_memory_held_before",
        WORDS,
        more=((ROW_STATE, RELEASE_BARRIER, _delayed(_which, 30000) + RELEASE_BARRIER),),
        expect="green",
    )
_mutation(
    "warps_without_a_column_take_part",
    SELECT,
    "    if (!busy) return;\n",
    "",
    BENT + "[row-(0,0,0,0,1)-sorted]",
    TINY + "[row-(0,0,0,0,1)]",
    LEVELS + RESIDENT,
    expect="green",
)
_mutation(
    "strict_filters_never",
    SELECT,
    "  const uint32_t floor = strict ? cut.key : cut.key - 1;",
    "  const uint32_t floor = cut.key - 1;",
    BENT + "[row-(0,700,16384,0,1)-unsorted]",
    LEVELS + LISTED,
    expect="green",
    why="plateaus overflow and are selected exactly",
)
_mutation(
    "range_of_scores_that_are_all_negative_too_low",
    SELECT,
    "  if (most < 0) {\n    high =",
    "  if (false) {\n    high =",
    BENT + "[row-(0,0,0,0,1)-sorted]",
    BENT + "[row-(0,700,16384,0,1)-unsorted]",
    MANY_TILES + THREE_ON_THEIR_WAY.format("f32"),
    expect="green",
    why="they crowd in the highest bin and are selected by key",
)
