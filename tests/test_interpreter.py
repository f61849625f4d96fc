"""The interpreter of jaxprs: each kind of equation reaches its method."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from shardkit._jax.interpreter import JaxprInterpreter

pytestmark = pytest.mark.check
X = jax.ShapeDtypeStruct((4,), jnp.float32)
MESH = AbstractMesh((2,), ("data",), axis_types=(AxisType.Auto,))


@jax.custom_jvp
def with_jvp(x):
    return jnp.sin(x)


with_jvp.defjvp(lambda primals, tangents: (with_jvp(*primals), tangents[0]))


@jax.custom_vjp
def with_vjp(x):
    return jnp.sin(x)


with_vjp.defvjp(lambda x: (with_vjp(x), None), lambda _, g: (g,))


class Kinds(JaxprInterpreter):
    """The kinds of the equations of a program; its values are nothing."""

    def __init__(self):
        self.kinds = []

    def constant(self, x):
        return None

    def literal(self, atom):
        return None

    def equation(self, equation, operands):
        self.kinds.append(equation.primitive.name)
        return [None] * len(equation.outvars)

    def call(self, equation, body, operands):
        self.kinds.append("call")
        return self.run(body, operands)

    def cond(self, equation, branches, operands):
        self.kinds.append(f"cond of {len(branches)}")
        return self.run(branches[-1], operands[1:])

    def scan(self, equation, body, operands):
        self.kinds.append("scan")
        return self.run(body, operands)

    def while_loop(self, equation, test, body, operands):
        self.kinds.append("while")
        self.run(test, operands)
        return self.run(body, operands)

    def shard_map(self, equation, body, operands):
        self.kinds.append("shard_map")
        return self.run(body, operands)


@pytest.mark.parametrize(
    ("function", "kinds"),
    [
        (jnp.sin, ["sin"]),
        (jax.jit(jnp.sin), ["call", "sin"]),
        (jax.checkpoint(jnp.sin), ["call", "sin"]),
        (with_jvp, ["call", "sin"]),
        (with_vjp, ["call", "sin"]),
        (lambda x: lax.cond(x[0].astype(bool), jnp.sin, jnp.cos, x), ["cond of 2", "sin"]),
        (lambda x: lax.scan(lambda carry, row: (jnp.sin(carry), row), x, x)[0], ["scan", "sin"]),
        (lambda x: lax.while_loop(lambda x: True, jnp.sin, x), ["while", "sin"]),
        (jax.shard_map(jnp.sin, mesh=MESH, in_specs=P("data"), out_specs=P("data")), ["shard_map", "sin"]),
    ],
)
def test_each_kind_of_equation_reaches_its_method(function, kinds):
    """A version of jax that renames a primitive: facts would no longer be followed into it, in silence."""
    reader = Kinds()
    reader.run(jax.make_jaxpr(function)(X), [None])
    held = {"call", "cond of 2", "scan", "while", "shard_map", "sin", "cos", "tan"}
    assert [kind for kind in reader.kinds if kind in held] == kinds
