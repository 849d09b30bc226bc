"""Weights from a file: safetensors, or a PyTorch state dict read without unpickling code."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gradveil.errors import UsageError, suggest
from gradveil.tensors import Named

__all__ = ["load_weights", "read_weights"]

# Under which keys training scripts put the state dict, and what wrappers put before every name.
NESTS = ("state_dict", "model_state_dict", "model", "net")
PREFIXES = ("module.", "_orig_mod.", "model.")
COUNTER = "num_batches_tracked"
SHOWN = 3


def load_weights(model: nn.Module, path: str) -> None:
    """Load a file into a model, in place; every name must fit, but for BatchNorm's counters, which nothing reads.

    Raises:
        UsageError: One sentence that lists up to three missing, unexpected or misshapen names.
    """
    found = _without_prefix(read_weights(path), model)
    expected = model.state_dict()
    missing = [name for name in expected if name not in found and not name.endswith(COUNTER)]
    extra = [name for name in found if name not in expected]
    problems = []
    if missing:
        hint = suggest(missing[0], extra) if extra else ""
        problems.append(f"missing {_listed(missing)}{hint if hint.endswith('?') else ''}")
    if extra:
        problems.append(f"unexpected {_listed(extra)}")
    wrong = [
        f"{name} is {tuple(found[name].shape)}, not {tuple(value.shape)}"
        for name, value in expected.items()
        if name in found and found[name].shape != value.shape
    ]
    if wrong:
        problems.append(f"wrong shapes: {_listed(wrong)}")
    if problems:
        raise UsageError(f"weights {path!r} do not fit the model: {'; '.join(problems)}; give the model these weights belong to")
    bad = next(
        (name for name, value in found.items() if value.is_floating_point() and not bool(torch.isfinite(value).all())), None
    )
    if bad is not None:
        raise UsageError(
            f"weights {path!r} hold numbers that are not finite in {bad!r}; save them from a run that did not diverge"
        )
    model.load_state_dict({**expected, **found})


def read_weights(path: str) -> Named:
    """Return the named tensors of a weights file, on the CPU; no code in the file is ever run."""
    file = Path(path).expanduser()
    if not file.is_file():
        raise UsageError(f"there is no weights file {path!r}")
    if file.suffix.lower() == ".safetensors":
        return _read_safetensors(file)
    if file.suffix.lower() not in (".pt", ".pth", ".bin", ".ckpt"):
        raise UsageError(f"cannot read weights from {path!r}; give a .safetensors file, or a state dict as .pt or .pth")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's words on what the sentence below says
            content = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # the restricted unpickler fails in many ways on bytes that are no checkpoint
        raise UsageError(
            f"cannot read {path!r} safely: it is damaged, or holds more than tensors; save the state dict alone, best with "
            "safetensors.torch.save_file(model.state_dict(), ...)"
        ) from error
    return _state_dict(content, path)


def _read_safetensors(file: Path) -> Named:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return dict(load_file(file))
    except (SafetensorError, OSError, ValueError) as error:
        raise UsageError(
            f"cannot read {str(file)!r} as safetensors ({error}); save it again with safetensors.torch.save_file"
        ) from error


def _state_dict(content: Any, path: str) -> Named:
    for nest in NESTS:
        if isinstance(content, Mapping) and isinstance(content.get(nest), Mapping):
            content = content[nest]
    if not isinstance(content, Mapping) or not content or not all(isinstance(value, Tensor) for value in content.values()):
        raise UsageError(f"{path!r} holds no state dict; save model.state_dict()")
    return {str(name): value for name, value in content.items()}


def _without_prefix(found: Named, model: nn.Module) -> Named:
    """Strip what DataParallel, torch.compile and trainers put before every name, unless the model has it too."""
    expected = model.state_dict()
    for prefix in PREFIXES:
        if all(name.startswith(prefix) for name in found) and not any(name.startswith(prefix) for name in expected):
            found = {name.removeprefix(prefix): value for name, value in found.items()}
    return found


def _listed(names: list[str]) -> str:
    rest = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + rest
