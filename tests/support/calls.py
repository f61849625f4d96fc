"""One valid call of each public function, for the walk over wrong arguments: nothing here is compiled or started."""

import inspect
import itertools
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

import shardkit as sk
from shardkit import analysis, collectives, cost, planner, runtime, schedules, testing, viz
from shardkit.analysis.hlo import aot
from shardkit.analysis.jaxpr.census import Census
from shardkit.collectives import compressed, hierarchical, ring, tables
from shardkit.cost.crossovers import ring_from
from shardkit.layers.vocabulary import vocab_cross_entropy_and_hits
from shardkit.models import blocks, parameters, transformer
from shardkit.on_device.precision import precision_of
from shardkit.planner.source import source_of
from shardkit.steps.diloco import DilocoState, Moved
from testing.kernels import tutorial

SIZES = {"data": 4, "model": 2}
MESH = sk.abstract_mesh(**SIZES)


def ones(*shape):
    return np.ones(shape, np.float32)


def loss(params, batch, keys):
    return jnp.sum((batch @ params["w"]) ** 2)


def used_precision(**fields):
    return precision_of(sk.Precision(**fields))


used_precision.__signature__ = inspect.signature(sk.Precision)  # a NamedTuple is checked where it is used


def returning(kind, room):
    """The public functions of a module that return that class."""
    found = [getattr(room, name) for name in room.__all__]
    return [f for f in found if inspect.isfunction(f) and inspect.signature(f).return_annotation == kind]


def required(function):
    each = inspect.signature(function).parameters.values()
    return [p.name for p in each if p.default is p.empty and p.kind is not p.VAR_POSITIONAL]


def sizes_of(build):
    """Arguments of the builder of a schedule."""
    return {"devices": 2, "microbatches": 4} | ({"chunks": 2} if "chunks" in required(build) else {})


