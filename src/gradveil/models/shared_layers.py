"""Layers that stand under several names in one model."""

from __future__ import annotations

import copy

from torch import nn

__all__ = ["separate_layers"]


def separate_layers(model: nn.Module) -> nn.Module:
    """Give every place where a layer with tensors stands a layer of its own, with the same tensors; changes ``model``.

    Weights stay tied, because the layers share their `nn.Parameter`. `torch.func.functional_call` puts the original weights back
    name by name, and where two names are one layer it puts the temporary ones back: the model then keeps tensors of a finished
    differentiation, and the next copy of it fails.
    """
    seen: set[int] = set()

    def visit(parent: nn.Module) -> None:
        for name, child in list(parent._modules.items()):
            if child is None:
                continue
            if id(child) in seen and _has_tensors(child):
                child = _twin(child)
                parent._modules[name] = child
            seen.add(id(child))
            visit(child)

    visit(model)
    return model


def _has_tensors(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None or next(module.buffers(), None) is not None


def _twin(module: nn.Module) -> nn.Module:
    """Return a layer that is another object and has the same parameters, buffers and, for now, parts."""
    twin = copy.copy(module)
    for name in ("_parameters", "_buffers", "_modules"):
        twin.__dict__[name] = dict(module.__dict__[name])
    return twin
