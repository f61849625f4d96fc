"""The parameters of a run alone: loaded onto every plan, bit by bit, or refused in a sentence."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from safetensors.numpy import load_file, save_file

import shardkit as sk
from shardkit.runtime import Checkpoints, load_params
from shardkit.runtime.checkpoint import reading
from support.checkpoint_rows import KEY, ROWS, make, params
from support.refusals import refused
from support.trees import assert_laid_out


def natural():
    """The parameters, each element another number."""
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda x: rng.normal(size=x.shape).astype(np.float32), params())


def like(row):
    """Shapes, dtypes and layouts under a plan."""
    return make(row).init.abstract(params()).params


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run under a plan that pads, whose newest step is 0."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    with Checkpoints(folder) as checkpoints:
        checkpoints.save(make("fsdp padded").init(natural(), KEY))
    return folder


def same(found, wanted):
    for x, y in zip(*map(jax.tree.leaves, (sk.unpadded(found), wanted)), strict=True):
        np.testing.assert_array_equal(x, y)


# proves F62: bit for bit, from one plan onto another
@pytest.mark.quick("one device", "fsdp padded", "unequal stages, fsdp padded")
@pytest.mark.parametrize("row", ROWS)
def test_the_parameters_of_a_run_under_every_plan(run, row):
    """They lie as init lays them: that loading undoes saving does not show that a step would take them."""
    loaded, made = load_params(run, like(row)), make(row).init(natural(), KEY).params
    jax.tree.map(np.testing.assert_array_equal, loaded, made)
    assert_laid_out(loaded, like(row))


def test_nothing_else_is_read(run, monkeypatch):
    asked, load = [], reading.load_arrays
    monkeypatch.setattr(reading, "load_arrays", lambda path, wanted: asked.append({*wanted}) or load(path, wanted))
    head = {name: x for name, x in like("dp").items() if name != "layers"}
    assert load_params(run, head, step=0, partial=True).keys() == head.keys()
    assert asked == [{f"params.{name}" for name in head}]
    assert load_params(run, {}, partial=True) == {}


def test_another_floating_dtype(run):
    half = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16, sharding=x.sharding), like("fsdp"))
    same(load_params(run, half, cast=True), jax.tree.map(lambda x: x.astype(jnp.bfloat16), natural()))
    assert refused(lambda: load_params(run, half)).endswith(
        "has leaf 'embed' of dtype float32; like has bfloat16. Pass cast=True to convert it."
    )


def test_what_is_refused(run):
    embed = like("dp")["embed"]

    def laid(shape, dtype=jnp.float32):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=embed.sharding)

    where = f"load_params: '{run / '0'}'"
    others = dict(like("dp"), embed=laid((2, 2)))
    assert refused(lambda: load_params(run, others)) == (
        f"{where} has leaf 'embed' of shape {list(embed.shape)}; like has [2, 2]. Build the parameters with the sizes "
        "of the run."
    )
    assert refused(lambda: load_params(run, dict(like("dp"), embed=laid(embed.shape, jnp.int32)), cast=True)) == (
        f"{where} has leaf 'embed' of dtype float32; like has int32. Load it in its own dtype, and convert it."
    )
    assert refused(lambda: load_params(run, dict(like("dp"), more=embed))) == (
        f"{where} lacks 1 leaf ('more'). Build the parameters as the run did."
    )
    assert refused(lambda: load_params(run, {"embed": embed})).endswith(
        "that like lacks. Pass partial=True to leave them out."
    )
    assert refused(lambda: load_params(run, like("dp"), step=1)) == (
        f"load_params: '{run}' has no finished step 1; it has 0. Pass one of these as step=."
    )
    assert refused(lambda: load_params(run, make("dp").init.abstract(params()))) == (
        "load_params: like must be the parameters; got a TrainState. Pass like.params, or restore all of it with "
        "Checkpoints."
    )
    assert refused(lambda: load_params(run, {"w": np.ones(2)})) == (
        "load_params: every leaf must be sharded over a mesh of devices; leaf 'w' has None. Pass the result of init or "
        "init.abstract of make_train_step, over a mesh from make_mesh."
    )


def test_evaluation_says_how_its_parameters_lie(tmp_path):
    plan = sk.fsdp("data", min_size=1, uneven="pad")
    mesh = sk.make_mesh(data=8)
    evaluate = sk.make_eval_step(lambda params, batch, keys: jnp.mean(batch @ params["w"]), mesh=mesh, plan=plan)
    whole = NamedSharding(mesh, PartitionSpec())
    with Checkpoints(tmp_path) as checkpoints:
        w, step = jax.device_put((np.arange(3, dtype=np.float32), jnp.int32(1)), whole)
        checkpoints.save(sk.TrainState(step, {"w": w}, (), None))
    loaded = load_params(tmp_path, evaluate.abstract({"w": jnp.ones(3)}))
    assert loaded["w"].array.shape == (8,)
    assert float(evaluate(loaded, np.ones((8, 3), np.float32))["loss"]) == 3
    made = evaluate.abstract(lambda key: {"w": jax.random.normal(key, (3,))})
    assert jax.tree.leaves(made) == jax.tree.leaves(evaluate.abstract({"w": jnp.ones(3)}))


@pytest.mark.parametrize("row", ["fsdp padded", "pipeline of chunks"])
def test_files_of_other_libraries(row, tmp_path):
    """As docs/howto/resume_elsewhere.md writes and reads them, bit by bit."""
    name = lambda path: jax.tree_util.keystr(path, simple=True, separator=".")  # noqa: E731
    whole = sk.runtime.fetch(sk.unpadded(make(row).init(natural(), KEY).params))
    leaves = jax.tree_util.tree_leaves_with_path(whole)
    save_file({name(path): x for path, x in leaves}, tmp_path / "weights.safetensors")
    file = load_file(tmp_path / "weights.safetensors")
    assert file["layers.up"].shape == natural()["layers"]["up"].shape
    same(jax.tree_util.tree_map_with_path(lambda path, _: file[name(path)], params()), natural())
