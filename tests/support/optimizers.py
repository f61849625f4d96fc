"""Optimizers of optax by name, and what the compiler may add for those that look across shards."""

import jax
import optax

OPTIMIZERS = {
    **{
        name: (lambda name=name: getattr(optax, name)(1e-2))
        for name in (
            *("adabelief", "adadelta", "adagrad", "adam", "adamax", "adamaxw", "adamw", "adan", "amsgrad", "fromage"),
            *("lamb", "lars", "lion", "nadam", "nadamw", "novograd", "optimistic_gradient_descent", "radam"),
            *("optimistic_adam_v2", "rmsprop", "rprop", "sgd", "sign_sgd", "sm3", "yogi"),
        )
        if hasattr(optax, name)
    },
    "adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=4),
    "noisy_sgd": lambda: optax.noisy_sgd(1e-2, key=3),
    "polyak_sgd": lambda: optax.polyak_sgd(max_learning_rate=1e-2),
    "muon": lambda: optax.contrib.muon(1e-2),
    "schedule_free": lambda: optax.contrib.schedule_free_adamw(1e-2),
    "dowg": lambda: optax.chain(optax.contrib.dowg(), optax.scale(-1.0)),
    "scale_by_factored_rms": lambda: optax.chain(
        optax.scale_by_factored_rms(min_dim_size_to_factor=4), optax.scale(-0.01)
    ),
    "momentum": lambda: optax.sgd(1e-2, momentum=0.9, nesterov=True),
    "clip": lambda: optax.chain(optax.clip(0.1), optax.sgd(1e-1)),
    "clip_by_global_norm": lambda: optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(1e-1)),
    "clip_by_block_rms": lambda: optax.chain(optax.clip_by_block_rms(0.1), optax.sgd(1e-1)),
    "adaptive_grad_clip": lambda: optax.chain(optax.adaptive_grad_clip(0.1), optax.sgd(1e-1)),
    "normalize_by_update_norm": lambda: optax.chain(optax.normalize_by_update_norm(), optax.sgd(1e-2)),
    "scale_by_trust_ratio": lambda: optax.chain(optax.scale_by_trust_ratio(), optax.sgd(1e-2)),
    "centralize": lambda: optax.chain(optax.centralize(), optax.sgd(1e-1)),
    "add_noise": lambda: optax.chain(optax.add_noise(0.1, 0.5, 3), optax.sgd(1e-1)),
    "trace": lambda: optax.chain(optax.trace(0.9), optax.scale(-0.01)),
    "ema": lambda: optax.chain(optax.ema(0.9), optax.scale(-0.01)),
    "weight decay with a mask": lambda: optax.chain(
        optax.add_decayed_weights(0.1, mask=lambda p: jax.tree.map(lambda x: x.ndim > 1, p)), optax.sgd(1e-2)
    ),
    "partition": lambda: optax.partition({"a": optax.adam(1e-2), "b": optax.sgd(1e-2)}, {"w": "a", "b": "b", "v": "a"}),
    "schedule": lambda: optax.adamw(optax.warmup_cosine_decay_schedule(0.0, 1e-2, 2, 10)),
    "MultiSteps": lambda: optax.MultiSteps(optax.adam(1e-2), 2),
    "inject_hyperparams": lambda: optax.inject_hyperparams(optax.adamw)(learning_rate=1e-2),
    "apply_if_finite": lambda: optax.apply_if_finite(optax.adam(1e-2), 2),
    "a chain of four": lambda: optax.chain(
        optax.clip_by_global_norm(0.5), optax.scale_by_adam(), optax.add_decayed_weights(0.01), optax.scale(-1e-2)
    ),
}
# What the compiler adds for an optimizer that looks across shards, at most: collectives and bytes a device sends, with
# 160 parameters. Element-wise ones add nothing; clipping by the global norm adds one sum of a scalar (of three: one a
# leaf, merged).
OWN = {"sgd": (0, 0), "adamw": (0, 0), "lion": (0, 0), "clip_by_global_norm": (1, 24), "novograd": (2, 40)}
OWN |= {"lamb": (7, 80), "lars": (7, 80), "adaptive_grad_clip": (2, 200), "sm3": (4, 200)}
OWN |= {"adafactor": (12, 300), "muon": (17, 2600)}


def without_a_mesh(name, loss_fn, params, batches):
    """Parameters and optimizer state after a step for each batch, on one device and by jax and optax alone."""
    optimizer = optax.with_extra_args_support(OPTIMIZERS[name]())

    def mean(params, batch):
        loss = loss_fn(params, batch, None)
        return loss.total / loss.weight

    @jax.jit
    def one_step(params, state, batch):
        loss, grads = jax.value_and_grad(mean)(params, batch)
        updates, state = optimizer.update(grads, state, params, value=loss)
        return optax.apply_updates(params, updates), state

    state = optimizer.init(params)
    for batch in batches:
        params, state = one_step(params, state, batch)
    return params, state
