"""Chained calls, each of which waits for the one before it on its own device.

The time of a call is a difference between chains of more and of fewer of them, so what starting the
first costs on the host drops out. Most chains are one program; those of a `Queue` run a program
once a call, for layers that take XLA or Pallas seconds to compile every time they occur.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
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
CUBLAS = {"xla_gpu_enable_triton_gemm": False}
"""XLA's options for products by cuBLAS, the yardstick: not by its own generated kernels."""
_UNDER_WAY_ON_CPU = 16  # with some thirty, JAX's CPU devices wait for each other for ever
_TURNS = 8  # routes of their own for so many calls: repeated ones would keep weights in cache


class Chain(NamedTuple):
    """A computation that can be repeated.

    Attributes:
      run: makes so many calls in a row and returns arrays to wait for.
      guess_s: a guess at the seconds of one.
    """

    run: Callable[[int], Any]
    guess_s: float


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


def apart(mesh: Mesh) -> Mesh:
    """The same devices, each of them all ranks of an expert-parallel axis of its own."""
    return Mesh(mesh.devices.reshape(-1, 1), ("replica", AXIS))


def _specs(mesh: Mesh) -> Operands:
    everywhere = P(mesh.axis_names)
    return Operands._make([everywhere, P(None, mesh.axis_names), *[everywhere] * 6])


def make_operands(
    shape: Shape, routes: str, mesh: Mesh, width: int, *, exponent: float = ZIPF_EXPONENT
) -> Operands:
    """Random operands of unit variance after each product, and routes as `draw_routes` says.

    Ranks of the mesh's expert-parallel axis share experts; replicas have their own, and the same
    routes.
    """
    n, ranks = mesh.size, mesh.shape[AXIS]
    replicas = n // ranks
    tokens, experts = n * shape.tokens, replicas * shape.experts_of(ranks)

    def place(array: np.ndarray, spec: P) -> jax.Array:
        return jax.device_put(array, NamedSharding(mesh, spec))

    ids = np.tile(draw_turns(shape, routes, ranks, exponent=exponent), (1, replicas, 1))
    matrices = (experts, shape.hidden, shape.inner)
    x, gate, up, down, left, right = _draw(
        mesh,
        (
            ((tokens, shape.hidden), 1),
            (matrices, shape.hidden),
            (matrices, shape.hidden),
            ((experts, shape.inner, shape.hidden), shape.inner),
            ((n, width, width), 1),
            ((n, width, width), width),
        ),
    )
    return Operands(
        x=x,
        ids=place(ids, P(None, mesh.axis_names)),
        router_weights=place(np.ones((tokens, shape.top_k), np.float32), P(mesh.axis_names)),
        gate=gate,
        up=up,
        down=down,
        left=left,
        right=right,
    )


def draw_turns(
    shape: Shape, routes: str, gpus: int, *, exponent: float = ZIPF_EXPONENT
) -> np.ndarray:
    """int32 [turns, n·T, K]: the routes of the calls, by turns."""
    generator = np.random.default_rng(0)
    tokens, experts = gpus * shape.tokens, shape.experts_of(gpus)
    turns = [
        draw_routes(routes, generator, tokens, experts, shape.top_k, exponent=exponent)
        for _ in range(_TURNS)
    ]
    return np.stack(turns)


def _draw(mesh: Mesh, arrays: tuple[tuple[tuple[int, ...], int], ...]) -> list[jax.Array]:
    """Random arrays of these sizes and fans-in, by one program."""

    @functools.partial(jax.jit, out_shardings=NamedSharding(mesh, P(mesh.axis_names)))
    def draw() -> list[jax.Array]:
        return [
            jax.random.normal(jax.random.key(seed), sizes, jnp.bfloat16) / fan_in**0.5
            for seed, (sizes, fan_in) in enumerate(arrays)
        ]

    return draw()


