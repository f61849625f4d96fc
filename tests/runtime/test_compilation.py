"""Compiled programs that are kept on disk."""

import os
import re

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.compilation_cache import compilation_cache

import shardkit as sk

OPTIONS = (
    "jax_compilation_cache_dir",
    "jax_persistent_cache_min_compile_time_secs",
    "jax_persistent_cache_min_entry_size_bytes",
)


@pytest.fixture
def as_before():
    before = {name: getattr(jax.config, name) for name in OPTIONS}
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


def test_a_program_is_compiled_once_and_loaded_after(tmp_path, as_before, data8):
    events = []
    listen = lambda event, **_: events.append(event.rpartition("/")[2])  # noqa: E731
    jax.monitoring.register_event_listener(listen)
    try:
        sk.runtime.compilation_cache(tmp_path / "programs")
        on_mesh = jax.shard_map(
            lambda x: sk.all_reduce(jnp.sin(x), "data"), mesh=data8, in_specs=jax.P("data"), out_specs=jax.P()
        )
        results = []
        for _ in range(2):
            events.clear()
            results.append(float(jax.jit(on_mesh)(jnp.arange(8.0))[0]))
            assert ("cache_hits" in events) == (len(results) == 2)
            jax.clear_caches()
    finally:
        jax.monitoring.unregister_event_listener(listen)
    assert results[0] == results[1] and os.stat(tmp_path / "programs").st_mode & 0o777 == 0o700


@pytest.mark.check
def test_a_directory_of_others_is_refused(tmp_path, as_before):
    tmp_path.chmod(0o777)
    message = (
        "compilation_cache: directory must be writable by its owner alone, because its programs are executed; got "
        f"{tmp_path}, and others can write to it. Run chmod go-w on it, or pass another one."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        sk.runtime.compilation_cache(tmp_path)
    (tmp_path / "file").write_text("")
    message = (
        f"compilation_cache: directory must be a directory that can be written to; got {tmp_path / 'file'} (File "
        "exists). Pass another one."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        sk.runtime.compilation_cache(tmp_path / "file")
