"""ZeRO and activation memory against the papers' printed tables; volumes against the census of real programs."""

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

import shardkit as sk
from shardkit import cost
from shardkit.analysis import census

GB = 1e9
# ZeRO, table 1: GB a device at DP degrees 1, 4, 16, 64, 256, 1024; a row for each model and stage 1, 2, 3.
DEGREES = (1, 4, 16, 64, 256, 1024)
TABLE_1 = {
    (7.5e9, 1): (120, 52.5, 35.6, 31.4, 30.4, 30.1),
    (7.5e9, 2): (120, 41.3, 21.6, 16.6, 15.4, 15.1),
    (7.5e9, 3): (120, 30, 7.5, 1.88, 0.47, 0.12),
    (128e9, 1): (2048, 896, 608, 536, 518, 513),
    (128e9, 2): (2048, 704, 368, 284, 263, 257),
    (128e9, 3): (2048, 512, 128, 32, 8, 2),
    (1e12, 1): (16000, 7000, 4750, 4187, 4046, 4011),
    (1e12, 2): (16000, 5500, 2875, 2218, 2054, 2013),
    (1e12, 3): (16000, 4000, 1000, 250, 62.5, 15.6),
}


# proves F52 (the closed form)
@pytest.mark.parametrize(("row", "printed"), TABLE_1.items())
def test_zero_table_1(row, printed):
    parameters, stage = row
    for ways, figure in zip(DEGREES, printed, strict=True):
        # the table rounds its first model and cuts the digits of the others
        unit = 10.0 ** -len(f"{figure}".partition(".")[2])
        assert cost.zero_memory(parameters, ways, stage) / GB == pytest.approx(figure, abs=unit)


def test_zero_figure_1():
    found = [round(cost.zero_memory(7.5e9, 64, stage) / GB, 1) for stage in range(4)]
    assert found == [120.0, 31.4, 16.6, 1.9]


def test_zero_breakdown():
    parts = cost.zero_breakdown(1000, 4, 2, parameter_bytes=4, gradient_bytes=8, optimizer_bytes=16)
    assert parts == (4000, 2000, 4000) and parts.total == 10_000 and parts.gradients == 2000
    assert cost.zero_memory(1000, 4, 2, parameter_bytes=4, gradient_bytes=8, optimizer_bytes=16) == 10_000


@given(parameters=st.integers(1, 10**13), ways=st.integers(1, 10**5))
def test_zero_stages_only_ever_save(parameters, ways):
    held = [cost.zero_memory(parameters, ways, stage) for stage in range(4)]
    assert held == sorted(held, reverse=True)
    assert held[3] == pytest.approx(held[0] / ways)
    assert held[0] == 16 * parameters


@given(parameters=st.integers(1, 10**12), ways=st.integers(1, 10**4), k=st.integers(1, 64))
def test_zero_volume_in_units_of_the_parameters(parameters, ways, k):
    unit = 2 * parameters * (ways - 1) / ways

    def volume(stage, **options):
        return cost.zero_volume(parameters, ways, stage, accumulate=k, **options)

    assert volume(0) == volume(1) == volume(3, layerwise=False) == pytest.approx(2 * unit)
    assert volume(2) == pytest.approx((k + 1) * unit)
    assert volume(3) == pytest.approx(3 * k * unit)
    assert volume(3, regather=False) == pytest.approx(2 * k * unit)


def on(kernel, n, axis="model"):
    mesh = AbstractMesh((n,), (axis,), axis_types=(AxisType.Auto,))
    return jax.shard_map(kernel, mesh=mesh, in_specs=P(), out_specs=P(axis), check_vma=True)


