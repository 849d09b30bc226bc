"""What attackers of an unfinished cell have found so far, so that a killed run goes on behind the last attacker that ended.

Attackers of a cell do not see each other's work and draw from generators of their own, so a cell whose first attackers are read
from here ends, on a CPU, with the same bytes as one that ran in one go. The folder belongs to the cell's key, which covers
settings, data and code; it goes when the cell is written. Tensors are kept bit by bit; nothing is pickled.
"""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from gradveil.storage.files import write_whole

if TYPE_CHECKING:
    from torch import Tensor

    from gradveil.records import Reconstruction

__all__ = ["PartialWork"]

TENSORS = ("inputs", "targets", "unfinished")


class PartialWork:
    """The folder of one cell; without one, nothing is kept and nothing found."""

    def __init__(self, folder: Path | None, device: str = "cpu") -> None:
        """Name the folder, made when something is put there, and where found tensors are wanted."""
        self._folder, self._device = folder, device
        self.seconds = 0.0
        """Time that attackers whose finds were taken had spent in earlier runs."""
        self.steps = 0
        """Their candidate-steps."""

    def has(self, place: int) -> bool:
        """Tell whether something is kept for a place of the line-up."""
        return self._folder is not None and self._path(place).is_file()

    def put(self, place: int, found: list[Reconstruction], seconds: float = 0.0) -> None:
        """Keep what the attacker at one place of the line-up found; what cannot be kept costs only the resumption."""
        if self._folder is None:
            return
        from safetensors.torch import save  # whoever has something to keep has loaded torch; whoever only looks need not

        tensors: dict[str, Tensor] = {}
        rows: list[dict[str, Any]] = []
        for index, one in enumerate(found):
            own = {name: getattr(one, name) for name in TENSORS} | {f"variables/{n}": v for n, v in one.variables.items()}
            # A slice of a batch is copied: the format refuses tensors that share memory.
            tensors |= {
                f"{index}/{name}": value.detach().cpu().contiguous().clone() for name, value in own.items() if value is not None
            }
            rows.append({each.name: getattr(one, each.name) for each in fields(one) if each.name not in (*TENSORS, "variables")})
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            told = {"rows": json.dumps(rows), "seconds": json.dumps(seconds)}
            write_whole(self._path(place), save(tensors, told))
        except (OSError, SafetensorError, ValueError, TypeError):
            return

    def take(self, place: int) -> list[Reconstruction] | None:
        """Return what was kept, or None where nothing whole is there."""
        if not self.has(place):
            return None
        try:
            with safe_open(self._path(place), framework="pt") as file:
                told = file.metadata() or {}
                rows, seconds = json.loads(told["rows"]), float(told["seconds"])
                tensors = {name: file.get_tensor(name).to(self._device) for name in file.keys()}  # noqa: SIM118 - no mapping
            found = [self._one(index, row, tensors) for index, row in enumerate(rows)]
        except (OSError, SafetensorError, ValueError, KeyError, TypeError):
            return None
        self.seconds += seconds
        self.steps += sum(one.steps for one in found)
        return found

    def _one(self, index: int, row: dict[str, Any], tensors: dict[str, Tensor]) -> Reconstruction:
        own = {name.split("/", 1)[1]: value for name, value in tensors.items() if name.startswith(f"{index}/")}
        variables = {name.removeprefix("variables/"): v for name, v in own.items() if name.startswith("variables/")}
        whole = {name: own.get(name) for name in TENSORS}
        from gradveil.records import Reconstruction

        return Reconstruction(**{**row, **whole, "variables": variables})

    def _path(self, place: int) -> Path:
        assert self._folder is not None
        return self._folder / f"{place:02d}.safetensors"
