"""What equations of Pallas say: the names of their arguments, their operands, and whether a kernel has a barrier."""

from __future__ import annotations

from typing import Any

import jax

from shardkit._jax import compat
from shardkit._jax.jaxprs import Site, source_line, walk
from shardkit.remote_copies.events import UnknownOrdersError


def list_argument_names(jaxpr: Any) -> list[str]:
    """The names of a kernel's references, "argument 2" where one has none."""
    names = getattr(jaxpr.debug_info, "arg_names", None) or ()
    argument_names = [f"argument {place}" for place in range(len(jaxpr.invars))]
    for place, name in enumerate(names[: len(argument_names)]):
        if name:
            argument_names[place] = str(name)
    return argument_names


def unflatten_operands(tree: Any, operands: list[Any]) -> Any:
    """The operands of an equation as its tree has them."""
    if hasattr(tree, "unflatten"):
        return tree.unflatten(operands)
    return jax.tree.unflatten(tree, operands)


def has_device_barrier(call: Any) -> bool:
    """Whether Pallas puts a barrier of all devices before a kernel.

    It does so before a kernel that communicates and has no barrier of its own. With a `collective_id` the kernel says
    that it has one, and with `skip_device_barrier` that it needs none.
    """
    params = call.params["compiler_params"]
    if getattr(params, "collective_id", None) is not None or getattr(params, "skip_device_barrier", False):
        return False
    if any(site.name == "get_barrier_semaphore" for site in walk(call.params["jaxpr"])):
        return False
    return communicates(call)


def communicates(call: Any) -> bool:
    """Whether a kernel sends copies or signals to devices that it names."""
    return any(compat.reaches_others(site.equation) for site in walk(call.params["jaxpr"]))


def list_calls(program: Any) -> list[Any]:
    """The equations of `pallas_call` in a program, each once, also where a scan runs it in each round.

    Raises:
        UnknownOrdersError: a kernel that communicates in a branch or a while loop: some devices may not call it.
    """
    calls = []
    for site in walk(program):
        if site.name != "pallas_call":
            continue
        is_conditional = site.times is None
        holder: Site | None = site
        while holder is not None:
            is_conditional = is_conditional or bool(holder.branch)
            holder = holder.outer
        if is_conditional and communicates(site.equation):
            raise UnknownOrdersError(
                f"{source_line(site.equation)}: the orders of a kernel in a branch or a while loop are not known, "
                "because some devices may not call it. Call it outside, and choose among its results with jnp.where."
            )
        calls.append(site.equation)
    return calls
