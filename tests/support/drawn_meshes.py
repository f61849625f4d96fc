"""What a drawn training step runs on: meshes, plans, schedules and options, each from the same random numbers."""

import math
import random
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import optax

import shardkit as sk
from shardkit.testing import Row
from support.pipelines import EVERY_SCHEDULE
from support.rows import FP16, MASTER
from support.training import lenient

PRECISIONS: dict[str, Any] = {"no": None, "bf16": "bf16", "fp16": FP16, "master": MASTER}
# Those whose update is no sign of a gradient: what rounding may do to them stays small.
OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "sgd": lambda: optax.sgd(0.5, momentum=0.9),
    "adamw": lambda: optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-3)),
    "adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=4),
    "lamb": lambda: optax.lamb(1e-2),
    "muon": lambda: optax.contrib.muon(1e-2),
    "MultiSteps": lambda: optax.MultiSteps(optax.adam(1e-2), 2),
    "schedule": lambda: optax.adamw(optax.warmup_cosine_decay_schedule(0.0, 1e-2, 2, 10)),
    "novograd": lambda: optax.novograd(1e-2),
    "block rms": lambda: optax.chain(optax.clip_by_block_rms(0.1), optax.sgd(1e-1)),
    "polyak_sgd": lambda: optax.polyak_sgd(max_learning_rate=1e-2),
}
# What the axes of a mesh may be for; data is dp, and zero and fsdp come in their forms.
USES = ("data", "zero", "fsdp", "context", "ulysses", "model", "expert", "stage")
SPLIT_THE_BATCH = ("data", "zero", "fsdp", "expert")


class Mesh(NamedTuple):
    """The axes of each use, major to minor as the plan names them, and all axes in the mesh's own order."""

    axes: dict[str, tuple[str, ...]]
    sizes: dict[str, int]

    def ways(self, *uses: str) -> int:
        """Devices along all axes of these uses."""
        return math.prod(self.sizes[name] for use in uses for name in self.axes.get(use, ()))

    def axis(self, use: str) -> Any:
        """What a plan is given."""
        names = self.axes[use]
        return names[0] if len(names) == 1 else names


def draw_mesh(draw: random.Random, uses: tuple[str, ...], most: dict[str, int] | None = None) -> Mesh:
    """One to eight devices: their number's primes are dealt to uses; some axes of one device stand beside them."""
    left = draw.choices(range(1, 9), [1, 3, 2, 5, 1, 5, 1, 8])[0]
    dealt: dict[str, list[int]] = {}
    for prime in (2, 3, 5, 7):
        while left % prime == 0:
            left //= prime
            fits = [u for u in uses if math.prod(dealt.get(u, [])) * prime <= (most or {}).get(u, 8)]
            dealt.setdefault(draw.choice(fits), []).append(prime)
    for use in uses:
        if use not in dealt and draw.random() < 0.1:
            dealt[use] = [1]
    if not dealt:
        dealt[uses[0]] = [1]
    axes, sizes = {}, {}
    for use, primes in dealt.items():
        apart = use != "stage" and len(primes) > 1 and draw.random() < 0.4
        parts = {f"{use}{i}": n for i, n in enumerate(primes)} if apart else {use: math.prod(primes)}
        sizes |= parts
        axes[use] = tuple(draw.sample(list(parts), len(parts)))
    if math.prod(sizes.values()) <= 4 and draw.random() < 0.1:
        sizes["spare"] = 2
    return Mesh(axes, {name: sizes[name] for name in draw.sample(list(sizes), len(sizes))})


def draw_plans(draw: random.Random, mesh: Mesh, rules: Any, sequence: bool) -> tuple[list[sk.Plan], str]:
    """The plans of all axes in any order, and what cannot be read from them."""
    said = []

    def sharded(use: str) -> sk.Plan:
        form = draw.choice(["zero1", "zero2", "zero2 by layer"] if use == "zero" else ["fsdp", "fsdp by layer"])
        options: dict[str, Any] = {"min_size": draw.choice([1, 1, 40]), "uneven": draw.choice(["pad", "replicate"])}
        if form.endswith("by layer"):
            options["layerwise"] = ("layers",)
        said.append(f"{use}: {form} {options}")
        return getattr(sk, form.split()[0])(mesh.axis(use), **options)

    makes = {
        "data": lambda: sk.dp(mesh.axis("data")),
        "zero": lambda: sharded("zero"),
        "fsdp": lambda: sharded("fsdp"),
        "context": lambda: sk.cp(mesh.axis("context")),
        "ulysses": lambda: sk.cp(mesh.axis("ulysses")),
        "model": lambda: sk.tp(mesh.axis("model"), rules, sequence=sequence),
        "expert": lambda: sk.ep(mesh.axis("expert")),
        "stage": lambda: sk.pp(mesh.axis("stage")),
    }
    plans = [makes[use]() for use in draw.sample(list(mesh.axes), len(mesh.axes))]
    return plans, "; ".join(said)


def draw_row(draw: random.Random, mesh: Mesh, plans: list[sk.Plan], grad_fn: Any, label: str, **options: Any) -> Row:
    """The row, over devices in any order."""
    name = draw.choice(list(OPTIMIZERS))
    nonfinite = draw.choice(["keep", "skip", "stop"])
    devices = draw.sample(jax.devices(), math.prod(mesh.sizes.values()))
    numbers = [device.id for device in devices]
    said = {"optimizer": name, "nonfinite": nonfinite, **options, "devices": numbers}
    options["precision"] = PRECISIONS[options.get("precision", "no")]
    return Row(
        mesh.sizes,
        sk.chain(*plans),
        grad_fn,
        nonfinite=nonfinite,
        optimizer=lenient(OPTIMIZERS[name]()),
        label=f"{mesh.sizes} as {mesh.axes}; {label}; " + ", ".join(f"{k}={v}" for k, v in said.items()),
        devices=devices,
        **options,
    )


def draw_schedule(draw: random.Random, mesh: Mesh) -> tuple[str, Any]:
    """A schedule for the mesh's stages; None without."""
    if "stage" not in mesh.axes:
        return "", None
    name = draw.choice(list(EVERY_SCHEDULE))
    stages = mesh.ways("stage")
    return name, EVERY_SCHEDULE[name](stages, draw.choice([stages, 2 * stages, draw.randint(1, 6)]))


def draw_sizes(draw: random.Random, schedule: Any, most: int) -> tuple[int, ...] | None:
    """The layers of each stage, where they are not equal."""
    count = schedule.devices * schedule.chunks
    return tuple(draw.randint(1, most) for _ in range(count)) if draw.random() < 0.5 else None
