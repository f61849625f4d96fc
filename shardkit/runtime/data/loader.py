"""Batches from a data set, on grain: one global order, of which each process loads its rows.

Grain reads, shuffles, repeats and keeps threads. What it has not is the row of a global batch: its `ShardByJaxProcess`
cuts the data set by processes, so that a run that resumes with other processes sees other batches, and some examples
twice. Here a sample has its number in the run, whatever the mesh. For example 8 samples a batch over "data" of 4
devices in two processes, from position 16:

    process 0    reads samples 16, 17, 18, 19, then 24, 25, 26, 27
    process 1    reads samples 20, 21, 22, 23, then 28, 29, 30, 31

and one process would read 16 to 23, then 24 to 31: the same batches.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from typing import Any, TypeVar

import numpy as np
from jax.sharding import Mesh, PartitionSpec

from shardkit._arguments.checks import at_least, mesh_in_context
from shardkit._arguments.extras import install
from shardkit._arguments.typed import typed
from shardkit.runtime.data.arrays import from_rows, local_rows

_MOST = 1024  # threads, and prefetched batches

T = TypeVar("T")


@typed
def loader(
    source: Any,
    *,
    batch: int,
    seed: int | None,
    mesh: Mesh | None = None,
    spec: PartitionSpec,
    position: int = 0,
    epochs: int | None = None,
    threads: int = 4,
    prefetch: int = 2,
) -> Loader:
    """Iterates over a data set in global batches, in an order that depends on the seed alone.

    The samples form one sequence, epoch after epoch, each epoch in another order; a batch is the next `batch` samples,
    on any mesh. So you can resume from `loader.position` with other processes, another mesh or another batch, without
    repeating or skipping a sample. A batch may span two epochs; an incomplete last batch is dropped.

    Args:
        source: anything with `len` and `source[i]`, or a `grain.MapDataset`. Its `.map` and `.random_map` see a
            sample's index `epoch * len(source) + i`, and so draw the same on every mesh. A sample is a pytree of arrays
            or numbers. Several threads read the source concurrently.
        batch: samples in a global batch, over all processes.
        seed: the seed of each epoch's order, 0 to 2**32 - 1. None keeps the source's order.
        mesh: the mesh, by default the mesh of `jax.set_mesh`; a process outside it reads one sample per batch, for
            shapes and dtypes.
        spec: the layout of the batch, `plan.batch_spec(mesh)`.
        position: number of samples the run has already used; pass `loader.position` of the run you resume.
        epochs: number of passes over the source; None for no limit.
        threads: samples read concurrently; 0 reads them on demand (best for data in memory).
        prefetch: batches prepared and sent to the devices in advance.

    Returns:
        A Loader: an iterator of batches, each a pytree of `jax.Array` with a new dim 0 of `batch` rows, sharded as the
        step expects them, with `loader.position`.

    Raises:
        ValueError: a batch that does not divide over the devices of the spec's first entry, or a number out of range;
            from the iterator, a sample that is None, as a grain filter produces.
        ImportError: grain is not installed.

    Example:
        >>> batches = sk.runtime.loader(range(16), batch=8, seed=None, mesh=mesh, spec=P("data"), epochs=1)
        >>> next(batches), batches.position
        (Array([0, 1, 2, 3, 4, 5, 6, 7], dtype=int32), 8)
    """
    mesh = mesh_in_context("loader", mesh)
    samples = _make_sequence(source, seed, epochs)
    at_least("loader", 1, batch=batch)
    at_least("loader", 0, position=position, threads=threads, prefetch=prefetch)
    for name, value in {"threads": threads, "prefetch": prefetch}.items():
        if value > _MOST:
            raise ValueError(f"loader: {name} must be at most {_MOST}; got {value}. Pass {name}={_MOST}.")
    if len(samples) < batch:
        raise ValueError(
            f"loader: the source must fill one batch; it has {len(samples)} samples in all epochs, and the batch needs "
            f"{batch}. Pass a smaller batch, or more epochs."
        )
    local_rows(batch, mesh, spec)  # refuses a batch that does not divide

    def batches_from(position: int) -> Iterator[Any]:
        return prefetch_to_device(_batches(samples, position, batch, mesh, spec, threads, prefetch), prefetch)

    return Loader(batches_from, batch, position)


class Loader:
    """An iterator of global batches; `loader` creates one.

    After an exception from the source, `next` retries the batch that failed.
    """

    def __init__(self, batches_from: Callable[[int], Iterator[Any]], batch: int, position: int):
        self._batches_from = batches_from
        self._batch = batch
        self._position = position
        self._batches: Any = None

    @property
    def position(self) -> int:
        """Samples of the sequence up to the last returned batch; prefetched ones do not count."""
        return self._position

    def __iter__(self) -> Loader:
        return self

    def __next__(self) -> Any:
        if self._batches is None:
            self._batches = self._batches_from(self._position)
        try:
            batch = next(self._batches)
        # Batches that were prefetched behind the failed one are dropped, and the next call begins again at `position`.
        except BaseException:
            self.close()
            raise
        self._position += self._batch
        return batch

    def close(self) -> None:
        """Ends the threads, as does deleting the Loader; the next batch starts new ones."""
        if self._batches is not None:
            self._batches.close()
            self._batches = None


def _batches(
    samples: Any, position: int, batch: int, mesh: Mesh, spec: PartitionSpec, threads: int, prefetch: int
) -> Iterator[Any]:
    """The batches from a position on, each from the rows that this process loads."""
    import grain

    rows = local_rows(batch, mesh, spec)
    rows_to_read = rows
    if not rows.size:  # outside the mesh one row, for shapes and dtypes
        rows_to_read = np.zeros(1, np.int64)
    dataset = grain.MapDataset.source(_Rows(samples, position, batch, rows_to_read))
    # grain counts rows here, and not batches. With fewer of them than threads, some threads would idle.
    # For example with 8 threads, prefetch=2 and 16 rows a batch: 32 rows are read ahead.
    ahead = 0
    if threads:
        ahead = max(threads, prefetch * len(rows_to_read))
    options = grain.ReadOptions(num_threads=threads, prefetch_buffer_size=ahead)
    local_batches = dataset.to_iter_dataset(options).batch(len(rows_to_read))
    with closing(iter(local_batches)) as iterator:
        for local_batch in iterator:
            yield from_rows(local_batch, rows, batch, mesh, spec)


class _Rows:
    """The samples that a process reads: its rows of each batch, from a position on."""

    def __init__(self, samples: Any, position: int, batch: int, rows: np.ndarray):
        self._samples = samples
        self._position = position
        self._batch = batch
        self._rows = rows

    def __len__(self) -> int:
        batches = max(0, len(self._samples) - self._position) // self._batch
        return batches * len(self._rows)

    def __getitem__(self, index: int) -> Any:
        # In the example above, process 1 has rows 4 to 7 of a batch of 8: its index 5 is row 5 of the batch after the
        # first, the sample 16 + 8 + 5 = 29.
        batch, row = divmod(index, len(self._rows))
        number = self._position + batch * self._batch + int(self._rows[row])
        try:
            sample = self._samples[number]
        except Exception as error:
            error.add_note(f"loader: while reading sample {number} of the run.")
            raise
        if sample is None:
            raise ValueError(
                f"loader: every index of the source must have a sample; the run's sample {number} is None. Filter the "
                "data set before it is indexed, as all later positions depend on the number of samples."
            )
        return sample


@typed
def prefetch_to_device(batches: Iterable[T], n: int = 2) -> Iterator[T]:
    """Requests batches `n` ahead, so their transfers overlap with the step.

    Args:
        batches: an iterable of batches. A batch must start its transfer when you request it, as global arrays do.
        n: batches in advance; each is stored on the devices.

    Returns:
        A generator of the same batches. An exception from `batches` is raised after the batches before it.

    Raises:
        ValueError: a negative `n`, on the first `next`.

    Example:
        >>> from shardkit.runtime.data.loader import prefetch_to_device
        >>> batches = (sk.runtime.from_full(np.full(8, i), mesh, P("data")) for i in range(3))
        >>> [int(batch.sum()) for batch in prefetch_to_device(batches)]
        [0, 8, 16]
    """
    at_least("prefetch_to_device", 0, n=n)
    ready: deque[T] = deque()
    iterator = iter(batches)
    has_more = True
    failure: Exception | None = None
    try:
        while has_more or ready:
            # One more than n: the batch that is returned next is not in advance.
            while has_more and len(ready) <= n:
                try:
                    ready.append(next(iterator))
                except StopIteration:
                    has_more = False
                except Exception as error:
                    has_more = False
                    failure = error
            if ready:
                yield ready.popleft()
        if failure is not None:
            raise failure
    finally:
        if hasattr(iterator, "close"):
            iterator.close()


def _make_sequence(source: Any, seed: int | None, epochs: int | None) -> Any:
    """All samples of the run, in order; refuses what has no samples by index."""
    try:
        import grain
    except ImportError:
        raise ImportError(f"loader: grain must be installed; it is not. Run {install('data')}.") from None
    if seed is not None and not 0 <= seed < 2**32:
        raise ValueError(f"loader: the seed must be None or 0 to 2**32 - 1; got {seed}. Pass seed=0.")
    at_least("loader", 1, epochs=epochs)
    is_dataset = isinstance(source, grain.MapDataset)
    is_sequence = hasattr(source, "__len__") and hasattr(source, "__getitem__")
    if not is_dataset and not is_sequence:
        raise TypeError(
            f"loader: source must have `len` and `source[i]`, or be a grain.MapDataset; got {source!r}. Pass for "
            "example a list of samples."
        )
    samples = source
    if not is_dataset:
        samples = grain.MapDataset.source(source)
    # Shuffled before it is repeated: every epoch has each sample once, and grain gives each epoch another order.
    if seed is not None:
        samples = samples.shuffle(seed=seed)
    return samples.repeat(epochs)
