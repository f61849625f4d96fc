"""Closed forms: what a computation must cost, from its sizes alone."""

from shardkit.cost.collectives import Traffic, wire

__all__ = ["Traffic", "wire"]
