# SPDX-License-Identifier: Apache-2.0
"""Every misuse is an error that names the argument, the rule and what was got.

Runs in a process of its own under `python -O` too, so nothing here rests on `assert`.
"""

import pathlib
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_topk

top_k: Any = jax_topk.top_k  # misused below, whatever its types say
paged_top_k: Any = jax_topk.paged_top_k
SCORES = np.zeros((3, 7), np.float32)
TABLE = np.zeros((3, 2), np.int32)


def lowered_for_cuda(scores, k, **options):
    select = jax.jit(lambda x: top_k(x, k, **options))
    return select.trace(scores).lower(lowering_platforms=("cuda",))


def on_cpu(scores, k, **options):
    scores = jax.device_put(scores, jax.devices("cpu")[0])
    return jax.jit(lambda x: top_k(x, k, **options))(scores)


def shaped(shape, dtype: Any = np.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


# What is done, the type of the error, and words that its message must hold.
MISUSES = {
    "k_is_a_float": (lambda: top_k(SCORES, 2.0), TypeError, ["k ", "float 2.0"]),
    "k_is_a_string": (lambda: top_k(SCORES, "2"), TypeError, ["k ", "str '2'"]),
    "k_is_none": (lambda: top_k(SCORES, None), TypeError, ["k ", "None"]),
    "k_is_a_list": (lambda: top_k(SCORES, [2]), TypeError, ["k ", "list [2]"]),
    "k_is_an_array": (
        lambda: top_k(SCORES, jnp.int32(2)),
        TypeError,
        ["k ", "int32"],
    ),
    "k_is_traced": (
        lambda: jax.jit(top_k)(SCORES, 2),
        TypeError,
        ["k ", "static", "traced"],
    ),
    "k_is_negative": (lambda: top_k(SCORES, -1), ValueError, ["k ", "k=-1"]),
    "k_is_negative_with_lengths": (
        lambda: top_k(SCORES, -1, lengths=3),
        ValueError,
        ["k ", "k=-1"],
    ),
    "k_is_above_n": (lambda: top_k(SCORES, 8), ValueError, ["lengths", "k=8", "7"]),
    "k_is_above_n_with_starts_only": (
        lambda: top_k(SCORES, 8, starts=0),
        ValueError,
        ["lengths", "k=8", "7"],
    ),
    "k_is_above_n_under_vmap": (
        lambda: jax.vmap(lambda x: top_k(x, 8))(SCORES),
        ValueError,
        ["lengths", "k=8", "7"],
    ),
    "scores_are_complex": (
        lambda: top_k(SCORES.astype(np.complex64), 2),
        TypeError,
        ["scores", "real", "complex64"],
    ),
    "scores_are_a_string": (lambda: top_k("abc", 2), TypeError, ["scores", "'abc'"]),
    "scores_are_none": (lambda: top_k(None, 2), TypeError, ["scores", "None"]),
    "scores_are_a_list": (
        lambda: top_k([1.0, 2.0], 1),
        TypeError,
        ["scores", "list"],
    ),
    "scores_are_objects": (
        lambda: top_k(np.array([None, 1]), 1),
        TypeError,
        ["scores", "object"],
    ),
    "scores_are_random_keys": (
        lambda: top_k(jax.random.split(jax.random.key(0), 4), 2),
        TypeError,
        ["scores", "key"],
    ),
    "scores_are_a_scalar": (
        lambda: top_k(np.float32(1), 1),
        ValueError,
        ["scores", "axis", "()"],
    ),
    "scores_are_too_wide": (
        lambda: jax.eval_shape(lambda x: top_k(x, 2), shaped((2**31,), np.int8)),
        ValueError,
        ["2147483647", "2147483648"],
    ),
    "lengths_are_floats": (
        lambda: top_k(SCORES, 2, lengths=np.ones(3, np.float32)),
        TypeError,
        ["lengths", "integer", "float32"],
    ),
    "starts_are_floats": (
        lambda: top_k(SCORES, 2, starts=jnp.ones(3)),
        TypeError,
        ["starts", "integer", "float32"],
    ),
    "lengths_are_a_float": (
        lambda: top_k(SCORES, 2, lengths=3.0),
        TypeError,
        ["lengths", "integer", "float"],
    ),
    "lengths_are_bools": (
        lambda: top_k(SCORES, 2, lengths=np.ones(3, bool)),
        TypeError,
        ["lengths", "integer", "bool"],
    ),
    "lengths_do_not_broadcast": (
        lambda: top_k(SCORES, 2, lengths=np.ones(4, np.int32)),
        ValueError,
        ["lengths", "(3,)", "(4,)"],
    ),
    "lengths_have_more_axes_than_rows": (
        lambda: top_k(SCORES, 2, lengths=np.ones((2, 3), np.int32)),
        ValueError,
        ["lengths", "(3,)", "(2, 3)"],
    ),
    "starts_do_not_broadcast": (
        lambda: top_k(SCORES, 2, starts=np.ones((3, 1), np.int32)),
        ValueError,
        ["starts", "(3,)", "(3, 1)"],
    ),
    "sorted_is_traced": (
        lambda: jax.jit(lambda x, s: top_k(x, 2, sorted=s))(SCORES, True),
        TypeError,
        ["sorted", "static", "traced"],
    ),
    "implementation_is_unknown": (
        lambda: top_k(SCORES, 2, implementation="fast"),
        ValueError,
        ["implementation", "'fast'", "'xla'", "'split'"],
    ),
    "row_kernel_on_a_cpu": (
        lambda: on_cpu(SCORES, 2, implementation="row"),
        ValueError,
        ["implementation", "'row'", "CPU"],
    ),
    "split_kernel_on_a_cpu": (
        lambda: on_cpu(SCORES, 2, implementation="split"),
        ValueError,
        ["implementation", "'split'", "CPU"],
    ),
    "integers_in_the_cpu_handler": (
        lambda: on_cpu(SCORES.astype(np.int32), 2, implementation="cpu"),
        ValueError,
        ["implementation", "'cpu'", "int32", "float32"],
    ),
    "cpu_handler_on_cuda": (
        lambda: lowered_for_cuda(shaped((3, 70)), 2, implementation="cpu"),
        ValueError,
        ["implementation", "'cpu'", "CUDA"],
    ),
    "integers_in_a_cuda_kernel": (
        lambda: lowered_for_cuda(shaped((3, 70), np.int32), 2, implementation="row"),
        ValueError,
        ["implementation", "'row'", "int32", "float32"],
    ),
    "k_beyond_the_row_kernel": (
        lambda: lowered_for_cuda(shaped((3, 7000)), 5000, implementation="row"),
        ValueError,
        ["implementation", "'row'", "4096", "5000"],
    ),
    "k_beyond_the_split_kernel": (
        lambda: lowered_for_cuda(shaped((3, 7000)), 5000, implementation="split"),
        ValueError,
        ["implementation", "'split'", "4096", "5000"],
    ),
    "paged_without_table_and_offsets": (
        lambda: paged_top_k(SCORES, 2),
        TypeError,
        ["page_table", "offsets", "neither"],
    ),
    "paged_with_table_and_offsets": (
        lambda: paged_top_k(SCORES, 2, TABLE, page_size=4, offsets=0),
        TypeError,
        ["page_table", "offsets", "both"],
    ),
    "a_table_without_a_page_size": (
        lambda: paged_top_k(SCORES, 2, TABLE),
        TypeError,
        ["page_size", "None"],
    ),
    "offsets_with_a_page_size": (
        lambda: paged_top_k(SCORES, 2, offsets=0, page_size=4),
        TypeError,
        ["page_size=4", "offsets"],
    ),
    "page_size_is_a_float": (
        lambda: paged_top_k(SCORES, 2, TABLE, page_size=4.0),
        TypeError,
        ["page_size", "static", "float 4.0"],
    ),
    "page_size_is_traced": (
        lambda: jax.jit(lambda s: paged_top_k(SCORES, 2, TABLE, page_size=s))(4),
        TypeError,
        ["page_size", "static", "traced"],
    ),
    "page_size_is_an_array": (
        lambda: paged_top_k(SCORES, 2, TABLE, page_size=np.array(4)),
        TypeError,
        ["page_size", "static"],
    ),
    "page_size_is_zero": (
        lambda: paged_top_k(SCORES, 2, TABLE, page_size=0),
        ValueError,
        ["page_size=0", "from 1"],
    ),
    "page_size_is_beyond_int32": (
        lambda: paged_top_k(SCORES, 2, TABLE, page_size=2**31),
        ValueError,
        ["page_size=2147483648", "2147483647"],
    ),
    "page_table_is_of_floats": (
        lambda: paged_top_k(SCORES, 2, TABLE.astype(np.float32), page_size=4),
        TypeError,
        ["page_table", "integer", "float32"],
    ),
    "page_table_is_a_number": (
        lambda: paged_top_k(SCORES, 2, 3, page_size=4),
        ValueError,
        ["page_table", "axis", "()"],
    ),
    "page_table_of_another_batch": (
        lambda: paged_top_k(SCORES, 2, TABLE[:2], page_size=4),
        ValueError,
        ["page_table", "(3,)", "(2, 2)"],
    ),
    "page_table_with_too_many_axes": (
        lambda: paged_top_k(SCORES, 2, TABLE[:, None], page_size=4),
        ValueError,
        ["page_table", "(3,)", "(3, 1, 2)"],
    ),
    "page_table_too_narrow_without_lengths": (
        lambda: paged_top_k(SCORES, 2, TABLE, page_size=3),
        ValueError,
        ["page_table", "7 columns", "lengths", "for 6"],
    ),
    "offsets_are_floats": (
        lambda: paged_top_k(SCORES, 2, offsets=1.5),
        TypeError,
        ["offsets", "integer", "float"],
    ),
    "offsets_of_another_batch": (
        lambda: paged_top_k(SCORES, 2, offsets=np.zeros(2, np.int32)),
        ValueError,
        ["offsets", "(3,)", "offsets.shape=(2,)"],
    ),
}


def complaint(name):
    """What is wrong with the error of a misuse; None if all is as it should be."""
    misuse, kind, words = MISUSES[name]
    try:
        misuse()
    except Exception as error:
        message = str(error)
        if type(error) is not kind:
            return f"{name}: expected a {kind.__name__}, got {error!r}"
        start = message.removeprefix("paged_").startswith("top_k requires ")
        if not start or "; got " not in message:
            return f"{name}: expected 'top_k requires ...; got ...', got: {message}"
        missing = [word for word in words if word not in message]
        return f"{name}: {missing} not in: {message}" if missing else None
    return f"{name}: expected a {kind.__name__}, got no error"


@pytest.mark.parametrize("name", MISUSES)
def test_misuse_is_an_error_in_words(name):
    problem = complaint(name)
    assert problem is None, problem


def test_the_errors_are_the_same_without_asserts():
    program = (
        "import sys, test_errors\n"
        "assert False, 'not under -O'\n"
        "found = [test_errors.complaint(name) for name in test_errors.MISUSES]\n"
        "sys.exit('\\n'.join(x for x in found if x) or 0)\n"
    )
    done = subprocess.run(
        [sys.executable, "-O", "-c", program],
        cwd=pathlib.Path(__file__).parent,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr


def test_nothing_runs_before_an_error():
    """Errors come from tracing: shapes alone are enough."""
    with pytest.raises(ValueError, match="k=9"):
        jax.eval_shape(lambda x: top_k(x, 9), shaped((3, 7)))
    with pytest.raises(TypeError, match="lengths"):
        jax.eval_shape(lambda x, n: top_k(x, 2, lengths=n), SCORES, np.ones(3))


def test_what_is_close_to_misuse_is_fine():
    assert top_k(SCORES, np.int64(2)).values.shape == (3, 2)
    assert top_k(SCORES, 7).values.shape == (3, 7)
    assert top_k(SCORES, 9, lengths=2).values.shape == (3, 9)
    for dtype in (np.int8, np.uint8, np.int16, np.uint32):
        lengths = np.array([1, 0, 2], dtype)
        indices = top_k(SCORES, 2, lengths=lengths).indices
        assert indices.tolist() == [[0, -1], [-1, -1], [0, 1]]
