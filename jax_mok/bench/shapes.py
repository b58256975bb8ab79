"""The layers that are measured: sizes of real models, one list for every table and plot."""

from __future__ import annotations

from typing import NamedTuple


class Shape(NamedTuple):
    """Sizes of a layer: tokens per GPU, widths H and I, experts of two GPUs, experts per token."""

    tokens: int
    hidden: int
    inner: int
    experts: int
    top_k: int

    def experts_of(self, gpus: int) -> int:
        """Experts of so many GPUs, each with as many as of two."""
        return max(1, self.experts // 2) * gpus

    def flops(self) -> int:
        """Of one GPU's forward pass, when the load is balanced."""
        return 6 * self.tokens * self.top_k * self.hidden * self.inner


SHAPES = {
    "qwen3-30b-a3b": Shape(8192, 2048, 768, 128, 8),
    "4096x1536": Shape(8192, 4096, 1536, 32, 8),
    "deepseek-v3": Shape(8192, 7168, 2048, 32, 8),
    "mixtral-8x7b": Shape(8192, 4096, 14336, 8, 2),
    "deepseek-v4-flash": Shape(8192, 4096, 2048, 64, 6),
    "gpt-oss": Shape(8192, 2880, 2880, 32, 4),
    "deepseek-v3-1024": Shape(1024, 7168, 2048, 32, 8),
    "deepseek-v3-128": Shape(128, 7168, 2048, 32, 8),
}

TOY = {"toy": Shape(32, 64, 64, 4, 2)}
"""To try a measurement where its figures mean nothing."""
