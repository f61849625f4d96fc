"""What follows from some arguments of a program alone, read in one pass; the registry of primitives."""

import sys
import sysconfig
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, partial_eval
from jax.sharding import PartitionSpec as P

import shardkit as sk
from shardkit._jax import primitives
from shardkit._jax.dependence import find_independent
from shardkit._jax.jaxprs import RunShare, file_name, find_share, own_line, share_scope, walk
from shardkit.analysis import lint
from shardkit.analysis.hlo import collectives, differences, proto
from shardkit.cost.collectives import COLLECTIVE_KINDS
from shardkit.testing import emulate


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
    still, moved = find_independent(jaxpr, 1, results)
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

    still, moved = find_independent(jax.make_jaxpr(fn)(1.0, 2.0).jaxpr, 1, 2)
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

    _, moved = find_independent(jax.make_jaxpr(layers)(1.0, 2.0).jaxpr, 1, 96)
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


@pytest.mark.check
def test_a_branch_counts_as_often_as_its_scope_says_it_runs():
    """Spread pipelines run embedding and head in some of the ticks; a branch inside of theirs has no scope."""

    def inner(x):
        return lax.cond(x[0] > 0, jnp.sin, lambda x: x, x)

    def tick(x, number):
        with jax.named_scope(share_scope(RunShare(2, 5))):
            return lax.cond(number < 2, lambda x: jnp.cos(inner(x)), lambda x: x, x), None

    jaxpr = jax.make_jaxpr(lambda x: lax.scan(lambda x, _: lax.scan(tick, x, np.arange(5)), x, length=3))(np.ones(2))
    times = {site.name: site.times for site in walk(jaxpr.jaxpr)}
    assert (times["cos"], times["sin"], times["lt"]) == (6, 6, 15)
    assert RunShare(2, 5).count_runs(None) is None
    assert find_share("jit(f)/while/body/shardkit_runs_2_of_5/cond") == (2, 5)
    assert find_share("jit(f)/while/body/shardkit_runs_2_of_5/cond/branch_1_fun/cond") is None


# Collectives of jax 0.10 to 0.12 that the census refuses, beside the halves of asynchronous ones.
REFUSED = {"psend", "precv", "pbroadcast_dynamic", "unreduced_pmax", "unreduced_pmin"}


def test_the_script_of_a_command_is_not_the_line_of_a_user(tmp_path):
    """`shardkit audit` once named line 4 of its own script for each collective outside of a loss."""
    script = (str(Path(sysconfig.get_path("scripts")) / "shardkit"), 4, "<module>")
    assert own_line([script]) == ""
    assert own_line([script, (str(tmp_path / "train.py"), 7, "make")]) == "train.py:7 (make)"


@pytest.mark.check
def test_rows_are_primitives_and_the_collectives_of_jax_are_rows():
    """A row that jax renamed, a collective that it added, a kind without a formula, and one that is not emulated."""
    named = {
        file: {each.name.removesuffix("_p") for each in vars(module).values() if isinstance(each, Primitive)}
        for file, module in [*sys.modules.items()]
        if file.startswith(("jax._src", "shardkit.collectives.replicated"))
    }
    rows = primitives.TABLE
    assert rows.keys() <= set().union(*named.values())
    others = named["jax._src.lax.parallel"] - rows.keys() - REFUSED
    assert {name for name in others if not name.endswith(("_start", "_done"))} == set()
    sending = {name: row for name, row in rows.items() if row.kind}
    assert {row.kind for row in sending.values()} == {*COLLECTIVE_KINDS, "broadcast"}
    assert {row.gradient for row in rows.values()} <= {*COLLECTIVE_KINDS, None}
    assert all(row.why for row in sending.values() if row.gradient)
    assert {name for name, row in sending.items() if not row.emulate} == {"pbroadcast"}
    assert not any(row.opcode or row.emulate or row.reduces for row in rows.values() if not row.kind)


SWAP = Primitive("swap")
SWAP.def_abstract_eval(lambda x, *, over: x)
ad.deflinear2(SWAP, lambda cotangent, _, *, over: [SWAP.bind(cotangent, over=over)])


def test_a_primitive_of_ones_own_is_one_row(monkeypatch):
    """A reader that knows jax's own primitives by name."""
    for table in (primitives.TABLE, primitives.KIND_OF_OPCODE):
        monkeypatch.setitem(table, "swap", None)  # and taken out after the test
    row = primitives.TABLE["all_to_all"]._replace(name="swap", opcode="swap", why="{value} is swapped over {over}.")
    primitives.register(row._replace(emulate=lambda x, axes, _: lax.all_to_all(x, axes, 0, 0), axes=("over",)))
    swap = lambda x: SWAP.bind(x, over=("data",))  # noqa: E731
    mesh, x, w = sk.abstract_mesh(data=4), jnp.arange(16.0), jnp.cos(jnp.arange(16.0))
    on = lambda f: jax.shard_map(f, mesh=mesh, in_specs=P("data"), out_specs=P("data"))  # noqa: E731
    (row,) = sk.census(on(swap), x).rows
    assert (row.kind, row.primitive, row.axes, row.sent) == ("all_to_all", "swap", ("data",), 12)
    assert [found.rule for found in lint(on(lambda x: lax.cond(x[0] > 0, swap, lambda x: x, x)), x)] == [
        "divergent-collective"
    ]
    (reason,) = sk.explain(jax.grad(lambda x: jnp.vdot(on(swap)(x), x)), x)
    assert reason.why == "x is swapped over 'data'."
    emulated = emulate(swap, {"data": 4}, P("data"), P("data"))
    np.testing.assert_array_equal(emulated(x), x.reshape(4, 4).T.ravel())
    np.testing.assert_array_equal(jax.grad(lambda x: jnp.vdot(emulated(x), w))(x), w.reshape(4, 4).T.ravel())
    assert differences.is_written(SimpleNamespace(op_name="jit(step)/swap"))
    compiled = proto.Instruction(id=1, opcode="swap-start")
    assert collectives.Pairs(None).collective_of(None, compiled).kind == "all_to_all"
