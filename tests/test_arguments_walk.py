"""Every public function, and some methods, with every wrong value of each argument's kind: a sentence, or why not."""

import collections
import inspect
import re

import pytest

import shardkit as sk
from shardkit import analysis, collectives, cost, planner, runtime, schedules, testing, viz
from shardkit.collectives import compressed, hierarchical, ring
from shardkit.models import transformer
from support import calls, walk

pytestmark = pytest.mark.check
ROOMS = (
    sk,
    analysis,
    planner,
    collectives,
    collectives.tables,
    cost,
    runtime,
    schedules,
    testing,
    viz,
    transformer,
)
FEWEST = 9000

# What is taken and means something: which calls, and why. Matched as `room.function(parameter=value)`.
HUGE = "10{30}"
TAKEN = [
    (rf"cost\..*=\(?{HUGE}.*|planner\..*={HUGE}\)", "closed forms are exact at any size"),
    (r"cost\..*bandwidth=(inf|int )\)", "a wire that costs nothing"),
    (r"collectives\.(bucketed\.all_reduce_tree|algorithms\.bucket)\(scatter_from=inf\)",
     "never, as cost.scatter_from says of two devices"),
    (r"cost\..*\(recompute=True\)", "another word for 'full'"),
    (r"cost\..*=(0|0\.0)\)", "nothing of it: no bytes, no latency, stage 0, no vocabulary"),
    (r"(cost|schedules)\..*\((axes|stages)=1\)", "one"),
    (r".*\((axis|inner|context|expert|stage|ulysses)=('nowhere'|'nothing of the kind'|\('data', '(data|nowhere)'\))\)",
     "a plan, a model and an expectation know no mesh; make_train_step and the kernels refuse it"),
    (r"strategies\.pipeline\.(pp|pipeline)\(stack='nothing of the kind'\)",
     "a plan and a pipeline know no parameters; the GradFn refuses those without it"),
    (r"models\.blocks\.Axes\(model='x'\)", "an axis; a kernel refuses it where the mesh has none of that name"),
    (r".*\((spec|specs|in_specs|out_specs|batch_spec|param_specs)=P\(None, None, 'data'\)\)",
     "a leaf takes as many entries as it has dims, or what the rank is shows at the call"),
    (r".*\((ignore|names|layerwise|flags)=\(\)\)|collectives\.axes\.vary\(axes=\(\)\)", "none of them"),
    (r".*\((w|w_Df)=(\{\}|\(\))\)", "a pytree without leaves"),
    (r".*\((x|w_DGK)=ndarray \(2, 2, 2, 2, 2, 2\)\)", "an array of any rank: dims before the last are a batch"),
    (r"testing\.emulate\.emulate\((in_specs|out_specs|mesh_sizes)=.*\)",
     "refused by the call, with the argument's path: the ranks show there"),
    (r"testing\.certify\.certify_gradients\(axes='x'\)", "one axis, by any name"),
    (r"calls\.emulate\(x=None\)", "a pytree without leaves"),
    (r"plans\.storage\.unpadded\(.*", "what is not padded stays what it is"),
    (r"strategies\.pipeline\..*\(layers_per_stage=(\(-1, 4\)|\(\))\)", "refused where a step is traced"),
    (r"steps\.diloco\.diloco\(fragments=<built-in function len>\)", "any function; init refuses what it returns"),
    (r".*\((args|batches|source)=(\[None\]|'x')\)", "handed on: what is in it is the user's function's affair"),
    (r".*\((name|best|master_addr)=(''|'nothing of the kind')\)", "any name"),
    (r"(collectives|meshes\.rng|runtime|jobs|steps\.train|strategies\.config|testing|schedules|strategies\.zero|plans\.plan|layers\.zigzag|analysis)\..*=(0|1|\[1\])\)",
     "a place, an index, a seed, a number of rows, steps, devices or bytes"),
    (r"collectives\.permute\.shift\(by=-1\)", "the other way"),
    (r"(collectives|models|layers|optimizers|strategies|meshes\.rng|runtime|jobs|schedules)\..*=0\.0\)",
     "no dropout, smoothing, cost, wait or loss"),
    (r"layers\..*attention\(scale=-1\.0\)", "a factor of the scores, of either sign"),
]  # fmt: skip
# Raised below our own frames, and rightly so; `len` is a function of the key that fails.
BELOW = r"testing\..*\.assert_(matches_reference|equal_for_all_inputs)\((in_specs|out_specs)=P\(None, None, 'data'\)\)"
BELOW += r"|calls\.abstract\(params=<built-in function len>\)"
# Not walked: they take nothing, anything, or start what outlives a test.
UNWALKED = {
    "testing.associative.assert_associative": "computes; tests/testing/test_associative.py has its sentences",
    "runtime.cluster.join.finish": "ends the process",
    "runtime.cluster.join.is_main": "takes nothing",
    "runtime.cluster.join.leave": "takes nothing",
    "runtime.cluster.join.log": "prints anything",
    "jobs.monitor.guard.guard": "starts a process; tests/jobs has its sentences",
    "runtime.data.reading.print_global": "prints any tree",
    "runtime.cluster.preemption.watch_preemption": "takes nothing",
    "models.transformer.in_order": "a function of what pieces gives",
    "analysis.hlo.differences.compiled": "compiles",
    "testing.exact.compiled.assert_compiled_equal": "compiles; tests/testing/exact/test_compiled.py has its sentences",
    "viz.schedule.figure": "of a timeline, which simulate gives",
}


def test_wrong_arguments_get_a_sentence():
    # It alone finds an argument whose mistake shows as an AttributeError of jax, or not at all.
    rows = walk.over_all(calls.builders() + calls.methods())
    count = collections.Counter(row.verdict for row in rows)
    print(f"\n{len(rows)} wrong arguments: {dict(count)}")
    below = [row for row in rows if row.verdict in ("raw", "hang") and not re.fullmatch(BELOW, row.call)]
    assert not below, "\n".join(map(str, below))
    taken = [row for row in rows if row.verdict == "accepted"]
    meaningless = [row for row in taken if not any(re.fullmatch(pattern, row.call) for pattern, _ in TAKEN)]
    assert not meaningless, "\n".join(map(str, meaningless))
    unused = [pattern for pattern, _ in TAKEN if not any(re.fullmatch(pattern, row.call) for row in taken)]
    assert not unused
    assert len(rows) >= FEWEST and count["sentence"] >= 0.95 * len(rows), count


def test_every_public_function_is_walked():
    inside = walk.inside_shard_map(calls.kernels)
    walked = {walk.name_of(function) for function, _ in inside + calls.builders()}
    public = set()
    for room in ROOMS:
        for name in room.__all__:
            each = getattr(room, name)
            if inspect.isfunction(each) and each.__module__.startswith("shardkit."):
                public.add(walk.name_of(each))
    for room in (compressed, hierarchical, ring):
        public |= {
            walk.name_of(each)
            for name, each in vars(room).items()
            if inspect.isfunction(each) and each.__module__ == room.__name__ and not name.startswith("_")
        }
    assert public - walked - set(UNWALKED) == set()
    assert set(UNWALKED) <= public and not set(UNWALKED) & walked
