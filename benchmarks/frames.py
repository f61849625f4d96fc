"""How many functions of shardkit stand between a step and `jax.lax`: what a reader of a traceback meets.

    python -m benchmarks.frames

For each kind of step, the longest way on Python's stack to a collective while the step is traced.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import PartitionSpec as P

import shardkit as sk
from benchmarks.start import start

PACKAGE = Path(sk.__file__).parent
COLLECTIVES = ("all_gather", "all_to_all", "pmax", "pmean", "pmin", "ppermute", "psum", "psum_scatter")

Loss = Callable[[Any, Any, Any], sk.Mean]


def read_frames() -> list[str]:
    """The functions of shardkit on the stack, the outermost first."""
    frames = []
    frame: FrameType | None = sys._getframe(2)  # that of the function which calls the collective
    while frame is not None:
        code = frame.f_code
        file = Path(code.co_filename)
        if file.is_relative_to(PACKAGE):
            frames.append(f"{file.relative_to(PACKAGE)}:{frame.f_lineno} {code.co_qualname}")
        frame = frame.f_back
    return frames[::-1]


@contextmanager
def note_collectives(stacks: list[list[str]]) -> Iterator[None]:
    """Notes the stacks of the COLLECTIVES that are traced inside."""
    # shardkit calls all of them as lax.NAME, so that what replaces them in that module is called.
    originals = {}
    for name in COLLECTIVES:
        originals[name] = getattr(lax, name)

    def note(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            stacks.append(read_frames())
            return original(*args, **kwargs)

        return call

    try:
        for name, original in originals.items():
            setattr(lax, name, note(original))
        yield
    finally:
        for name, original in originals.items():
            setattr(lax, name, original)


def layers_loss(params: Any, batch: jax.Array, keys: Any) -> sk.Mean:
    """A stack of layers, gathered one by one."""

    def apply_layer(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.tanh(x @ w)

    return sk.Mean.of(sk.scan_layers(apply_layer, params["layers"], batch) ** 2)


def ring_loss(params: Any, batch: jax.Array, keys: Any) -> sk.Mean:
    """Two matmuls split over "model" that send in a ring."""
    h = jnp.tanh(sk.all_gather_matmul(batch, params["w"], "model", impl="ring"))
    y = sk.matmul_reduce_scatter(h, params["v"], "model", impl="ring")
    return sk.Mean(sk.all_reduce(jnp.sum(y**2), "model"), jnp.float32(y.size))


def matrix_loss(params: Any, batch: jax.Array, keys: Any) -> sk.Mean:
    """Two matrices, which Muon orthogonalizes."""
    return sk.Mean.of((jnp.tanh(batch @ params["w"]) @ params["v"]) ** 2)


def find_longest_stack(loss: Loss, params: Any, plan: sk.Plan, mesh: jax.sharding.Mesh, optimizer: Any) -> list[str]:
    """The longest stack of a collective, while the first call of the step is traced."""
    # The checks of a first call trace the loss, too, from other places than a step does.
    init, step = sk.make_train_step(sk.value_and_grad(loss), optimizer, mesh=mesh, plan=plan, check=False)
    state = init(params, jax.random.key(0))
    stacks: list[list[str]] = []
    with note_collectives(stacks):
        step(state, jnp.ones((8, 8)))
    return max(stacks, key=len)


def find_stacks() -> dict[str, list[str]]:
    """The longest stack of each kind of step, by its name."""
    mesh = sk.make_mesh(data=2, model=2)
    layers = {"layers": jnp.ones((3, 8, 8))}
    pair = {"w": jnp.ones((8, 8)), "v": jnp.ones((8, 8))}
    by_layer = sk.fsdp("data", layerwise=("layers",), min_size=1)
    tensor = sk.chain(sk.dp("data"), sk.tp("model", {"w": P(None, "model"), "v": P("model")}))
    whole = sk.fsdp("data", min_size=1)
    muon = sk.muon(0.02, plan=whole, mesh=mesh)
    return {
        "fsdp by layer": find_longest_stack(layers_loss, layers, by_layer, mesh, optax.sgd(0.1)),
        "tp, ring": find_longest_stack(ring_loss, pair, tensor, mesh, optax.sgd(0.1)),
        "muon": find_longest_stack(matrix_loss, pair, whole, mesh, muon),
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the number of frames of each kind of step, and the frames."""
    start(__doc__, argv, devices=4)
    for name, frames in find_stacks().items():
        print(f"{name}: {len(frames)} frames")
        for frame in frames:
            print(f"    {frame}")


if __name__ == "__main__":
    main()
