"""Instruments: what a program communicates, read from the program itself."""

from shardkit.analysis.census import Census, Row, census

__all__ = ["Census", "Row", "census"]
