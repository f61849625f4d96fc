"""`shardkit sample RUN`: text from a saved run."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro

import shardkit as sk
from shardkit.cli.evaluate import saved_run
from shardkit.cli.output import Json, write_json
from shardkit.cli.plans import config_of
from shardkit.models import transformer
from shardkit.simulated import offer_cpu_devices

EXAMPLES = {
    "shardkit sample runs/a --prompt 'import '": "256 bytes after a prompt",
    "shardkit sample runs/a --temperature 0": "the most likely bytes",
}


@dataclass(frozen=True)
class Options:
    """Options of `shardkit sample`."""

    run: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN")]
    """Directory of checkpoints, from `shardkit train --checkpoint`."""
    step: int | None = None
    """The step; by default the newest one."""
    prompt: str = "\n"
    """Text to continue."""
    bytes: int = 256
    """Bytes to add to it."""
    temperature: float = 0.8
    """The logits are divided by this; 0 takes the most likely byte."""
    seed: int = 0
    """Seed of the bytes that are drawn."""
    json: Json = None
    """Write the results to this file, or with - to standard output."""


def sample(options: Annotated[Options, tyro.conf.arg(name="")]) -> int:
    """Continue a text with a saved run, on one device."""
    for name, least in (("bytes", 1), ("temperature", 0), ("seed", 0)):
        value = getattr(options, name)
        if not least <= value < math.inf:
            raise ValueError(f"sample: --{name} must be at least {least}; got {value}. Pass {least} or more.")
    if not options.prompt:
        raise ValueError("sample: --prompt must have a character to continue; got none. Pass for example 'import '.")
    offer_cpu_devices(1)
    saved, trained = saved_run("sample", options.run, options.step)
    config = config_of(trained, {})
    mesh = sk.make_mesh(jax.local_devices()[:1], data=1)
    evaluate: Any = sk.make_eval_step(transformer.loss_fn(config), mesh=mesh, plan=sk.dp("data"))
    like = evaluate.abstract(partial(transformer.init, config=config))
    params = sk.runtime.load_params(options.run, like, step=saved.step)
    text = continued(params, config, options.prompt.encode(), trained.length, options)
    words = text.decode(errors="replace")
    print(words)
    row = {"step": saved.step, "prompt": options.prompt, "text": words, "temperature": options.temperature}
    write_json(options.json, "sample", [row | {"seed": options.seed}], run=options.run)
    return 0


def continued(params: Any, config: transformer.Config, prompt: bytes, length: int, options: Any) -> bytes:
    """The prompt and the bytes after it, each drawn given at most `length` before it."""

    @jax.jit
    def draw(params: Any, window_1T: jax.Array, last: jax.Array, key: jax.Array) -> jax.Array:
        logits_V = transformer.apply(params, window_1T, config)[0, last]  # attention is causal: what follows is unseen
        if options.temperature == 0:
            return jnp.argmax(logits_V)
        return jax.random.categorical(key, logits_V / options.temperature)

    text, key = bytearray(prompt), jax.random.key(options.seed)
    for index in range(options.bytes):
        window = np.zeros((1, length), np.int32)
        seen = text[-length:]
        window[0, : len(seen)] = seen
        text.append(int(draw(params, window, np.int32(len(seen) - 1), jax.random.fold_in(key, index))))
    return bytes(text)