@pytest.mark.parametrize("n", [1, 4])
def test_zero_volume_is_what_the_collectives_send(n):
    def everywhere(x):
        return sk.all_reduce(sk.vary(x, "data"), "data")[None]

    def sharded(x):
        return sk.all_gather(sk.reduce_scatter(sk.vary(x, "data"), "data"), "data")[None]

    for kernel, stage in ((everywhere, 0), (sharded, 1)):
        found = census(on(lambda x, k=kernel: sk.vary(k(x), "data"), n, "data"), jnp.zeros(64))
        assert float(found.sent()) == cost.zero_volume(64, n, stage, parameter_bytes=4, gradient_bytes=4)


MODELS = {  # Korthikanti et al., table 3: heads, hidden, layers, tensor, stages, chunks; 2048 tokens, v = 51200
    "22B": (64, 6144, 48, 8, 1, 1),
    "175B": (96, 12288, 96, 8, 8, 3),
    "530B": (128, 20480, 105, 8, 35, 3),
    "1T": (160, 25600, 128, 8, 64, 1),
}


@pytest.mark.parametrize("tensor", [1, 8])
@pytest.mark.parametrize(("heads", "hidden"), [m[:2] for m in MODELS.values()])
def test_activation_table_2(heads, hidden, tensor):
    s, b = 2048, 3
    sbh, core = s * b * hidden, 5 * heads * s / hidden

    def layer(**options):
        return cost.activation_memory(batch=b, sequence=s, hidden=hidden, heads=heads, **options)

    assert layer() == pytest.approx(sbh * (34 + core))
    assert layer(tensor=tensor) == pytest.approx(sbh * (10 + 24 / tensor + core / tensor))
    assert layer(tensor=tensor, sequence_parallel=True) == pytest.approx(sbh / tensor * (34 + core))
    assert layer(tensor=tensor, recompute="selective") == pytest.approx(sbh * (10 + 24 / tensor))
    assert layer(tensor=tensor, sequence_parallel=True, recompute="selective") == pytest.approx(sbh * 34 / tensor)
    assert layer(tensor=tensor, recompute="full") == layer(recompute=True) == 2 * sbh
    assert layer(recompute=False) == layer()


# Section 5: for GPT-3 and MT-NLG, 5as/h is 80 and 64, and selective recomputation saves 70% and 65% of the activations.
@pytest.mark.parametrize(("model", "core", "saved"), [("175B", 80, 70), ("530B", 64, 65)])
def test_what_selective_recomputation_saves(model, core, saved):
    heads, hidden, *_ = MODELS[model]
    whole, selective = (
        cost.activation_memory(batch=1, sequence=2048, hidden=hidden, heads=heads, recompute=r)
        for r in ("none", "selective")
    )
    assert whole / (2048 * hidden) == pytest.approx(34 + core)
    assert round(100 * (1 - selective / whole)) == saved


def whole_model(model, **options):
    heads, hidden, layers, tensor, stages, chunks = MODELS[model]
    settings = {"tensor": tensor, "stages": stages, "chunks": chunks, "sequence_parallel": True} | options
    return cost.model_activation_memory(
        layers, batch=1, sequence=2048, hidden=hidden, heads=heads, vocabulary=51200, **settings
    )


@pytest.mark.parametrize("model", MODELS)
def test_activations_of_the_first_stage(model):
    heads, h, layers, t, p, m = MODELS[model]
    sbh = 2048 * h
    factor = 1 + (p - 1) / (p * m) if m > 1 else 1
    extra = sbh / t * (p + (4 * (1 + 51200 / h) if p == 1 else 0))
    assert whole_model(model) == pytest.approx(sbh * layers / t * (34 + 5 * heads * 2048 / h) * factor + extra)
    assert cost.interleaving_factor(p, m) == factor


def test_fewer_microbatches_than_stages_hold_less():
    assert whole_model("175B", microbatches=2) == pytest.approx(whole_model("175B") / 4)
    assert whole_model("175B", microbatches=100) == whole_model("175B")


def test_activations_without_sequence_parallelism():
    # dropout mask, final norm, and head input whole on every device, logits sharded
    found = cost.model_activation_memory(
        2, batch=1, sequence=4, hidden=8, heads=2, vocabulary=16, tensor=2, recompute="full"
    )
    assert found == 2 * 2 * 32 + 32 + 4 * 32 + 4 * 4 * 16 / 2


