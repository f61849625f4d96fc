"""A program that the compiler of absent chips has seen, and the report on it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from shardkit.analysis.hlo import proto
from shardkit.analysis.hlo.collectives import collectives_of, total_work
from shardkit.analysis.hlo.memory import Memory
from shardkit.analysis.hlo.report import Report
from shardkit.analysis.hlo.time_model import clock_of
from shardkit.analysis.hlo.timeline import timeline_of
from shardkit.analysis.hlo.topology import Topology, device_memory, device_of, parse_topology
from shardkit.analysis.jaxpr.census import census_of


class Built(NamedTuple):
    """A program that the compiler of absent chips has seen.

    Attributes:
        traced: the traced step.
        sizes: names and sizes of the mesh axes.
        module: the serialized program; None where it does not fit the chip's memory.
        answer: what the compiler's process said of it: memory, times, versions, and its log.
        lowering_seconds: time to lower.
    """

    traced: Any
    sizes: dict[str, int]
    module: bytes | None
    answer: dict[str, Any]
    lowering_seconds: float

    def report(self, where: Topology) -> Report:
        """The report on it for these chips; of a program that does not fit, with the compiler's message."""
        base: dict[str, Any] = {
            "topology": str(where),
            "mesh": self.sizes,
            "census": census_of(self.traced.jaxpr.jaxpr),
            "lowering_seconds": self.lowering_seconds,
        }
        if self.module is None:
            return Report(fits=False, message=self.answer["message"], memory=None, limit=device_memory(where), **base)
        return report_of(self.module, self.answer, **base)


def report_of(
    serialized: bytes, answer: Mapping[str, Any], *, topology: str, mesh: Mapping[str, int], **base: Any
) -> Report:
    """The report on a compiled module: `serialized` by the compiler, `answer` from the child process."""
    where = parse_topology(topology)
    chip, limit = device_of(where), device_memory(where)
    clock = clock_of(where.platform, chip, answer["places"])
    module = proto.read(serialized)
    memory = Memory(**answer["memory"])
    return Report(
        topology=topology,
        mesh=dict(mesh),
        fits=where.platform == "tpu" or memory.peak <= limit,  # the TPU compiler refuses what does not fit
        limit=limit,
        message="",
        memory=memory,
        rows=collectives_of(module, mesh, clock),
        compute=total_work(module, clock),
        timeline=timeline_of(module, mesh, clock),
        compile_seconds=answer["seconds"],
        compiler_rss=answer["rss"],
        versions=dict(answer["versions"]),
        **base,
    )
