# SPDX-License-Identifier: Apache-2.0
"""The handlers answer with an error, in words, whatever they are called with.

Python never makes such calls; an exported program, another version or another caller
may.
"""

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import raw_calls
from implementations import Implementation, kernels

from jax_topk import _ffi

ROWS, N, K = 3, 7, 2
TARGETS = {
    "cpu": "jax_topk_cpu_v1",
    "row": "jax_topk_row_v1",
    "split": "jax_topk_split_v1",
    "cluster": "jax_topk_cluster_v1",
    "paged_cpu": "jax_topk_paged_cpu_v1",
    "paged_row": "jax_topk_paged_row_v1",
    "paged_split": "jax_topk_paged_split_v1",
    "paged_cluster": "jax_topk_paged_cluster_v1",
}


def _parameters(names):
    return [
        pytest.param(name)
        if name.endswith("cpu")
        else pytest.param(name, marks=Implementation(name.split("_")[-1], "cuda").mark)
        for name in names
    ]


EVERY = _parameters(name for name in TARGETS if not name.startswith("paged"))
PAGED = _parameters(name for name in TARGETS if name.startswith("paged"))
BYTES = 4096  # of workspace a row: ample


class Call:
    """A call that is right, to be spoiled in one place."""

    def __init__(self, name):
        self.name = name
        self.target = TARGETS[name]
        self.operands = [np.arange(ROWS * N, dtype=np.float32).reshape(ROWS, N)]
        self.results = [((ROWS, K), np.float32), ((ROWS, K), np.int32)]
        if name.endswith("split"):
            self.results.append(((ROWS, BYTES), np.uint8))
        self.attributes = raw_calls.attributes(self.target, K)
        if name.startswith("paged"):
            self.operands.append(np.array([[9, 4], [1, 1], [0, 8]], np.int32))
            self.attributes |= {"page_size": np.int64(5), "page_stride": np.int64(10)}

    def window(self, name, shape=(ROWS, 1), dtype=np.int32):
        self.operands.append(np.ones(shape, dtype))
        self.attributes[f"has_{name}"] = True

    def __call__(self):
        device = jax.devices("cpu" if self.name.endswith("cpu") else "cuda")[0]
        operands = jax.device_put(self.operands, device)
        results = raw_calls.call(self.target, operands, self.results, self.attributes)
        return jax.device_get(results)


def _no_lengths(call):
    call.attributes["has_lengths"] = True


def _an_operand_too_many(call):
    call.operands.append(np.ones((ROWS, 1), np.int32))


def _a_result_too_few(call):
    del call.results[-1]


def _a_result_too_many(call):
    call.results.append(((ROWS, K), np.int32))


def _scalar_scores(call):
    call.operands[0] = np.float32(1)


def _integer_scores(call):
    call.operands[0] = call.operands[0].astype(np.int32)
    call.results[0] = ((ROWS, K), np.int32)


def _k_of_zero(call):
    call.attributes["k"] = np.int64(0)


def _negative_k(call):
    call.attributes["k"] = np.int64(-1)


def _k_above_n(call):
    call.attributes["k"] = np.int64(N + 1)
    call.results[:2] = [((ROWS, N + 1), np.float32), ((ROWS, N + 1), np.int32)]


def _k_unlike_the_results(call):
    call.attributes["k"] = np.int64(K + 1)


def _lengths_of_another_batch(call):
    call.window("lengths", (ROWS + 1, 1))


def _lengths_without_their_axis(call):
    call.window("lengths", (ROWS,))


def _lengths_of_two_columns(call):
    call.window("lengths", (ROWS, 2))


def _lengths_that_are_floats(call):
    call.window("lengths", dtype=np.float32)


def _lengths_that_are_unsigned(call):
    call.window("lengths", dtype=np.uint32)


def _starts_of_another_batch(call):
    call.window("lengths")
    call.window("starts", (1, 1))


def _starts_that_are_short(call):
    call.window("starts", dtype=np.int16)


def _values_of_another_dtype(call):
    call.results[0] = ((ROWS, K), jnp.bfloat16)


def _values_of_another_batch(call):
    call.results[0] = ((ROWS - 1, K), np.float32)


def _indices_that_are_unsigned(call):
    call.results[1] = ((ROWS, K), np.uint32)


def _indices_with_an_axis_more(call):
    call.results[1] = ((1, ROWS, K), np.int32)


