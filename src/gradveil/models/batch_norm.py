"""BatchNorm mode is an explicit choice: running statistics (eval), or the statistics of the batch (train).

It changes what an update reveals, and an attacker in the other mode matches a different function; so the choice is made in
one place and recorded with every result.
"""

from __future__ import annotations

import copy

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from gradveil.errors import UsageError, suggest

__all__ = ["BATCH_NORM_MODES", "batch_norm_layers", "batch_norm_mode", "set_batch_norm_mode"]

BATCH_NORM_MODES = ("eval", "train")


class _FixedBatchNorm(_BatchNorm):
    """BatchNorm with running statistics as plain arithmetic, which ``torch.func.vmap`` maps without a loop."""

    def forward(self, inputs: Tensor) -> Tensor:
        """Return (inputs - mean) / sqrt(var + eps) * weight + bias, channel by channel."""
        assert self.running_mean is not None and self.running_var is not None
        shape = (1, -1) + (1,) * (inputs.ndim - 2)
        scale = (self.running_var + self.eps).rsqrt()
        shift = -self.running_mean * scale
        if self.affine:
            scale, shift = scale * self.weight, shift * self.weight + self.bias
        return inputs * scale.reshape(shape) + shift.reshape(shape)


def batch_norm_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Return the BatchNorm layers by name, in the model's order."""
    return {name: layer for name, layer in model.named_modules() if isinstance(layer, _BatchNorm)}


def set_batch_norm_mode(model: nn.Module, mode: str) -> nn.Module:
    """Return a copy in eval mode whose BatchNorm layers use the statistics asked for.

    Args:
        model: Not changed.
        mode: ``eval`` uses the running statistics. ``train`` uses those of the batch and tracks nothing: the running
            statistics are removed, as `torch.func.replace_all_batch_norm_modules_` does, because ``vmap`` cannot update them
            in place. Load weights first.

    Raises:
        UsageError: For an unknown mode, or ``eval`` where a layer has no running statistics.
    """
    if mode not in BATCH_NORM_MODES:
        raise UsageError(f"there is no BatchNorm mode {mode!r}{suggest(mode, BATCH_NORM_MODES)}")
    chosen = copy.deepcopy(model).eval()
    for name, layer in batch_norm_layers(chosen).items():
        assert isinstance(layer, _BatchNorm)
        if mode == "train":
            layer.track_running_stats = False
            layer.running_mean = layer.running_var = layer.num_batches_tracked = None
        elif layer.running_mean is None:
            raise UsageError(
                f"BatchNorm layer {name!r} has no running statistics; choose mode 'train', or train it with tracking"
            )
        else:
            # Same tensors, names and numbers; but torch has no batching rule for its eval-mode kernel and falls back to a loop.
            layer.__class__ = _FixedBatchNorm
    return chosen


def batch_norm_mode(model: nn.Module) -> str:
    """Read the mode off a model: ``none`` without BatchNorm layers, ``eval``, ``train``, or ``mixed``."""
    layers = [layer for layer in model.modules() if isinstance(layer, _BatchNorm)]
    modes = {"train" if layer.training or layer.running_mean is None else "eval" for layer in layers}
    return "none" if not modes else modes.pop() if len(modes) == 1 else "mixed"
