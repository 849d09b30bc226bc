"""Make convolutions of the attacker's copy fast for many candidates at once.

Mapped over candidates, the weight gradient of a convolution and everything derived from it become convolutions with one
group per candidate, which libraries run far below the speed of the machine. Written as unfolding and a matrix product, the
same arithmetic is batched matrix products, in the first and in the second derivative. It pays for wide layers on a GPU and costs
elsewhere; measured in docs/measurements.md.
"""

from __future__ import annotations

import copy

import torch.nn.functional as F
from torch import Tensor, nn

from gradveil.learning.learner import Learner

__all__ = ["with_matrix_convolutions"]


class _MatrixConv2d(nn.Conv2d):
    """The same weights under the same names, and the same result up to rounding."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - the name is torch's
        outputs, inputs = self.weight.shape[0], self.weight.shape[1]
        batch, _, height, width = input.shape
        pads, strides, kernel = self.padding, self.stride, self.kernel_size
        assert not isinstance(pads, str)
        high = (height + 2 * pads[0] - self.dilation[0] * (kernel[0] - 1) - 1) // strides[0] + 1
        wide = (width + 2 * pads[1] - self.dilation[1] * (kernel[1] - 1) - 1) // strides[1] + 1
        if kernel == (1, 1) and pads == (0, 0):
            columns = input[:, :, :: strides[0], :: strides[1]].reshape(batch, inputs, high * wide)
        else:
            columns = F.unfold(input, kernel, self.dilation, pads, strides)  # (B, C, H, W) -> (B, C·k·k, H'·W')
        rows = self.weight.reshape(outputs, -1)
        result = rows @ columns
        if self.bias is not None:
            result = result + self.bias[:, None]
        return result.reshape(batch, outputs, high, wide)


def with_matrix_convolutions(learner: Learner) -> Learner:
    """Return a learner whose two-dimensional convolutions are matrix products; grouped and padded-by-content ones stay."""
    model = copy.deepcopy(learner.model)
    changed = False
    for module in model.modules():
        plain = type(module) is nn.Conv2d and module.groups == 1 and module.padding_mode == "zeros"
        if plain and not isinstance(module.padding, str):
            module.__class__ = _MatrixConv2d
            changed = True
    return learner.replace(model=model) if changed else learner