def _an_attribute_missing(call):
    del call.attributes["sorted"]


def _k_of_32_bits(call):
    call.attributes["k"] = np.int32(K)


# What is spoiled, and words of the error.
MISUSES = {
    "no_lengths": (_no_lengths, ["expected 2 operands", "got 1"]),
    "an_operand_too_many": (_an_operand_too_many, ["expected 1 operands", "got 2"]),
    "a_result_too_few": (_a_result_too_few, ["results, got 1 and"]),
    "a_result_too_many": (_a_result_too_many, ["results, got 1 and"]),
    "scalar_scores": (_scalar_scores, ["rank 1 or more", "rank 0"]),
    "integer_scores": (_integer_scores, ["float32, bfloat16 or float16", "[3, 7]"]),
    "k_of_zero": (_k_of_zero, ["k of 1 or more", "got 0"]),
    "negative_k": (_negative_k, ["k of 1 or more", "got -1"]),
    "k_above_n": (_k_above_n, ["at most n = 7", "got 8"]),
    "k_unlike_the_results": (_k_unlike_the_results, ["values", "[3, 2]"]),
    "lengths_of_another_batch": (_lengths_of_another_batch, ["lengths", "[4, 1]"]),
    "lengths_without_their_axis": (_lengths_without_their_axis, ["lengths", "[3]"]),
    "lengths_of_two_columns": (_lengths_of_two_columns, ["lengths", "[3, 2]"]),
    "lengths_that_are_floats": (_lengths_that_are_floats, ["lengths", "dtype"]),
    "lengths_that_are_unsigned": (_lengths_that_are_unsigned, ["lengths", "dtype"]),
    "starts_of_another_batch": (_starts_of_another_batch, ["starts", "[1, 1]"]),
    "starts_that_are_short": (_starts_that_are_short, ["starts", "dtype"]),
    "values_of_another_dtype": (_values_of_another_dtype, ["values", "dtype"]),
    "values_of_another_batch": (_values_of_another_batch, ["values", "[2, 2]"]),
    "indices_that_are_unsigned": (_indices_that_are_unsigned, ["indices", "dtype"]),
    "indices_with_an_axis_more": (_indices_with_an_axis_more, ["indices", "[1, 3, 2]"]),
    "an_attribute_missing": (_an_attribute_missing, ["attribute"]),
    "k_of_32_bits": (_k_of_32_bits, ["expected S64", "S32"]),
}


def error_of(call):
    with pytest.raises(jax.errors.JaxRuntimeError) as raised:
        call()
    return str(raised.value)


@pytest.mark.parametrize("name", EVERY)
def test_a_call_that_fits_is_answered(name):
    values, indices = Call(name)()[:2]
    assert indices.tolist() == [[6, 5]] * ROWS
    assert values.tolist() == [[6, 5], [13, 12], [20, 19]]


@pytest.mark.parametrize("misuse", MISUSES)
@pytest.mark.parametrize("name", EVERY)
def test_a_call_that_does_not_fit_is_an_error(name, misuse):
    call = Call(name)
    spoil, words = MISUSES[misuse]
    spoil(call)
    message = error_of(call)
    missing = [word for word in words if word not in message]
    assert not missing, f"{missing} not in: {message}"


@pytest.mark.parametrize("name", PAGED)
def test_a_paged_call_that_fits_is_answered(name):
    values, slots = Call(name)()[:2]
    assert slots.tolist() == [[41, 40], [11, 10], [81, 80]]
    assert values.tolist() == [[6, 5], [13, 12], [20, 19]]


def _no_table(call):
    del call.operands[-1]


def _a_table_of_another_batch(call):
    call.operands[-1] = np.zeros((ROWS - 1, 2), np.int32)


def _a_table_with_an_axis_more(call):
    call.operands[-1] = np.zeros((ROWS, 1, 2), np.int32)


def _a_table_that_is_a_number(call):
    call.operands[-1] = np.int32(0)


def _a_table_that_is_unsigned(call):
    call.operands[-1] = call.operands[-1].astype(np.uint32)


def _a_page_size_of_zero(call):
    call.attributes["page_size"] = np.int64(0)


def _a_page_size_beyond_int32(call):
    call.attributes["page_size"] = np.int64(2**31)


def _a_negative_page_size(call):
    call.attributes["page_size"] = np.int64(-1)


