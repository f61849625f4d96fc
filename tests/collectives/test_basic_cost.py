"""collectives/basic.py: what each kernel sends, counted in the traced program, and the wording of its errors."""

import re
from importlib.util import find_spec

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import shardkit as sk
from shardkit import cost
from shardkit._jax.compat import UnboundAxisError
from support.refusals import unbound_axis

N, B = 4, 6 * 8 * 4  # devices along the axis, bytes of the float32 block [6, 8] on each
BLOCK = jax.ShapeDtypeStruct((2 * 6, N * 8), np.float32)


def counted(kernel):
    """The census of a kernel on a mesh of 2 x N, whose input is a block [6, 8] that differs on every device."""
    mesh = sk.make_mesh(data=2, model=N)
    return sk.census(jax.shard_map(kernel, mesh=mesh, in_specs=P("data", "model"), out_specs=P("data", "model")), BLOCK)


def traced(kernel):
    """Its collectives: the primitive, the axes and the bytes of the operand."""
    return [(row.primitive.removesuffix("_invariant"), row.axes, row.bytes_in) for row in counted(kernel).rows]


AROUND = "2 B (n-1)/n bytes in 2 (n-1) hops"
COSTS = {  # as the docstrings say
    sk.all_reduce: f"{AROUND}, as a ring sends it.",
    sk.all_gather: "B (n-1) bytes in n-1 hops, B being one shard.",
    sk.reduce_scatter: "B (n-1)/n bytes in n-1 hops.",
    sk.all_to_all: "B (n-1)/n bytes, to n-1 other devices.",
    sk.shift: "B bytes in one step (min(by, n - by) hops in a ring); none where by is a multiple of n.",
    sk.broadcast: f"{AROUND}: a masked all_reduce, which makes the result invariant.",
}
KERNELS = [  # kernel, call, its primitive
    (sk.all_reduce, lambda x: sk.all_reduce(x, "model"), "psum"),
    (sk.all_reduce, lambda x: sk.all_reduce(x, "model", op="mean"), "psum"),
    (sk.all_reduce, lambda x: sk.all_reduce(x, "model", op="max"), "pmax"),
    (sk.all_reduce, lambda x: sk.all_reduce(x, "model", op="min"), "pmin"),
    (sk.all_gather, lambda x: sk.all_gather(x, "model", dim=1), "all_gather"),
    (sk.all_gather, lambda x: sk.all_gather(x, "model", replicated=True), "all_gather"),
    (sk.reduce_scatter, lambda x: sk.reduce_scatter(x, "model", dim=1), "reduce_scatter"),
    (sk.all_to_all, lambda x: sk.all_to_all(x, "model", split_dim=1, concat_dim=0), "all_to_all"),
    (sk.shift, lambda x: sk.shift(x, "model", by=3), "ppermute"),
    (sk.broadcast, lambda x: sk.broadcast(x, "model", source=1), "psum"),
]


@pytest.mark.parametrize(("kernel", "call", "primitive"), KERNELS)
def test_one_collective_of_one_block(kernel, call, primitive):  # proves F76
    assert re.search(r"Cost: (.+)", kernel.__doc__).group(1) == COSTS[kernel]
    assert traced(call) == [(primitive, ("model",), B)]


def test_a_tuple_of_axes_is_one_collective():
    both = ("model", "data")
    assert traced(lambda x: sk.all_reduce(x, both)) == [("psum", both, B)]
    assert traced(lambda x: sk.reduce_scatter(x, both, dim=1)) == [("reduce_scatter", both, B)]
    assert traced(lambda x: sk.shift(x, both)) == [("ppermute", ("data", "model"), B)]