@functools.partial(jax.jit, static_argnums=(1, 2, 3), compiler_options=CUBLAS)
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
    return jax.shard_map(body, mesh=mesh, in_specs=(_specs(mesh),), out_specs=P(mesh.axis_names))(
        operands
    )


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
        def call(turn: jax.Array | int, zero: jax.Array) -> tuple[jax.Array, ...]:
            return _results(layer, backward, operands, operands.ids[turn % _TURNS] + zero)

        def call_and_drop(turn: jax.Array, zero: jax.Array) -> jax.Array:
            # All of every result counts, or XLA would compute only what the next call depends on.
            results = jax.lax.optimization_barrier(call(turn, zero))
            corners = [(0 * result.ravel()[0]).astype(jnp.int32) for result in results]
            return sum(corners, zero)

        # A loop, because some layers take XLA seconds to compile, every time they occur. All but
        # the last call, whose results it would have to copy.
        return call(calls - 1, jax.lax.fori_loop(0, calls - 1, call_and_drop, jnp.int32(0)))

    mapped = jax.shard_map(
        body, mesh=mesh, in_specs=(_specs(mesh),), out_specs=P(mesh.axis_names), check_vma=False
    )
    return mapped(operands)


def _results(
    layer: Callable[..., jax.Array], backward: bool, operands: Operands, ids: jax.Array
) -> tuple[jax.Array, ...]:
    x, _, router_weights, *experts, _, _ = operands

    def one(x: jax.Array, router_weights: jax.Array, *experts: jax.Array) -> jax.Array:
        return layer(x, ids, router_weights, *experts, axis_name=AXIS)

    if not backward:
        return (one(x, router_weights, *experts),)
    y, pullback = jax.vjp(one, x, router_weights, *experts)
    return y, *pullback(y)


class Queue:
    """Calls that wait in the devices' queues, each a run of the same program.

    A call of less than about 0.3 ms is limited by what starting a program takes on the host.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        arguments: Sequence[tuple[Any, ...]],
        options: Mapping[str, Any] | None = None,
    ) -> None:
        """Prepares them.

        Args:
          function: what a call does.
          arguments: of the calls by turns, all of the same shapes.
          options: of XLA's compiler.
        """
        self._function, self._arguments, self._options = function, arguments, options

    @functools.cached_property
    def program(self) -> jax.stages.Compiled:
        """Of one call."""
        lowered = jax.jit(self._function).lower(*self._arguments[0])
        return lowered.compile(compiler_options=dict(self._options or {}))

    def __call__(self, calls: int) -> Any:
        """Starts so many, the first with the first arguments; returns what the last one does."""
        for turn in range(calls):
            results = self.program(*self._arguments[turn % len(self._arguments)])
            if turn % _UNDER_WAY_ON_CPU == 0 and jax.default_backend() == "cpu":
                jax.block_until_ready(results)
        return results


def layer_queue(
    operands: Operands,
    mesh: Mesh,
    layer: Callable[..., jax.Array],
    backward: bool,
    options: Mapping[str, Any] | None = None,
) -> Queue:
    """Calls of a layer, which take and return what those of `run_layer` do."""
    specs = Operands._make([P(AXIS)] * len(Operands._fields))
    function = jax.shard_map(
        lambda operands: _results(layer, backward, operands, operands.ids),
        mesh=mesh,
        in_specs=(specs,),
        out_specs=P(AXIS),
        check_vma=False,
    )
    turns = jax.device_put(list(np.asarray(operands.ids)), NamedSharding(mesh, P(AXIS)))
    return Queue(function, [(operands._replace(ids=ids),) for ids in turns], options)


def compile_side_by_side(queues: Iterable[Queue]) -> None:
    """Their programs, each on a thread; errors come when the programs are needed.

    Programs of several devices must not be run from several threads: devices that start them in
    different orders wait for each other for ever.
    """
    with ThreadPoolExecutor() as pool:
        wait([pool.submit(getattr, queue, "program") for queue in queues])


def product_chain(mesh: Mesh, width: int, guess_s: float) -> Chain:
    """The product of two square matrices of this width on every device, on a GPU by cuBLAS."""
    left, right = _draw(mesh, (((mesh.size, width, width), 1), ((mesh.size, width, width), width)))

    multiply = jax.shard_map(jnp.matmul, mesh=mesh, in_specs=P(AXIS), out_specs=P(AXIS))
    program = jax.jit(multiply, compiler_options=CUBLAS)

    def run(calls: int) -> jax.Array:
        product = left
        for _ in range(calls):
            product = program(product, right)
        return product

    return Chain(run, guess_s)


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
