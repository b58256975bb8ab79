"""Hundreds of calls of all kinds in one process: every answer is right, memory does not grow."""

from typing import NamedTuple

import harness
import jax
import numpy as np
import oracle
import routings
from harness import AXIS
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from oracle import Inputs, Outputs

import jax_mok

ROUNDS = 200  # of two calls each
MESHES = 6  # made, and dropped again
HIDDEN, INNER, EXPERTS, TOP_K = 16, 24, 12, 2
TOLERANCE = 1e-5
# What the second half may add to the process: the arrays of its calls are more than ten times that.
MOST_GROWTH = 16 * 2**20

TINY, SMALL, HUGE = 1, 17, 1000  # tokens of a device
PUSH = jax_mok.MoEConfig(ring_rows=64, dispatch="push", reverse_combine="push", saved_rows=0)
PULL = jax_mok.MoEConfig(ring_rows=256, chunk_rows=64, combine="pull", reverse_dispatch="pull")
COLLECTIVE = jax_mok.MoEConfig(composition="collective")


class Case(NamedTuple):
    """What two independent layers of one program run on, and what they gave the first time."""

    layers: tuple[Inputs, Inputs]
    results: tuple[Outputs, Outputs]


class Program:
    """Two layers, forward and backward, and beside them a sum over all devices."""

    def __init__(
        self, mesh_shape: tuple[int, ...], tokens: int, configs: tuple[jax_mok.MoEConfig, ...]
    ) -> None:
        devices = np.array(jax.devices()[: np.prod(mesh_shape)]).reshape(mesh_shape)
        self.mesh = Mesh(devices, ("dp", AXIS)[-len(mesh_shape) :])
        self.tokens = tokens
        axes = self.mesh.axis_names
        total = jax.shard_map(
            lambda x: jax.lax.psum(x.sum(0), axes), mesh=self.mesh, in_specs=P(axes), out_specs=P()
        )
        steps = [harness.layer_step(self.mesh, config) for config in configs]

        def run(layers: tuple[Inputs, Inputs]) -> tuple[list[Outputs], jax.Array]:
            return [s(inputs) for s, inputs in zip(steps, layers, strict=True)], total(layers[0].x)

        self.run = jax.jit(run)

    def draw(self, rng: np.random.Generator) -> Case:
        """New inputs, and results held to the oracle."""
        ranks = self.mesh.shape[AXIS]
        tokens = self.tokens * self.mesh.size // ranks
        layers = []
        for name in rng.choice(sorted(routings.ROUTINGS), 2):
            routes = routings.ROUTINGS[name](rng, ranks, tokens, TOP_K, EXPERTS)
            layers.append(
                harness.draw_inputs(rng, routes, hidden=HIDDEN, inner=INNER, experts=EXPERTS)
            )
        results, _ = jax.tree.map(np.asarray, self.run(tuple(layers)))
        take_record(*layers)
        for inputs, outputs in zip(layers, results, strict=True):
            oracle.assert_close(outputs, oracle.layer(inputs), TOLERANCE)
        return Case(tuple(layers), tuple(results))


def take_record(*layers: Inputs) -> None:
    """What the layers' calls have recorded has to be of ids out of range, and of theirs."""
    ids = np.concatenate([inputs.expert_ids.ravel() for inputs in layers])
    harness.expect_recorded_faults(ids, EXPERTS)


def run_on_a_new_mesh(rng: np.random.Generator, case: Case) -> None:
    """The same bits on devices in a new order, by a program that nobody keeps."""
    inputs = case.layers[0]
    mesh = Mesh(rng.permutation(np.array(jax.devices()[:8]))[:4], (AXIS,))
    padding = -len(inputs.x) % 4
    x, ids, weights = (
        np.pad(a, ((0, padding), (0, 0)), constant_values=fill)
        for a, fill in zip(inputs[:3], (0, -1, 0), strict=True)
    )
    layer = jax.jit(lambda *operands: jax_mok.moe(*operands, mesh=mesh, axis_name=AXIS))
    y = np.asarray(layer(x, ids, weights, *inputs[3:6]))
    take_record(inputs)
    np.testing.assert_array_equal(y[: len(inputs.x)], case.results[0].y)


def test_hundreds_of_calls_leave_nothing_behind() -> None:
    rng = np.random.default_rng(17)
    programs = [
        Program((3,), TINY, (PUSH, PULL)),
        Program((4,), HUGE, (PULL, PUSH)),
        Program((4,), SMALL, (PUSH, COLLECTIVE)),
        Program((2, 2), SMALL, (harness.DEFAULTS, PULL)),
    ]
    cases = [[program.draw(rng) for _ in range(4)] for program in programs]

    memory = []
    for turn in range(ROUNDS):
        if turn == ROUNDS // 2:
            memory.append(harness.memory_of_this_process())
        # Both are under way before either is waited for.
        pair = rng.choice(len(programs), 2)
        drawn = [cases[number][rng.integers(4)] for number in pair]
        runs = [programs[n].run(case.layers) for n, case in zip(pair, drawn, strict=True)]
        for (results, total), case in zip(runs, drawn, strict=True):
            for outputs, expected in zip(results, case.results, strict=True):
                harness.assert_same_bits(Outputs(*map(np.asarray, outputs)), expected)
            np.testing.assert_allclose(total, case.layers[0].x.sum(0), rtol=1e-3, atol=1e-3)
        take_record(*(inputs for case in drawn for inputs in case.layers))
        if turn % (ROUNDS // MESHES) == 0:
            run_on_a_new_mesh(rng, drawn[0])
    memory.append(harness.memory_of_this_process())

    print([m / 2**20 for m in memory])
    assert memory[1] - memory[0] < MOST_GROWTH
