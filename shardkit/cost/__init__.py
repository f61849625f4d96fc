"""Closed forms for the cost of a computation, from its sizes alone; chips as data.

Start with `collectives.py`, the bytes of a collective, and `links.py`, its time. A new chip is one row in
`hardware.py`. Imports argument checks only, and no jax arrays.
"""

from shardkit.cost.activations import activation_memory
from shardkit.cost.collectives import bus_factor as bus_factor
from shardkit.cost.collectives import collective_time, wire
from shardkit.cost.crossovers import bucket_bytes, scatter_from
from shardkit.cost.crossovers import ring_from as ring_from
from shardkit.cost.hardware import Chip, chip, chips, group_bandwidth
from shardkit.cost.hardware import chip_of as chip_of
from shardkit.cost.links import Link, Links, links
from shardkit.cost.pipeline import bubble
from shardkit.cost.quantization import quantization_error, quantized_bytes
from shardkit.cost.rooflines import roofline
from shardkit.cost.transformer import mfu, transformer_flops
from shardkit.cost.transformer import transformer_parameters as transformer_parameters
from shardkit.cost.volumes import context_volume, expert_volume, tensor_volume
from shardkit.cost.zero import zero_memory, zero_volume

__all__ = [
    "Chip",
    "Link",
    "Links",
    "activation_memory",
    "bubble",
    "bucket_bytes",
    "chip",
    "chips",
    "collective_time",
    "context_volume",
    "expert_volume",
    "group_bandwidth",
    "links",
    "mfu",
    "quantization_error",
    "quantized_bytes",
    "roofline",
    "scatter_from",
    "tensor_volume",
    "transformer_flops",
    "wire",
    "zero_memory",
    "zero_volume",
]
