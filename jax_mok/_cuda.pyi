from jax_mok._native import Fault

def registrations() -> dict[str, dict[str, object]]: ...
def take_faults() -> list[Fault]: ...
def launched_calls() -> int: ...
def can_reach(device: int, peer: int) -> bool: ...
def plan_fits(
    *, ranks: int, tokens: int, top_k: int, experts: int, tile_rows: int, chunk_rows: int
) -> bool: ...
def plan_workspace_bytes(
    *, ranks: int, tokens: int, top_k: int, experts: int, tile_rows: int, chunk_rows: int
) -> int: ...
def backward_arena_bytes(
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
    reverse_combine_push: bool,
    reverse_dispatch_push: bool,
    composed: bool,
) -> int: ...
def backward_workspace_bytes(
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
    reverse_combine_push: bool,
    reverse_dispatch_push: bool,
    composed: bool,
) -> int: ...
def arena_bytes(
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
    composed: bool,
    keeps_plan: bool,
) -> int: ...
def workspace_bytes(
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
    composed: bool,
    keeps_plan: bool,
) -> int: ...
