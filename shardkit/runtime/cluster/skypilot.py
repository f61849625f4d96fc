"""A job as a SkyPilot task: one process on each node, which `initialize` joins by SkyPilot's variables."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from shardkit.runtime.cluster.preemption import PREEMPTED
from shardkit.runtime.monitor.hello import TOKEN

HEAD = """\
# sky jobs launch --secret {token}="$(openssl rand -hex 32)" FILE
# The secret identifies the processes of the job; it is in no file.
"""


def check_accelerator(accelerator: str, devices: int | None) -> None:
    """Refuses what is no GPU of SkyPilot's catalog by its look, and a GPU without a number.

    Raises:
        ValueError: the refusal.
    """
    if accelerator == "gpu" or accelerator.startswith("tpu-") or not re.fullmatch(r"[A-Za-z][\w.-]*", accelerator):
        raise ValueError(
            f"render: accelerator must be 'cpu' or for skypilot a GPU by its name, such as 'H100'; got "
            f"{accelerator!r}. Pass one of those."
        )
    if accelerator != "cpu" and devices is None:
        raise ValueError(
            f"render: devices must be given with accelerator {accelerator!r}; got none. Pass the number per process."
        )


def task(
    words: Sequence[str],
    *,
    processes: int,
    devices: int | None,
    name: str,
    image: str | None,
    accelerator: str,
    variables: Mapping[str, str],
) -> dict[str, Any]:
    """The task: it is started again after a preemption and when a node is lost; every other failure is final."""
    resources: dict[str, Any] = {} if accelerator == "cpu" else {"accelerators": f"{accelerator}:{devices}"}
    if image is not None:
        resources["image_id"] = f"docker:{image}"
    resources["job_recovery"] = {"max_restarts_on_errors": 0, "recover_on_exit_codes": [PREEMPTED]}
    return {
        "name": name,
        "num_nodes": processes,
        "resources": resources,
        "envs": dict(variables),
        "secrets": {TOKEN: None},
        "run": shlex.join(words) + "\n",
    }
