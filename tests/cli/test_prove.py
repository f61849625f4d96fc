"""`shardkit prove` as a user runs it."""

import json

import pytest

PROGRAM = """
import jax, jax.numpy as jnp, numpy as np, optax
from jax.sharding import PartitionSpec as P
import shardkit as sk

def softmax(factor=1):
    def kernel(x_bd):
        powers = jnp.exp(x_bd)
        return factor * powers / sk.all_reduce(powers.sum(-1, keepdims=True), "model")

    how = dict(mesh=sk.abstract_mesh(model=64), in_specs=P(None, "model"), out_specs=P(None, "model"))
    return dict(kernel=kernel, reference=jax.nn.softmax, args=(jax.ShapeDtypeStruct((1, 64), "f"),), **how)

def twice():
    return softmax(2)

def step(loss=lambda w, x, keys: sk.Mean.of((x @ w) ** 2)):
    plain = sk.value_and_grad(lambda w, x, keys: sk.Mean.of((x @ w) ** 2))
    rows = [sk.testing.Row({"data": 2}, sk.dp("data"))]
    laws = [sk.testing.laws.equal_for_all_inputs]
    data = dict(params=np.ones(4, "f"), batches=[np.ones((8, 4), "f")] * 2, optimizer=optax.sgd(0.1))
    return dict(step=sk.value_and_grad(loss), reference=plain, rows=rows, laws=laws, **data)

def summed():
    return step(lambda w, x, keys: sk.Mean.of(x.sum() * (x @ w) ** 2))

def half():
    return {"kernel": jnp.exp}

def listed():
    return [1]

def broken():
    raise OSError("no disk")

def unknown_axis():
    return {**softmax(), "kernel": lambda x: jax.lax.psum(x, "data")}

def in_numpy():
    return {**softmax(), "reference": lambda x: jnp.asarray(np.exp(x))}

def key_error():
    return step(lambda w, x, keys: sk.Mean.of(x["x"]))

def compiled(scale=1):
    mesh = sk.make_mesh(data=4, model=2)
    x = jax.device_put(np.ones((8, 4), "f"), jax.NamedSharding(mesh, P("data")))
    w = jax.device_put(np.ones((4, 6), "f"), jax.NamedSharding(mesh, P(None, "model")))
    return jax.jit(lambda x, w: jnp.tanh(x @ w).mean(0) * scale), x, w

def with_reference():
    function, *args = compiled()
    return dict(function=function, args=args, reference=compiled(2)[0])

def too_many():
    return *compiled(), 1.0

def unjitted():
    return (lambda x: x), np.ones(3, "f")
"""


@pytest.fixture
def program(tmp_path, monkeypatch):
    (tmp_path / "kernels.py").write_text(PROGRAM)
    monkeypatch.chdir(tmp_path)


# proves N49: from a shell, with a certificate, an exit code and JSON; the 64 devices of the mesh are not there
def test_a_kernel_and_a_step(program, inside):
    out = inside("prove", "kernels.py:softmax").stdout
    assert out.startswith("equal for all inputs: kernel and softmax, on mesh model=64, values and gradients\n")
    done = inside("prove", "kernels.py:twice", "--json", code=1)
    said = json.loads(done.stdout)
    assert said["command"] == "prove" and said["rows"] == [] and done.stderr == said["differs"][0] + "\n"
    assert "the result is not the reference's for all inputs: it is 2 times the reference" in said["differs"][0]
    done = inside("prove", "kernels.py:step", "--json")
    row = "data=2: dp('data')"
    assert json.loads(done.stdout)["rows"] == [{"row": row, "law": "equal_for_all_inputs", "broken": "", "note": ""}]
    assert done.stderr.splitlines()[1].split() == [*row.split(), "holds"]
    out = inside("prove", "kernels.py:summed", code=1).stdout
    assert out.startswith("prove: 1 of 1 do not hold:\n- data=2: dp('data'), equal_for_all_inputs: on mesh data=2")


def test_a_compiled_program(program, inside):
    out = inside("prove", "kernels.py:compiled", "--compiled").stdout
    assert out.startswith("equal for all inputs: <lambda> as compiled on 8 devices (cpu, jax ")
    done = inside("prove", "kernels.py:with_reference", "--compiled", "--json", code=1)
    assert "it is 1/2 of the reference everywhere" in json.loads(done.stdout)["differs"][0]
    for name, said in {
        "half": "prove: with --compiled kernels.py:half must return (function, *args), or a dict of function, args, "
        "reference and points; got dict. Return for example (jax.jit(step), state, batch).",
        "too_many": "prove: kernels.py:too_many must return a function followed by its own arguments; too many "
        "positional arguments. Return for example (jax.jit(step), state, batch).",
        "unjitted": "assert_compiled_equal: function must be one of jax.jit, which can be traced and compiled; got "
        "function. Pass jax.jit(function).",
    }.items():
        assert inside("prove", f"kernels.py:{name}", "--compiled", code=2).stderr == f"error: {said}\n"


@pytest.mark.parametrize(
    "said, name",
    {
        "must return the arguments of sk.testing.assert_equal_for_all_inputs; missing a required argument: "
        "'reference'. Its parameters are kernel, reference, mesh, in_specs, out_specs, args, grad, points, "
        "check_vma.": "half",
        "must return the arguments of a proof as a dict; got list. Return for example dict(step=grad_fn, "
        "reference=grad_fn, rows=rows, params=params, batches=batches).": "listed",
        "must return the arguments of a proof; it raises OSError: no disk. Run it with python to see the "
        "traceback.": "broken",
    }.items(),
)
def test_what_is_no_proof(program, inside, name, said):
    assert inside("prove", f"kernels.py:{name}", code=2).stderr == f"error: prove: kernels.py:{name} {said}\n"


# They ended with 70, as if shardkit were wrong, and the first without a word.
@pytest.mark.parametrize(
    "name, said",
    {
        "unknown_axis": "assert_equal_for_all_inputs: jax.shard_map must support what the kernel calls at "
        "kernels.py:37; it raises AssertionError without a message",
        "in_numpy": "prove: the functions of kernels.py:in_numpy must run; kernels.py:40 "
        "(<lambda>) raises TracerArrayConversionError: ",
        "key_error": "prove: the functions of kernels.py:key_error must run; kernels.py:43 (<lambda>) raises ",
    }.items(),
)
def test_functions_that_raise(program, inside, name, said):
    error = inside("prove", f"kernels.py:{name}", code=2).stderr
    assert error.startswith(f"error: {said}")
    assert error.count("\n") == 1
