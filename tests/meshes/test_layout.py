"""layout.py: specs from logical names, local and global shapes, placement, and what each device holds."""

import math
import re

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardkit as sk
from shardkit.meshes.layout import canonical
from support.refusals import raises, refusals, refused

RULES = (("batch", "data"), ("hidden", "model"), ("embed", None))
SPELLINGS = [(P(None), P()), (P(None, None), P()), (P("data", None), P("data"))]
SPELLINGS += [(P(("data",)), P("data")), (P((), "model"), P(None, "model"))]
SPELLINGS += [(P(("data", "model"), ()), P(("data", "model"))), (P(None, "model"), P(None, "model"))]


@pytest.mark.parametrize("rules", [RULES, dict(RULES)], ids=["pairs", "mapping"])
def test_rules_give_specs(rules):  # proves S24, F4
    logical = {
        "in": ("embed", "hidden"),
        "layers": [("hidden", "embed"), ("hidden",)],
        "scale": (),
        "x": ("batch", None),
    }
    assert sk.specs_from_rules(logical, rules) == {
        "in": P(None, "model"),
        "layers": [P("model"), P("model")],
        "scale": P(),
        "x": P("data"),
    }
    assert sk.specs_from_rules(("rows", None), {"rows": ("data", "model")}) == P(("data", "model"))


TWICE = "Give the other dim another axis, or None."
RULE_ERRORS = refusals(
    {
        "specs_from_rules: leaf out.0 has the logical axis 'vocabulary', which has no rule; there are rules for "
        "'batch', 'hidden', 'embed'. Add a rule; None replicates the dim.": (
            {"out": [("hidden", "vocabulary")]},
            RULES,
        ),
        "specs_from_rules: leaf w has the logical axis 'hidden', which has no rule; there are rules for none. "
        "Add a rule; None replicates the dim.": ({"w": ("hidden",)}, {}),
        "specs_from_rules: leaf w: a mesh axis can shard one dim only; got 'model' twice in P('model', 'model') "
        f"(from the logical axes ('embed', 'hidden')). {TWICE}": (
            {"w": ("embed", "hidden")},
            {"embed": "model", "hidden": "model"},
        ),
        "specs_from_rules: logical axis 'hidden' has two rules. Remove one.": (
            {"w": ("embed", "hidden")},
            [*RULES, ("hidden", "data")],
        ),
    },
    {
        "specs_from_rules: leaf w must be a tuple of logical axis names or None, one for each dim; got 'hidden'. "
        "Pass for example ('embed', 'hidden').": ({"w": "hidden"}, RULES),
        "specs_from_rules: leaf (the whole tree) must be a tuple of logical axis names or None, one for each dim; "
        "got 3. Pass for example ('embed', 'hidden').": (3, RULES),
    },
)


@pytest.mark.parametrize("kind, message, case", RULE_ERRORS)
def test_errors_of_rules(kind, case, message):
    logical, rules = case
    with raises(kind, message):
        sk.specs_from_rules(logical, rules)


LAYOUTS = [  # a global array [8, 16] on data=2 x model=4
    (P("data", "model"), (4, 4)),
    (P("data", None), (4, 16)),
    (P("data"), (4, 16)),
    (P(None, "model"), (8, 4)),
    (P("model", "data"), (2, 8)),
    (P(("data", "model")), (1, 16)),
    (P(None, ("model", "data")), (8, 2)),
    (P(()), (8, 16)),
    (P(None, None), (8, 16)),
    (P(), (8, 16)),
]


@pytest.mark.quick("spec1-local1", "spec4-local4", "spec6-local6", "spec7-local7")
@pytest.mark.parametrize(("spec", "local"), LAYOUTS)
def test_specs_and_local_shapes(spec, local, mesh2x4):  # proves S20, S21, S22, S32
    x = np.arange(128, dtype=np.float32).reshape(8, 16)
    placed = sk.shard(x, mesh2x4, spec)
    assert sk.local_shape(x.shape, spec, mesh2x4) == local
    assert {shard.data.shape for shard in placed.addressable_shards} == {local}
    assert placed.sharding == NamedSharding(mesh2x4, canonical(spec))
    np.testing.assert_array_equal(np.asarray(placed), x)
    f = jax.shard_map(lambda x_l: jnp.full(1, x_l.size), mesh=mesh2x4, in_specs=spec, out_specs=P())
    assert int(f(placed)[0]) == math.prod(local)


