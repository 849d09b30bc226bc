"""Arithmetic on named tensors: plain dictionaries from parameter name to tensor, in the model's own order.

Every function returns new tensors, works under ``torch.func.vmap`` unless it says otherwise, and refuses operands whose names
differ. `matrix_products` alone is about how all of torch multiplies.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from gradveil.errors import BadUpdate, UsageError, suggest

__all__ = [
    "Named",
    "add",
    "check_finite",
    "check_same_names",
    "detach",
    "digest",
    "find_device",
    "flatten",
    "map_tensors",
    "matrix_products",
    "mean",
    "norm",
    "scale",
    "stack",
    "sub",
    "to",
    "unchecked",
    "unflatten",
]

Named = dict[str, Tensor]
_checking: ContextVar[bool] = ContextVar("checking", default=True)


def check_same_names(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> None:
    """Raise `BadUpdate` unless both sides have the same names."""
    if left.keys() == right.keys():
        return
    missing, extra = sorted(left.keys() - right.keys()), sorted(right.keys() - left.keys())
    hint = suggest(extra[0], missing) if extra and missing else ""
    raise BadUpdate(f"tensor names differ: missing {missing or 'none'}, unexpected {extra or 'none'}{hint}")


def _check_not_empty(named: Mapping[str, Tensor]) -> None:
    if not named:
        raise BadUpdate("there are no tensors: the model has nothing to train or the update is empty")


def map_tensors(function: Callable[[Tensor], Tensor], named: Mapping[str, Tensor]) -> Named:
    """Apply ``function`` to each tensor."""
    return {name: function(value) for name, value in named.items()}


def add(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> Named:
    """Return left + right."""
    check_same_names(left, right)
    return {name: value + right[name] for name, value in left.items()}


def sub(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> Named:
    """Return left - right."""
    check_same_names(left, right)
    return {name: value - right[name] for name, value in left.items()}


def scale(named: Mapping[str, Tensor], factor: float | Tensor) -> Named:
    """Return factor * named."""
    return {name: value * factor for name, value in named.items()}


def norm(named: Mapping[str, Tensor]) -> Tensor:
    """Return the L2 norm over all entries of all tensors."""
    _check_not_empty(named)
    return torch.stack([value.square().sum() for value in named.values()]).sum().sqrt()


def flatten(named: Mapping[str, Tensor]) -> Tensor:
    """Return one vector: all tensors, in order."""
    _check_not_empty(named)
    return torch.cat([value.reshape(-1) for value in named.values()])


def unflatten(vector: Tensor, like: Mapping[str, Tensor]) -> Named:
    """Return the inverse of `flatten`, with the names and shapes of ``like``."""
    sizes = [value.numel() for value in like.values()]
    if vector.numel() != sum(sizes):
        raise BadUpdate(f"a vector of {vector.numel()} entries cannot fill {sum(sizes)}")
    pieces = vector.split(sizes)
    return {name: piece.reshape(value.shape) for piece, (name, value) in zip(pieces, like.items(), strict=True)}


def stack(many: list[Named]) -> Named:
    """Return one set of tensors with a leading axis over ``many``."""
    if not many:
        raise BadUpdate("nothing to stack: give at least one set of tensors")
    for other in many[1:]:
        check_same_names(many[0], other)
    return {name: torch.stack([one[name] for one in many]) for name in many[0]}


def mean(many: list[Named]) -> Named:
    """Return the mean over ``many``, tensor by tensor."""
    return {name: value.mean(0) for name, value in stack(many).items()}


def detach(named: Mapping[str, Tensor]) -> Named:
    """Return copies cut from the graph."""
    return {name: value.detach().clone() for name, value in named.items()}


def to(named: Mapping[str, Tensor], target: torch.device | torch.dtype) -> Named:
    """Return the tensors on a device, or (floating tensors only) in a precision."""
    if isinstance(target, torch.dtype):
        return {n: v.to(target) if v.is_floating_point() else v for n, v in named.items()}
    return {name: value.to(target) for name, value in named.items()}


def check_finite(named: Mapping[str, Tensor], what: str = "the update") -> None:
    """Raise `BadUpdate` naming the first tensor with a NaN or an infinity; under vmap only inside `unchecked`.

    The norm of all of them answers for all but huge entries in one pass, and a GPU is waited for once.
    """
    if not _checking.get():
        return
    floating = {name: value.detach() for name, value in named.items() if value.is_floating_point() and value.numel()}
    if not floating or bool(torch.isfinite(torch.nn.utils.get_total_norm(list(floating.values())))):
        return
    for name, value in floating.items():
        if not bool(torch.isfinite(value).all()):
            count = int((~torch.isfinite(value)).sum())
            raise BadUpdate(f"{what} has {count} entries that are not finite in {name!r}; look at the training that made it")


@contextmanager
def unchecked() -> Iterator[None]:
    """Leave `check_finite` out, for code that runs under vmap, where nobody can look: look at what comes out of it instead."""
    before = _checking.set(False)
    try:
        yield
    finally:
        _checking.reset(before)


@contextmanager
def matrix_products(device: torch.device, *, coarse: bool) -> Iterator[None]:
    """Decide whether a GPU may round the factors of matrix products and convolutions to ten bits (TF32), which is faster.

    torch's own default allows it in convolutions only.
    """
    if device.type != "cuda":
        yield
        return
    # Not by the older `allow_tf32`: torch refuses to read that once anybody has used these.
    places: tuple[Any, ...] = (torch.backends.cuda.matmul, torch.backends.cudnn.conv)  # type: ignore[attr-defined]
    before = [place.fp32_precision for place in places]
    try:
        for place in places:
            place.fp32_precision = "tf32" if coarse else "ieee"
        yield
    finally:
        for place, precision in zip(places, before, strict=True):
            place.fp32_precision = precision


def find_device(wanted: str) -> str:
    """Return ``cpu``, ``cuda`` or one of several GPUs, such as ``cuda:1``; ``auto`` takes a GPU if there is one."""
    there = torch.cuda.is_available()
    if wanted.startswith("cuda") and not there:
        raise UsageError(f"device is {wanted!r}, and torch finds no GPU here; use auto or cpu")
    return wanted if wanted != "auto" else ("cuda" if there else "cpu")


def digest(*groups: Named) -> str:
    """Return a digest of names, shapes, precisions and bits: equal for equal content, whichever objects hold it."""
    told = hashlib.sha256()
    for place, named in enumerate(groups):
        for name, value in named.items():
            told.update(f"{place}|{name}|{tuple(value.shape)}|{value.dtype}|".encode())
            told.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return told.hexdigest()
