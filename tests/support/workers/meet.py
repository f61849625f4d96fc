"""Starts a job by `initialize` and runs its health check; prints what it returned, or the error."""

import argparse
import os
import time

import jax

import shardkit as sk

parser = argparse.ArgumentParser()
parser.add_argument("--timeout", type=float, default=30.0)
parser.add_argument("--late", type=float, default=0.0)
parser.add_argument("--expect", type=int)
given = parser.parse_args()
time.sleep(given.late if os.environ.get("JAX_PROCESS_ID") == "0" else 0)
begun = time.monotonic()
try:
    cluster = sk.runtime.initialize(timeout=given.timeout, expect_devices=given.expect)
except (RuntimeError, ValueError) as error:
    print(f"after {time.monotonic() - begun:.1f} s: {type(error).__name__}: {error}", flush=True)
    time.sleep(
        2 if os.environ.get("JAX_PROCESS_ID") == "0" else 0
    )  # with it ends jax's service: that aborts the others
    os._exit(9)
print(cluster._asdict(), cluster.device_count, cluster.local_device_count, flush=True)
devices = {d.id for d in jax.local_devices()}
sk.runtime.barrier("all here", 30)
sk.runtime.log("only once")
print(sk.runtime.health_check(processes=jax.process_count(), devices=jax.device_count()), sorted(devices), flush=True)