@st.composite
def layouts(draw):
    sizes = draw(st.sampled_from([{"a": 8}, {"a": 2, "b": 4}, {"a": 2, "b": 1, "c": 3}]))
    rank = draw(st.integers(0, 3))
    free = draw(st.permutations(list(sizes)))
    entries = []
    for _ in range(rank):
        taken = draw(st.integers(0, len(free)))
        entries.append(tuple(free[:taken]))
        free = free[taken:]
    local = draw(st.lists(st.integers(0, 5), min_size=rank, max_size=rank))
    return sizes, P(*entries), tuple(local)


@given(layouts())
def test_shapes_there_and_back(layout):  # proves S32
    sizes, spec, local = layout
    mesh = sk.make_mesh(jax.devices()[: math.prod(sizes.values())], **sizes)
    whole = tuple(
        size * math.prod(sizes[axis] for axis in entry or ()) for size, entry in zip(local, spec, strict=True)
    )
    assert sk.local_shape(whole, spec, mesh) == local
    assert NamedSharding(mesh, spec).shard_shape(whole) == local
    assert sk.local_shape(whole, canonical(spec), mesh) == local


MODEL = "its axes are 'data', 'model'. Use one of them, or add the axis to make_mesh."
SPEC_ERRORS = [
    (
        (8, 6),
        P("data", "model"),
        "dim 1 must be divisible by axis 'model'; got size 6 over 4 devices. Pad dim 1 or choose another dim.",
    ),
    (
        (12,),
        P(("data", "model")),
        "dim 0 must be divisible by axes 'data', 'model'; got size 12 over 8 devices. Pad dim 0 or choose another dim.",
    ),
    ((8, 8), P("data", "data"), f"a mesh axis can shard one dim only; got 'data' twice in P('data', 'data'). {TWICE}"),
    ((8, 8), P(None, "stage"), f"the spec P(None, 'stage') uses axis 'stage', which the mesh does not have; {MODEL}"),
    ((8,), P("data", "model"), "the spec P('data', 'model') has 2 entries for an array of rank 1. Drop an entry."),
    ((), P(None, "model"), "the spec P(None, 'model') has 2 entries for an array of rank 0. Drop an entry."),
]


@pytest.mark.parametrize(("shape", "spec", "message"), SPEC_ERRORS)
def test_errors_of_specs(shape, spec, message, mesh2x4):
    assert refused(lambda: sk.local_shape(shape, spec, mesh2x4)) == f"local_shape: {message}"
    tree = {"layers": [np.zeros(8, np.float32), {"w": np.zeros(shape, np.float32)}]}
    specs = {"layers": [P(), spec]}
    assert refused(lambda: sk.shard(tree, mesh2x4, specs)) == f"shard: leaf layers.1.w: {message}"


def test_shard_takes_one_spec_or_a_prefix_and_a_constraint_inside_jit_is_kept(mesh2x4):
    tree = {"a": np.zeros((8, 4), np.float32), "b": {"c": np.zeros((4,), np.int32), "d": np.float32(1)}}

    def specs_of(specs):
        return jax.tree.map(lambda x: x.sharding.spec, sk.shard(tree, mesh2x4, specs))

    assert specs_of(P()) == {"a": P(), "b": {"c": P(), "d": P()}}
    assert specs_of({"a": P("model", None), "b": P()}) == {"a": P("model"), "b": {"c": P(), "d": P()}}
    assert specs_of({"a": P(), "b": {"c": P(("model",)), "d": P()}}) == {"a": P(), "b": {"c": P("model"), "d": P()}}
    # proves S23
    wanted = NamedSharding(mesh2x4, P("model", "data"))
    x = sk.shard(np.ones((8, 8), np.float32), mesh2x4, P("data"))
    y = jax.jit(lambda x: jax.lax.with_sharding_constraint(2 * x, wanted))(x)
    assert y.sharding == wanted
    assert y.addressable_shards[0].data.shape == (2, 4)


