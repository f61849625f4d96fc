"""The examples in docstrings run, and print what they say."""

import doctest
import importlib
import inspect
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import shardkit as sk

# What the public names are reached through; a name that several of them export is checked once.
FACES = ("", "collectives", "analysis", "cost", "models.transformer", "planner", "runtime", "schedules")
FACES += ("testing", "viz", "layers", "bench")


def public():
    """Public functions by name, as a user writes them."""
    found = {}
    for face in FACES:
        room = importlib.import_module(f"shardkit.{face}" if face else "shardkit")
        # An example of a function that its module keeps to itself, such as a piece of the transformer, runs too.
        inside = [n for n, f in vars(room).items() if inspect.isfunction(f) and f.__module__ == room.__name__]
        for name in (*room.__all__, *(n for n in inside if n[0] != "_" and n not in room.__all__)):
            each = getattr(room, name)
            if inspect.ismodule(each):
                members = vars(each).items()
                found |= {
                    f"{name}.{n}": f
                    for n, f in members
                    if inspect.isfunction(f) and f.__module__ == each.__name__ and n[0] != "_"
                }
            elif inspect.isfunction(each) and each not in found.values():
                found.setdefault(f"{face}.{name}".lstrip("."), each)
    return {name: each for name, each in found.items() if each.__module__.startswith("shardkit.")}


def examples_of(name, function):
    names = {"sk": sk, "jax": JAX, "jnp": jnp, "np": np, "optax": optax, "P": P}
    return doctest.DocTestParser().get_doctest(inspect.getdoc(function) or "", names, name, None, 0)


def compiled(*args, **options):
    """jax.shard_map in one program: where it is called on arrays, it compiles each operation, as a hundred of them."""
    mapped = jax.shard_map(*args, **options)
    jitted = jax.jit(mapped)

    def call(*args):
        traced = any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(args))
        return (mapped if traced else jitted)(*args)

    return call


JAX = SimpleNamespace(**vars(jax) | {"shard_map": compiled})
EXAMPLES = {name: each for name, each in public().items() if ">>>" in (each.__doc__ or "")}


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_print_what_they_say(name):
    """In each: sk, jax, jnp, np, optax, P, eight devices and `mesh`, of which "data" has two and "model" four."""
    test = examples_of(name, EXAMPLES[name])
    test.globs["mesh"] = sk.make_mesh(data=2, model=4)
    said = []
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    assert runner.run(test, out=said.append).failed == 0, "".join(said)


@pytest.mark.check
def test_every_public_function_has_an_example():
    """What ends the process or starts others shows a block of code, which is not run."""
    assert [name for name, each in public().items() if "Example:" not in (each.__doc__ or "")] == []
