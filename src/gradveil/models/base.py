"""The registry of models, and `build_model`: from a spelling to a checked model with known weights.

A factory takes ``(input_shape, classes)`` and its own settings by keyword and returns a module that maps inputs (B,
*input_shape) in [0, 1] to logits (B, classes), or, where targets are masks, to one logit per pixel (B, classes, H, W).
Normalisation lives inside the model.

This is the one place in the package where a global generator is seeded, because PyTorch's layers draw their first weights
from it. It happens inside `sealed_randomness`, which puts every global generator back as it was.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gradveil.errors import GradveilError, UsageError, suggest
from gradveil.models.weights import load_weights
from gradveil.randomness import Seed
from gradveil.registry import Card, Registry, import_object, parse_call

__all__ = ["MODELS", "Factory", "ModelCard", "build_model", "parameter_count", "probe", "sealed_randomness"]

Factory = Callable[..., nn.Module]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelCard(Card):
    """What a reader needs to know about a model.

    Attributes:
        inputs: Which inputs it takes, in words.
    """

    inputs: str


MODELS: Registry[Factory, ModelCard] = Registry("model", "gradveil.models")


def build_model(
    spelling: str,
    *,
    input_shape: tuple[int, ...],
    classes: int,
    seed: Seed,
    weights: str | None = None,
    dense: bool = False,
) -> nn.Module:
    """Return a checked model in eval mode, on the CPU.

    Args:
        spelling: Built-in name with settings, ``lenet(activation="relu")``; or ``package.module:factory`` or
            ``file.py:factory``, also with settings. A factory of yours gets ``input_shape``, ``classes`` and ``num_classes``
            by keyword as far as its signature has them.
        input_shape: Shape of one input.
        classes: Number of outputs wanted.
        seed: Decides the first weights; the global generators are left as they were.
        weights: ``.safetensors`` file, or ``.pt`` / ``.pth`` with a state dict, to load on top.
        dense: Whether targets are masks, so that the model gives ``classes`` outputs for every pixel.

    Raises:
        UsageError: In one sentence that says what to change.
    """
    name, settings = parse_call(spelling)
    # User code may draw on import, and is imported once; fresh generators for its factory make every call give the same weights.
    with sealed_randomness(seed.number("import")):
        factory = _import(name) if ":" in name else MODELS.get(name)
    with sealed_randomness(seed.number("weights")):
        model = _call(factory, name, settings, input_shape, classes)
    model.eval()
    if weights is not None:
        load_weights(model, weights)
    probe(model, name, input_shape, classes, dense=dense)
    return model


def parameter_count(model: nn.Module) -> int:
    """Return the number of trainable entries."""
    return sum(parameter.numel() for parameter in model.parameters())


def probe(model: nn.Module, name: str, input_shape: tuple[int, ...], classes: int, *, dense: bool = False) -> None:
    """Run two black inputs through the model and raise unless logits come out: (2, classes), or with masks one per pixel."""
    parameter = next(model.parameters(), None)
    if parameter is None:
        raise UsageError(f"model {name!r} has no parameters, so its updates are empty; give a model that can be trained")
    inputs = torch.zeros((2, *input_shape), dtype=parameter.dtype, device=parameter.device)
    try:
        with torch.no_grad():
            outputs = model(inputs)
    except (Exception, SystemExit) as error:  # anything may go wrong in code that is not ours
        raise UsageError(
            f"model {name!r} fails on inputs of shape {tuple(inputs.shape)} ({_brief(error)}); give a model for such inputs"
        ) from error
    if not isinstance(outputs, Tensor):
        raise UsageError(
            f"model {name!r} returns {type(outputs).__name__}, not one tensor; wrap it so that it returns the logits alone"
        )
    wanted = (2, classes, *input_shape[1:]) if dense else (2, classes)
    if tuple(outputs.shape) != wanted:
        cure = f"set its last layer to {classes} outputs"
        if dense:
            cure = "the data has masks, so use unet or another model with one output per pixel"
        elif outputs.dim() > 2:
            cure = "the data has classes, so use a model that gives one row per input"
        raise UsageError(
            f"model {name!r} gives outputs of shape {tuple(outputs.shape)} for 2 inputs, where {wanted} is needed; {cure}"
        )
    if not bool(torch.isfinite(outputs).all()):
        raise UsageError(f"model {name!r} gives outputs that are not finite for black inputs; look at its weights")


@contextlib.contextmanager
def sealed_randomness(number: int) -> Iterator[None]:
    """Seed the global generators inside the block and restore them after it.

    Only the CPU generator of torch: models are made there, and seeding a GPU's would touch what we cannot restore cheaply.
    """
    before_numpy, before_python = np.random.get_state(), random.getstate()
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(number)
        np.random.seed(number % 2**32)
        random.seed(number)
        try:
            yield
        finally:
            np.random.set_state(before_numpy)
            random.setstate(before_python)


def _import(name: str) -> Any:
    try:
        return import_object(name)
    except GradveilError:
        raise
    except (Exception, SystemExit) as error:  # anything may go wrong in code that is not ours
        raise UsageError(f"importing {name.rpartition(':')[0]!r} fails ({_brief(error)}); correct it first") from error


def _call(factory: Any, name: str, settings: dict[str, Any], input_shape: tuple[int, ...], classes: int) -> nn.Module:
    if isinstance(factory, nn.Module):
        raise UsageError(f"{name!r} is a model already made, so its weights cannot be seeded; give a function that makes it")
    if not callable(factory):
        raise UsageError(f"{name!r} is {type(factory).__name__}, not a function or class that makes a model")
    arguments = _arguments(factory, name, settings, {"input_shape": input_shape, "classes": classes, "num_classes": classes})
    try:
        model = factory(**arguments)
    except GradveilError:
        raise
    except (Exception, SystemExit) as error:  # anything may go wrong in code that is not ours
        raise UsageError(f"cannot make the model {name!r} ({_brief(error)}); call it by hand to see where it fails") from error
    if not isinstance(model, nn.Module):
        raise UsageError(f"{name!r} returns {type(model).__name__}, not a torch.nn.Module; return the model")
    return model


def _arguments(factory: Any, name: str, settings: dict[str, Any], offered: dict[str, Any]) -> dict[str, Any]:
    """Return what to call the factory with: what is offered as far as it takes it, and settings that it must know."""
    try:
        parameters = inspect.signature(factory).parameters.values()
    except (TypeError, ValueError):
        return dict(settings)
    keywords = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    known = [keyword for keyword in keywords if keyword not in offered]
    anything = any(p.kind is p.VAR_KEYWORD for p in parameters)
    for key in settings:
        if key not in known and not (anything and key not in offered):
            raise UsageError(f"model {name!r} has no setting {key!r}{suggest(key, known)}")
    plain = {key: tuple(value) if isinstance(value, list) else value for key, value in settings.items()}
    return {**{key: value for key, value in offered.items() if key in keywords}, **plain}


def _brief(error: BaseException) -> str:
    """Return the kind and the first line of an error, cut to a readable length."""
    first = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {first[:160]}" if first else type(error).__name__
