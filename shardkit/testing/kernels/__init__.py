"""Kernels of remote copies, proved in every order: no race, no deadlock, and what they compute as a plain program.

Start with `assertion.py`. Imports the machine and its orders, `shardkit.remote_copies`, and the proof for all inputs,
`shardkit.testing.exact`.
"""

from shardkit.remote_copies.proof import OrdersError
from shardkit.testing.kernels.assertion import check_orders
from shardkit.testing.kernels.written_out import write_out

__all__ = ["OrdersError", "check_orders", "write_out"]
