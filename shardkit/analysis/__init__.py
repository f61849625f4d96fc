"""Instruments: what a program communicates, read from the program itself."""

from shardkit.analysis.census import Census, Row, census
from shardkit.analysis.contract import Collective, collective, expects

__all__ = ["Census", "Collective", "Row", "census", "collective", "expects"]