def kernels():
    """Calls inside shard_map over `MESH`, as (function, valid arguments)."""
    x, tokens = ones(8, 4), np.zeros((2, 4), np.int32)
    q = ones(2, 4, 4, 4)
    key = jax.random.key(0)
    keys = jax.random.split(key, 8)
    over = {"x": x, "axis": "data"}
    routing = sk.layers.route(ones(8, 4), top_k=2)
    config = transformer.Config(vocabulary=16, layers=1, dim=8, heads=2, experts=2, group=4)
    weights = transformer.init(key, config)
    layer = jax.tree.map(lambda leaf: leaf[0], weights["layers"])
    state = {"weights": layer, "x_btD": jnp.ones((2, 4, 8))}
    alike = (collectives.all_gather, collectives.reduce_scatter, collectives.all_reduce, collectives.broadcast)
    alike += (collectives.shift, collectives.assume_replicated, collectives.gather_to_one, collectives.halo_exchange)
    alike += (collectives.prefix_scan, collectives.pad_to_axis, ring.all_gather, ring.reduce_scatter, ring.all_reduce)
    levels = {"x": x, "inner": "model", "outer": "data"}
    return [
        *((each, over) for each in alike),
        *((each, levels) for each in (hierarchical.all_reduce, hierarchical.all_gather, hierarchical.reduce_scatter)),
        (collectives.all_to_all, over | {"split_dim": 0, "concat_dim": 1}),
        (collectives.axis_index, {"axis": "data"}),
        (collectives.axis_size, {"axis": "data"}),
        (collectives.vary, {"tree": x, "axes": "data"}),
        (collectives.vary_like, {"tree": x, "like": x}),
        (collectives.debug_print, {"x": x}),
        (collectives.unpad_from_axis, {"x": x, "size": 4}),
        (collectives.all_gather_uneven, over | {"sizes": (8, 7, 6, 5)}),
        (collectives.reduce_scatter_uneven, over | {"sizes": (3, 2, 2, 1)}),
        (collectives.all_reduce_tree, {"tree": x, "axis": "data"}),
        (collectives.ragged_all_to_all, over | {"counts": np.ones((4, 4), np.int32), "rows": 8, "limit": 4}),
        (collectives.all_gather_matmul, {"x_tD": x, "w_Df": ones(4, 4), "axis": "data"}),
        (collectives.matmul_reduce_scatter, {"h_Tf": x, "w_fD": ones(4, 4), "axis": "data"}),
        (compressed.all_reduce, over | {"residual": ones(8, 4), "dtype": jnp.bfloat16}),
        (compressed.all_gather, over | {"dtype": jnp.bfloat16}),
        (compressed.reduce_scatter, over | {"residual": ones(8, 4), "dtype": jnp.bfloat16}),
        (compressed.reduce_scatter_two_level, levels | {"residual": ones(8, 4), "dtype": jnp.bfloat16}),
        (sk.layers.column_linear, {"x": x, "w": ones(4, 4), "axis": "model"}),
        (sk.layers.row_linear, {"h": x, "w": ones(4, 4), "axis": "model"}),
        (sk.layers.device_major_qkv, {"w": ones(4, 24), "ways": 2, "heads": 4}),
        (sk.layers.local_groups, {"w_DGK": ones(8, 2, 4), "axis": "model", "heads": 4, "kv_heads": 2}),
        (sk.layers.dot_attention, {"q_bTHK": q, "k_bTGK": q, "v_bTGK": q}),
        (sk.layers.ring_attention, {"q_btHK": q, "k_btGK": q, "v_btGK": q, "axis": "data"}),
        (sk.layers.ulysses_attention, {"q_btHK": q, "k_btGK": q, "v_btGK": q, "axis": "data"}),
        (sk.layers.positions, {"tokens_per_device": 4, "axis": "data"}),
        (sk.layers.zigzag, {"tree": tokens, "axis": "data"}),
        (sk.analysis.sends, {"kind": "all_to_all", "axis": "data", "sent": 4}),
        (sk.dropout, {"x_b": x, "keys_b": keys, "rate": 0.5}),
        (sk.example_keys, {"key": key, "n": 4}),
        (sk.fold_axes, {"key": key, "axes": "data"}),
        (sk.fold_axis, {"key": key, "axis": "data"}),
        (sk.fold_keys, {"keys": keys, "data": 1}),
        (sk.step_key, {"key": key, "step": 1}),
        (
            sk.layers.moe,
            {
                "x": jnp.ones((2, 4, 8)),
                "router_DE": jnp.ones((8, 4)),
                "experts": {"w": ones(1, 8, 8)},
                "expert_fn": lambda experts, x, dot: dot(x, experts["w"]),
                "axis": "data",
            },
        ),
        (sk.layers.route, {"logits_NE": ones(8, 4), "top_k": 2}),
        (sk.layers.routing_stats, {"logits_NE": ones(8, 4), "routing": routing}),
        (sk.scan_layers, {"layer_fn": lambda w, x: x * w, "stacked": ones(3, 4), "x": ones(4)}),
        (sk.layers.sharded_layer_norm, {"x_Td": x, "gain_d": ones(4), "bias_d": ones(4), "axis": "model"}),
        (sk.layers.sharded_rms_norm, {"x_Td": x, "gain_d": ones(4), "axis": "model"}),
        (sk.layers.vocab_embed, {"tokens_bT": tokens, "table_vD": ones(8, 4), "axis": "model"}),
        *(
            (each, {"x_bTD": ones(2, 4, 4), "head_Dv": ones(4, 8), "targets_bT": tokens, "axis": "model"})
            for each in (sk.layers.vocab_cross_entropy, vocab_cross_entropy_and_hits)
        ),
        (sk.bytes_per_device, {"tree": x}),
        (sk.unpadded, {"tree": {"w": x}}),
        (transformer.init, {"key": key, "config": config}),
        (transformer.apply, {"params": weights, "tokens_bT": tokens, "config": config}),
        (transformer.run, {"params": weights, "batch": {"tokens": tokens}, "config": config}),
        (blocks.attention, state | {"config": config}),
        (blocks.experts, state | {"config": config}),
        (blocks.rms_norm, {"x_bTD": ones(2, 4, 8), "gain_D": ones(8)}),
        (blocks.rotate, {"x_bTHK": q, "positions_T": np.arange(4)}),
    ]


