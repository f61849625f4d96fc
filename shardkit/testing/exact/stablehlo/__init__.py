"""Reads an optimized module as a function of `jax.lax`: each of its operations becomes one primitive, or a few.

Start with `block_reader.py`, which has an example. jaxlib turns the module that a compiler made into StableHLO and
parses it (`module.py`): fusions keep their regions, collectives their groups of devices. So what reads traced programs
reads compiled ones too, once the function that is made here of a module is traced. `operation_rules.py` is the table of
what each operation means, of the families `scalar_rules.py`, `shape_rules.py`, `reduction_rules.py`,
`product_rules.py`, `control_rules.py`, `library_rules.py` and `device_rules.py`, the collectives over the
axes of the mesh. `attributes.py` reads what stands at an operation, and `source_lines.py` gives each equation the lines
of the source that its operation came from.

Nothing is done with layouts, aliases and copies: they say where numbers are, and not which numbers.

Imports `_jax/`, `collectives/` and the reader of modules in `analysis/hlo/`.
"""
