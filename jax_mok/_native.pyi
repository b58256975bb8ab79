from typing import Literal, TypedDict

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
