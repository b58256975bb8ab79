"""Programs that chain calls, each of which waits for the one before it on its own device.

The time of a call is a difference between programs that chain more and fewer of them, so what
starting a program costs on the host drops out.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_mok.bench.routes import ZIPF_EXPONENT, draw_routes
from jax_mok.bench.shapes import Shape
from jax_mok.config import MoEConfig
from jax_mok.moe import moe_ffn

AXIS = "ep"
_TURNS = 8  # routes of their own for so many calls: repeated ones would keep weights in cache


class Chain(NamedTuple):
    """A computation that can be repeated.

    Attributes:
      run: makes so many calls in a row and returns arrays to wait for.
      guess_s: a guess at the seconds of one.
    """

    run: Callable[[int], Any]
    guess_s: float


@dataclasses.dataclass(frozen=True)
class Programs:
    """A chain's `run` whose programs can be compiled before they run, several at a time.

    Attributes:
      function: jitted; takes the operands, and as static arguments the options and the number of
        calls.
      operands: arrays.
      options: hashable.
    """

    function: jax.stages.Wrapped
    operands: tuple[Any, ...]
    options: tuple[Any, ...]
    _compiled: dict[int, jax.stages.Compiled] = dataclasses.field(default_factory=dict, init=False)

    def compile(self, calls: int) -> jax.stages.Compiled:
        """The program of so many calls."""
        if calls not in self._compiled:
            lowered = self.function.lower(*self.operands, *self.options, calls)
            self._compiled[calls] = lowered.compile()
        return self._compiled[calls]

    def __call__(self, calls: int) -> Any:
        """Runs it."""
        return self.compile(calls)(*self.operands)


def compile_side_by_side(jobs: Iterable[tuple[Programs, int]]) -> None:
    """The programs of so many calls, each on a thread; errors come when they are needed."""
    with ThreadPoolExecutor() as pool:
        wait([pool.submit(programs.compile, calls) for programs, calls in jobs])


class Operands(NamedTuple):
    """Of the layer and of a plain product, in bf16 but for ids and router weights.

    x [n·T, H], ids [turns, n·T, K], router_weights [n·T, K], gate and up [E, H, I], down [E, I, H];
    left and right [n, width, width], a matrix a device.
    """

    x: jax.Array
    ids: jax.Array
    router_weights: jax.Array
    gate: jax.Array
    up: jax.Array
    down: jax.Array
    left: jax.Array
    right: jax.Array


_SPECS = Operands._make([P(AXIS), P(None, AXIS), *[P(AXIS)] * 6])


def make_operands(
    shape: Shape, routes: str, mesh: Mesh, width: int, *, exponent: float = ZIPF_EXPONENT
) -> Operands:
    """Random operands of unit variance after each product, and routes as `draw_routes` says."""
    n, experts = mesh.size, shape.experts_of(mesh.size)

    @functools.partial(
        jax.jit, static_argnums=(0, 1, 2), out_shardings=NamedSharding(mesh, P(AXIS))
    )
    def normal(seed: int, sizes: tuple[int, ...], fan_in: int) -> jax.Array:
        return jax.random.normal(jax.random.key(seed), sizes, jnp.bfloat16) / fan_in**0.5

    def place(array: np.ndarray, spec: P) -> jax.Array:
        return jax.device_put(array, NamedSharding(mesh, spec))

    generator = np.random.default_rng(0)
    tokens = n * shape.tokens
    ids = np.stack(
        [
            draw_routes(routes, generator, tokens, experts, shape.top_k, exponent=exponent)
            for _ in range(_TURNS)
        ]
    )
    return Operands(
        x=normal(0, (tokens, shape.hidden), 1),
        ids=place(ids, P(None, AXIS)),
        router_weights=place(np.ones((tokens, shape.top_k), np.float32), P(AXIS)),
        gate=normal(1, (experts, shape.hidden, shape.inner), shape.hidden),
        up=normal(2, (experts, shape.hidden, shape.inner), shape.hidden),
        down=normal(3, (experts, shape.inner, shape.hidden), shape.inner),
        left=normal(4, (n, width, width), 1),
        right=normal(5, (n, width, width), width),
    )


# cuBLAS is the yardstick, not XLA's own generated products.
@functools.partial(
    jax.jit,
    static_argnums=(1, 2, 3),
    compiler_options={"xla_gpu_enable_triton_gemm": False},
)
def run_in_order(
    operands: Operands, mesh: Mesh, config: MoEConfig, order: tuple[str, ...]
) -> list[jax.Array]:
    """Calls of "layer", "gradients", "checkpointed" and "product" in that order.

    Gradients are the layer's forward and backward pass, for all five of its operands and with its
    output as the output's gradient; checkpointed, of a layer under `jax.checkpoint`, which keeps
    nothing. A product is that of the two matrices, on every device.

    Returns:
      The last result of each kind.
    """
    body = functools.partial(_run_on_a_device, config=config, order=order)
    return jax.shard_map(body, mesh=mesh, in_specs=(_SPECS,), out_specs=P(AXIS))(operands)


def _run_on_a_device(
    operands: Operands, *, config: MoEConfig, order: tuple[str, ...]
) -> list[jax.Array]:
    x, all_ids, router_weights, gate, up, down, left, right = operands
    results: dict[str, jax.Array] = {}
    product, previous = left[0], ""
    zero = jnp.int32(0)  # known only when the call before has ended
    turns = itertools.cycle(range(_TURNS))
    for kind in order:
        if kind == "layer":
            ids = all_ids[next(turns)] + zero
            y = moe_ffn(x, ids, router_weights, gate, up, down, axis_name=AXIS, config=config)
            results[kind], zero = y, (0 * y[0, 0]).astype(jnp.int32)
        elif kind in ("gradients", "checkpointed"):
            keeps = kind == "gradients"
            dx = _gradients(operands, all_ids[next(turns)] + zero, config, keeps)[0]
            results[kind], zero = dx, (0 * dx[0, 0]).astype(jnp.int32)
        else:
            if previous not in ("", kind):
                # In place, and one element only: a product depends on the one before it anyway.
                corner = product[:1, :1] + zero.astype(product.dtype)
                product = jax.lax.dynamic_update_slice(product, corner, (0, 0))
            product = product @ right[0]
            results[kind], zero = product[None], (0 * product[0, 0]).astype(jnp.int32)
        previous = kind
    return list(results.values())


def _gradients(
    operands: Operands, ids: jax.Array, config: MoEConfig, keeps: bool
) -> tuple[jax.Array, ...]:
    def layer(x: jax.Array, router_weights: jax.Array, *experts: jax.Array) -> jax.Array:
        return moe_ffn(x, ids, router_weights, *experts, axis_name=AXIS, config=config)

    x, _, router_weights, *experts, _, _ = operands
    y, pullback = jax.vjp(layer if keeps else jax.checkpoint(layer), x, router_weights, *experts)
    return tuple(pullback(y))


@functools.partial(jax.jit, static_argnums=(1, 2, 3, 4))
def run_layer(
    operands: Operands, mesh: Mesh, layer: Callable[..., jax.Array], backward: bool, calls: int
) -> tuple[jax.Array, ...]:
    """So many calls of a layer, with the gradients of its operands if `backward`.

    Args:
      operands: of every call, the routes by turns.
      mesh: the devices.
      layer: (x, ids, router_weights, gate, up, down, *, axis_name) -> y, of one device's arrays.
      backward: as said.
      calls: how many, each of which waits for the one before.

    Returns:
      Of the last call y, and if `backward` the gradients of x, the router weights, gate, up and
      down for y as the output's gradient.
    """

    def body(operands: Operands) -> tuple[jax.Array, ...]:
        x, all_ids, router_weights, *experts, _, _ = operands

        def call(turn: jax.Array | int, zero: jax.Array) -> tuple[jax.Array, ...]:
            def one(x: jax.Array, router_weights: jax.Array, *experts: jax.Array) -> jax.Array:
                ids = all_ids[turn % _TURNS] + zero
                return layer(x, ids, router_weights, *experts, axis_name=AXIS)

            if not backward:
                return (one(x, router_weights, *experts),)
            y, pullback = jax.vjp(one, x, router_weights, *experts)
            return y, *pullback(y)

        def call_and_drop(turn: jax.Array, zero: jax.Array) -> jax.Array:
            # All of every result counts, or XLA would compute only what the next call depends on.
            results = jax.lax.optimization_barrier(call(turn, zero))
            corners = [(0 * result.ravel()[0]).astype(jnp.int32) for result in results]
            return sum(corners, zero)

        # A loop, because some layers take XLA seconds to compile, every time they occur. All but
        # the last call, whose results it would have to copy.
        return call(calls - 1, jax.lax.fori_loop(0, calls - 1, call_and_drop, jnp.int32(0)))

    return jax.shard_map(body, mesh=mesh, in_specs=(_SPECS,), out_specs=P(AXIS), check_vma=False)(
        operands
    )


def link_chain(mesh: Mesh, local_bytes: int) -> Chain:
    """Every device sends so many bytes to its right neighbour and takes as many from its left."""
    to_right = [(rank, (rank + 1) % mesh.size) for rank in range(mesh.size)]

    @functools.partial(jax.jit, static_argnums=1)
    def run(values: jax.Array, calls: int) -> jax.Array:
        def body(values: jax.Array) -> jax.Array:
            for _ in range(calls):
                values = jax.lax.ppermute(values, AXIS, to_right)
            return values

        return jax.shard_map(body, mesh=mesh, in_specs=P(AXIS), out_specs=P(AXIS))(values)

    values = _device_bytes(mesh, local_bytes)
    return Chain(functools.partial(run, values), guess_s=local_bytes / 3e11)


def memory_chain(mesh: Mesh, local_bytes: int) -> Chain:
    """Every device copies so many bytes within its memory: it reads and writes as many."""
    values = _device_bytes(mesh, local_bytes)
    copy = jax.jit(jnp.copy)  # XLA copies what it returns, by the driver's own routine

    def run(calls: int) -> jax.Array:
        for _ in range(calls):
            result = copy(values)
        return result

    return Chain(run, guess_s=2 * local_bytes / 4e12)


def _device_bytes(mesh: Mesh, local_bytes: int) -> jax.Array:
    sharding = NamedSharding(mesh, P(AXIS))
    return jnp.zeros(mesh.size * local_bytes // 2, jnp.bfloat16, device=sharding)
