# SPDX-License-Identifier: Apache-2.0
"""A language model with sparse attention: checked, trained, and generating text.

    python examples/sparse_attention.py [--steps N] [--out FOLDER]

1. One layer (jax_topk.sparse_attention) is compared with dense attention, and all ways
   to run it with each other: prefill, chunked, decoding, several tokens at once, paged.
2. A model of two layers learns the documentation of Python's standard library, byte by
   byte, with dense attention. Then its indexers alone learn where that attention goes.
   What is measured on text that it has not seen: how much of the attention the selected
   keys hold, and what the model loses when it attends to nothing else.
3. It goes on with a text of its own, from a paged cache under lax.scan.

Takes a minute or so on two cores; the same file runs on a GPU. Exits with 1 if a check
fails. Writes sparse_attention.png where matplotlib is installed.
"""

import argparse
import ast
import functools
import pathlib
import sys
import sysconfig
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_topk import sparse_attention as sparse

CONFIG = sparse.Config(
    width=64, heads=4, groups=2, head_dim=16, index_heads=4, index_dim=16, k=32
)
LAYERS, TOKENS, BATCH = 2, 256, 10
FP8 = jnp.float8_e4m3fn

# 1. One layer ------------------------------------------------------------------------


def check(name: str, got: jax.Array, want: jax.Array, near: float = 1e-5) -> bool:
    """Whether tokens agree, but for one in a hundred.

    Products of other shapes round otherwise, and may so turn two keys around that are
    worth the same within rounding.
    """
    furthest = np.abs(np.asarray(got) - np.asarray(want)).max(-1)
    good = bool((furthest > near).mean() <= 0.01)
    print(f"  {name:<58} {np.median(furthest):8.1e}  {'ok' if good else 'WRONG'}")
    return good


