"""What reads the compiled program: compilers of absent chips, memory, collectives, what the compiler changed.

Start with `aot.py`; `proto.py` reads the program's bytes. Imports cost and `analysis/jaxpr`; a compiler of absent chips
runs in a process of its own.
"""
