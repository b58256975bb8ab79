"""Moves of rows and signals between two GPUs, by kernels of `link_kernels.cu` through CuPy."""

from __future__ import annotations

import importlib.resources
from typing import Any, NamedTuple

import numpy as np

from jax_mok.bench.timing import Times, summarise

WAYS = ("pull", "push")
HOWS = ("loads", "bulk copies")

_KERNELS = {"loads": "move_by_loads", "bulk copies": "move_by_bulk_copies"}
_THREADS = {"loads": 512, "bulk copies": 32}
_SHARED_BYTES = {"loads": 0, "bulk copies": 8 * 16384}
_BUFFER_BYTES = 2**28
_BYTES_OF_BLOCK = 2**23  # moved by a block at least: some milliseconds' worth
_SIGNALS = 2000
_SIGNAL_CYCLES = 2**31  # about a second, after which a kernel gives up


class Move(NamedTuple):
    """What is measured.

    Attributes:
      way: "pull" if the GPU that takes the rows moves them, "push" if it is the one that has them.
      how: "loads" and stores of 16 bytes a thread, or "bulk copies" through shared memory.
      blocks: of the kernel, one to an SM.
      row_bytes: of a row; rows are taken in random order.
      both_ways: whether the other GPU does the same at the same time.
    """

    way: str
    how: str
    blocks: int
    row_bytes: int
    both_ways: bool


class Link:
    """Two GPUs that reach each other's memory.

    Attributes:
      sides: of each GPU its number, kernels, stream and buffers.
    """

    def __init__(self, first: int, second: int) -> None:
        """Takes buffers on both.

        Args:
          first: a GPU, as CUDA numbers it.
          second: another one.

        Raises:
          RuntimeError: if they cannot reach each other.
        """
        import cupy

        self._cupy = cupy
        self.sides: list[dict[str, Any]] = []
        source = importlib.resources.files("jax_mok.bench").joinpath("link_kernels.cu").read_text()
        for gpu, peer in ((first, second), (second, first)):
            if not cupy.cuda.runtime.deviceCanAccessPeer(gpu, peer):
                raise RuntimeError(f"GPU {gpu} cannot reach the memory of GPU {peer}")
            with cupy.cuda.Device(gpu):
                _enable_peer(cupy, peer)
                module = cupy.RawModule(code=source, options=("--std=c++17",))
                self.sides.append(
                    {
                        "gpu": gpu,
                        "module": module,
                        "stream": cupy.cuda.Stream(non_blocking=True),
                        "source": cupy.zeros(_BUFFER_BYTES, cupy.uint8),
                        "target": cupy.zeros(_BUFFER_BYTES, cupy.uint8),
                        "flags": cupy.zeros(64, cupy.uint32),
                    }
                )
                cupy.cuda.runtime.deviceSynchronize()

    def rate(self, move: Move, rounds: int) -> Times:
        """Bytes per second of each direction that is busy."""
        order = self.rows_of(move)
        rows = len(order)
        active = self.sides if move.both_ways else self.sides[:1]
        launches = []
        for side in active:
            peer = self._peer_of(side)
            pulls = move.way == "pull"
            target = side["target"] if pulls else peer["target"]
            source = peer["source"] if pulls else side["source"]
            with self._cupy.cuda.Device(side["gpu"]):
                places = self._cupy.asarray(order.astype(np.int32))
            launches.append((side, (target, source, places, np.int32(rows), move.row_bytes)))
        seconds = [self._seconds(move, launches) for _ in range(rounds + 1)][1:]
        return summarise([rows * move.row_bytes / s for s in seconds])

    @staticmethod
    def rows_of(move: Move) -> np.ndarray:
        """The rows of the buffers that are moved, in their order."""
        there_are = _BUFFER_BYTES // move.row_bytes
        wanted = max(move.blocks, move.blocks * _BYTES_OF_BLOCK // move.row_bytes)
        return np.random.default_rng(0).permutation(there_are)[:wanted]

    def signal(self, way: str, rounds: int) -> Times:
        """Seconds until a GPU sees a word that the other has written: there (push), or at home."""
        first, second = self.sides
        seconds = [self._signal_seconds(first, second, way) for _ in range(rounds + 1)][1:]
        return summarise(seconds)

    def _peer_of(self, side: dict[str, Any]) -> dict[str, Any]:
        return self.sides[1] if side is self.sides[0] else self.sides[0]

    def _seconds(self, move: Move, launches: list[tuple[dict[str, Any], tuple[Any, ...]]]) -> float:
        events = []
        for side, arguments in launches:
            with self._cupy.cuda.Device(side["gpu"]), side["stream"] as stream:
                kernel = side["module"].get_function(_KERNELS[move.how])
                shared_bytes = _SHARED_BYTES[move.how]
                kernel.max_dynamic_shared_size_bytes = shared_bytes
                begin, end = self._cupy.cuda.Event(), self._cupy.cuda.Event()
                begin.record(stream)
                target, source, places, rows, row_bytes = arguments
                kernel(
                    (move.blocks,),
                    (_THREADS[move.how],),
                    (target.data.ptr, source.data.ptr, places.data.ptr, rows, np.int32(row_bytes)),
                    shared_mem=shared_bytes,
                )
                end.record(stream)
                events.append((begin, end))
        for _, end in events:
            end.synchronize()
        elapsed = (self._cupy.cuda.get_elapsed_time(begin, end) for begin, end in events)
        return max(elapsed) * 1e-3

    def _signal_seconds(self, first: dict[str, Any], second: dict[str, Any], way: str) -> float:
        for side in (first, second):
            with self._cupy.cuda.Device(side["gpu"]):
                side["flags"].fill(0)
                self._cupy.cuda.runtime.deviceSynchronize()
        ends = []
        for side, peer, is_first in ((first, second, 1), (second, first, 0)):
            shown, awaited = (peer, side) if way == "push" else (side, peer)
            with self._cupy.cuda.Device(side["gpu"]), side["stream"] as stream:
                begin, end = self._cupy.cuda.Event(), self._cupy.cuda.Event()
                begin.record(stream)
                side["module"].get_function("signal")(
                    (1,),
                    (1,),
                    (
                        shown["flags"].data.ptr,
                        awaited["flags"].data.ptr,
                        np.int32(_SIGNALS),
                        np.int32(is_first),
                        np.int64(_SIGNAL_CYCLES),
                        side["flags"].data.ptr + 128,
                    ),
                )
                end.record(stream)
                ends.append((begin, end))
        for side, (_, end) in zip((first, second), ends, strict=True):
            end.synchronize()
            with self._cupy.cuda.Device(side["gpu"]):
                has_missed = bool(side["flags"][32])
            if has_missed:
                raise RuntimeError(f"GPU {side['gpu']} saw no signal of the other within a second")
        begin, end = ends[1]
        return self._cupy.cuda.get_elapsed_time(begin, end) * 1e-3 / (2 * _SIGNALS)


def _enable_peer(cupy: Any, peer: int) -> None:
    try:
        cupy.cuda.runtime.deviceEnablePeerAccess(peer)
    except cupy.cuda.runtime.CUDARuntimeError as error:
        if "AlreadyEnabled" not in str(error) and "already enabled" not in str(error):
            raise
