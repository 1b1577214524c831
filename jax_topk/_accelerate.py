# SPDX-License-Identifier: Apache-2.0
"""``accelerate_lax``: programs that call ``jax.lax.top_k`` get our kernels as they are.

Decided here: for whom and for how long. What is lowered to what is the primitive's
business.
"""

from __future__ import annotations

from typing import Any

from jax_topk._primitive import (
    accelerated,
    accelerated_everywhere,
    replace_lax_lowering,
)


class accelerate_lax:  # called like a function, like jax.set_mesh
    """Lowers ``jax.lax.top_k``, and all that is made of it, to this package's kernels.

    As a function, ``accelerate_lax()`` holds from there on. As a context manager it
    holds inside; afterwards all is as before. Either is for the calling thread, like
    ``jax.set_mesh``, and with ``all_threads`` for every thread of the process.

    The kernels are used on CPU and CUDA for float32, bfloat16 and float16, with k up to
    4096 on CUDA; elsewhere JAX's own rule is. The answer is the documented one of
    ``jax.lax.top_k``: by descending value, equal ones by ascending index. So it is the
    same, bit for bit, with two exceptions in which JAX's own departs from it: on GPUs
    with k up to 16, which does not keep equal values in order, and NaNs of 16 bits,
    whose payloads its CPU rule rewrites.

    What counts is where a program is lowered. ``jax.jit`` traces, lowers and compiles a
    function anew when it is first called inside, and again takes what it compiled
    outside when it is called there: the switch is part of the keys of JAX's caches.
    An ahead-of-time ``lower()`` inside gives an accelerated program, wherever it is
    compiled and called; so does ``jax.export``, which needs the names in
    ``FFI_TARGETS`` then. Everything before lowering is JAX's: its errors, batching,
    derivatives and types of shardings. Rows that are sharded stay where they are.

    Args:
        all_threads: whether it holds in all threads, rather than in the calling one.

    Example:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> from jax_topk import accelerate_lax
        >>> old = jax.jit(lambda x: jax.lax.top_k(x, 2))
        >>> x = jnp.array([3.0, 1.0, 2.0])
        >>> with accelerate_lax():
        ...     print(old(x)[0], "jax_topk" in old.lower(x).as_text())
        [3. 2.] True
        >>> print(old(x)[0], "jax_topk" in old.lower(x).as_text())
        [3. 2.] False
    """

    def __init__(self, *, all_threads: bool = False) -> None:
        replace_lax_lowering()
        self._before = None
        if all_threads:
            self._before = accelerated_everywhere.get_global()
            accelerated_everywhere.set_global(True)
        else:
            self._context = accelerated(True)
            self._context.__enter__()

    def __enter__(self) -> accelerate_lax:
        return self

    def __exit__(self, *error: Any) -> None:
        if self._before is None:
            self._context.__exit__(*error)
        else:
            accelerated_everywhere.set_global(self._before)
