"""Readers of the compiled program: compilers for absent chips, memory, collectives, changes by the compiler.

Start with `aot.py`; `proto.py` reads the program's bytes, `saved.py` keeps programs in files. A new chip is a row of
`cost/hardware.py`; a GPU also needs `targets/NAME.txtpb`. Imports cost, meshes, steps and `analysis/jaxpr`; a compiler
for absent chips runs in a separate process, except under `topology_devices`.
"""
