"""Graphs of which edges, nodes or rows of the adjacency are split."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from corpus.case import floats
from faults.case import planted

EDGES, NODES, COLS = P("dp"), P("dp"), P(None, "tp")
SOURCES = np.array([0, 1, 2, 3, 3, 1], np.int32)
TARGETS = np.array([1, 2, 3, 0, 1, 0], np.int32)


def message_passing(x, weights, sources, targets):
    messages = jnp.tanh(x[sources] @ weights)
    arrived = jax.ops.segment_sum(messages, targets, x.shape[0])
    # fault: received = arrived
    received = lax.psum(arrived, "dp")
    return jax.nn.relu(x + received)


def message_passing_reference(x, weights, sources, targets):
    return jax.nn.relu(x + jax.ops.segment_sum(jnp.tanh(x[sources] @ weights), targets, 4))


def mean_of_neighbours(x, sources, targets):
    nodes = x.shape[0]
    sums = lax.psum(jax.ops.segment_sum(x[sources], targets, nodes), "dp")
    ones = jnp.ones(targets.shape[0])
    # fault: degrees = jax.ops.segment_sum(ones, targets, nodes) + 1.0
    degrees = lax.psum(jax.ops.segment_sum(ones, targets, nodes), "dp") + 1.0
    return sums / degrees[:, None]


def mean_of_neighbours_reference(x, sources, targets):
    degrees = jax.ops.segment_sum(jnp.ones(6), targets, 4) + 1.0
    return jax.ops.segment_sum(x[sources], targets, 4) / degrees[:, None]


def normalized_by_degrees(x, adjacency):
    """Rows of the adjacency on each device; both ends divide by the root of their degree."""
    own = adjacency.sum(1)
    all_degrees = lax.all_gather(own, "dp", tiled=True)
    # fault: scaled = x / jnp.sqrt(lax.psum(adjacency.sum(0), "dp"))[:, None]
    scaled = x / jnp.sqrt(all_degrees)[:, None]
    return adjacency @ scaled / jnp.sqrt(own)[:, None]


def normalized_by_degrees_reference(x, adjacency):
    degrees = adjacency.sum(1)
    return adjacency @ (x / jnp.sqrt(degrees)[:, None]) / jnp.sqrt(degrees)[:, None]


def edge_softmax(scores, values, targets):
    powers = jnp.exp(scores)
    # fault: sums = jax.ops.segment_sum(powers, targets, 4)
    sums = lax.psum(jax.ops.segment_sum(powers, targets, 4), "dp")
    shares = powers / sums[targets]
    return lax.psum(jax.ops.segment_sum(shares[:, None] * values, targets, 4), "dp")


def edge_softmax_reference(scores, values, targets):
    powers = jnp.exp(scores)
    shares = powers / jax.ops.segment_sum(powers, targets, 4)[targets]
    return jax.ops.segment_sum(shares[:, None] * values, targets, 4)


def nodes_of_a_device(x, neighbours):
    """Each device has rows of the nodes, and the global numbers of their neighbours."""
    everybody = lax.all_gather(x, "dp", tiled=True)
    first = lax.axis_index("dp") * x.shape[0]
    # fault: own = jnp.arange(x.shape[0])
    own = first + jnp.arange(x.shape[0])
    differences = everybody[neighbours] - everybody[own][:, None]
    return (differences**2).sum(1)


def nodes_of_a_device_reference(x, neighbours):
    return ((x[neighbours] - x[:, None]) ** 2).sum(1)


def page_rank(rank, links):
    """Columns of the links on each device: a node's rank flows to where it points."""
    nodes = links.shape[0]
    flows = lax.psum(links @ rank, "dp")
    # fault: restart = 0.25 / rank.shape[0]
    restart = 0.25 / nodes
    return 0.75 * flows + restart


def two_hops(x, adjacency):
    once = lax.all_gather(adjacency @ x, "dp", tiled=True)
    # fault: twice = adjacency @ x
    twice = adjacency @ once
    return twice + lax.dynamic_slice_in_dim(x, lax.axis_index("dp") * 2, 2)


def pooled(x, graphs, weights):
    """The mean of each graph's nodes, then a layer with split columns."""
    hot = jax.nn.one_hot(graphs, 2)
    counts = lax.psum(hot.sum(0), "dp")
    means = lax.psum(hot.T @ x, "dp") / counts[:, None]
    # fault: hidden = jnp.tanh(lax.psum(means @ weights, "dp"))
    hidden = jnp.tanh(means @ weights)
    return hidden


def pooled_reference(x, graphs, weights):
    hot = jax.nn.one_hot(graphs, 2)
    return jnp.tanh(hot.T @ x / hot.sum(0)[:, None] @ weights)


X, SQUARE = floats(4, 3), floats(4, 4) ** 2
NEIGHBOURS = np.array([[1, 2], [3, 0], [0, 1], [2, 1]], np.int32)
CASES = [
    planted(
        message_passing, message_passing_reference, (X, floats(3, 3), SOURCES, TARGETS), (P(), P(), EDGES, EDGES), P(),
        dp=2,
    ),
    planted(mean_of_neighbours, mean_of_neighbours_reference, (X, SOURCES, TARGETS), (P(), EDGES, EDGES), P(), dp=2),
    planted(normalized_by_degrees, normalized_by_degrees_reference, (X, SQUARE), (P(), NODES), NODES, dp=2, grad=0),
    planted(
        edge_softmax, edge_softmax_reference, (floats(6), floats(6, 2), TARGETS), (EDGES, EDGES, EDGES), P(), dp=2
    ),
    planted(nodes_of_a_device, nodes_of_a_device_reference, (X, NEIGHBOURS), (NODES, NODES), NODES, dp=2),
    planted(page_rank, lambda r, a: 0.75 * (a @ r) + 0.25 / 4, (floats(4), SQUARE), (NODES, P(None, "dp")), P(), dp=2),
    planted(two_hops, lambda x, a: a @ (a @ x) + x, (X, SQUARE), (P(), NODES), NODES, dp=2),
    planted(
        pooled, pooled_reference, (X, np.array([0, 1, 1, 0]), floats(3, 4)), (NODES, NODES, COLS), COLS, dp=2, tp=2
    ),
]  # fmt: skip
