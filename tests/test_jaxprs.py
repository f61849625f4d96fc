"""What follows from some arguments of a program alone, read in one pass."""

import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from jax.interpreters import partial_eval

from shardkit._jax.jaxprs import file_name, not_reached


def calls(w, x):
    return jax.jit(lambda a, b: (jnp.sin(a), a * b, 2.0))(w, x)


def loop(w, x):
    def body(carry, each):
        a, b, c = carry
        return (b, c, c * each), (a, each)

    return jax.lax.scan(body, (x[0], w[0], w[1]), w)


def crossed(w, x):
    return jax.lax.scan(lambda carry, _: ((carry[1], carry[0] + 1, carry[2]), carry[0]), (w[0], x[0], w[1]), length=3)


def branches(w, x):
    return jax.lax.cond(w[0] > 0, lambda w, x: (w, x, w), lambda w, x: (w + 1, w, 2 * w), w, x)


def chosen(w, x):
    return jax.lax.cond(x[0] > 0, lambda w: w, lambda w: 2 * w, w), w


def recomputed(w, x):
    return jax.checkpoint(lambda w, x: (jnp.cos(w), jax.nn.relu(w) * x))(w, x)


def repeated(w, x):
    until = jax.lax.while_loop
    return [until(lambda s: s[0] < 3, lambda s: (s[0] + 1, s[1] * 2), (a[0], a[1])) for a in (w, x)]


@pytest.mark.parametrize("fn", [calls, loop, crossed, branches, chosen, recomputed, repeated])
def test_what_follows_from_the_first_arguments_alone_is_what_dead_code_says(fn):
    jaxpr = jax.make_jaxpr(lambda w, x: jax.tree.leaves(fn(w, x)))(jnp.arange(1.0, 4), jnp.ones(3)).jaxpr
    results = len(jaxpr.outvars)
    needs = [partial_eval.dce_jaxpr(jaxpr, [i == k for i in range(results)])[1] for k in range(results)]
    still, moved = not_reached(jaxpr, 1, results)
    assert moved == [used[1] for used in needs]
    assert 0 < sum(moved) < results
    w = jnp.arange(1.0, 4)
    expected = jax.core.eval_jaxpr(jaxpr, [], w, jnp.ones(3))
    assert [x.tolist() for x in jax.core.eval_jaxpr(still, [], w)] == [
        x.tolist() for x, moves in zip(expected, moved, strict=True) if not moves
    ]


def test_an_effect_of_other_arguments_is_left_out(capsys):
    def fn(w, x):
        jax.debug.print("{}", x)
        return jnp.sin(w), w * x

    still, moved = not_reached(jax.make_jaxpr(fn)(1.0, 2.0).jaxpr, 1, 2)
    assert (moved, len(still.invars), [e.primitive.name for e in still.eqns]) == ([False, True], 1, ["sin"])


def test_unrolled_layers_are_read_in_one_pass(monkeypatch):
    passes = []
    dce = partial_eval.dce_jaxpr
    monkeypatch.setattr(partial_eval, "dce_jaxpr", lambda *args, **kwargs: passes.append(1) or dce(*args, **kwargs))

    def layers(w, x):
        kept = []
        for _ in range(48):
            kept += [x, jnp.sin(w)]
            x = jnp.tanh(x * w)
        return x, *kept

    _, moved = not_reached(jax.make_jaxpr(layers)(1.0, 2.0).jaxpr, 1, 96)
    assert moved == [True, False] * 48
    assert len(passes) == 1


@pytest.mark.check
def test_a_cell_of_a_notebook_is_named_by_its_number(monkeypatch):
    """A census in a notebook whose lines stand in files named by a hash, or by the number of an earlier run."""
    numbers = {"/tmp/ipykernel_7/4021874.py": 3}

    def label(file):
        return ("Cell", f"In[{numbers[file]}]") if file in numbers else None

    named = SimpleNamespace(compile=SimpleNamespace(format_code_name=label))
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: named))
    assert [file_name(file) for file in ("/tmp/ipykernel_7/4021874.py", "/a/model.py")] == ["cell 3", "model.py"]
    numbers["/tmp/ipykernel_7/4021874.py"] = 5
    assert file_name("/tmp/ipykernel_7/4021874.py") == "cell 5"
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: None))  # imported by a script
    assert file_name("/a/model.py") == "model.py"
