"""A call of the layer on up to a rack of GPUs, simulated.

The kernel is simulated event by event (`cuda/rack/simulation.h`) from its own plan and work lists;
what stands before and behind it is added by formulas. Sources of all figures are named beside them:
documents are those of this repository, measured on H200s. What is not measured says so.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Literal, NamedTuple

import numpy as np

from jax_mok import _native, gpu
from jax_mok.bench.bound import Bound, bound_of
from jax_mok.bench.shapes import Shape
from jax_mok.config import MoEConfig
from jax_mok.layout import make_layout

PullOrder = Literal["peers", "rows", "plan"]
_BF16_BYTES = 2.0
MXFP8_BYTES = 33 / 32
"""Of an element: one byte, and a scale of one for 32 of them."""
BIN_S = 20e-6
"""Of time, in which bytes on the link are counted together."""

# docs/hopper-forward.md: a step of 64 of the contraction, for two tiles by 256 columns, takes what
# its products need of the tensor cores; an item of gate/up costs 3,800 to 4,000 cycles beside its
# steps, one of down 3,700 to 3,800.
_STEP_CYCLES, _GATE_UP_CYCLES, _DOWN_CYCLES = 1024, 3900, 3750
_FLOPS_OF_STEP = 2 * 128 * 256 * 64
# The one fitted number: with it the runs of one GPU in docs/hopper-forward.md come out right.
_PRODUCT_USE_OF_TENSOR_CORES = 0.98


class Machine(NamedTuple):
    """A GPU and its port, rates in bytes or operations per second.

    Attributes:
      sms: multiprocessors.
      product_flops_per_s: of a cuBLAS product of 8192³ in a burst.
      memory_bytes_per_s: read and written.
      link_bytes_per_s: of the port, each way.
      request_share: what a pulled byte's request takes of the port, the other way.
      signal_s: until a peer sees a push.
      pull_bytes_per_s: of a pulling warp under the kernel's load.
      pull_latency_s: what it takes at least for what it copies together.
      look_s: what it takes to look at 32 rows of the plan.
    """

    sms: int
    product_flops_per_s: float
    memory_bytes_per_s: float
    link_bytes_per_s: float
    request_share: float
    signal_s: float
    pull_bytes_per_s: float
    pull_latency_s: float
    look_s: float

    def with_pulls_as_fast(self, times: float) -> Machine:
        """As a kernel would have that pulls so many times as fast where the link lets it."""
        return self._replace(
            pull_bytes_per_s=self.pull_bytes_per_s * times,
            pull_latency_s=self.pull_latency_s / times,
        )

    @property
    def cycle_s(self) -> float:
        """Of an SM in a burst: cuBLAS keeps its tensor cores busy nearly all the time."""
        steps_per_s = self.product_flops_per_s / self.sms / _FLOPS_OF_STEP
        return _PRODUCT_USE_OF_TENSOR_CORES / steps_per_s / _STEP_CYCLES


H200 = Machine(
    sms=132,
    # docs/hopper-forward.md: 805 to 848 TFLOP/s in a burst; memory copied at 4134 GB/s.
    product_flops_per_s=826e12,
    memory_bytes_per_s=4134e9,
    # docs/link.md: a pull of 132 blocks one way, and both ways at once; a signal by push.
    link_bytes_per_s=365e9,
    request_share=365 / 330 - 1,
    signal_s=1.23e-6,
    # `bench timeline`, in docs/rack.md: three rows of 14336 bytes take 29.9 µs, one of 4096 4.13.
    # What limits them is not known; these figures are of all warps pulling at once.
    pull_bytes_per_s=1.44e9,
    pull_latency_s=4.13e-6,
    # Not measured: two loads from L2, one after the other. On two GPUs it does not matter.
    look_s=0.6e-6,
)

# NVIDIA's figures: H200 989 TFLOP/s of dense bf16, NVLink 450 GB/s each way, memory 4.8 TB/s (its
# data sheet); GB200 NVL72 360 PFLOP/s with sparsity, 130 TB/s both ways, 576 TB/s for its 72 GPUs
# (the same a GPU: https://glennklockwood.com/garden/processors/B200), 148 SMs each. Every share
# of the data sheet that an H200 reaches is taken for the other's too. Nothing of this is measured,
# and this project has no kernel for that GPU: these are the same schedule, warps and tiles there.
GB200 = H200._replace(
    sms=148,
    product_flops_per_s=H200.product_flops_per_s * (360e15 / 2 / 72) / 989e12,
    memory_bytes_per_s=H200.memory_bytes_per_s * (576e12 / 72) / 4.8e12,
    link_bytes_per_s=H200.link_bytes_per_s * (130e12 / 2 / 72) / 450e9,
)

MACHINES = {"h200": H200, "gb200": GB200}

# docs/hopper-forward.md, by JAX's profiler: barriers and ends; the rest between launches.
_BARRIERS_S, _BETWEEN_LAUNCHES_S = 20e-6, 22e-6
# The plan's kernels: docs/hopper-forward.md has 26 µs for 131,072 choices of all ranks; `bench
# layer --json` on two H200s 18 µs for 16,384. A straight line through both: where there are more
# choices, it is not measured.
_PLAN_S, _PLAN_S_PER_CHOICE = 17e-6, 7e-11


_DEFAULTS = MoEConfig()


@dataclasses.dataclass(frozen=True)
class Case:
    """What is simulated.

    Attributes:
      shape: the layer, experts per GPU as on two.
      gpus: n.
      config: ring, chunk and directions.
      machine: the GPUs.
      exponent: of the experts' load, a Zipf distribution; 0 for a uniform one.
      pull_order: "peers" as the kernel does; "rows" of the plan, whoever has their tokens; or
        "plan": its `pull_order`, chunk by chunk from all ranks in turn.
      repeats_tokens: whether a token comes to a GPU for each of its choices there, not once.
      token_bytes: of an element that is dispatched.
      output_bytes: of an element that is combined.
    """

    shape: Shape
    gpus: int
    config: MoEConfig = _DEFAULTS
    machine: Machine = H200
    exponent: float = 0.0
    pull_order: PullOrder = "peers"
    repeats_tokens: bool = False
    token_bytes: float = _BF16_BYTES
    output_bytes: float = _BF16_BYTES


class Outcome(NamedTuple):
    """A simulated call.

    Attributes:
      seconds: of the call.
      parts: of it, by name; the kernel's is that of the slowest rank.
      bound: what no layer can beat; bf16 rows on the link whatever is simulated.
      kernel: what `_native.Rack.simulate` gives.
    """

    seconds: float
    parts: dict[str, float]
    bound: Bound
    kernel: dict[str, Any]

    def share_of_link(self, machine: Machine) -> float:
        """Of what the ports could take in during the call, mean over GPUs."""
        moved = self.kernel["dispatch"]["bytes"].sum() + self.kernel["combine"]["bytes"].sum()
        return float(moved) / len(self.kernel["kernel_s"]) / machine.link_bytes_per_s / self.seconds


@functools.lru_cache(maxsize=2)
def routes_of(shape: Shape, gpus: int, exponent: float) -> np.ndarray:
    """int32 [gpus, T, K], distinct experts per token; the same whenever they are drawn."""
    experts = shape.experts_of(gpus)
    generator = np.random.default_rng(0)
    shares = (1.0 + generator.permutation(experts)) ** -exponent
    limits = np.cumsum(shares / shares.sum())
    tokens = gpus * shape.tokens
    routes = np.empty((shape.top_k, tokens), np.int32)
    for k in range(shape.top_k):  # one expert after the other, drawn anew where a token has it
        again = np.arange(tokens)
        while again.size:
            drawn = np.searchsorted(limits, generator.random(again.size), side="right")
            routes[k, again] = np.minimum(drawn, experts - 1)
            again = again[np.any(routes[:k, again] == routes[k, again], axis=0)]
    return np.ascontiguousarray(routes.T).reshape(gpus, shape.tokens, shape.top_k)


@functools.lru_cache(maxsize=2)
def _rack(
    shape: Shape, gpus: int, config: MoEConfig, exponent: float, repeats_tokens: bool
) -> _native.Rack:
    experts = shape.experts_of(gpus)
    layout = make_layout(
        config, ranks=gpus, tokens=shape.tokens, top_k=shape.top_k, experts=experts
    )
    return _native.Rack(
        routes=routes_of(shape, gpus, exponent),
        experts=experts,
        hidden=shape.hidden,
        inner=shape.inner,
        ring_rows=gpu.ring_rows(layout),
        chunk_rows=layout.chunk_rows,
        repeats_tokens=repeats_tokens,
    )


def simulate(case: Case) -> Outcome:
    """One forward call."""
    shape, machine, n = case.shape, case.machine, case.gpus
    rack = _rack(
        shape,
        n,
        MoEConfig(ring_rows=case.config.ring_rows, chunk_rows=case.config.chunk_rows),
        case.exponent,
        case.repeats_tokens,
    )
    kernel = rack.simulate(
        pull_order=case.pull_order,
        dispatch_push=case.config.dispatch == "push",
        combine_push=case.config.combine == "push",
        token_bytes=case.token_bytes * shape.hidden,
        output_bytes=case.output_bytes,
        bin_s=BIN_S,
        sms=machine.sms,
        link_bytes_per_s=machine.link_bytes_per_s,
        request_share=machine.request_share,
        signal_s=machine.signal_s,
        pull_bytes_per_s=machine.pull_bytes_per_s,
        pull_latency_s=machine.pull_latency_s,
        look_s=machine.look_s,
        step_s=_STEP_CYCLES * machine.cycle_s,
        gate_up_s=_GATE_UP_CYCLES * machine.cycle_s,
        down_s=_DOWN_CYCLES * machine.cycle_s,
    )
    summed = (shape.top_k + 1) * shape.tokens * _row_bytes(shape)
    parts = {
        **_parts_before(case),
        "pushing tokens": kernel["push_tokens_s"],
        "kernel": float(kernel["kernel_s"].max()),
        "pulling rows": kernel["pull_rows_s"],
        "top-k sum": summed / machine.memory_bytes_per_s,
        "between launches": _BETWEEN_LAUNCHES_S,
    }
    bound = bound_of(
        shape,
        routes_of(shape, n, case.exponent).reshape(-1, shape.top_k),
        n,
        backward=False,
        flops_per_s=machine.product_flops_per_s,
        link_bytes_per_s=machine.link_bytes_per_s if n > 1 else None,
    )
    return Outcome(sum(parts.values()), parts, bound, kernel)


def _row_bytes(shape: Shape) -> float:
    return _BF16_BYTES * shape.hidden


def _parts_before(case: Case) -> dict[str, float]:
    shape, machine, n = case.shape, case.machine, case.gpus
    choices = shape.tokens * shape.top_k
    parts = {"plan": _PLAN_S + n * choices * _PLAN_S_PER_CHOICE}
    if n == 1:
        return parts
    pulled_per_s = machine.link_bytes_per_s / (1 + machine.request_share)
    return {
        # A local copy to where the peers can read; a push needs none.
        "showing tokens": 2 * _row_bytes(shape) * shape.tokens / machine.memory_bytes_per_s
        if case.config.dispatch == "pull"
        else 0.0,
        "barriers": _BARRIERS_S,
        "routes": 4 * (n - 1) * choices / pulled_per_s,
        **parts,
    }
