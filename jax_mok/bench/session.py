"""What the measurements on GPUs share: their flags, devices, rates, progress and JSON."""

from __future__ import annotations

import dataclasses
import functools
import json
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from absl import app, flags
from jax.sharding import Mesh
from rich.progress import Progress

from jax_mok.bench import chains
from jax_mok.bench.bound import Bound, bound_of
from jax_mok.bench.routes import KINDS
from jax_mok.bench.shapes import SHAPES, TOY, Shape
from jax_mok.bench.stopwatch import Stopwatch
from jax_mok.bench.timing import Times

KNOWN = SHAPES | TOY
NOTHING_OF_USE = "anything of use: sizes and repeats are too small for that on CPU devices"
_PLATFORM = flags.DEFINE_enum(
    "platform", "cuda", ["cuda", "cpu"], "cpu only tries the measurement, at toy size"
)
_GPUS = flags.DEFINE_integer("gpus", None, "devices to use; default: all", lower_bound=1)
_SHAPES = flags.DEFINE_list(
    "shapes", None, f"some of {', '.join(KNOWN)}; default: all but toy, on CPU devices toy alone"
)
_ROUNDS = flags.DEFINE_integer("rounds", 30, "timed rounds", lower_bound=2)
_ROUTES = flags.DEFINE_enum("routes", "uniform", KINDS, "load of experts")
_BACKWARD = flags.DEFINE_bool("backward", False, "forward and backward, for all gradients")
_JSON = flags.DEFINE_string("json", None, "also write the figures to this file")

_LINK_BYTES = 2**29  # sent by each GPU at a time
_MEMORY_BYTES = 2**30  # read by each GPU at a time


class Scale(NamedTuple):
    """What a platform's measurements are made of.

    Attributes:
      product: the name of what does the plain product,
      product_width: and the width of its matrices.
      flops_per_s: a guess, which sets how many calls a program has.
      call_s: likewise, of what a call of the layer takes beside its products.
      burst_s: see `Stopwatch`.
      sustained_s: see `Stopwatch`.
    """

    product: str
    product_width: int
    flops_per_s: float
    call_s: float
    burst_s: float
    sustained_s: float

    @property
    def product_flops(self) -> int:
        """Of one plain product."""
        return 2 * self.product_width**3


_SCALES = {
    "cuda": Scale("cuBLAS", 8192, 5e14, 3e-4, burst_s=0.02, sustained_s=0.12),
    "cpu": Scale("jnp.dot", 128, 1e10, 4e-3, burst_s=0.01, sustained_s=0.01),
}


class Rates(NamedTuple):
    """Bytes per second of each GPU, None where they were not measured.

    Attributes:
      link: each way, both ways busy.
      memory: read and written.
    """

    link: Times | None
    memory: Times | None


