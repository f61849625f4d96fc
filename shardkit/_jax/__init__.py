"""What depends on the version of jax, and what reads its programs: the one walker of jaxprs, sealed dtypes.

Start with `jaxprs.py`. Only `compat.py` and `backends.py` import jax privately. Imports nothing else of the package but
checks of arguments.
"""
