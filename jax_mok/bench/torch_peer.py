"""The peer of those who use PyTorch: NCCL's all-to-all around `grouped_mm`, a process a GPU.

Tokens are sorted by expert and sent to its rank, there sorted by expert again, multiplied by three
grouped products of bf16, and sent back. Run by `jax_mok.bench.peers` where torch can be imported:

    python -m jax_mok.bench.torch_peer routes.npy figures.json '{"tokens": ..., ...}'
"""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from jax_mok.bench.shapes import Shape
from jax_mok.bench.timing import Times, summarise

_LIMIT_S = 240
_CALLS = 10  # of a round
_WARM_UP = 4
_SAMPLE = 16  # tokens that are compared with the plain layer
_TOLERANCE = 2e-2


def is_there() -> bool:
    """Whether torch can be imported."""
    return importlib.util.find_spec("torch") is not None


def measure(shape: Shape, routes: np.ndarray, gpus: int, backward: bool, rounds: int) -> Times:
    """Seconds of a call, the slowest rank's.

    Args:
      shape: of the layer.
      routes: int32 [turns, n·T, K], by turns.
      gpus: n.
      backward: with the gradients of x and the experts' weights.
      rounds: to time.

    Raises:
      RuntimeError: if it fails, or its results are wrong.
    """
    arguments = {
        **shape._asdict(),
        "experts": shape.experts_of(gpus),
        "gpus": gpus,
        "backward": backward,
        "rounds": rounds,
    }
    with tempfile.TemporaryDirectory() as folder:
        routes_file, figures = Path(folder) / "routes.npy", Path(folder) / "figures.json"
        np.save(routes_file, routes)
        command = [sys.executable, "-m", __name__, str(routes_file), str(figures)]
        finished = subprocess.run(
            [*command, json.dumps(arguments)], capture_output=True, text=True, timeout=_LIMIT_S
        )
        if finished.returncode:
            raise RuntimeError(finished.stderr[-300:])
        seconds: list[float] = json.loads(figures.read_text())
    return summarise(seconds)


def _main(routes_file: str, figures: str, arguments: str) -> None:
    import torch.multiprocessing

    sizes = json.loads(arguments)
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sizes["port"] = sock.getsockname()[1]
    torch.multiprocessing.spawn(_run, (routes_file, figures, sizes), nprocs=sizes["gpus"])


def _run(rank: int, routes_file: str, figures: str, sizes: dict[str, Any]) -> None:
    """One process: checks, then times."""
    import torch
    import torch.distributed

    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(sizes["port"])}
    torch.cuda.set_device(rank)
    gpu = torch.device("cuda", rank)
    torch.distributed.init_process_group("nccl", rank=rank, world_size=sizes["gpus"], device_id=gpu)
    tokens, top_k, local = sizes["tokens"], sizes["top_k"], sizes["experts"] // sizes["gpus"]
    all_routes = torch.from_numpy(np.load(routes_file)).to(gpu, torch.int64)
    routes = all_routes[:, rank * tokens : (rank + 1) * tokens]
    x = _normal(torch, gpu, 1000 + rank, tokens, sizes["hidden"])
    both, down = (
        torch.stack([each[part] for each in map(_expert_of(torch, gpu, sizes), _held(rank, local))])
        for part in range(2)
    )
    router_weights = torch.ones(tokens, top_k, device=gpu, dtype=torch.bfloat16)
    for operand in (x, both, down):
        operand.requires_grad_(sizes["backward"])

    def call(turn: int) -> Any:
        y = _layer(torch, x, routes[turn % len(routes)], router_weights, both, down, sizes)
        if sizes["backward"]:
            x.grad = both.grad = down.grad = None
            y.backward(y.detach())
        return y

    _check(torch, call(0), x, routes[0], sizes)
    seconds = []
    for turn in range(_WARM_UP + sizes["rounds"]):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.distributed.barrier()
        torch.cuda.synchronize()
        begin.record()
        for each in range(_CALLS):
            call(turn * _CALLS + each)
        end.record()
        torch.cuda.synchronize()
        slowest = torch.tensor(begin.elapsed_time(end) * 1e-3 / _CALLS, device=gpu)
        torch.distributed.all_reduce(slowest, torch.distributed.ReduceOp.MAX)
        if turn >= _WARM_UP:
            seconds.append(float(slowest))
    if rank == 0:
        Path(figures).write_text(json.dumps(seconds))
    torch.distributed.destroy_process_group()


