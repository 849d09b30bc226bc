"""What a model is, apart from its tensors, as text: for keys that must not depend on which object holds it."""

from __future__ import annotations

from torch import nn

__all__ = ["structure_of"]

_PLAIN = (str, int, float, bool, tuple, list, type(None))


def structure_of(model: nn.Module) -> str:
    """Return the modules by name and class with their plain attributes and functions; equal for equal structure.

    >>> structure_of(nn.ReLU()) == structure_of(nn.ReLU()), structure_of(nn.ReLU()) == structure_of(nn.Tanh())
    (True, False)
    """
    told = []
    for name, module in model.named_modules():
        kind = type(module)
        public = [(key, value) for key, value in sorted(vars(module).items()) if not key.startswith("_")]
        plain = {key: value for key, value in public if isinstance(value, _PLAIN)}
        functions = {key: f"{value.__module__}.{value.__qualname__}" for key, value in public if hasattr(value, "__qualname__")}
        told.append(f"{name}:{kind.__module__}.{kind.__qualname__}{module.extra_repr()}{plain}{functions}")
    return "\n".join(told)
