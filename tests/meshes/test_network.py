"""The two views of links: bandwidths of whole groups, and the loads of single links."""

import numpy as np
import pytest

from shardkit import cost
from shardkit.cost.links import Group, link_of_group
from shardkit.meshes.network import Dim, Network, time_busiest_link

pytestmark = pytest.mark.check

V5E, H100 = cost.chip("v5e"), cost.chip("h100")
TORUS = Network("v5e", tuple(Dim(name, 16, 1, True, V5E.link_bandwidth) for name in "xy"), shared=False)
HOSTS = Network(
    "h100",
    (Dim("host", 4, 0, False, H100.network_bandwidth), Dim("gpu", 8, 2, False, H100.link_bandwidth)),
    shared=False,
)
SQUARE = np.array(list(np.ndindex(16, 16))).reshape(16, 16, 2)
GPUS = np.array(list(np.ndindex(4, 8))).reshape(4, 8, 2)
ALONG_X = SQUARE.transpose(1, 0, 2)


# Catches a bandwidth of a group that its links do not have: a direction too many, a dimension, or an adapter.
@pytest.mark.parametrize(
    ("chip", "network", "groups", "group"),
    {
        "one dim of a torus": (V5E, TORUS, ALONG_X, Group(dims=1)),
        "the other dim": (V5E, TORUS, SQUARE, Group(dims=1)),
        "both dims": (V5E, TORUS, SQUARE.reshape(1, 256, 2), Group(dims=2)),
        "a host": (H100, HOSTS, GPUS, Group()),
        "one GPU of each host": (H100, HOSTS, GPUS.transpose(1, 0, 2), Group(members_on_a_host=1)),
    }.values(),
)
@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter", "all_reduce", "ppermute"])
def test_a_group_with_its_links_to_itself_takes_as_long_as_its_busiest_link(kind, chip, network, groups, group):
    seconds = link_of_group(chip, kind, group).seconds(1.0)
    assert time_busiest_link(network, kind, groups) == pytest.approx(seconds, rel=1e-12)


# Catches adapters that a ring over whole hosts does not use: by links it crosses each host's border once.
def test_a_ring_over_whole_hosts_uses_the_adapters_of_all_gpus():
    by_links = time_busiest_link(HOSTS, "all_gather", GPUS.reshape(1, 32, 2))
    group = link_of_group(H100, "all_gather", Group(members_on_a_host=8))
    assert group.bandwidth == 8 * H100.network_bandwidth
    assert by_links <= group.seconds(1.0) < 1.25 * by_links