def _layer(
    torch: Any,
    x: Any,
    ids: Any,
    router_weights: Any,
    both: Any,
    down: Any,
    sizes: dict[str, Any],
) -> Any:
    """y [T, H] of this rank's tokens; gate and up are one matrix [E/n, H, 2·I]."""
    top_k, experts, ranks = sizes["top_k"], sizes["experts"], sizes["gpus"]
    local, inner = experts // ranks, sizes["inner"]
    flat = ids.reshape(-1)
    order = torch.argsort(flat, stable=True)  # by expert, so by rank too
    counts = torch.bincount(flat, minlength=experts)
    all_counts = torch.empty(ranks, experts, dtype=counts.dtype, device=x.device)
    torch.distributed.all_gather_into_tensor(all_counts, counts)
    own = all_counts.view(ranks, ranks, local)[:, torch.distributed.get_rank()]  # [from, expert]
    sent, received = counts.view(ranks, local).sum(1).tolist(), own.sum(1).tolist()

    rows = _exchange(torch)(x[order // top_k], received, sent)
    groups = torch.arange(local, device=x.device).repeat(ranks)
    expert = torch.repeat_interleave(groups, own.reshape(-1), output_size=sum(received))
    by_expert = torch.argsort(expert, stable=True)
    ends = own.sum(0).cumsum(0).to(torch.int32)
    product = getattr(torch.nn.functional, "grouped_mm", None) or torch._grouped_mm
    hidden = product(rows[by_expert], both, offs=ends)
    hidden = torch.nn.functional.silu(hidden[:, :inner]) * hidden[:, inner:]
    outputs = product(hidden, down, offs=ends)
    home = _exchange(torch)(outputs[torch.argsort(by_expert)], sent, received)
    choices = home[torch.argsort(order)].view(len(x), top_k, -1)
    return (choices * router_weights[..., None]).sum(1)


def _exchange(torch: Any) -> Any:
    """(rows, how many come from each rank, how many go to each) -> rows, differentiable."""

    class Exchange(torch.autograd.Function):  # type: ignore[misc]
        @staticmethod
        def forward(context: Any, rows: Any, come: list[int], go: list[int]) -> Any:
            context.counts = go, come
            result = rows.new_empty(sum(come), rows.shape[1])
            torch.distributed.all_to_all_single(result, rows.contiguous(), come, go)
            return result

        @staticmethod
        def backward(context: Any, gradient: Any) -> Any:
            come, go = context.counts
            result = gradient.new_empty(sum(come), gradient.shape[1])
            torch.distributed.all_to_all_single(result, gradient.contiguous(), come, go)
            return result, None, None

    return Exchange.apply


def _check(torch: Any, y: Any, x: Any, ids: Any, sizes: dict[str, Any]) -> None:
    """Compares some tokens with the plain layer, in f32; every rank can make every expert."""
    expert_of, inner = _expert_of(torch, x.device, sizes), sizes["inner"]
    for token in range(min(_SAMPLE, len(x))):
        want = torch.zeros(sizes["hidden"], device=x.device)
        for expert in ids[token].tolist():
            both, down = (matrix.float() for matrix in expert_of(expert))
            hidden = x[token].detach().float() @ both
            want += (torch.nn.functional.silu(hidden[:inner]) * hidden[inner:]) @ down
        error = float((y[token].detach().float() - want).norm() / want.norm())
        if not error < _TOLERANCE:
            raise RuntimeError(f"token {token} is wrong by {error:.1e}")


def _expert_of(torch: Any, gpu: Any, sizes: dict[str, Any]) -> Any:
    hidden, inner = sizes["hidden"], sizes["inner"]

    def matrices(expert: int) -> tuple[Any, Any]:
        both = _normal(torch, gpu, 2 * expert, hidden, 2 * inner) / hidden**0.5
        return both, _normal(torch, gpu, 2 * expert + 1, inner, hidden) / inner**0.5

    return matrices


def _held(rank: int, local: int) -> range:
    return range(rank * local, (rank + 1) * local)


def _normal(torch: Any, gpu: Any, seed: int, *shape: int) -> Any:
    generator = torch.Generator(gpu).manual_seed(seed)
    return torch.randn(*shape, generator=generator, device=gpu, dtype=torch.bfloat16)


if __name__ == "__main__":
    _main(*sys.argv[1:])