@dataclasses.dataclass(frozen=True)
class Session:
    """One run of a measurement.

    Attributes:
      mesh: the devices.
      scale: of their platform.
      shapes: by name, what is measured.
      routes: the load of experts, one of `KINDS`.
      backward: whether the backward pass is measured too.
      rounds: timed rounds.
      progress: what is shown meanwhile.
      on_gpus: else on CPU devices, which only try the measurement.
      opened: `time.monotonic()` when it began.
    """

    mesh: Mesh
    scale: Scale
    shapes: dict[str, Shape]
    routes: str
    backward: bool
    rounds: int
    progress: Progress
    on_gpus: bool
    opened: float = dataclasses.field(default_factory=time.monotonic)

    def say(self, stage: str) -> None:
        """Tells on stderr what begins, and when: a run that is ended early says where it was."""
        seconds = time.monotonic() - self.opened
        self.progress.console.print(
            f"{seconds:7.1f} s  {stage}", highlight=False, markup=False, soft_wrap=True
        )

    def flops(self, shape: Shape) -> int:
        """Of one GPU; a backward pass has twice the products of a forward pass."""
        return (3 if self.backward else 1) * shape.flops()

    def bound(self, shape: Shape, routes: np.ndarray, product: Times, rates: Rates) -> Bound | None:
        """What no layer can beat on these GPUs, with what the plain product took in the same mode.

        Args:
          shape: of the layer.
          routes: int32 [turns, n·T, K].
          product: seconds of it.
          rates: as measured.

        Returns:
          None on CPU devices.
        """
        if not self.on_gpus:
            return None
        return bound_of(
            shape,
            routes,
            self.mesh.shape[chains.AXIS],
            backward=self.backward,
            flops_per_s=self.scale.product_flops / product.median,
            link_bytes_per_s=rates.link and rates.link.median,
        )

    def stopwatch(
        self,
        name: str,
        measurements: int,
        *,
        rounds: int | None = None,
        warm_up: int | None = None,
    ) -> Stopwatch:
        """One whose rounds, of so many measurements, are shown under this name.

        `rounds` and `warm_up` are instead of the session's and `Stopwatch`'s.
        """
        watch = Stopwatch(self.scale.burst_s, self.scale.sustained_s, rounds or self.rounds)
        if warm_up is not None:
            watch = dataclasses.replace(watch, warm_up=warm_up)
        task = self.progress.add_task(name, total=measurements * watch.all_rounds)
        advance = functools.partial(self.progress.update, task, advance=1, refresh=True)
        return dataclasses.replace(watch, after_round=advance)

    def rates(self) -> Rates:
        """What moving bytes takes on these devices, if they are GPUs."""
        if not self.on_gpus:
            return Rates(None, None)
        repeated = {"memory": chains.memory_chain(self.mesh, _MEMORY_BYTES)}
        if self.mesh.size > 1:
            repeated["link"] = chains.link_chain(self.mesh, _LINK_BYTES)
        self.say("link and memory rates")
        seconds = self.stopwatch("link and memory", 1).burst(repeated)
        moved = {"memory": 2 * _MEMORY_BYTES, "link": _LINK_BYTES}
        rates = {
            name: Times(*(moved[name] / s for s in (each.median, each.high, each.low)))
            for name, each in seconds.items()
        }
        return Rates(rates.get("link"), rates["memory"])

    def description(self) -> dict[str, Any]:
        """What the figures belong to."""
        return {
            "devices": self.mesh.size,
            "kind": self.mesh.devices.flat[0].device_kind,
            "jax": jax.__version__,
            "routes": self.routes,
            "backward": self.backward,
            "rounds": self.rounds,
            "product": self.scale.product,
        }

    def not_measured(self) -> list[str]:
        """What there is not on these devices."""
        if not self.on_gpus:
            return [
                "link and memory rates, which CPU devices do not have to themselves, and so the "
                "bound and the reading of weights; the plan and the memory of a call (GiB), which "
                "are those of GPU kernels",
                NOTHING_OF_USE,
            ]
        return ["the link, which one GPU has no use for"] if self.mesh.size == 1 else []


def open_session(argv: Sequence[str], progress: Progress) -> Session:
    """The session that the flags ask for.

    Raises:
      app.UsageError: if they ask for what there is not.
    """
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {' '.join(argv[1:])}")
    names = _SHAPES.value
    if names is None:
        names = list(TOY if _PLATFORM.value == "cpu" else SHAPES)
    if not names:
        raise app.UsageError(f"--shapes is empty; known: {', '.join(KNOWN)}")
    unknown = sorted(set(names) - set(KNOWN))
    if unknown:
        raise app.UsageError(f"unknown --shapes {', '.join(unknown)}; known: {', '.join(KNOWN)}")
    if _JSON.value:
        expect_writable("--json", _JSON.value)
    if _PLATFORM.value == "cpu":
        jax.config.update("jax_platforms", "cpu")
    try:
        devices = jax.devices(_PLATFORM.value)
    except RuntimeError as error:
        raise app.UsageError(
            f"JAX finds no NVIDIA GPU ({error}): --platform=cpu tries the measurement without"
        ) from error
    if _GPUS.value and _GPUS.value > len(devices):
        raise app.UsageError(f"--gpus={_GPUS.value}, and this machine has {len(devices)}")
    return Session(
        mesh=Mesh(np.array(devices[: _GPUS.value]), (chains.AXIS,)),
        scale=_SCALES[_PLATFORM.value],
        shapes={name: KNOWN[name] for name in names},
        routes=_ROUTES.value,
        backward=_BACKWARD.value,
        rounds=_ROUNDS.value,
        progress=progress,
        on_gpus=_PLATFORM.value == "cuda",
    )


def expect_writable(flag: str, path: str) -> None:
    """Before all measuring.

    Raises:
      app.UsageError: if no file can be written there.
    """
    try:
        with open(path, "a"):
            pass
    except OSError as error:
        raise app.UsageError(f"{flag}={path} cannot be written: {error.strerror}") from error


def measure_shapes(
    session: Session,
    measured: dict[str, Any],
    measure: Callable[[str, Shape], dict[str, Any]],
    summary: Callable[[str, dict[str, Any]], str],
) -> None:
    """Adds the figures of every shape to `measured`, and writes them to --json as they come."""
    measured["shapes"] = {}
    for name, shape in session.shapes.items():
        measured["shapes"][name] = measure(name, shape)
        session.say(summary(name, measured["shapes"][name]))
        write_json(measured)


def write_json(measured: dict[str, Any]) -> None:
    """Writes all that has been measured to --json, if that is given."""
    if _JSON.value:
        with open(_JSON.value, "w") as file:
            json.dump(measured, file, indent=1)
