from typing import Any, Literal, TypedDict

import numpy as np
from numpy.typing import NDArray

class Fault(TypedDict):
    kind: Literal["timeout", "expert_out_of_range", "kernel_timeout", "other_call"]
    operation: str
    group: int
    rank: int
    peer: int
    expected: int
    seen: int
    device: int

def registrations() -> dict[str, dict[str, object]]: ...
def take_faults() -> tuple[list[Fault], int]: ...
def build_plan(
    routes: NDArray[np.int32], rank: int, experts: int, tile_rows: int, chunk_rows: int
) -> dict[str, NDArray[np.int32]]: ...
def ring_position(row: int, ring_rows: int, chunk_rows: int) -> tuple[int, int, int]: ...

class Rack:
    def __init__(
        self,
        *,
        routes: NDArray[np.int32],
        experts: int,
        hidden: int,
        inner: int,
        ring_rows: int,
        chunk_rows: int,
        repeats_tokens: bool,
    ) -> None: ...
    def simulate(
        self,
        *,
        pull_order: Literal["peers", "rows", "plan"],
        dispatch_push: bool,
        combine_push: bool,
        token_bytes: float,
        output_bytes: float,
        bin_s: float,
        sms: int,
        link_bytes_per_s: float,
        request_share: float,
        signal_s: float,
        pull_bytes_per_s: float,
        pull_latency_s: float,
        look_s: float,
        step_s: float,
        gate_up_s: float,
        down_s: float,
    ) -> dict[str, Any]: ...
