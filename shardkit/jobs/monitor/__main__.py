"""The program of a monitor, which `runtime/channel/client.py` starts by its path.

It imports modules of the package without running the package itself, which would import jax.
"""

import sys
from pathlib import Path
from types import ModuleType

_PACKAGE = Path(__file__).parents[2]
for _name in ("shardkit", "shardkit.jobs", "shardkit.runtime"):
    sys.modules[_name] = ModuleType(_name)
    sys.modules[_name].__path__ = [str(_PACKAGE.joinpath(*_name.split(".")[1:]))]

from shardkit.jobs.monitor.main import main  # noqa: E402

if __name__ == "__main__":
    main()
