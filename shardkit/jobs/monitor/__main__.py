"""The program of a monitor, which `runtime/channel/client.py` starts by its path.

It imports modules of the package without running the package itself, which would import jax.
"""

import sys
from pathlib import Path
from types import ModuleType

package = ModuleType("shardkit")
package.__path__ = [str(Path(__file__).parents[2])]
sys.modules["shardkit"] = package
for room in ("jobs", "runtime"):
    inner = ModuleType(f"shardkit.{room}")
    inner.__path__ = [str(Path(__file__).parents[2] / room)]
    sys.modules[inner.__name__] = inner

from shardkit.jobs.monitor.main import main  # noqa: E402

main()