def builders():
    """Calls outside of shard_map."""
    devices = jax.devices()[:8]
    mesh = jax.sharding.Mesh(np.array(devices).reshape(4, 2), ("data", "model"))
    grad_fn, optimizer, plan = sk.value_and_grad(loss), optax.sgd(0.1), sk.dp("data")
    step = {"grad_fn": grad_fn, "optimizer": optimizer, "mesh": mesh, "plan": plan}
    worker = lambda mesh: sk.make_train_step(grad_fn, optimizer, mesh=mesh, plan=plan)  # noqa: E731
    schedule = schedules.one_f_one_b(2, 4)
    functions = {"embed": lambda s, b, k: b, "stage": lambda w, x, k: x, "head": lambda s, x, b: jnp.sum(x)}
    over = {"schedule": schedule, "axis": "stage"}
    pipe = sk.pipeline(**over)
    rules = {"w": P(None, "data")}
    halves = sk.submeshes(mesh, "model")
    put = {"stages": [lambda p, x: x] * 2, "meshes": halves}
    params, batch = {"w": ones(4, 4)}, ones(8, 4)
    training = {"params": params, "batches": [batch], "optimizer": optimizer}
    laid = sk.shard(batch, mesh, P("data"))
    kernel = lambda x: jax.lax.psum(x, "data")  # noqa: E731
    mapped = {"mesh": mesh, "in_specs": P("data"), "out_specs": P()}
    config = transformer.Config(vocabulary=16, layers=1, dim=8, heads=2)
    path = Path(tempfile.mkdtemp())
    fresh = itertools.count()
    model = planner.Model(8, 64, 4, vocabulary=256)
    place = {"chip": "v5e", "batch": 64, "sequence": 128}
    found = planner.estimate(model, planner.Layout(data=8), **place)
    rooms = {"batch": 1, "sequence": 8, "hidden": 8}
    traced = {"fn": lambda x: x + 1, "args": (ones(4),)}
    placed = {"tree": batch, "mesh": mesh, "spec": P("data")}
    return [
        (sk.abstract_mesh, {"sizes": {"data": 8}}),
        (sk.make_mesh, {"sizes": {"data": 8}, "devices": devices}),
        (
            sk.make_hybrid_mesh,
            {"fast": {"m": 4}, "slow": {"d": 2}, "devices": devices, "group_of": lambda d: d.id // 4},
        ),
        (sk.simulate_devices, {"n": len(jax.devices())}),
        (sk.tp, {"axis": "data", "rules": rules}),
        *((each, {"axis": "data"}) for each in returning("Plan", sk) if required(each) == ["axis"]),
        (sk.strategy, {"name": "own", "axis": "data"}),
        (sk.chain, {"plans": (plan,)}),
        (sk.init_residuals, {"params": params, "mesh": mesh, "plan": plan}),
        (sk.describe, {"thing": plan, "params": params, "mesh": mesh}),
        (sk.describe, {"thing": laid, "after": laid}),
        (sk.local_shape, {"shape": (8, 4), "spec": P("data"), "mesh": mesh}),
        (sk.shard, {"tree": batch, "mesh": mesh, "specs": P("data")}),
        (sk.reshard, {"tree": laid, "source": P("data"), "target": P("data"), "mesh": mesh}),
        (sk.reshard_steps, {"tree": laid, "source": P("data"), "target": P(None, "data"), "mesh": mesh}),
        (
            sk.reshard_steps,
            {
                "tree": laid,
                "source": P("data"),
                "target": P("away"),
                "mesh": mesh,
                "to": sk.abstract_mesh(away=8),
                "dtype": jnp.bfloat16,
                "piece_bytes": 64,
            },
        ),
        (sk.specs_from_rules, {"logical_axes": {"w": ("a", "b")}, "rules": {"a": "data", "b": None}}),
        (sk.submeshes, {"mesh": mesh, "axis": "data"}),
        (sk.gathered, {"layer_fn": lambda w, x: x}),
        (sk.value_and_grad, {"loss_fn": loss}),
        (sk.make_train_step, step),
        (sk.make_eval_step, {"loss_fn": loss, "mesh": mesh, "plan": plan}),
        (sk.muon, {"learning_rate": 0.1, "mesh": mesh, "plan": plan}),
        (sk.diloco, {"make_step": worker, "outer": optimizer, "mesh": mesh, "axis": "model"}),
        (sk.pipeline, over),
        (pipe.value_and_grad, functions),
        (pipe.loss, functions),
        (sk.device_put_value_and_grad, put | {"loss": lambda y, b: jnp.sum(y)}),
        *((each, sizes_of(each)) for each in returning("Schedule", schedules)),
        *(
            (each, {"op": "all_gather", "devices": 4})
            for each in (tables.ring, tables.halving, tables.bruck, tables.pat, tables.bine)
        ),
        (tables.torus, {"op": "all_gather", "sizes": (2, 2)}),
        (tables.torus_links, {"sizes": (2, 2)}),
        (tables.tree, {"devices": 4}),
        (tables.to_mscclpp, {"table": tables.ring("all_gather", 4)}),
        (tables.from_mscclpp, {"text": tables.to_mscclpp(tables.ring("all_gather", 2))}),
        (schedules.Schedule.from_csv, {"text": schedule.to_csv()}),
        (schedules.Schedule.simulate, {"self": schedule}),
        (schedules.Schedule.least_makespan, {"self": schedule}),
        (schedules.Schedule.order, {"self": schedule, "device": 0}),
        (testing.assert_matches_reference, {"kernel": kernel, "reference": lambda x: x, **mapped, "args": (batch,)}),
        (testing.assert_equal_for_all_inputs, {"kernel": kernel, "reference": lambda x: x, **mapped, "args": (batch,)}),
        (
            testing.assert_kernel,
            {
                "kernel": tutorial.permute,
                "reference": lambda x: jnp.roll(x, 2, 0),
                "mesh": sk.abstract_mesh(x=4),
                "in_specs": P("x"),
                "out_specs": P("x"),
                "args": (np.zeros((8, 2), np.float32),),
            },
        ),
        (
            testing.assert_same_training,
            {"grad_fn": grad_fn, "reference_grad_fn": grad_fn, "mesh": mesh, "plan": plan}
            | training
            | {"key": np.zeros(2, np.uint32)},  # the default would be compiled before the others are looked at
        ),
        (
            testing.certify_gradients,
            {"grad_fn": lambda p, b: p, "loss_fn": lambda p, b: jnp.sum(p["w"]), "params": params, "batch": batch},
        ),
        (testing.small, {"function": lambda x: x, "args": (batch,)}),
        (testing.covering, {"factors": {"a": [1, 2], "b": [1, 2]}}),
        (testing.emulate, {"kernel": kernel, "mesh_sizes": {"data": 4}, "in_specs": P("data"), "out_specs": P()}),
        (testing.one_device, {"grad_fn": grad_fn} | training),
        (
            testing.prove,
            {"step": grad_fn, "reference": grad_fn, "rows": [testing.Row({"data": 4}, plan)]}
            | training
            | {"key": np.zeros(2, np.uint32)},
        ),
        (testing.wire, {"step": lambda state, batch: state, "state": batch, "batch": batch}),
        (analysis.audit, {"step": traced["fn"], "args": ()}),
        *((each, traced) for each in (analysis.census, analysis.explain, analysis.lint)),
        (analysis.collective, {"kind": "all_reduce", "axis": "data"}),
        (analysis.expects, {"rows": ()}),
        (aot.compile, {"step": jax.jit(lambda x: x), "args": (ones(4),), "topology": "v5e:2x4"}),
        (aot.parse_topology, {"text": "v5e:2x4"}),
        (planner.estimate, {"model": model, "layout": planner.Layout(data=8)} | place),
        (planner.advise, {"model": model, "layout": planner.Layout(data=8)} | place),
        (planner.search, {"model": model, "chips": 8} | place),
        (
            planner.counted,
            {"loss_fn": lambda params, batch, keys: jnp.sum(batch @ params), "params": ones(4), "batch": ones(2, 4)},
        ),
        (planner.table, {"candidates": []}),
        (planner.kinds, {"candidates": []}),
        (planner.explain, {"best": found, "judge": lambda layout: found}),
        (source_of, {"candidate": found, "batch": 64, "sequence": 128}),
        (cost.activation_memory, rooms | {"heads": 2}),
        (cost.bubble, {"stages": 2, "microbatches": 4}),
        (cost.bus_factor, {"op": "all_reduce", "n": 4}),
        (cost.chip, {"name": "v5e"}),
        *((each, {"chip": "v5e"}) for each in (cost.links, cost.group_bandwidth)),
        (ring_from, {"link": cost.Link(1e-6, 1e9), "columns": 8, "flops": 1e12}),
        (cost.scatter_from, {"link": cost.Link(1e-6, 1e9), "n": 4}),
        (cost.bucket_bytes, {"link": cost.Link(1e-6, 1e9), "n": 4}),
        (cost.roofline, {"flops": 1.0, "bytes": 1.0, "chip": "v5e"}),
        (cost.mfu, {"flops": 1.0, "seconds": 1.0, "peak": 1.0}),
        (cost.collective_time, {"kind": "all_reduce", "size": 8, "n": 4, "bandwidth": 1.0}),
        (cost.wire, {"kind": "all_reduce", "size": 8, "n": 4}),
        (cost.context_volume, rooms | {"ways": 2}),
        (cost.expert_volume, {"tokens": 8, "hidden": 8, "ways": 2}),
        (cost.tensor_volume, rooms | {"ways": 2}),
        (cost.quantization_error, {"largest": 1.0, "dtype": "int8"}),
        (cost.quantized_bytes, {"elements": 8, "dtype": "int8"}),
        (cost.transformer_flops, {"layers": 1, "hidden": 8, "sequence": 8}),
        (cost.transformer_parameters, {"layers": 1, "hidden": 8}),
        *((each, {"parameters": 8.0, "ways": 2, "stage": 1}) for each in (cost.zero_memory, cost.zero_volume)),
        (runtime.from_full, placed),
        (runtime.from_process_local, placed),
        (
            runtime.from_single_device,
            {"shards": [s.data for s in laid.addressable_shards], "mesh": mesh, "spec": P("data"), "shape": (8, 4)},
        ),
        (runtime.local_rows, {"batch": 8, "mesh": mesh, "spec": P("data")}),
        (runtime.local_shards, {"x": laid}),
        (runtime.fetch, {"tree": batch}),
        (runtime.replicate, {"tree": batch, "mesh": mesh}),
        (runtime.replica_drift, {"tree": laid}),
        (runtime.assert_no_drift, {"tree": laid}),
        (runtime.nonfinite, {"tree": laid}),
        (runtime.triage, {"grad_fn": grad_fn, "mesh": mesh, "plan": plan}),
        (runtime.loader, {"source": [np.ones(4)] * 8, "batch": 4, "seed": 0, "mesh": mesh, "spec": P("data")}),
        (runtime.load_params, {"path": path / "run", "like": {"w": laid}}),
        (runtime.Checkpoints, {"directory": path / str(next(fresh))}),
        (runtime.preempted, {"step": 1}),
        (runtime.barrier, {"name": "x"}),
        (sk.layers.balance_bias, {"bias_E": ones(4), "choices_E": ones(4)}),
        (sk.layers.deal, {"segments_BT": np.zeros((1, 256), np.int32), "devices": 2}),
        (viz.draw, {"schedule": schedule, "output": path / "a.svg"}),
        (viz.array, {"x": laid, "output": path / "b.svg", "after": laid}),
        (viz.table, {"table": sk.tables.ring("all_gather", 2), "output": path / "t.svg"}),
        (transformer.loss_fn, {"config": config}),
        (transformer.pieces, {"config": config}),
        (parameters.logical_axes, {"config": config}),
        (parameters.muon_dims, {"config": config}),
        (parameters.tensor_rules, {"config": config, "axis": "model", "ways": 2}),
        *(
            (each, {})
            for each in (
                sk.DistributedConfig,
                used_precision,
                testing.meshes,
                testing.programs,
                testing.sharded_arrays,
                runtime.health_check,
                runtime.initialize,
                transformer.Config,
                transformer.Axes,
            )
        ),
    ]


def methods():
    """Methods, and functions that builders return."""
    params, batch, plan = {"w": ones(4, 4)}, ones(8, 4), sk.dp("data")
    init, step = sk.make_train_step(sk.value_and_grad(loss), optax.sgd(0.1), mesh=MESH, plan=plan)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ("data", "model"))
    worker = lambda mesh: sk.make_train_step(sk.value_and_grad(loss), optax.sgd(0.1), mesh=mesh, plan=plan)  # noqa: E731
    run = sk.diloco(worker, optax.sgd(1.0), mesh=mesh, axis="model")
    begun = {"state": DilocoState((), {}, ())}  # of no fragment
    emulated = testing.emulate(lambda x: jax.lax.psum(x, "data"), {"data": 4}, P("data"), P())

    def trace(state, batch):
        return step.trace(state, batch)

    def abstract(params):
        return init.abstract(params)

    def emulate(x):
        return emulated(x)

    return [
        (trace, {"state": init.abstract(params), "batch": batch}),
        (abstract, {"params": params}),
        (emulate, {"x": batch}),
        (run.step, begun | {"batches": [batch] * 3}),
        *((each, begun | {"fragment": 1}) for each in (run.start, run.exchange, run.trace)),
        (run.finish, begun | {"moved": Moved({}, 1)}),
        (Census.compare, {"self": Census(()), "other": Census(())}),
        (sk.Mean.of, {"values": batch, "weights": batch}),
        (sk.Plan.layouts, {"self": plan, "params": params, "mesh": MESH}),
        (sk.Plan.describe, {"self": plan, "params": params, "mesh": MESH}),
        (sk.Plan.batch_spec, {"self": plan, "mesh": MESH}),
        (sk.algorithms.ring, {"bidirectional": True}),
        (sk.algorithms.hierarchical, {"inner": "model"}),
        (sk.algorithms.bucket, {"bucket_bytes": 1024}),
        (sk.layers.Capacity, {"factor": 1.25, "group": 4}),
        (sk.layers.Dropless, {"dense": True}),
    ]
