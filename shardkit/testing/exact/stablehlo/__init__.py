"""Reads an optimized module as a function of `jax.lax`: each of its operations becomes one primitive, or a few.

Start with `block_reader.py`, which has an example. jaxlib turns the module that a compiler made into StableHLO and
parses it (`module.py`): fusions keep their regions, collectives their groups of devices. Here the module becomes a
function of arrays, which jax traces. So the interpreter of traced programs runs compiled ones, too.

`operation_rules.py` is the table of the meanings of operations. The families: `scalar_rules.py`, `shape_rules.py`,
`reduction_rules.py`, `product_rules.py`, `control_rules.py`, `library_rules.py`, and `device_rules.py`, the collectives
over the axes of the mesh. `attributes.py` reads the attributes of an operation, and `source_lines.py` gives an equation
the lines of the source that its operation came from. Before jaxlib parses a module, `synchronous.py`, `typed_alike.py`,
`tilings.py` and `listed_groups.py` rewrite what it could not turn into StableHLO.

Nothing is done with layouts, aliases and copies: they say where numbers are, and not which numbers.

Imports `_jax/`, `collectives/` and the reader of modules in `analysis/hlo/`.
"""
