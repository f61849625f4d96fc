"""`sk.aot.tune`: which options of the compiler stay, and in which order the trials are told."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import shardkit as sk
from shardkit.analysis.hlo.tuning import Trial, try_options
from support.compilers import tpu
from support.recorded.programs import abstract_mesh, shape


class Times:
    """A report of a step that takes so long, or needs so much memory."""

    memory, rows = None, ()

    def __init__(self, seconds):
        self.seconds, self.fits, self.needed = seconds, seconds > 0, -seconds


def compiler(seconds):
    """Times by the options that are set, 10 s without; None is refused, and what is below 0 needs so many bytes."""

    def compiled(options):
        time = seconds.get(tuple(sorted(options)), 10)
        if time is None:
            return Trial(options, None, "refused by the compiler")
        return Trial(options, Times(time))

    return compiled


def test_an_option_stays_only_beside_those_before_it_and_if_the_step_is_faster():
    """b helps alone, and beside a it harms; c is refused, d does not fit, and e helps beside a."""
    times = {("a",): 8, ("b",): 9, ("a", "b"): 8.5, ("a", "c"): None, ("a", "d"): -1024, ("a", "e"): 7}
    tuned = try_options(compiler(times), [{name: True} for name in "abcde"])
    assert tuned.options == {"a": True, "e": True}
    assert [sorted(trial.options) for trial in tuned.trials[:4]] == [["a", "e"], ["a"], ["a", "b"], []]
    assert {trial.message for trial in tuned.trials[4:]} == {"refused by the compiler", ""}
    assert "refused: refused by the compiler" in str(tuned) and "does not fit: 1.00 KiB" in str(tuned)


def test_a_step_that_does_not_fit_keeps_what_needs_less_memory_and_nothing_that_is_refused_or_no_help():
    times = {(): -9, ("a",): None, ("b",): -8, ("b", "c"): -8, ("b", "d"): 3}
    tuned = try_options(compiler(times), [{name: True} for name in "abcd"])
    assert [sorted(trial.options) for trial in tuned.trials] == [["b", "d"], ["b"], ["b", "c"], [], ["a"]]
    assert try_options(compiler({("a",): 10}), [{"a": 1}]).options == {}
    assert try_options(compiler({}), []).options == {}


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"a": True}, r"options must be a list of mappings, tried one after the other; got {'a': True}\. Pass"),
        ([None], r"aot.tune: options must be a list of mappings, tried one after the other; got \[None\]"),
        ([{"a": None}], "aot.tune: options must map names of compiler options to numbers, strings or booleans"),
    ],
)
def test_options_that_are_no_list_of_mappings_are_refused(options, error):
    with pytest.raises(TypeError, match=error):
        sk.aot.tune(jnp.sin, (1.0,), topology="v5e:2x2", options=options)


@tpu
def test_a_gather_that_may_not_run_beside_compute_is_slower_and_an_unknown_option_is_told():
    mesh = abstract_mesh(data=4)

    def body(w, x):
        first = x @ lax.all_gather(w[0], "data", tiled=True)
        return first @ lax.all_gather(w[1], "data", tiled=True)

    step = jax.shard_map(body, mesh=mesh, in_specs=(P(None, "data"), P("data")), out_specs=P("data"))
    args = (shape((2, 1024, 1024), mesh, P(None, "data")), shape((4096, 1024), mesh, P("data")))
    seen = []
    alone = {"xla_tpu_enable_async_collective_fusion": False}
    tuned = sk.aot.tune(step, args, topology="v5e:2x2", options=[alone, {"xla_no_such": 1}], on_trial=seen.append)
    assert tuned.options == {} and seen[0] is not seen[1]
    assert [trial.options for trial in tuned.trials] == [trial.options for trial in seen]
    assert tuned.trials[0].synchronous < tuned.trials[1].synchronous
    assert "No such compile option" in tuned.trials[2].message
