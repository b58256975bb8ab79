"""Your first expert-parallel layer, step by step, with the shape and sharding of everything.

    python examples/first_layer.py

On a machine without GPUs the CPU is made eight devices. Nothing is trained: see train_lm.py.
"""

import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_mok
from jax_mok import router

TOKENS, HIDDEN, INNER, EXPERTS, CHOICES = 1024, 256, 512, 16, 2


def show(name: str, array: jax.Array) -> None:
    """Prints what an array is, and how much of it a device has."""
    spec = getattr(array.sharding, "spec", "one device")
    part = array.sharding.shard_shape(array.shape)
    print(f"{name:<16} {array.dtype!s:<9} {array.shape!s:<18} {spec!s:<26} a device: {part}")


def main() -> None:
    """Walks through one forward and one backward pass."""
    devices = jax.devices()
    mesh = jax.make_mesh((len(devices),), ("ep",), axis_types=(jax.sharding.AxisType.Auto,))
    print(f"1. A mesh of {len(devices)} {devices[0].platform} devices, along one axis, 'ep'.\n")

    print("2. Tokens and experts are split along it; the router is the same everywhere.")
    split, whole = NamedSharding(mesh, P("ep")), NamedSharding(mesh, P())
    dtype = jnp.float32 if devices[0].platform == "cpu" else jnp.bfloat16

    def normal(seed: int, shape: tuple[int, ...], place: NamedSharding) -> jax.Array:
        values = jax.random.normal(jax.random.key(seed), shape, dtype) / shape[-2] ** 0.5
        return jax.device_put(values, place)

    x = normal(0, (TOKENS, HIDDEN), split) * TOKENS**0.5
    weights = {
        "router": normal(1, (HIDDEN, EXPERTS), whole),
        "gate": normal(2, (EXPERTS, HIDDEN, INNER), split),
        "up": normal(3, (EXPERTS, HIDDEN, INNER), split),
        "down": normal(4, (EXPERTS, INNER, HIDDEN), split),
    }
    for name, array in {"x": x, **weights}.items():
        show(name, array)

    print("\n3. The router chooses experts for every token, and says how much each counts.")
    choose = router.Router(top_k=CHOICES)

    @jax.jit
    def route(x: jax.Array, kernel: jax.Array) -> router.Routing:
        return choose(x @ kernel)

    ids, router_weights, _ = route(x, weights["router"])
    show("expert ids", ids)
    show("router weights", router_weights)
    load = router.load_of(ids, EXPERTS)
    print(f"The busiest of {EXPERTS} experts has {float(load.peak):.2f} times an even share.")

    print("\n4. The layer: tokens go to their experts' devices, through them, and home again.")

    @jax.jit
    def layer(weights: dict[str, jax.Array], x: jax.Array) -> jax.Array:
        ids, router_weights, _ = choose(x @ weights["router"])
        experts = (weights[name] for name in ("gate", "up", "down"))
        return jax_mok.moe(x, ids, router_weights, *experts, mesh=mesh, axis_name="ep")

    show("y", layer(weights, x))

    print("\n5. Gradients are split as what they belong to.")
    gradients = jax.jit(jax.grad(lambda weights: jnp.sum(layer(weights, x) ** 2)))(weights)
    for name, gradient in gradients.items():
        show(f"d {name}", gradient)

    jax_mok.check()
    print("\n6. jax_mok.check() has found no fault in any of the calls.")


if __name__ == "__main__":
    main()
