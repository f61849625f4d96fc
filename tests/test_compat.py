"""What depends on the jax version: private names are looked up where they are used."""

import re
import subprocess
import sys
from pathlib import Path

import jax

PACKAGE = Path(__file__).parents[1] / "shardkit"
SOURCE = (PACKAGE / "_jax" / "compat.py").read_text() + (PACKAGE / "_jax" / "backends.py").read_text()
PRIVATE = re.findall(r'private\("([\w.]+)"\)', SOURCE)


def test_closed_forms_and_schedules_need_no_private_name_of_jax():
    assert "core.get_axis_env" in PRIVATE and len(PRIVATE) > 10
    code = (
        "import importlib, sys, jax, shardkit._jax.sealed, shardkit.cost, shardkit.schedules\n"
        "for name in [name for name in sys.modules if name.startswith('shardkit')]: del sys.modules[name]\n"
        f"for path in {sorted({*PRIVATE, 'dtypes.ExtendedDType'})}:\n"
        "    module, name = path.rsplit('.', 1)\n"
        "    delattr(importlib.import_module(f'jax._src.{module}'), name)\n"
        "import shardkit.cost, shardkit.schedules\n"
        "from shardkit._jax import backends, sealed\n"
        "print(len(shardkit.schedules.gpipe(2, 4).order(0)), shardkit.cost.chip('v5e').flops > 0)\n"
        "for use in (backends.jax_has_started, lambda: sealed.Sealed('float32', '')):\n"
        "    try: use()\n"
        "    except ImportError as error: print(error)\n"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    missing = (
        "shardkit needs jax._src.{}, which jax {} does not have. Install a supported version: "
        'pip install "jax>=0.10,<0.13".'
    )
    names = "xla_bridge.backends_are_initialized", "dtypes.ExtendedDType"
    assert out.splitlines() == ["8 True", *(missing.format(name, jax.__version__) for name in names)]