def test_what_sends_nothing():  # proves S42
    sizes = []

    def sizes_only(x):
        sizes.extend(sk.axis_size(axis) for axis in ("data", "model", ("model", "data")))
        return x * np.float32(sizes[-1])

    assert traced(sizes_only) == []
    assert sizes == [2, 4, 8]
    assert all(type(size) is int for size in sizes)
    assert traced(lambda x: sk.vary(x[:, :1] * 0 + sk.axis_index("model").astype(x.dtype), ("data", "model"))) == []
    for by in (0, N, -N, 2 * N):
        assert traced(lambda x, by=by: sk.shift(x, "model", by=by)) == []
    assert traced(lambda x: sk.shift(x, "model", by=0, wrap=False)) == []

    mesh = sk.make_mesh(data=2, model=N)
    f = jax.shard_map(lambda x: x * sk.axis_size("model"), mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    text = jax.jit(f).lower(jax.ShapeDtypeStruct((8,), np.int32)).compile().as_text()
    assert "multiply" in text
    assert not re.search(r"all-reduce|all-gather|collective-permute|reduce-scatter|all-to-all", text)


def test_gather_and_scatter_are_transposes():  # proves S46
    def backward(kernel):
        return lambda x: jax.vjp(kernel, x)[1](kernel(x))[0]

    gather = backward(lambda x: sk.all_gather(x, "model", dim=1))
    forward = [("all_gather", ("model",), B)] * 2
    assert traced(gather) == [*forward, ("reduce_scatter", ("model",), N * B)]
    scatter = backward(lambda x: sk.reduce_scatter(x, "model", dim=1))
    forward = [("reduce_scatter", ("model",), B)] * 2
    assert traced(scatter) == [*forward, ("all_gather", ("model",), B // N)]


# proves S47: by the docstrings, by the cost model and as counted, and the gather that makes it whole is the other half
def test_a_scatter_sends_half_of_a_reduction():
    def sent(cost):
        return eval(re.match(r"(2 )?(B \(n-1\)(?:/n)?)", cost).group(0).replace(" ", "*"), {"B": B, "n": N})

    costs = {kernel.__name__: sent(cost) for kernel, cost in COSTS.items() if kernel is not sk.shift}
    assert costs == {"all_reduce": 288, "broadcast": 288, "all_gather": 576, "reduce_scatter": 144, "all_to_all": 144}
    assert [cost.wire(kind, B, N).sent for kind in ("all_reduce", "reduce_scatter")] == [288, 144]
    assert counted(lambda x: sk.all_reduce(x, "model")).sent() == 288
    assert counted(lambda x: sk.reduce_scatter(x, "model", dim=1)).sent() == 144
    assert counted(lambda x: sk.all_gather(sk.reduce_scatter(x, "model", dim=1), "model", dim=1)).sent() == 288


def test_a_reduction_of_marked_parameters_stands_where_it_is_written():
    """The trap of vma: an unmarked parameter's gradient is summed automatically, before the mean, if data vary."""
    mesh = sk.make_mesh(jax.devices()[:4], data=4)
    x = np.arange(1, 9, dtype=np.float32)  # true gradient of mean((w x)^2) at w=1: 2 mean(x^2) = 51

    def step(mark):
        def local(w, x_b):
            w = sk.vary(w, "data") if mark else w
            grad = jax.grad(lambda w: jnp.mean((w * x_b) ** 2))(w)
            return sk.all_reduce(grad, "data", op="mean")

        return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=(P(), P("data")), out_specs=P()))

    assert float(step(mark=True)(np.float32(1), x)) == 51
    assert float(step(mark=False)(np.float32(1), x)) == 4 * 51  # T6
    assert [row.kind for row in sk.census(step(mark=True), np.float32(1), x).rows] == ["all_reduce"]


UNBOUND = "is not an axis of this mesh; its axes are 'data', 'model'. Use one of them, or add the axis to make_mesh."
RANK2 = "for an array of rank 2. Choose 0 to 1."
CALLS = {
    "axis_size": lambda x, axis: x * sk.axis_size(axis),
    "axis_index": lambda x, axis: x + sk.axis_index(axis),
    "vary": sk.vary,
    "all_reduce": sk.all_reduce,
    "all_gather": sk.all_gather,
    "reduce_scatter": sk.reduce_scatter,
    "all_to_all": lambda x, axis: sk.all_to_all(x, axis, split_dim=0, concat_dim=0),
    "shift": sk.shift,
    "broadcast": sk.broadcast,
}


def refused(call):
    with pytest.raises((ValueError, TypeError)) as error:
        traced(call)
    return type(error.value), str(error.value)


# proves T4: an axis that no shard_map binds
@pytest.mark.parametrize("name", CALLS)
def test_errors_of_the_axis(name):
    call = CALLS[name]
    assert refused(lambda x: call(x, "stage")) == (UnboundAxisError, f"{name}: axis 'stage' {UNBOUND}")
    assert refused(lambda x: call(x, ("data", "model", "data"))) == (
        ValueError,
        f"{name}: axis 'data' is used twice in ('data', 'model', 'data'). Name each axis once.",
    )
    assert refused(lambda x: call(x, 3)) == (
        TypeError,
        f"{name}: {'axes' if name == 'vary' else 'axis'} must be a mesh axis name or a tuple of "
        f"names{' or ()' * (name == 'vary')}; got 3. Pass for example axis='data' or axis=('data', 'model').",
    )
    with unbound_axis(
        f"{name}: axis 'data' is not bound here, because no shard_map surrounds this call. "
        "Call it inside jax.shard_map over a mesh with that axis."
    ):
        call(np.ones((2, 2), np.float32), "data")


DIVIDES = "dim 0 must be divisible by {}; got size 6 over {} devices. Pad dim 0 or choose another dim."
ERRORS = {
    "all_reduce: op must be 'sum', 'mean', 'max', 'min', 'any' or 'all'; got 'median'. "
    "Pass for example op='sum'.": lambda x: sk.all_reduce(x, "data", op="median"),
    f"all_gather: dim must name a dimension of the array; got 2 {RANK2}": lambda x: sk.all_gather(x, "data", dim=2),
    "all_gather: dim must name a dimension of the array; got 0 for an array of rank 0. "
    "Choose an array of rank 1 or more.": lambda x: sk.all_gather(x[0, 0], "data"),
    f"reduce_scatter: dim must name a dimension of the array; got -3 {RANK2}": lambda x: sk.reduce_scatter(
        x, "data", dim=-3
    ),
    f"all_to_all: split_dim must name a dimension of the array; got 2 {RANK2}": lambda x: sk.all_to_all(
        x, "data", split_dim=2, concat_dim=0
    ),
    f"all_to_all: concat_dim must name a dimension of the array; got 5 {RANK2}": lambda x: sk.all_to_all(
        x, "data", split_dim=0, concat_dim=5
    ),
    "reduce_scatter: " + DIVIDES.format("axis 'model'", 4): lambda x: sk.reduce_scatter(x, "model", dim=-2),
    "reduce_scatter: " + DIVIDES.format("axes 'data', 'model'", 8): lambda x: sk.reduce_scatter(
        {"ok": x.T, "bad": x}, ("data", "model")
    ),
    "all_to_all: " + DIVIDES.format("axis 'model'", 4): lambda x: sk.all_to_all(x, "model", split_dim=0, concat_dim=1),
    "broadcast: source must be a device of the axis; got 4 over 4 devices. Choose 0 to 3.": lambda x: sk.broadcast(
        x, "model", source=4
    ),
    "broadcast: source must be a device of the axis; got -1 over 8 devices. Choose 0 to 7.": lambda x: sk.broadcast(
        x, ("data", "model"), source=-1
    ),
}


@pytest.mark.parametrize("message, call", ERRORS.items())
def test_errors_of_the_arguments(call, message):
    assert refused(call) == (ValueError, message)
    if message.startswith("reduce_scatter: dim 0 must be divisible by axis"):  # which is the default
        assert refused(lambda x: sk.reduce_scatter(x, "model")) == (ValueError, message)


# proves F86. Catches what the TPU's compiler runs as an all_reduce, of twice the bytes: a scatter beside a dim of size
# 1, the gradient of such a gather, and the scatter of a flat array.
@pytest.mark.skipif(find_spec("libtpu") is None, reason="the TPU compiler is not installed: shardkit[aot]")
def test_on_a_tpu_a_scatter_stays_one():
    def kernel(x):
        gathered = jax.grad(lambda x: jnp.sum(jnp.sin(sk.all_gather(x, "data", dim=2))))(x)
        total = sk.hierarchical.all_reduce(jnp.cos(x), "model", "data")
        (packed,) = sk.collectives.all_reduce_tree([jnp.tan(x)], ("data", "model"), scatter_from=0)
        return sk.reduce_scatter(jnp.sin(x), "model", dim=1), gathered, total, packed

    specs = {
        "in_specs": P(None, None, "data"),
        "out_specs": (P(None, "model", "data"), P(None, None, "data"), P(), P()),
    }
    f = jax.jit(jax.shard_map(kernel, mesh=sk.abstract_mesh(data=2, model=2), **specs))
    report = sk.aot.compile(f, (jax.ShapeDtypeStruct((1, 1024, 1024), np.float32),), topology="v5e:2x2")
    sent = sorted((row.kind, row.axes, float(row.total / 2**20)) for row in report.rows)
    assert sent == [
        ("all_gather", ("data",), 2),
        ("all_gather", ("data", "model"), 1.5),
        ("all_gather", ("model",), 1),
        ("all_reduce", ("data",), 1),
        ("reduce_scatter", ("data",), 2),
        ("reduce_scatter", ("data", "model"), 1.5),
        ("reduce_scatter", ("model",), 1),
        ("reduce_scatter", ("model",), 1),
    ]


# Catches a shape that is derived from a size of 0.
@pytest.mark.check
@pytest.mark.parametrize(
    ("shape", "dim"), [((8, 0), 0), ((1, 8, 1, 0), -3), ((0, 8), 1), ((8, 1, 1, 3), -4), ((8,), 0)]
)
def test_empty_arrays_and_dims_of_size_1_keep_their_shapes(shape, dim):
    def kernel(x):
        total = sk.hierarchical.all_reduce(x, "b", "a")
        (packed,) = sk.collectives.all_reduce_tree([x], ("a", "b"), scatter_from=0)
        return sk.reduce_scatter(x, ("a", "b"), dim=dim), sk.all_gather(x, ("a", "b"), dim=dim), total, packed

    one, whole = list(shape), list(shape)
    one[dim], whole[dim] = shape[dim] // 8, shape[dim] * 8
    everywhere = jax.vmap(jax.vmap(kernel, axis_name="b", axis_size=2), axis_name="a", axis_size=4)
    found = jax.eval_shape(everywhere, jax.ShapeDtypeStruct((4, 2, *shape), np.float32))
    assert [x.shape[2:] for x in found] == [tuple(one), tuple(whole), shape, shape]
