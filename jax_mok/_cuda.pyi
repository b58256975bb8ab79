from typing import Protocol

from jax_mok._native import Fault

def registrations() -> dict[str, dict[str, object]]: ...
def take_faults() -> list[Fault]: ...
def launched_calls() -> int: ...
def start_timeline(device: int) -> str: ...
def take_timeline(device: int) -> bytes: ...
def can_reach(device: int, peer: int) -> bool: ...
def plan_fits(
    *, ranks: int, tokens: int, top_k: int, experts: int, tile_rows: int, chunk_rows: int
) -> bool: ...
def plan_workspace_bytes(
    *, ranks: int, tokens: int, top_k: int, experts: int, tile_rows: int, chunk_rows: int
) -> int: ...

class _OfForwardPass(Protocol):
    def __call__(
        self,
        *,
        ranks: int,
        tokens: int,
        top_k: int,
        experts: int,
        tile_rows: int,
        chunk_rows: int,
        ring_rows: int,
        hidden: int,
        inner: int,
        dispatch_push: bool,
        combine_push: bool,
        reverse_combine_push: bool,
        reverse_dispatch_push: bool,
        composed: bool,
        keeps_plan: bool,
        mxfp8: bool,
    ) -> int: ...

arena_bytes: _OfForwardPass
workspace_bytes: _OfForwardPass

class _OfBackwardPass(Protocol):
    def __call__(
        self,
        *,
        ranks: int,
        tokens: int,
        top_k: int,
        experts: int,
        tile_rows: int,
        chunk_rows: int,
        ring_rows: int,
        saved_rows: int,
        hidden: int,
        inner: int,
        dispatch_push: bool,
        combine_push: bool,
        reverse_combine_push: bool,
        reverse_dispatch_push: bool,
        composed: bool,
        mxfp8: bool,
    ) -> int: ...

backward_arena_bytes: _OfBackwardPass
backward_workspace_bytes: _OfBackwardPass
