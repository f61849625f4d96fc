"""The loader: one order for every mesh, a position that resumes it, and what it refuses."""

import sys
import threading
from itertools import islice

import grain
import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import shardkit as sk
from shardkit.runtime.data.loader import loader, prefetch_to_device
from support.refusals import raises

PINNED = [4, 7, 11, 8, 17, 5, 10, 19]


def make(mesh, source=None, **options):
    defaults = {"batch": 8, "seed": 3, "mesh": mesh, "spec": P(mesh.axis_names[0]), "threads": 2}
    return loader(range(20) if source is None else source, **{**defaults, **options})


def taken(batches, count=None):
    return np.concatenate([np.asarray(x) for x in islice(batches, count)]).tolist()


# proves S116, F66: every epoch holds every sample once, in an order of its own that the seed alone decides
def test_epochs_cover_the_source_in_orders_of_their_own(data8):
    line = taken(make(data8, epochs=3))  # 60 samples: 7 batches, the last 4 samples dropped
    assert len(line) == 56
    assert sorted(line[:20]) == sorted(line[20:40]) == list(range(20))
    assert line[:20] != line[20:40] and len(set(line[40:])) == 16
    assert line[:8] == PINNED
    assert taken(make(data8, seed=4), 2) != line[:16]
    assert taken(make(data8, seed=None), 3) == [*range(20), *range(4)]


# proves F66: the order depends neither on the mesh nor on the threads
@pytest.mark.quick("0-sizes2", "3-sizes1")
@pytest.mark.parametrize("sizes", [{"data": 8}, {"data": 2, "context": 4}, {"data": 1}])
@pytest.mark.parametrize("threads", [0, 3])
def test_the_order_does_not_depend_on_mesh_or_threads(sizes, threads, data8):
    count = int(np.prod(list(sizes.values())))
    mesh = sk.make_mesh(jax.devices()[:count], **sizes)
    assert taken(make(mesh, threads=threads), 5) == taken(make(data8), 5)


# proves F65: a run that goes on from the position repeats and skips nothing, with another batch and mesh too
@pytest.mark.quick("2")
@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_position_resumes(prefetch, data8, mesh2x4):
    line = taken(make(data8), 12)
    first = make(data8, prefetch=prefetch)
    assert first.position == 0
    begun = taken(first, 3)
    assert first.position == 24  # what was prefetched beyond it was not consumed
    first.close()
    second = make(mesh2x4, batch=4, position=first.position)
    assert begun + taken(second, 18) == line
    assert second.position == 96


# proves S117: the rows that a batch is made of, and their layout
def test_batches_are_trees_laid_out_as_the_step_wants_them():
    mesh = sk.make_mesh(data=2, context=4)
    source = [{"tokens": np.full(8, i, np.int32), "weight": np.float32(i)} for i in range(12)]
    batch = next(make(mesh, source, batch=4, spec=P("data", "context")))
    assert batch["tokens"].sharding.spec == P("data", "context") and batch["weight"].sharding.spec == P("data")
    assert batch["tokens"].shape == (4, 8) and batch["weight"].dtype == np.float32
    np.testing.assert_array_equal(batch["tokens"][:, 0], batch["weight"].astype(np.int32))


# proves F66: transformations draw by the sample's index in the run, so alike on every mesh and after a resume
def test_random_maps_of_a_map_dataset(data8, mesh2x4):
    drawn = grain.MapDataset.range(20).seed(7).random_map(lambda x, rng: np.float64(x + rng.random()))
    line = taken(make(data8, drawn), 6)
    assert taken(make(mesh2x4, drawn, batch=4, position=16, threads=0), 8) == line[16:]
    epochs = sorted(line[:20]), sorted(line[20:40])
    assert [int(x) for x in epochs[0]] == list(range(20)) and epochs[0] != epochs[1]


class Broken:
    """A source of which one sample cannot be read the first time."""

    def __init__(self, bad):
        self.bad, self.tries = bad, 0

    def __len__(self):
        return 64

    def __getitem__(self, index):
        if index == self.bad:
            self.tries += 1
            if self.tries == 1:
                raise OSError("unreadable")
        return index


# proves F65: an exception leaves the position at the batch that was not given, and asking again gives that batch
@pytest.mark.parametrize("prefetch", [0, 1, 3])
@pytest.mark.parametrize("threads", [0, 2])
def test_the_position_after_an_exception(prefetch, threads, data8):
    batches = make(data8, Broken(29), seed=None, prefetch=prefetch, threads=threads)
    assert taken(batches, 3) == list(range(24))
    with pytest.raises(OSError, match="unreadable") as error:
        next(batches)
    assert "loader: while reading sample 29 of the run." in error.value.__notes__
    assert batches.position == 24
    assert taken(batches, 2) == list(range(24, 40))
    assert batches.position == 40


def test_the_end_and_closing(data8):
    before = set(threading.enumerate())
    batches = make(data8, epochs=1)
    assert len(taken(batches)) == 16
    with pytest.raises(StopIteration):
        next(batches)
    assert batches.position == 16
    assert list(make(data8, epochs=1, position=40)) == []
    closed, dropped = make(data8), make(data8)
    next(closed), next(dropped)
    started = set(threading.enumerate()) - before
    assert started
    closed.close()
    del dropped
    for thread in started:
        thread.join(60)
    assert not any(thread.is_alive() for thread in started)


# proves F65
@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_prefetch_takes_so_many_ahead(ahead):
    made = []

    def numbers():
        for number in range(5):
            made.append(number)
            yield number

    batches = prefetch_to_device(numbers(), ahead)
    assert next(batches) == 0 and made == list(range(ahead + 1))
    assert list(batches) == [1, 2, 3, 4]


def test_an_exception_comes_after_what_came_before_it():
    def numbers():
        yield 1
        yield 2
        raise OSError("late")

    batches = prefetch_to_device(numbers(), 4)
    assert [next(batches), next(batches)] == [1, 2]
    with pytest.raises(OSError, match="late"):
        next(batches)


def refused(wording, mesh, error=ValueError, **options):
    with raises(error, wording):
        next(make(mesh, **options))


# proves S115
def test_what_is_refused(data8):
    refused(
        "local_rows: the batch must be divisible by axis 'data'; got 12 rows over 8 devices. Pass another batch, or "
        "pad with examples of weight 0.",
        data8,
        batch=12,
    )
    refused(
        "loader: the source must fill one batch; it has 20 samples in all epochs, and the batch needs 24. Pass a "
        "smaller batch, or more epochs.",
        data8,
        batch=24,
        epochs=1,
    )
    refused("loader: the seed must be None or 0 to 2**32 - 1; got -1. Pass seed=0.", data8, seed=-1)


def test_a_sample_that_a_filter_left_out(data8):
    refused(
        "loader: every index of the source must have a sample; the run's sample 3 is None. Filter the data set before "
        "it is indexed, as all later positions depend on the number of samples.",
        data8,
        source=grain.MapDataset.range(20).filter(lambda x: x != 3),
        seed=None,
    )


def test_without_grain(data8, monkeypatch):
    monkeypatch.setitem(sys.modules, "grain", None)
    refused("loader: grain must be installed; it is not. Run pip install 'shardkit[data]'.", data8, ImportError)