def layer_checks() -> bool:
    config = CONFIG._replace(k=20)
    batch, t, n, size = 3, 96, 128, 16
    params = sparse.init(jax.random.key(0), config)
    x = jax.random.normal(jax.random.key(1), (batch, t, config.width))
    extend = jax.jit(sparse.extend, static_argnums=1)
    results = []

    print("one layer: the median distance of a token's output")
    for window in (None, 30):
        covering = config._replace(k=t, window=window)
        y, _ = extend(params, covering, sparse.new_cache(batch, n, config), x)
        want, _, _ = sparse.dense(params, covering, x)
        name = "k covers all that a token sees: dense attention"
        name += "" if window is None else f", window of {window}"
        results.append(check(name, y, want))

    empty = sparse.new_cache(batch, n, config)
    whole, _ = extend(params, config, empty, x)

    def in_chunks(cache: sparse.Cache, chunk: int) -> jax.Array:
        parts = []
        for i in range(0, t, chunk):
            y, cache = extend(params, config, cache, x[:, i : i + chunk])
            parts.append(y)
        return jnp.concatenate(parts, 1)

    results.append(check("prefill in chunks: at once", in_chunks(empty, 32), whole))
    multi = in_chunks(empty, 4)
    results.append(check("four tokens at a time: at once", multi, whole))
    decoded = decode(params, config, empty, x)
    results.append(check("decoding in a scan: at once", decoded, whole))

    pages = np.random.default_rng(0).permutation(2 * batch * n // size)
    table = jnp.asarray(pages[: batch * n // size].reshape(batch, -1), np.int32)
    paged = sparse.new_paged_cache(table, size, len(pages), config)
    y, _ = extend(params, config, paged, x)
    results.append(check("prefill into pages: into a run of slots", y, whole))
    y = decode(params, config, paged, x)
    results.append(check("decoding from pages: from a run of slots", y, decoded))

    fp8 = sparse.new_cache(batch, n, config, index_dtype=FP8)
    whole, _ = extend(params, config, fp8, x)
    paged = sparse.new_paged_cache(table, size, len(pages), config, index_dtype=FP8)
    y = decode(params, config, paged, x)
    results.append(check("index keys in FP8, decoding from pages: at once", y, whole))

    def loss(params: sparse.Params, layer: Any) -> jax.Array:
        return (layer(params) ** 2).mean()

    covering = config._replace(k=t)
    gradients = [
        jax.jit(jax.grad(functools.partial(loss, layer=layer)))(params)
        for layer in (
            lambda params: sparse.extend(params, covering, empty, x)[0],
            lambda params: sparse.dense(params, covering, x)[0],
        )
    ]
    flat = [jnp.concatenate([jnp.ravel(v) for v in g.values()]) for g in gradients]
    name = "k covers: the gradient of dense attention"
    results.append(check(name, flat[0][:, None], flat[1][:, None]))
    return all(results)


def decode(
    params: sparse.Params, config: sparse.Config, cache: sparse.Cache, x: jax.Array
) -> jax.Array:
    """Token by token, in one program."""

    @jax.jit
    def run(params: Any, cache: sparse.Cache, x: jax.Array) -> jax.Array:
        def step(cache: sparse.Cache, token: jax.Array) -> Any:
            y, cache = sparse.extend(params, config, cache, token[:, None])
            return cache, y[:, 0]

        return jax.lax.scan(step, cache, x.swapaxes(0, 1))[1].swapaxes(0, 1)

    return run(params, cache, x)


# 2. A model --------------------------------------------------------------------------


def text() -> np.ndarray:
    """The docstrings of Python's standard library, as bytes."""
    parts = []
    for path in sorted(pathlib.Path(sysconfig.get_path("stdlib")).glob("*.py")):
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError):
            continue
        kinds = (ast.Module, ast.ClassDef, ast.FunctionDef)
        nodes = [node for node in ast.walk(tree) if isinstance(node, kinds)]
        parts += [doc for node in nodes if (doc := ast.get_docstring(node))]
    return np.frombuffer("\n\n".join(parts).encode("ascii", "replace"), np.uint8)


def init_model(key: jax.Array) -> dict[str, Any]:
    keys = jax.random.split(key, 3 * LAYERS + 1)
    width = CONFIG.width
    normal = jax.random.normal
    layers = [
        {
            "attention": sparse.init(keys[3 * i], CONFIG),
            "up": normal(keys[3 * i + 1], (width, 4 * width)) / np.sqrt(width),
            "down": normal(keys[3 * i + 2], (4 * width, width)) / np.sqrt(4 * width),
        }
        for i in range(LAYERS)
    ]
    return {"layers": layers, "embedding": normal(keys[-1], (128, width)) / 8}


def normed(x: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt((x**2).mean(-1, keepdims=True) + 1e-6)


def apply(params: Any, tokens: jax.Array, attention: Any) -> Any:
    """Logits of the next byte; `attention(i, params, x)` is the i-th layer's."""
    x = params["embedding"][tokens] * 8
    others = []
    for i, layer in enumerate(params["layers"]):
        y, *other = attention(i, layer["attention"], normed(x))
        x = x + y
        x = x + jax.nn.gelu(normed(x) @ layer["up"]) @ layer["down"]
        others.append(other)
    return normed(x) @ params["embedding"].T, others


def densely(_: int, params: sparse.Params, x: jax.Array) -> Any:
    return sparse.dense(params, CONFIG, x)


def sparsely(
    _: int, params: sparse.Params, x: jax.Array, index_dtype: Any = None
) -> Any:
    batch, t, _ = x.shape
    cache = sparse.new_cache(batch, t, CONFIG, index_dtype=index_dtype)
    return sparse.extend(params, CONFIG, cache, x)


def bits(logits: jax.Array, tokens: jax.Array) -> jax.Array:
    """Bits a byte, of all but the first."""
    log_p = jax.nn.log_softmax(logits[:, :-1])
    taken = jnp.take_along_axis(log_p, tokens[:, 1:, None], -1)
    return -taken.mean() / np.log(2)


def language_loss(params: Any, tokens: jax.Array) -> jax.Array:
    return bits(apply(params, tokens, densely)[0], tokens)


def attention_loss(params: Any, tokens: jax.Array) -> jax.Array:
    """Its gradient is zero but for the indexers."""
    frozen = jax.tree.map(jax.lax.stop_gradient, params)
    for layer, own in zip(frozen["layers"], params["layers"], strict=True):
        for name in ("index_query", "index_key", "index_weight"):
            layer["attention"][name] = own["attention"][name]
    _, others = apply(frozen, tokens, densely)
    losses = [sparse.indexer_loss(scores, mass, CONFIG) for mass, scores in others]
    return sum(losses, jnp.zeros(())) / LAYERS


@functools.partial(jax.jit, static_argnames=("loss", "rate"))
def train(
    params: Any, state: Any, batches: jax.Array, *, loss: Any, rate: float
) -> tuple[Any, Any, jax.Array]:
    """Adam, a step for each batch (Kingma and Ba, 2014, arXiv:1412.6980)."""

    def step(carry: Any, tokens: jax.Array) -> Any:
        params, (first, second, count) = carry
        value, gradient = jax.value_and_grad(loss)(params, tokens)
        count = count + 1
        first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, first, gradient)
        second = jax.tree.map(lambda v, g: 0.99 * v + 0.01 * g**2, second, gradient)

        def moved(p: jax.Array, m: jax.Array, v: jax.Array) -> jax.Array:
            m, v = m / (1 - 0.9**count), v / (1 - 0.99**count)
            return p - rate * m / (jnp.sqrt(v) + 1e-8)

        params = jax.tree.map(moved, params, first, second)
        return (params, (first, second, count)), value

    (params, state), values = jax.lax.scan(step, (params, state), batches)
    return params, state, values.mean()


@jax.jit
def evaluate(params: Any, tokens: jax.Array) -> dict[str, jax.Array]:
    logits, others = apply(params, tokens, densely)

    def held(best: bool) -> jax.Array:
        """Of tokens that see more than k keys: the attention that the selected hold."""
        parts = [
            sparse.recall(mass if best else scores, mass, CONFIG)[:, CONFIG.k :]
            for mass, scores in others
        ]
        return jnp.stack(parts).mean()

    return {
        "dense": bits(logits, tokens),
        "sparse": bits(apply(params, tokens, sparsely)[0], tokens),
        "fp8": bits(
            apply(params, tokens, functools.partial(sparsely, index_dtype=FP8))[0],
            tokens,
        ),
        "recall": held(best=False),
        "best": held(best=True),
    }


def training(data: np.ndarray, steps: int, chunk: int = 20) -> tuple[Any, Any, bool]:
    """The trained model, what was seen on the way, and whether it went as it should."""
    rng = np.random.default_rng(0)
    split = len(data) * 9 // 10

    def draw(part: np.ndarray, *count: int) -> jax.Array:
        at = rng.integers(0, len(part) - TOKENS, count)
        return jnp.asarray(part[at[..., None] + np.arange(TOKENS)], np.int32)

    unseen = draw(data[split:], BATCH)
    params = init_model(jax.random.key(2))
    history: list[Any] = []
    for phase, loss, rate, total in (
        ("language", language_loss, 4e-3, steps),
        ("indexer", attention_loss, 8e-3, steps // 2),
    ):
        zeros = jax.tree.map(jnp.zeros_like, params)
        state: Any = (zeros, zeros, jnp.zeros(()))
        for i in range(0, total, chunk):
            now = {name: float(x) for name, x in evaluate(params, unseen).items()}
            batches = draw(data[:split], chunk, BATCH)
            params, state, value = train(params, state, batches, loss=loss, rate=rate)
            history.append({"phase": phase, "step": i, "loss": float(value), **now})
            if i // chunk % 3 == 0 or i + chunk >= total:
                unit = "bits a byte" if phase == "language" else "KL, nats"
                print(
                    f"  {phase:>8} {i:4}   loss {value:6.3f} {unit:<11}   "
                    f"recall {now['recall']:.3f} of at most {now['best']:.3f}"
                )
    after = {name: float(x) for name, x in evaluate(params, unseen).items()}
    untrained = next(row for row in history if row["phase"] == "indexer")
    learning = [row["loss"] for row in history if row["phase"] == "indexer"]
    history.append({"phase": "end", **after})
    print(
        f"on unseen text, bits a byte: dense {after['dense']:.3f}; with {CONFIG.k} "
        f"keys of up to {TOKENS}: {untrained['sparse']:.3f} before the indexers "
        f"learnt, {after['sparse']:.3f} after "
        f"({after['fp8']:.3f} with index keys in FP8)"
    )
    good = (
        learning[-1] < learning[0]
        and after["recall"] > untrained["recall"]
        and after["sparse"] < untrained["sparse"]
    )
    print(
        f"recall {untrained['recall']:.3f} -> {after['recall']:.3f} of at most "
        f"{after['best']:.3f}: {'ok' if good else 'WRONG'}"
    )
    return params, history, good


def plot(history: Any, path: pathlib.Path) -> None:
    import matplotlib  # pyright: ignore[reportMissingImports]

    matplotlib.use("Agg")
    from matplotlib import pyplot  # pyright: ignore[reportMissingImports]

    figure, axes = pyplot.subplots(1, 3, figsize=(12, 3.6), layout="constrained")
    language = [row for row in history if row["phase"] == "language"]
    indexer = [row for row in history if row["phase"] == "indexer"]
    axes[0].plot([r["step"] for r in language], [r["loss"] for r in language])
    axes[0].set(title="the model learns", ylabel="bits a byte", xlabel="step")
    steps = [row["step"] for row in indexer]
    axes[1].plot(steps, [row["loss"] for row in indexer])
    axes[1].set(title="then its indexers learn", ylabel="KL, nats", xlabel="step")
    axes[2].plot(steps, [row["recall"] for row in indexer], label="selected")
    axes[2].plot(steps, [row["best"] for row in indexer], "--", label="best possible")
    title = f"attention that {CONFIG.k} of up to {TOKENS} keys hold"
    axes[2].set(title=title, xlabel="step")
    axes[2].legend()
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
    print(f"written: {path}")


# 3. Text -----------------------------------------------------------------------------


def generate(params: Any, prompt: str, count: int) -> str:
    """What the model makes of a beginning, from a paged cache of each layer."""
    start = jnp.asarray([list(prompt.encode())], np.int32)
    pages = (start.shape[1] + count) // 16 + 1
    table = jnp.asarray(np.random.default_rng(1).permutation(pages)[None], np.int32)
    caches = [sparse.new_paged_cache(table, 16, pages, CONFIG) for _ in range(LAYERS)]

    def forward(caches: Any, tokens: jax.Array, key: jax.Array) -> Any:
        def attention(i: int, params: sparse.Params, x: jax.Array) -> Any:
            return sparse.extend(params, CONFIG, caches[i], x)

        logits, others = apply(params, tokens, attention)
        token = jax.random.categorical(key, 1.5 * logits[:, -1])
        return token, [cache for (cache,) in others]

    @jax.jit
    def run(caches: Any, start: jax.Array) -> jax.Array:
        def step(carry: Any, key: jax.Array) -> Any:
            token, caches = carry
            return forward(caches, token[:, None], key), token

        keys = jax.random.split(jax.random.key(3), count + 1)
        return jax.lax.scan(step, forward(caches, start, keys[0]), keys[1:])[1]

    return prompt + bytes(np.asarray(run(caches, start))[:, 0].tolist()).decode()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--steps", type=int, default=300, help="of the model's training"
    )
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("build"))
    given = parser.parse_args()
    begin = time.perf_counter()
    print(f"jax {jax.__version__} on {jax.devices()[0].device_kind}")
    # GPUs multiply float32 in fewer bits unless they are told not to.
    with jax.default_matmul_precision("highest"):
        good = layer_checks()
    data = text()
    print(f"\ntraining on {len(data)} bytes of documentation")
    params, history, learnt = training(data, given.steps)
    try:
        given.out.mkdir(parents=True, exist_ok=True)
        plot(history, given.out / "sparse_attention.png")
    except ImportError:
        print("no plot: matplotlib is not installed")
    print("\nfrom a paged cache:", repr(generate(params, "Return the ", 120)))
    print(f"{time.perf_counter() - begin:.0f} s")
    if not (good and learnt):
        print("WRONG: see above")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