def test_matmul_keeps_rows_and_columns_split():  # proves S33
    mesh = sk.make_mesh(i=4, j=2)
    rng = np.random.default_rng(0)
    x, w, b = (rng.integers(-3, 4, s).astype(np.float32) for s in ((192, 64), (64, 128), (128,)))
    specs = (P("i", None), P(None, "j"), P("j"))
    assert [sk.local_shape(v.shape, s, mesh) for v, s in zip((x, w, b), specs, strict=True)] == [
        (48, 64),
        (64, 64),
        (64,),
    ]
    y = jax.jit(lambda x, w, b: x @ w + b[None])(*sk.shard((x, w, b), mesh, specs))
    assert y.sharding.spec == P("i", "j")
    assert y.sharding.shard_shape(y.shape) == (48, 64)
    np.testing.assert_array_equal(np.asarray(y), x @ w + b)


@pytest.mark.optimized
def test_contracting_a_split_dim_reduces_once():  # proves S38
    mesh = sk.make_mesh(a=2, b=4)
    rng = np.random.default_rng(0)
    x, y = (rng.integers(-3, 4, s).astype(np.float32) for s in ((8, 16), (16, 12)))
    placed = sk.shard((x, y), mesh, (P("a", "b"), P("b", None)))
    compiled = jax.jit(jnp.matmul).lower(*placed).compile()
    z = compiled(*placed)
    assert z.sharding.is_equivalent_to(NamedSharding(mesh, P("a", None)), 2)
    np.testing.assert_array_equal(np.asarray(z), x @ y)
    sent = re.findall(
        r"(all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(?:-start)?\(", compiled.as_text()
    )
    assert sent == ["all-reduce"]


def test_describe_a_tree(mesh2x4):  # proves S17, S32, F87: with what test_inspection.py says inside shard_map
    tree = {
        "count": 3,
        "deep": sk.shard(np.zeros((2, 3, 8, 2, 2), np.int8), mesh2x4, P("data", None, ("model",))),
        "embed": np.zeros((5, 2), np.float64),
        "key": jax.random.key(0),
        "layers": [
            sk.shard(np.zeros((8, 1024), np.float32), mesh2x4, P("data", "model")),
            sk.shard(np.zeros((16,), jnp.bfloat16), mesh2x4, P(("data", "model"))),
        ],
        "norm": sk.shard(np.zeros((4, 4), np.int32), mesh2x4, P(None, "model")),
        "one": jnp.ones((8, 4)),
        "step": sk.shard(np.zeros((), np.int32), mesh2x4, P()),
    }
    assert sk.describe(tree) == (
        "leaf      global     dtype     spec                      local      devices  bytes/device\n"
        "count     scalar     int       host                      scalar     0        4\n"
        "deep      2x3x8x2x2  int8      P('data', None, 'model')  1x3x2x2x2  8        24\n"
        "embed     5x2        float64   host                      5x2        0        80\n"
        "key       scalar     key<fry>  one device                scalar     1        8\n"
        "layers.0  8x1024     float32   P('data', 'model')        4x256      8        4,096\n"
        "layers.1  16         bfloat16  P(('data', 'model'))      2          8        4\n"
        "norm      4x4        int32     P(None, 'model')          4x1        8        16\n"
        "one       8x4        float32   one device                8x4        1        128\n"
        "step      scalar     int32     P()                       scalar     8        4\n"
        "9 leaves, 4,364 bytes on each device"
    )
    assert sk.bytes_per_device(tree) == 4364


def test_bytes_per_device(data8):
    keys = sk.example_keys(jax.random.key(0), 16)
    assert sk.bytes_per_device(keys) == 16 * 8
    split = jax.jit(lambda k: k, out_shardings=NamedSharding(data8, P("data")))(keys)
    assert sk.bytes_per_device({"keys": split, "w": sk.shard(np.zeros((3, 8), np.float32), data8, P())}) == 16 + 96
    assert sk.bytes_per_device({}) == 0


@pytest.mark.parametrize(("spec", "spelling"), SPELLINGS)
def test_canonical_spelling(spec, spelling):
    assert tuple(canonical(spec)) == tuple(spelling)
    assert canonical(canonical(spec)) == canonical(spec)


def test_one_spelling_compiles_once(data8):
    f, x = jax.jit(lambda x: x + 1), np.zeros((8, 2), np.float32)
    for spec in (P("data"), P("data", None), P(("data",), ())):
        f(sk.shard(x, data8, spec))
    assert f._cache_size() == 1
