"""What a caller can choose."""

from __future__ import annotations

import dataclasses
import numbers
from typing import Any, Literal, get_args

import jax
import numpy as np

from jax_mok import directions
from jax_mok.errors import MoEInputError

Direction = Literal["pull", "push"]
Composition = Literal["auto", "fused", "composed", "collective"]
Precision = Literal["operands", "mxfp8"]

TILE_ROWS = 64
_MOST_ROWS = 2**31 - TILE_ROWS
_LONGEST_TIMEOUT_S = 86400
_LARGEST_FLOAT32 = float(np.finfo(np.float32).max)


@dataclasses.dataclass(frozen=True)
class MoEConfig:
    """Options of the layer. Immutable and hashable, so it can be a static argument.

    None of them changes a bit of any result, except `clamp`, `precision` and, on GPUs,
    `composition`.

    Attributes:
      ring_rows: rows of the ring that holds dispatched tokens on an expert's rank, a multiple of 64
        and of `chunk_rows`. A load larger than the ring takes more waves. In the fused GPU kernel
        the ring holds hidden rows, 2·ring_rows·I bytes, and peers' tokens lie in a buffer
        [ranks, T, H] that does not depend on it. None: the balanced load (one row per choice, and
        padding of tiles) with an eighth of head-room, but 4096 rows at least; in the backward
        pass on GPUs of wide experts a part of it, see `jax_mok.memory`.
      chunk_rows: rows of one chunk of the ring, a multiple of 64; on CPU devices pulls from the
        peers are interleaved within a chunk, in the order that `build_plan` gives. Of the GPU
        kernels only the size of the ring, whole chunks, depends on it. None: up to 4096, what
        divides the ring.
      saved_rows: rows on a rank whose pre-activations are kept for the backward pass, a multiple of
        64. Later rows are dispatched and multiplied again there. None: one ring. On GPUs the
        backward pass works in their memory if they fill its ring, and else in a ring of its own,
        4·ring_rows·I bytes.
      dispatch: who moves token rows to the experts: the expert's rank ("pull") or the token's home
        rank ("push"; on GPUs before the experts start, so this time is not hidden behind products).
        In the backward pass tokens move again, the same way. The collective composition has no
        directions.
      combine: who moves output rows home: the token's home rank ("pull") or the expert's ("push").
        On GPUs "pull" moves them only after all experts are done, and keeps memory for the output
        rows of the worst load, every choice of every rank, instead of this rank's own choices:
        about as many times more as there are ranks; see `jax_mok.memory`.
      reverse_combine: as `dispatch`, for the output's gradient.
      reverse_dispatch: as `combine`, for the input's gradient.
      clamp: if given, the gate is limited to at most `clamp` and the up projection to
        ±`clamp` before the activation (as in gpt-oss).
      precision: "operands" multiplies in x's dtype. "mxfp8" rounds what the products contract to
        MXFP8, in blocks of 32; activations and their gradients travel to the experts so, and
        weights may be stored so. H and I are multiples of 32 then (of 64 in the GPU kernels). What
        is rounded along which axis is listed in `jax_mok.precision`.
      composition: "fused" is the GPU kernel; CPU devices have none. "composed" moves rows through
        memory that the ranks share, "collective" through XLA's own collectives, around products
        that are XLA's. "auto" on CPU devices: collective if several processes take part, else
        composed. "auto" on GPUs: fused, or collective where `jax_mok.moe` sees that GPUs along the
        mesh axis cannot reach each other's memory, as those of several hosts without a common
        NVLink domain; a warning in the log names the ranks. "fused" and "composed" then raise.
        `jax_mok.moe_ffn` and an `AbstractMesh` do not tell the GPUs: there "auto" is fused, and
        set-up fails with an error if they cannot.
        On GPUs composed is for comparison: the fused kernel's work in launches of its own for each
        move and each product, in as many waves as the worst load takes through the ring, with
        copies of a wave's rows.
      timeout_s: seconds, at most a day, that a rank waits for its peers before the call fails (on
        GPUs: before its output is NaN; the time of the kernel itself counts). The set-up of
        GPU calls waits a second at least, the collective composition as long as XLA's collectives.
    """

    ring_rows: int | None = None
    chunk_rows: int | None = None
    saved_rows: int | None = None
    dispatch: Direction = "pull"
    combine: Direction = "push"
    reverse_combine: Direction = "pull"
    reverse_dispatch: Direction = "push"
    clamp: float | None = None
    precision: Precision = "operands"
    composition: Composition = "auto"
    timeout_s: float = 120.0

    def __post_init__(self) -> None:
        """Refuses values that no sizes could make valid."""
        for name, least in (("ring_rows", TILE_ROWS), ("chunk_rows", TILE_ROWS), ("saved_rows", 0)):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, _rows(name, getattr(self, name), least))
        for name in ("dispatch", "combine", "reverse_combine", "reverse_dispatch"):
            _check_choice(name, getattr(self, name), get_args(Direction))
        _check_choice("precision", self.precision, get_args(Precision))
        _check_choice("composition", self.composition, get_args(Composition))
        if self.clamp is not None:
            object.__setattr__(self, "clamp", _positive("clamp", self.clamp, _LARGEST_FLOAT32))
        timeout_s = _positive("timeout_s", self.timeout_s, _LONGEST_TIMEOUT_S)
        object.__setattr__(self, "timeout_s", timeout_s)
        if self.ring_rows and self.chunk_rows and self.ring_rows % self.chunk_rows:
            above = -(-self.ring_rows // self.chunk_rows) * self.chunk_rows
            raise MoEInputError(
                f"MoEConfig.ring_rows={self.ring_rows} is not a multiple of "
                f"chunk_rows={self.chunk_rows}: round it up to {above}"
            )

    @classmethod
    def auto(cls, **options: Any) -> MoEConfig:
        """Options with the directions that were fastest on GPUs like this process's.

        `python -m jax_mok.bench link` measures and keeps them, see `jax_mok.directions`. Where it
        has not run, and for the `options` given, it is as the constructor. All processes of a job
        must get the same: they run one program.
        """
        kind = jax.devices()[0].device_kind
        return cls(**{**directions.recall(kind), **options})


def config_or_default(config: MoEConfig | None) -> MoEConfig:
    """The config, or the default for None; refuses anything else."""
    if config is None:
        return MoEConfig()
    if not isinstance(config, MoEConfig):
        raise MoEInputError(f"config must be a MoEConfig or None, got {type(config).__name__}")
    return config


def _rows(name: str, value: Any, least: int) -> int:
    whole = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if not whole or not least <= int(value) <= _MOST_ROWS or int(value) % TILE_ROWS:
        raise MoEInputError(
            f"MoEConfig.{name}={value!r} must be None or an integer multiple of {TILE_ROWS}, "
            f"at least {least} and below 2**31"
        )
    return int(value)


def _check_choice(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if not isinstance(value, str) or value not in allowed:
        raise MoEInputError(f"MoEConfig.{name}={value!r} must be one of {', '.join(allowed)}")


def _positive(name: str, value: Any, most: float) -> float:
    number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not number or not 0 < value <= most:
        raise MoEInputError(
            f"MoEConfig.{name}={value!r} must be a positive finite number, at most {most:g}"
        )
    return float(value)
