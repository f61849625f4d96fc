"""Every plan in one table beside one device: which fit, what is refused, and the tolerance."""

import math
from importlib import import_module

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import shardkit as sk
from shardkit import bench
from shardkit.bench.workload import cases_of, explain_left_out, reference
from shardkit.models import transformer

strategies = import_module("shardkit.bench.strategies")  # the package has a function of this name
CONFIG = transformer.Config(layers=4, dim=16, heads=4)


def names(work, **sizes):
    return list(cases_of(work, sk.make_mesh(jax.devices()[: math.prod(sizes.values())], **sizes)))


@pytest.mark.check
def test_every_plan_that_fits_the_mesh_is_a_case():
    """A plan forgotten, or one that the mesh cannot hold, shows here; so does why the others are left out."""
    work = bench.Workload(None, None, None, None, CONFIG)
    data = ["jit: dp", "dp", "jit: zero1", "zero1", "jit: fsdp", "fsdp", "fsdp, by layer"]
    two = ["jit: dp x tp", "dp x tp", "jit: fsdp x tp", "fsdp x tp", "fsdp x tp, sequence"]
    many = ["dp, 2 microbatches", "zero2, 2 microbatches", "fsdp, 2 microbatches"]
    pipelines = ["GPipe", "1F1B"]
    assert names(work, data=2, model=4) == ["one device", *data, *two, *many, *pipelines]
    assert names(work, data=8) == ["one device", *data, *many]
    tp = ["jit: tp", "tp", "tp, sequence"]
    assert names(work, model=4) == ["one device", *data, *tp, *many, *pipelines]
    assert names(work, model=8) == ["one device", *data, *many]
    assert explain_left_out({"model": 8}, work) == [
        "tensor parallelism: 4 heads of width 64 over model=8",
        "pipelines: 4 layers over model=8",
    ]
    own = names(bench.Workload(None, None, None, {}), data=4, model=2)
    assert {"dp", "zero1", "zero2, 2 microbatches", "fsdp", "jit: fsdp x rules", "fsdp x rules"} < set(own)


@pytest.mark.check
def test_what_cannot_be_compared_is_refused(mesh2x4, monkeypatch):
    def error(work, mesh=mesh2x4, **options):
        with pytest.raises(ValueError) as found:
            bench.strategies(work, mesh=mesh, **options)
        return str(found.value)

    work = bench.Workload(None, None, {"x": np.ones((16, 2))})
    assert error(work, sk.make_mesh(stage=8)) == (
        "strategies: the mesh must have the axes 'data' and 'model', or one of them; got stage=8. Write for example "
        "data=4 model=2; pipelines run over 'model'."
    )
    assert error(work, optimizer="sgd") == (
        "strategies: optimizer must be 'adamw' or 'muon'; got 'sgd'. Pass for example optimizer='adamw'."
    )
    assert error(work, only=["ddp"]).startswith(
        "strategies: --only must name cases that fit the mesh; got 'ddp'; these fit: 'jit: dp', "
    )
    assert error(bench.Workload(None, None, {"x": np.ones((12, 2))})) == (
        "strategies: dim 0 of every array of the batch must be the example, divisible by devices x microbatches; got "
        "12 for 8 x 2. Pass 16 examples."
    )
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    assert error(work) == (
        "strategies: all cases must run in one process, beside one device; got 2 processes. Run the command without "
        "shardkit launch."
    )


def test_the_tolerance_is_of_the_order_of_one_devices_sums():
    """Ten times what the reverse order changes, where that is more than the rounding of the sums themselves."""
    ones = jnp.ones(2)
    carry = ones, (optax.ScaleByAdamState(jnp.int32(0), ones, ones),)
    for change, wanted in ((1e-4, 1e-3), (0.0, 8 * np.finfo(np.float32).eps)):
        step = lambda carry, batch, by=change: (carry, {"loss": 1 + by * batch[0]})  # noqa: E731
        case = bench.Case("one device", step, carry, (jnp.zeros(16).at[0].set(1.0),))
        assert strategies._find_tolerance(case) == pytest.approx(wanted, rel=2e-3)


# proves S61: explicit collectives give what jit with NamedShardings gives, and send less
@pytest.mark.parametrize("optimizer", [pytest.param("adamw", marks=pytest.mark.deep), "muon"])
def test_explicit_fsdp_sends_less_than_the_automatic_partitioner(data8, optimizer):
    config = transformer.Config(vocabulary=64, layers=2, dim=64, heads=2)
    with jax.numpy_dtype_promotion("standard"):  # optax does not trace under strict promotion
        work, how = reference(config, 16, 32), {"only": ["jit: fsdp", "fsdp"], "calls": 1, "rounds": 1}
        _, theirs, ours = bench.strategies(work, mesh=data8, optimizer=optimizer, **how)
    assert not theirs["wrong"] and not ours["wrong"]
    assert ours["wire_bytes"] == ours["written_bytes"] < theirs["wire_bytes"]