@pytest.mark.parametrize("n", [1, 4])
def test_tensor_volume_is_what_two_megatron_blocks_send(n):
    b, s, h = 2, 8, 16
    weights = [jax.ShapeDtypeStruct((h, 4 * h), jnp.float32), jax.ShapeDtypeStruct((4 * h, h), jnp.float32)] * 2

    def layer(x, up, down, up2, down2):
        # two blocks, as attention and feed-forward are: matrix by column, matrix by row, all_reduce
        def loss(x):
            for first, last in ((up, down), (up2, down2)):
                x = sk.all_reduce(jnp.tanh(sk.vary(x, "model") @ first) @ last, "model")
            return x.sum()

        return jax.grad(loss)(x)

    mesh = AbstractMesh((n,), ("model",), axis_types=(AxisType.Auto,))
    specs = (P(), P(None, "model"), P("model"), P(None, "model"), P("model"))
    f = jax.shard_map(layer, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=True)
    found = census(f, jax.ShapeDtypeStruct((b, s, h), jnp.float32), *weights)
    volume = cost.tensor_volume(batch=b, sequence=s, hidden=h, ways=n, value_bytes=4)
    assert float(found.sent()) == volume.total and volume.forward == volume.backward
    backward = sum(r.total for r in found.rows if r.backward)
    assert float(backward) == volume.backward


def test_tensor_volume_variants():
    def volume(**options):
        return cost.tensor_volume(batch=2, sequence=8, hidden=16, ways=4, **options)

    reduced = 2 * 3 / 4 * 2 * 8 * 16 * 2
    assert volume() == volume(recompute="selective") == (2 * reduced, 2 * reduced)
    assert volume(recompute=True) == (2 * reduced, 4 * reduced)
    assert volume(sequence_parallel=True) == volume()  # four gathers and four scatters are four all_reduces
    assert volume(sequence_parallel=True, regather=True) == (2 * reduced, 3 * reduced)
    assert volume(sequence_parallel=True, regather=True, recompute="full") == (2 * reduced, 4 * reduced)


def test_context_volume():
    def volume(method, ways=4, **options):
        return cost.context_volume(batch=2, sequence=64, hidden=32, ways=ways, method=method, **options)

    q = 2 * 16 * 32 * 2  # bytes of the local queries
    assert volume("ring") == (3 * 2 * q, 3 * 2 * q + 4 * 2 * q)
    assert volume("all_gather") == (3 * 2 * q, 2 * 3 * 2 * q)
    assert volume("ulysses") == (3 / 4 * 4 * q, 3 / 4 * 4 * q)
    assert volume("ring", kv_hidden=8) == tuple(v / 4 for v in volume("ring"))
    assert volume("ulysses", kv_hidden=8).forward == 3 / 4 * (2 * q + q / 2)
    assert all(volume(method, ways=1).total == 0 for method in ("ring", "all_gather", "ulysses"))
    # Ulysses, section 3.2: constant where sequence and devices grow together; the ring grows
    assert 0.9 < volume("ulysses", 64).total * 64 / (volume("ulysses", 32).total * 32) < 1.1
    assert volume("ring", 64).total > 0.9 * volume("ring", 32).total


def test_ulysses_volume_is_what_its_all_to_alls_send():
    n, b, s, heads, size = 4, 2, 8, 4, 8

    def device(q, k, v):
        def loss(q, k, v):
            q, k, v = (sk.all_to_all(x, "sequence", split_dim=2, concat_dim=1) for x in (q, k, v))
            out = q * jnp.tanh(k) * v
            return sk.all_to_all(out, "sequence", split_dim=1, concat_dim=2).sum()

        return jax.grad(loss, argnums=(0, 1, 2))(q, k, v)

    mesh = AbstractMesh((n,), ("sequence",), axis_types=(AxisType.Auto,))
    spec = P(None, "sequence")
    f = jax.shard_map(device, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=True)
    found = census(f, *[jax.ShapeDtypeStruct((b, s, heads, size), jnp.float32)] * 3)
    volume = cost.context_volume(batch=b, sequence=s, hidden=heads * size, ways=n, method="ulysses", value_bytes=4)
    assert float(found.sent()) == volume.total


