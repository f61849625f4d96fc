"""Kernels of remote copies, proved in every order: no race, no deadlock, and what they compute as a plain program.

Start with `orders.py`, which says why a few runs decide all orders. Imports `shardkit._jax`, and the proof for all
inputs.
"""

from shardkit.testing.kernels.proof import OrdersError, check_orders
from shardkit.testing.kernels.written_out import write_out

__all__ = ["OrdersError", "check_orders", "write_out"]