def _a_stride_of_zero(call):
    call.attributes["page_stride"] = np.int64(0)


def _no_page_stride(call):
    del call.attributes["page_stride"]


PAGED_MISUSES = {
    "no_table": (_no_table, ["expected 2 operands", "got 1"]),
    "a_table_of_another_batch": (_a_table_of_another_batch, ["page_table", "[2, 2]"]),
    "an_axis_more": (_a_table_with_an_axis_more, ["page_table", "[3, 1, 2]"]),
    "a_table_that_is_a_number": (_a_table_that_is_a_number, ["page_table", "[]"]),
    "a_table_that_is_unsigned": (_a_table_that_is_unsigned, ["page_table", "int32"]),
    "a_page_size_of_zero": (_a_page_size_of_zero, ["page_size", "from 1", "got 0"]),
    "beyond_int32": (_a_page_size_beyond_int32, ["page_size", "got 2147483648"]),
    "a_negative_page_size": (_a_negative_page_size, ["page_size", "got -1"]),
    "a_stride_of_zero": (_a_stride_of_zero, ["page_stride", "got 0"]),
    "no_page_stride": (_no_page_stride, ["attribute"]),
}


@pytest.mark.parametrize("misuse", PAGED_MISUSES)
@pytest.mark.parametrize("name", PAGED)
def test_a_paged_call_that_does_not_fit_is_an_error(name, misuse):
    call = Call(name)
    spoil, words = PAGED_MISUSES[misuse]
    spoil(call)
    message = error_of(call)
    missing = [word for word in words if word not in message]
    assert not missing, f"{missing} not in: {message}"


@pytest.mark.parametrize("name", kernels())
def test_a_geometry_of_another_size_is_an_error(name):
    for count in (0, 4, 6):
        call = Call(name)
        call.attributes["geometry"] = np.zeros(count, np.int64)
        message = error_of(call)
        assert "geometry of 5 numbers" in message and f"got {count}" in message


@pytest.mark.gpu
def test_a_workspace_that_does_not_fit_is_an_error():
    for shape, dtype, words in (
        ((ROWS, BYTES), np.int8, ["workspace", "dtype"]),
        ((ROWS - 1, BYTES), np.uint8, ["workspace", f"[2, {BYTES}]"]),
        ((BYTES,), np.uint8, ["workspace", f"[{BYTES}]"]),
        ((ROWS, 8), np.uint8, ["bytes of workspace", "got 8"]),
        ((ROWS, 31), np.uint8, ["needs 32 bytes of workspace", "got 31"]),
    ):
        call = Call("split")
        call.results[2] = (shape, dtype)
        message = error_of(call)
        missing = [word for word in words if word not in message]
        assert not missing, f"{missing} not in: {message}"


@pytest.mark.parametrize("name", kernels())
def test_a_plan_that_no_device_can_run_is_an_error(name):
    k = _ffi.MAX_K + 1
    call = Call(name)
    call.operands[0] = np.zeros((ROWS, 2 * k), np.float32)
    call.attributes["k"] = np.int64(k)
    call.results = [((ROWS, k), np.float32), ((ROWS, k), np.int32)]
    if name == "split":
        call.results.append(((ROWS, 64 * k), np.uint8))
    message = error_of(call)
    assert f"'{name}' cannot run on this device" in message
    assert str(_ffi.MAX_K) in message and str(k) in message


@pytest.mark.gpu
def test_a_small_workspace_means_fewer_ctas_and_no_less_exact():
    """A program exported for a smaller device, or more rows, has less of it."""
    rows, n, k = 2, 400_009, 64
    rng = np.random.default_rng(1)
    scores = rng.integers(-9999, 9999, (rows, n)).astype(np.float32)
    device = jax.devices("cuda")[0]
    operand = jax.device_put(scores, device)
    want = oracle.top_k(scores, k, sorted=False)
    for ctas in (1, 2, 3, 7, 64):
        size = raw_calls.workspace_bytes(rows, n, k, (ctas, 0, 0, 0, 0))
        select = raw_calls.split(k, (0,) * 5, size, sorted=False)
        values, indices, workspace = jax.device_get(select(operand, None))
        oracle.check((values, indices), scores, k, sorted=False, expected=want)
        if ctas > 1:
            assert not raw_calls.words(workspace).any()