def test_pipeline_and_expert_volume():
    assert cost.pipeline_volume(batch=2, sequence=8, hidden=4) == (128, 128)
    assert cost.pipeline_volume(batch=2, sequence=8, hidden=4, microbatches=5, chunks=3, tensor=2).total == 15 * 128
    assert cost.expert_volume(tokens=10, hidden=4, ways=5) == (2 * 64, 2 * 64)
    assert cost.expert_volume(tokens=10, hidden=4, ways=5, top_k=2, capacity_factor=1.25).forward == 2.5 * 128


LAYER = {"batch": 1, "sequence": 8, "hidden": 8, "heads": 2}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: cost.zero_memory(1, 4, 4), "zero_memory: stage must be 0, 1, 2 or 3; got 4. Choose one of them."),
        (
            lambda: cost.zero_memory(1, 0, 1),
            "zero_memory: ways must be a whole number of at least 1; got 0. Correct ways.",
        ),
        (
            lambda: cost.zero_breakdown(1, 4, 1, optimizer_bytes=-1),
            "zero_memory: optimizer_bytes must be 0 or more; got -1. Correct optimizer_bytes.",
        ),
        (lambda: cost.zero_memory(-1, 4, 1), "zero_memory: parameters must be 0 or more; got -1. Correct parameters."),
        (
            lambda: cost.zero_volume(1, 4, "3"),
            "zero_volume: stage must be 0, 1, 2 or 3; got '3'. Choose one of them.",
        ),
        (
            lambda: cost.zero_volume(1, 4, 3, accumulate=0),
            "zero_volume: accumulate must be a whole number of at least 1; got 0. Correct accumulate.",
        ),
        (
            lambda: cost.activation_memory(**LAYER | {"tensor": 0}),
            "activation_memory: tensor must be a whole number of at least 1; got 0. Correct tensor.",
        ),
        (
            lambda: cost.activation_memory(**LAYER, recompute="some"),
            "activation_memory: recompute must be 'none', 'selective' or 'full'; got 'some'. Choose one of them.",
        ),
        (
            lambda: cost.interleaving_factor(0, 1),
            "interleaving_factor: stages must be a whole number of at least 1; got 0. Correct stages.",
        ),
        (
            lambda: cost.model_activation_memory(6, **LAYER, stages=2, chunks=2),
            "model_activation_memory: stages * chunks must divide layers; got 4 and 6. Change one of them.",
        ),
        (
            lambda: cost.tensor_volume(batch=1, sequence=8, hidden=8, ways=2, regather=True),
            "tensor_volume: regather must go with sequence_parallel; got regather=True and sequence_parallel=False. "
            "Without it the input is whole on every device: set regather=False.",
        ),
        (
            lambda: cost.context_volume(batch=1, sequence=8, hidden=8, ways=2, method="tree"),
            "context_volume: method must be 'ring', 'all_gather' or 'ulysses'; got 'tree'. Choose one of them.",
        ),
        (
            lambda: cost.pipeline_volume(batch=1, sequence=8, hidden=8, microbatches=0),
            "pipeline_volume: microbatches must be a whole number of at least 1; got 0. Correct microbatches.",
        ),
        (
            lambda: cost.expert_volume(tokens=1, hidden=8, ways=2, capacity_factor=0),
            "expert_volume: capacity_factor must be greater than 0; got 0. Correct capacity_factor.",
        ),
    ],
)
def test_errors(call, message):
    with pytest.raises(ValueError) as error:
        call()
    assert str(error.value) == message
