"""Wrong calls of both comparisons with a reference: one sentence, before or in place of jax's own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import shardkit as sk

X = np.ones((8, 4), "f")
ASSERTIONS = [sk.testing.assert_equal_for_all_inputs, sk.testing.assert_matches_reference]


def same(x):
    return x


def of_two(x, y):
    return x + y


def summed(x):
    return x.sum()


def doubled(x):
    return x, x


def text(x):
    return "text"


def nothing(x):
    return None


WRONG = {
    "args[0]: the spec P('data', None, None) has 3 entries": {"in_specs": P("data", None, None)},
    "args[0]: dim 0 must be divisible by axis 'data'; got size 6 over 4": {"args": (X[:6],)},
    "args[0]: the spec P('data',) has 1 entry for an array of rank 0": {"args": (np.float32(1),)},
    "args[0]: the spec P('data',) has 1 entry": {"args": (1.0,)},
    "args[1]['b']: dim 0 must be": {"args": (X, {"b": X[:2]}), "kernel": of_two, "reference": of_two},
    "in_specs must be one spec for all arguments, or a tuple with one for each of them; got a tuple of 2 for 1": {
        "in_specs": (P("data"), P())
    },
    "one for each of them; got a list of 1 for 1 argument": {"in_specs": [P("data")]},
    "one for each of them; got a dict for 1 argument": {"in_specs": {"x": P("data")}},
    "args must be a tuple of the arguments; got float32[8,4]": {"args": X},
    "the leaves of args must be arrays or numbers; args[0] is 'abc'": {"args": ("abc",)},
    "the leaves of args must be arrays or numbers; args[0]['k'] is a function": {"args": ({"k": same},)},
    "the leaves of args must be arrays or numbers; args[0] is a ndarray": {"args": (np.array([same] * 8),)},
    "the kernel must take the arguments in args, of which there is 1; it is called as of_two(x, y)": {"kernel": of_two},
    "the reference must take the arguments in args, of which there is 1; it is called as of_two(x, y)": {
        "reference": of_two
    },
    "the kernel must take the arguments in args, of which there are 2; it is called as same(x)": {"args": (X, X)},
    "the kernel must take the arguments in args, of which there are 0": {"args": ()},
    "the kernel's result: the spec P('data',) has 1 entry for an array of rank 0": {
        "kernel": summed,
        "reference": summed,
    },
    "the kernel must return arrays; its result is 'text'": {"kernel": text},
    "the reference must return arrays; its result is 'text'": {"reference": text},
    "it is (*, *) and the reference one array": {"kernel": doubled},
    "it is one array and the reference (*, *)": {"reference": doubled},
    "it is None and the reference one array": {"kernel": nothing},
    "out_specs must be one spec for all results of the kernel, or have their structure; got a tuple of 3 for a tuple": {
        "kernel": doubled,
        "out_specs": (P("data"),) * 3,
    },
    "in_specs must be a PartitionSpec or a pytree of them or None; got P(unreduced=": {
        "in_specs": P(unreduced={"data"})
    },
    "out_specs must be a PartitionSpec or a pytree of them; got P(reduced=": {"out_specs": P(reduced={"data"})},
    "it varies along 'data', and its spec is P(). Reduce or gather it over axis 'data'": {"out_specs": P()},
}


@pytest.mark.parametrize("assertion", ASSERTIONS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("said", WRONG)
def test_a_wrong_call_is_refused_in_a_sentence(said, assertion):
    call = {
        "kernel": same,
        "reference": same,
        "in_specs": P("data"),
        "out_specs": P("data"),
        "args": (X,),
        **WRONG[said],
    }
    with pytest.raises((TypeError, ValueError, AssertionError)) as caught:
        assertion(call.pop("kernel"), call.pop("reference"), mesh=sk.make_mesh(jax.devices()[:4], data=4), **call)
    message = str(caught.value)
    assert message.startswith(assertion.__name__)
    assert said in message
    assert "\n" not in message


# What the functions themselves raise stays as it is, with a note of what they were called with.
def test_errors_of_the_functions_say_their_arguments():
    mesh = sk.make_mesh(jax.devices()[:4], data=4)
    call = {"mesh": mesh, "in_specs": P("data"), "out_specs": P("data"), "args": (X,)}
    for assertion in ASSERTIONS:
        with pytest.raises(TypeError) as caught:
            assertion(lambda x: x @ x, same, **call)
        assert "called on mesh data=4 with the shards of one device: float32[2,4]" in caught.value.__notes__[0]
        with pytest.raises(NameError) as caught:
            assertion(same, lambda x: lax.psum(x, "data"), **call)
        assert "called with the global arrays: float32[8,4]. It runs without a mesh" in caught.value.__notes__[0]


def test_a_comparison_of_floats_takes_no_shapes():
    with pytest.raises(TypeError, match=r"args\[0\] is a ShapeDtypeStruct"):
        sk.testing.assert_matches_reference(
            same,
            same,
            mesh=sk.make_mesh(jax.devices()[:4], data=4),
            in_specs=P("data"),
            out_specs=P("data"),
            args=(jax.ShapeDtypeStruct((8, 4), jnp.float32),),
        )


# jax's assertion has no message, and would pass for a kernel that is refuted.
@pytest.mark.parametrize("assertion", ASSERTIONS, ids=lambda f: f.__name__)
def test_an_unknown_axis_refutes_nothing(assertion):
    def kernel(x):
        return lax.psum(x, "model")

    call = {"mesh": sk.make_mesh(jax.devices()[:4], data=4), "in_specs": P("data"), "out_specs": P()}
    with pytest.raises(ValueError) as caught:
        assertion(kernel, summed, args=(X,), **call)
    line = kernel.__code__.co_firstlineno + 1
    assert str(caught.value) == (
        f"{assertion.__name__}: jax.shard_map must support what the kernel calls at test_wrong_calls.py:{line}; it "
        "raises AssertionError without a message, as for a psum with axis_index_groups or over an unknown axis. Use "
        "the mesh's axes, 'data', and make groups an axis of the mesh."
    )


def test_a_comparison_of_floats_takes_no_mesh_without_devices():
    call = {"mesh": sk.abstract_mesh(data=4), "in_specs": P("data"), "out_specs": P("data"), "args": (X,)}
    with pytest.raises(ValueError) as caught:
        sk.testing.assert_matches_reference(same, same, **call)
    assert str(caught.value) == (
        "assert_matches_reference: the mesh must have devices; got abstract data=4. Pass sk.make_mesh(data=4)."
    )
