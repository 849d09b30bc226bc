"""Attention that can be differentiated twice and mapped: torch's own kernels, its plain arithmetic chosen.

The fused kernels behind ``F.scaled_dot_product_attention`` have no second derivative, on a CPU or a GPU, and the fused layers
that `nn.MultiheadAttention` and `nn.TransformerEncoderLayer` switch to in eval mode have no first one. The arithmetic they stand
for has all; only the choice is made here, for the length of a call, and put back.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

__all__ = ["plain_attention"]


@contextlib.contextmanager
def plain_attention() -> Iterator[None]:
    """Compute attention by matrix products and a softmax inside the block."""
    fused = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fused)
