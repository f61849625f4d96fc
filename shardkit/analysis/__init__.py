"""Instruments: what a program communicates, read from the program itself."""

from shardkit.analysis import aot, planner
from shardkit.analysis.account import Compiled, compiled
from shardkit.analysis.census import Census, Row, census
from shardkit.analysis.contract import Collective, collective, expects
from shardkit.analysis.explain import Explanation, Reason, explain
from shardkit.analysis.lint import lint
from shardkit.analysis.profile import profile, trace
from shardkit.analysis.rules import RULES, Finding
from shardkit.analysis.scaling import Scaling, scaling
from shardkit.analysis.timings import Profile, Timing

__all__ = [
    "RULES",
    "Census",
    "Collective",
    "Compiled",
    "Explanation",
    "Finding",
    "Profile",
    "Reason",
    "Row",
    "Scaling",
    "Timing",
    "aot",
    "census",
    "collective",
    "compiled",
    "expects",
    "explain",
    "lint",
    "planner",
    "profile",
    "scaling",
    "trace",
]
