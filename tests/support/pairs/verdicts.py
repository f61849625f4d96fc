"""Pairs of a kernel and a reference, drawn by a seed, and what the proof for all inputs says of each.

    pair = drawn(7)
    print(pair)                      # both programs, and what was done to them
    print(pair.truth())              # None: the same function; else the kind of the difference
    print(judged(pair).outcome)      # proved, refused, refuted or crashed

A right pair is right by construction: the kernel is the distributed reference, and each step to it is an identity. Of a
wrong one the kernel (seldom the reference) has one mistake, and numpy says whether that changes the function.
"""

import contextlib
import dataclasses
import functools
import random
import re
from unittest import mock

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

import shardkit as sk
from shardkit.testing.exact import program_pair
from shardkit.testing.exact.equality import UnprovableError
from support.pairs.distribution import distributed
from support.pairs.draws import Drawing, plain
from support.pairs.language import AXIS, Node, built
from support.pairs.mistakes import planted
from support.pairs.rewrites import rewritten
from support.pairs.truth import difference

_ATTEMPTS = 3  # at a mistake that changes the function
OUTCOMES = ("proved", "refused", "refuted", "crashed")


@dataclasses.dataclass(frozen=True)
class Pair:
    """A kernel and a reference.

    Attributes:
        seed: what it was drawn by.
        kernel: the program of each device.
        reference: that of one.
        devices: how many.
        shape: of each input.
        split: which inputs are split by rows.
        layout: that of the result: "split" or "whole".
        grad: whether gradients are compared too.
        mistake: the one that was planted, "" in a right pair.
        steps: the identities, each with the pair before it.
    """

    seed: int
    kernel: Node
    reference: Node
    devices: int
    shape: tuple[int, int]
    split: tuple[bool, ...]
    layout: str
    grad: bool = False
    mistake: str = ""
    steps: tuple[tuple[str, "Pair"], ...] = ()

    def __str__(self) -> str:
        layouts = ["split" if each else "whole" for each in self.split]
        inputs = ", ".join(f"{name} {layout}" for name, layout in zip("xyz", layouts, strict=False))
        lines = [
            f"seed {self.seed}: {self.devices} devices, {list(self.shape)}, {inputs}, result {self.layout}"
            f"{', with gradients' if self.grad else ''}",
            f"  steps: {', '.join(name for name, _ in self.steps) or 'none'}; mistake: {self.mistake or 'none'}",
            f"  kernel:    {self.kernel}",
            f"  reference: {self.reference}",
        ]
        return "\n".join(lines)

    def truth(self) -> str | None:
        """The kind of the difference that numpy finds, None where it finds none."""
        return difference(self)


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What the proof said of a pair: the outcome, and its message."""

    outcome: str
    message: str

    @property
    def cause(self) -> str:
        """What a refusal or a crash names."""
        if self.outcome == "refused":
            found = re.search(r"finite field; (.*?) at ", self.message)
            return found[1] if found else self.message.partition(": ")[2].partition(";")[0]
        return self.message.partition("\n")[0][:80]


@functools.cache
def _mesh(devices: int) -> jax.sharding.AbstractMesh:
    return sk.abstract_mesh(**{AXIS: devices})


def drawn(seed: int) -> Pair:
    """The pair of a seed."""
    draw = random.Random(f"pair {seed}")
    devices = draw.choice([1, 2, 2, 2, 4])
    drawing = Drawing(draw, devices)
    whole = drawing.result()
    split = tuple(draw.random() < 0.75 for _ in drawing.inputs)
    kernel, layout = distributed(whole, draw, devices, split)
    pair = Pair(seed, kernel, plain(whole), devices, drawing.shape, split, layout)
    pair = dataclasses.replace(pair, grad=drawing.smooth and draw.random() < 0.4)
    for _ in range(draw.choice([0, 1, 1, 2, 2, 3])):
        side = "kernel" if draw.random() < 0.7 else "reference"
        step = rewritten(getattr(pair, side), draw)
        if step is not None:
            steps = (*pair.steps, (step[0], pair))
            pair = dataclasses.replace(pair, **{side: step[1]}, steps=steps)
    return _with_a_mistake(pair, draw) if draw.random() < 0.6 else pair


def _with_a_mistake(pair: Pair, draw: random.Random) -> Pair:
    """With a mistake that makes a difference, if some attempts find one."""
    wrong = pair
    for _ in range(_ATTEMPTS):
        side = "kernel" if draw.random() < 0.8 else "reference"
        mistake = planted(getattr(pair, side), draw, pair.devices if side == "kernel" else 1)
        if mistake is not None:
            wrong = dataclasses.replace(pair, **{side: mistake[1]}, mistake=mistake[0], grad=False)
            if wrong.truth() is not None:
                break
    return wrong


def judged(pair: Pair, line: bool = False) -> Verdict:
    """What the proof says; `line` lets it look for the mistake, which takes ten times as long as all else."""
    with (
        contextlib.nullcontext()
        if line
        else mock.patch.object(program_pair.ProgramPair, "_locate", lambda *_, **__: "")
    ):
        return _judged(pair)


def _judged(pair: Pair) -> Verdict:
    specs = tuple(P(AXIS) if each else P() for each in pair.split)
    args = (jax.ShapeDtypeStruct(pair.shape, jnp.float32),) * len(pair.split)
    try:
        found = sk.testing.assert_equal_for_all_inputs(
            built(pair.kernel),
            built(pair.reference),
            mesh=_mesh(pair.devices),
            in_specs=specs,
            out_specs=P(AXIS) if pair.layout == "split" else P(),
            args=args,
            grad=pair.grad,
            points=2,
            check_vma=pair.layout == "split",
        )
    except UnprovableError as error:
        return Verdict("refused", str(error))
    except AssertionError as error:
        return Verdict("refuted", str(error))
    except Exception as error:  # a fault of the proof or of the generator; the table names it
        return Verdict("crashed", f"{type(error).__name__}: {error}")
    return Verdict("proved", str(found))


def cause_of_alarm(pair: Pair) -> str:
    """Of a right pair that is not proved, the first step behind which it is not."""
    outcome = judged(pair).outcome
    stages = [*(before for _, before in pair.steps), pair]
    names = ["the distribution", *(name for name, _ in pair.steps)]
    for name, stage in zip(names, stages, strict=True):
        if judged(stage).outcome == outcome:
            return name
    return names[-1]
