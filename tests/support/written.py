"""Modules of StableHLO that a test writes as text."""

from types import SimpleNamespace

from shardkit._jax import compat
from shardkit.testing.exact.stablehlo.block_reader import BlockReader
from shardkit.testing.exact.stablehlo.operation_rules import OPERATION_RULES


def run_text(text, *arguments, sizes=None):
    """The results of a module, of one device: without sizes its mesh has no axes, and its groups name any devices."""
    sizes = sizes or {}
    with compat.private("interpreters.mlir.make_ir_context")():
        module = compat.private("interpreters.mlir.ir").Module.parse(text)
        block = module.body.operations[0].regions[0].blocks[0]
        parts = SimpleNamespace(mesh=sizes, axes=tuple(sizes), call_at_line=lambda operation, rule: rule())
        return BlockReader(parts, OPERATION_RULES).run(block, arguments)
