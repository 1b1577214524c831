# SPDX-License-Identifier: Apache-2.0
"""A program of its own: what a selection costs before it runs, beside jax.lax.top_k.

    python tests/compile_time.py

Milliseconds to trace, lower and compile a program with one selection and one with 61,
each the median of several programs that jax has not seen before.
"""

import itertools
import statistics
import time

import jax
import numpy as np

from jax_topk import top_k

K = 20
SCORES = jax.ShapeDtypeStruct((3, 300), np.float32)
LENGTHS = jax.ShapeDtypeStruct((3,), np.int32)
KINDS = {
    "jax.lax.top_k": lambda x, _: jax.lax.top_k(x, K)[0],
    "top_k": lambda x, _: top_k(x, K).values,
    "top_k, lengths": lambda x, lengths: top_k(x, K, lengths=lengths).values,
}


def program(select, layers, derivative):
    def loss(x, lengths):
        for _ in range(layers):
            x = x + select(x, lengths)[..., :1]
        return x.sum()

    return jax.jit(jax.grad(loss) if derivative else loss)


def milliseconds(select, layers, derivative):
    """The medians of tracing, lowering and compiling."""
    seen = []
    for _ in range(21 if layers == 1 else 5):
        start = time.perf_counter()
        traced = program(select, layers, derivative).trace(SCORES, LENGTHS)
        traced_at = time.perf_counter()
        lowered = traced.lower()
        lowered_at = time.perf_counter()
        lowered.compile()
        compiled_at = time.perf_counter()
        times = (start, traced_at, lowered_at, compiled_at)
        seen.append([1e3 * (b - a) for a, b in itertools.pairwise(times)])
    return [statistics.median(column) for column in zip(*seen, strict=True)]


def main():
    print(f"jax {jax.__version__}, {jax.devices()[0].device_kind}; ms, x: by lax's")
    print(f"{'':28}trace   lower  trace + lower    compile")
    for derivative in (False, True):
        for layers in (1, 61):
            lax = None
            for name, select in KINDS.items():
                trace, lower, compile_ = milliseconds(select, layers, derivative)
                both = trace + lower
                lax = lax or both
                what = f"{'grad of ' if derivative else ''}{layers} x {name}"
                ratio = f"{both:8.1f} {both / lax:4.1f} x"
                print(f"{what:26}{trace:7.1f} {lower:7.1f} {ratio} {compile_:9.1f}")


if __name__ == "__main__":
    main()
