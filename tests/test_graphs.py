# SPDX-License-Identifier: Apache-2.0
"""What a call leaves behind and what it is made of: clean words, one kernel.

The workspace is a hidden result of the split kernel. Here the handler is called past
Python, so that it can be looked at, and laid over memory that held known bytes.
"""

import pathlib
import re

import inputs
import jax
import numpy as np
import oracle
import pytest
import raw_calls
from implementations import Implementation

N, K = 1000, 48
BENT = [(4, 256, 0, 0, 0), (5, 1, 16, 0, 0), (64, 1, 0, 0, 0)]
IDS = [str(Implementation("split", "cuda", geometry)) for geometry in BENT]
EACH = pytest.mark.parametrize("geometry", BENT, ids=IDS)
FFI = pathlib.Path(__file__).parents[1] / "ffi"


class Overlay:
    """A jitted split call whose workspace lies where the bytes of our choice were."""

    def __init__(self, rows, geometry):
        self.size = raw_calls.workspace_bytes(rows, N, K, geometry)
        self.select = raw_calls.split(K, geometry, self.size, sorted=False)
        self.rows = rows
        self.device = jax.devices("cuda")[0]
        self.held = self.calls = 0

    def __call__(self, scores, lengths, word):
        """Results after a call; `word` is what every 8 bytes held, None: whatever."""
        operands = jax.device_put((scores, lengths), self.device)
        if self.calls == 0:  # nothing but the call itself may allocate below
            jax.block_until_ready(self.select(*operands))
        fill = np.full(self.rows * self.size // 8, word, np.uint64).view(np.uint8)
        fill = fill.reshape(self.rows, self.size)
        # Holes of just the right sizes, between neighbours that stay.
        answer = np.zeros((self.rows, K), np.float32)
        made = [
            jax.device_put(one, self.device)
            for one in (answer, answer, answer, answer, fill, fill)
        ]
        jax.block_until_ready(made)
        address = made[4].unsafe_buffer_pointer()
        for buffer in made[::2]:
            buffer.delete()
        results = jax.block_until_ready(self.select(*operands))
        held = results[2].unsafe_buffer_pointer() == address
        self.calls += 1
        self.held += held
        values, indices, workspace = jax.device_get(results)
        for buffer in (*made[1::2], *results):
            buffer.delete()
        oracle.check((values, indices), scores, K, lengths, sorted=False)
        return raw_calls.words(workspace), held


def batch_of(call, rows):
    rng = inputs.generator("graphs", call)
    scores = rng.integers(-99, 99, (rows, N)).astype(np.float32)
    ends = [N, 0, K, K + 1, N, 257, 256, -1, N - 1, N]
    return scores, np.resize(np.roll(ends, call), rows).astype(np.int32)


@EACH
@pytest.mark.gpu
def test_every_launch_leaves_arrival_words_of_zero(geometry):
    rows = 10
    overlay = Overlay(rows, geometry)
    for call, word in enumerate(
        [0, 2**64 - 1, 0x5A5A5A5A5A5A5A5A, 1, 0x7FF8000000000000, 3, 0xFFFF, 7] * 2
    ):
        scores, lengths = batch_of(call, rows)
        words, held = overlay(scores, lengths, word)
        # Rows that one CTA answers have not touched theirs.
        shared = lengths > max(geometry[1], 64)
        assert not words[shared].any(), [hex(one) for one in words]
        if held:
            untouched = words[~shared]
            assert (untouched == word).all(), [hex(one) for one in untouched]
    assert overlay.held > 0, "the workspace never lay where it was prepared"


@pytest.mark.gpu
def test_a_workspace_that_holds_arrival_words_of_any_launch():
    """The words of another launch, at any count, mean nothing to this one."""
    rows = 6
    overlay = Overlay(rows, (4, 256, 0, 0, 0))
    call = 0
    for number in (0, 1, 2, 2**32 - 1, 0x12345678):
        for arrivals in (1, 2, 3, 4, 5, 0xFFFF):
            scores, lengths = batch_of(call, rows)
            overlay(scores, lengths, 0x7FF4 << 48 | number << 16 | arrivals)
            call += 1
    assert overlay.held > 0, "the workspace never lay where it was prepared"


def test_the_handlers_neither_allocate_nor_synchronise():
    forbidden = re.compile(
        r"cuda(?:Malloc|Free|Memset|Memcpy|Host\w+|StreamCreate|EventCreate)\w*"
        r"|cuda\w*Synchronize|cudaLaunchHostFunc|cudaStreamWaitEvent"
    )
    for path in sorted(FFI.iterdir()):
        code = re.sub(r"//[^\n]*", "", path.read_text())
        assert not forbidden.findall(code), path.name


@pytest.mark.gpu
def test_a_call_is_one_kernel_and_nothing_else(python_under):
    """What a call puts on the stream is what XLA records into a graph."""
    # Without graphs the profiler sees each thing that is put on the stream.
    printed = python_under("--xla_gpu_enable_command_buffer=", "profiled.py")
    assert "one kernel a call" in printed


GRAPHS = """
import sys
import implementations, jax, numpy as np
bent = implementations.Implementation("split", "cuda", (4, 256, 0, 0, 0))
scores = jax.device_put(np.ones((3, 1000), np.float32), bent.device)
text = bent.jitted(48).lower(scores, None, None).compile().as_text()
print(text)
"""


@pytest.mark.gpu
def test_xla_puts_the_call_into_a_graph_and_adds_nothing(python_under):
    text = python_under("--xla_gpu_graph_min_graph_size=1", "-c", GRAPHS)
    assert len(re.findall(r'custom_call_target="jax_topk_split_v1"', text)) == 1
    assert not re.findall(r"\b(?:fusion|copy|broadcast|memset)\(", text), text
