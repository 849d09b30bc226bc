"""Split points: a model cut in two, a bottom model that a party keeps and a top model that the label owner keeps.

`split_model(model, cut)` gives modules whose composition is the model: ``top(bottom(x)) == model(x)``, with the same parameters
under the same names. What the bottom gives is the embedding, and the only thing that crosses the wire.

Cuts have names:

* ResNets: ``cut1`` after the first stage of blocks, ``cut2`` after the second, and so on; before the mean over pixels.
* LeNet, ConvNet, MLP and any ``nn.Sequential``: ``cut1`` after the first activation, ``cut2`` after the second, and so on. Of
  a Sequential, the name of a child cuts after that child.
* A model of yours that is none of these: give it a method ``split(cut) -> (bottom, top)`` and an attribute ``cuts``, a list of
  names.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from gradveil.errors import UsageError, suggest
from gradveil.models.layers import ACTIVATIONS
from gradveil.models.lenet import LeNet
from gradveil.models.resnet import ResNet

__all__ = ["PixelMean", "cuts_of", "split_model", "widen_first_linear"]

Steps = list[tuple[str, nn.Module]]

_ACTIVATIONS = tuple(type(make()) for make in ACTIVATIONS.values())


class PixelMean(nn.Module):
    """The mean over pixels: (B, C, h, w) -> (B, C)."""

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the mean of each channel."""
        return inputs.mean((2, 3))


def cuts_of(model: nn.Module) -> list[str]:
    """Return the names of a model's cuts, from the input on; empty where it cannot be split."""
    own = getattr(model, "cuts", None)
    if callable(getattr(model, "split", None)) and isinstance(own, Sequence):
        return [str(name) for name in own]
    found = _steps_and_cuts(model)
    return list(found[1]) if found else []


def split_model(model: nn.Module, cut: str) -> tuple[nn.Module, nn.Module]:
    """Return bottom and top of a model; they share its parameters, so copy them before one side trains alone.

    Args:
        model: A built-in model, an ``nn.Sequential``, or one with a method ``split``.
        cut: Name of the split point; see the head of this file.

    Raises:
        UsageError: The model has no such cut, or cannot be split.
    """
    split: Callable[[str], Any] | None = getattr(model, "split", None)
    if callable(split) and isinstance(getattr(model, "cuts", None), Sequence):
        names = cuts_of(model)
        if cut not in names:
            raise UsageError(f"this model has no cut {cut!r}{suggest(cut, names)}")
        return _checked(split(cut))
    found = _steps_and_cuts(model)
    if found is None:
        raise UsageError(
            f"{type(model).__name__} cannot be split: make it an nn.Sequential, or give it a method split(cut) that returns "
            "bottom and top, and a list of names called cuts"
        )
    steps, cuts = found
    children = [name for name, _ in steps] if isinstance(model, nn.Sequential) else []
    if cut in cuts:
        after = cuts[cut]
    elif cut in children:
        after = children.index(cut) + 1
    else:
        raise UsageError(f"this model has no cut {cut!r}{suggest(cut, list(cuts))}")
    if after >= len(steps):
        raise UsageError(f"the cut {cut!r} leaves nothing for the label owner; cut earlier")
    bottom, top = _sequence(steps[:after]), _sequence(steps[after:])
    return bottom.train(model.training), top.train(model.training)


def _checked(parts: Any) -> tuple[nn.Module, nn.Module]:
    if not (isinstance(parts, tuple) and len(parts) == 2 and all(isinstance(part, nn.Module) for part in parts)):
        raise UsageError("the model's method split(cut) must return two modules, bottom and top")
    return parts[0], parts[1]


def _sequence(steps: Steps) -> nn.Sequential:
    made = nn.Sequential()
    for name, module in steps:
        made.add_module(name, module)
    return made


def _steps_and_cuts(model: nn.Module) -> tuple[Steps, dict[str, int]] | None:
    """Return the model as a row of modules, and after how many of them each cut comes."""
    if isinstance(model, ResNet):
        stem: Steps = [(name, model.get_submodule(name)) for name in ("normalize", "conv1", "bn1", "act1")]
        stages: Steps = [(name, model.get_submodule(name)) for name in (f"layer{i + 1}" for i in range(model.stages))]
        cuts = {f"cut{index + 1}": len(stem) + index + 1 for index in range(model.stages)}
        return [*stem, *stages, ("mean", PixelMean()), ("linear", model.linear)], cuts
    if isinstance(model, (LeNet, nn.Sequential)):
        # LeNet makes its layers in the order it calls them.
        steps = list(model.named_children())
        activations = [index for index, (_, module) in enumerate(steps) if isinstance(module, _ACTIVATIONS)]
        return steps, {f"cut{count + 1}": index + 1 for count, index in enumerate(activations) if index + 1 < len(steps)}
    return None


def widen_first_linear(top: nn.Module, times: int) -> nn.Module:
    """Replace the first linear layer of a top model by one that reads ``times`` as many features; fresh weights.

    Embeddings without places, (B, features), are joined by putting them side by side, so the layer that reads them grows. Draws
    from torch's global generator; call it where that is sealed.

    Raises:
        UsageError: Something else than a linear layer reads the embedding.
    """
    for name, module in top.named_modules():
        if type(module) is nn.Linear:
            wide = nn.Linear(times * module.in_features, module.out_features, bias=module.bias is not None)
            parent, _, own = name.rpartition(".")
            setattr(top.get_submodule(parent), own, wide.to(module.weight))
            return top
        if list(module.parameters(recurse=False)) or list(module.buffers(recurse=False)):
            break
    raise UsageError("the layer after this cut is not linear, so flat embeddings cannot be joined before it; cut elsewhere")
