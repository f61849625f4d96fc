"""Random numbers: a key is a word of 64 bits, and its draws are hashes of the word and a place.

jax's own random numbers are hashes too, by another function that takes longer to compile than all the rest of a proof.
A program that is right is right for any hash. But a compiled program holds jax's own hash, which its traced one must
then draw too: `apply_threefry` computes it.

Worked example: `random.split(key, 2)` of the word w gives mix(w + 2**32) and mix(w + 2 * 2**32). `random.bits(key)` of
a key gives mix(w + 2**32), cut to 32 bits. In further draws of inputs the bits are hashed with the seed of the draw:
so a comparison of random numbers goes both ways too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from shardkit._jax import compat
from shardkit.testing.exact.numbers.errors import UnsupportedError
from shardkit.testing.exact.numbers.hashing import mix

_DERIVED = ("random_fold_in", "random_split", "random_bits")
_LOW_HALF = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)  # bits
# Of Threefry-2x32: by how many bits the rounds rotate, and the word that the third part of the key has.
_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_GROUPS = 5
_PARITY = np.uint32(0x1BD11BDA)


def make_words(data: np.ndarray) -> np.ndarray:
    """Keys [...] from their data [..., n] of 32 bits: the two halves of a word side by side.

    So `random_unwrap` gives the data back. Further pairs are hashed into the word.
    """
    # threefry has two halves, so one word; rbg has four, and the second pair is hashed in.
    word = np.zeros(data.shape[:-1], np.uint64)
    for number in range(data.shape[-1]):
        half = data[..., number].astype(np.uint64)
        is_upper = number % 2 == 0
        if is_upper and number > 0:
            word = mix(word)
        if is_upper:
            half = half << _HALF
        word = word ^ half
    return word


def split_words(words: np.ndarray) -> np.ndarray:
    """The data [..., 2] of keys [...], the upper half first."""
    return np.stack([words >> _HALF, words & _LOW_HALF], -1).astype(np.uint32)


def apply_random(equation: Any, operands: Sequence[np.ndarray], draw: int) -> np.ndarray | None:
    """The result of a primitive of random keys, in a draw of that seed; None for one that has no meaning here."""
    name = equation.primitive.name
    x = operands[0]
    if name == "random_seed":
        return _make_seed(np.asarray(x))
    if name == "random_wrap":
        return make_words(x)
    if name == "random_unwrap":
        return split_words(x)
    if name == "random_clone":
        return x
    if name in _DERIVED and not _has_threefry_keys(equation):
        raise UnsupportedError("random numbers of keys that are not threefry's, as of rbg: these depend on the batch,")
    if name == "random_fold_in":
        return mix(mix(x), operands[1].astype(np.uint64))
    if name == "random_split":
        return _hash_places(x, equation.params["shape"])
    if name == "random_bits":
        words = _hash_places(x, equation.params["shape"])
        # Other bits in each draw: programs must be equal for every mask that a dropout may draw.
        if draw:
            words = mix(words, np.uint64(draw))
        return words.astype(f"uint{equation.params['bit_width']}")
    return None


def _make_seed(x: np.ndarray) -> np.ndarray:
    """The key of an integer seed: its two halves are the data of the key."""
    # jax.random.key(-1) has the data of 2**32 - 1, or of 2**64 - 1 with 64 bits.
    seed = x.astype(np.int64).view(np.uint64)
    if x.dtype.itemsize > 4:
        return seed
    return seed & _LOW_HALF


def _hash_places(keys: np.ndarray, shape: Sequence[int]) -> np.ndarray:
    """A word for each key and each place of the shape.

    Without `jax_threefry_partitionable` the first of many words is another than the first of few.
    """
    if not _is_partitionable():
        keys = mix(keys, np.uint64(math.prod(shape)))
    # In the upper half of a word, so that no place equals the low bits of a seed.
    places = np.arange(1, math.prod(shape) + 1, dtype=np.uint64) << _HALF
    places = places.reshape(shape)
    keys = keys.reshape(keys.shape + (1,) * len(shape))
    return np.asarray(mix(keys, places))


def apply_threefry(equation: Any, operands: Sequence[np.ndarray]) -> np.ndarray | None:
    """The bits that jax itself draws of a threefry key, as a compiled program does; None for other keys and primitives.

    A key is a word of two halves. A draw at a place is a word, too: the hash, by the key, of the number of the place.
    """
    name = equation.primitive.name
    if name not in _DERIVED or not _is_threefry(equation):
        return None
    keys = operands[0]
    if name == "random_fold_in":
        return _hash_threefry(keys, operands[1].astype(np.uint64))
    shape = equation.params["shape"]
    places = np.arange(math.prod(shape), dtype=np.uint64).reshape(shape)
    keys = keys.reshape(keys.shape + (1,) * len(shape))
    words = _hash_threefry(keys, places)
    if name == "random_split":
        return words
    # As jax does it: of fewer than 64 bits both halves of a word are joined by xor.
    width = equation.params["bit_width"]
    if width < 64:
        words = (words >> _HALF) ^ (words & _LOW_HALF)
    return words.astype(f"uint{width}")


def _is_threefry(equation: Any) -> bool:
    """Whether keys are those of threefry, and are split by the number of each place."""
    return _has_threefry_keys(equation) and _is_partitionable()


def _is_partitionable() -> bool:
    return bool(getattr(jax.config, "jax_threefry_partitionable", False))


def _has_threefry_keys(equation: Any) -> bool:
    impl: str = compat.key_impl(equation.invars[0].aval.dtype).name
    return impl == "threefry2x32"


def _hash_threefry(keys: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    """Threefry-2x32 of words of 64 bits, of which each half is one of its words (Salmon et al., SC 2011)."""
    shape = np.broadcast_shapes(keys.shape, numbers.shape)
    # In one dim, because the sums of arrays wrap around, and those of numpy's scalars warn.
    keys = np.broadcast_to(keys, shape).reshape(-1)
    numbers = np.broadcast_to(numbers, shape).reshape(-1)
    first_key = (keys >> _HALF).astype(np.uint32)
    second_key = (keys & _LOW_HALF).astype(np.uint32)
    schedule = (first_key, second_key, first_key ^ second_key ^ _PARITY)
    first = (numbers >> _HALF).astype(np.uint32) + first_key
    second = (numbers & _LOW_HALF).astype(np.uint32) + second_key
    for group in range(_GROUPS):
        for rotation in _ROTATIONS[group % 2]:
            first = first + second
            second = (second << np.uint32(rotation)) | (second >> np.uint32(32 - rotation))
            second = second ^ first
        first = first + schedule[(group + 1) % 3]
        second = second + schedule[(group + 2) % 3] + np.uint32(group + 1)
    words = (first.astype(np.uint64) << _HALF) | second.astype(np.uint64)
    return words.reshape(shape)
