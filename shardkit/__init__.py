"""shardkit: explicit collectives for JAX.

You write kernels for one device, with `jax.shard_map` and lax collectives, and compose them into data parallelism,
ZeRO, tensor parallelism and pipelines. An *axis* is a mesh axis, a *dim* is an array dimension.

Shape suffixes: an upper-case letter is a whole dimension, lower case is this device's shard, as in `x_tD`, `w_Df`.
B batch, T tokens, D model, F hidden, H heads, K head size, V vocabulary, L layers, M microbatches, S stages, E experts.
"""

import ast as _ast
from importlib import import_module as _import_module
from pathlib import Path as _Path

__version__ = "0.1.0"

# Each name and the module that it is imported from at its first use: the stub, which type checkers read, is the list.
_STUB = _ast.parse(_Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8")).body
_NAMES = {alias.name: node.module for node in _STUB if isinstance(node, _ast.ImportFrom) for alias in node.names}
__all__ = [name for name, module in _NAMES.items() if module != __name__]

_DEPRECATED = ("pipeline_value_and_grad",)  # warns when it is called


def __getattr__(name):
    module = "shardkit.strategies.pipeline" if name in _DEPRECATED else _NAMES.get(name)
    if module is None:
        raise AttributeError(f"module 'shardkit' has no attribute {name!r}")
    value = _import_module(f"{module}.{name}") if module == __name__ else getattr(_import_module(module), name)
    return globals().setdefault(name, value)


def __dir__():
    return sorted(_NAMES)
