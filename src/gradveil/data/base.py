"""The data set record, its one validation, and the registry of built-in data.

Whatever the source, records arrive here in one form: float32 inputs (N, C, ...) in [0, 1] and whole-number class targets
(N,), or, for segmentation, a mask of 0 and 1 for each picture. Every `Dataset` is validated when it is made, so no later station
has to check again.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gradveil.errors import UsageError
from gradveil.records import Batch
from gradveil.registry import Card, Registry

__all__ = ["DATASETS", "DataCard", "Dataset", "check_values", "validate"]

MOST_CLASSES = 100_000
"""More than this is taken for an id column mistaken for labels: a model with that many outputs would not fit anyway."""


@dataclass(frozen=True, kw_only=True)
class DataCard(Card):
    """What a reader needs to know about built-in data.

    Attributes:
        shape: Shape of one input.
        classes: Number of classes.
        licence: Under which terms the records may be used, in words.
    """

    shape: tuple[int, ...]
    classes: int
    licence: str


@dataclass(frozen=True, eq=False)
class Dataset:
    """Labelled records of one kind.

    Attributes:
        name: Built-in name or path, for people to read.
        inputs: float32 (N, C, ...) in [0, 1].
        targets: int64 (N,), each in [0, classes); or masks, float32 (N, 1, H, W) of 0 and 1.
        classes: Number of classes, at least 2; the model has as many outputs. With masks 1: one output per pixel.
        class_names: One name per class.
        records: One id per record. Private for user data: never shown in a report that may leave the building.
        owners: Natural owner of each record (patient, writer, subject), or None where unknown.
        builtin: True for data that ships with public packages, whose pictures may be shown.
    """

    name: str
    inputs: Tensor
    targets: Tensor
    classes: int
    class_names: tuple[str, ...]
    records: tuple[str, ...]
    owners: tuple[str, ...] | None = None
    builtin: bool = False

    def __post_init__(self) -> None:
        """Refuse data that later stations cannot work with."""
        validate(self)

    def __len__(self) -> int:
        """Return the number of records."""
        return int(self.inputs.shape[0])

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one input."""
        return tuple(self.inputs.shape[1:])

    @property
    def dense(self) -> bool:
        """Whether targets are masks: one value per pixel, and no classes."""
        return self.targets.dim() > 2

    def take(self, indices: Sequence[int]) -> Dataset:
        """Return the records at ``indices``, in that order; the classes stay."""
        rows = [int(index) for index in indices]
        wrong = next((row for row in rows if not 0 <= row < len(self)), None)
        if wrong is not None:
            raise UsageError(f"there is no record {wrong} in {self.name!r}; it has records 0 to {len(self) - 1}")
        return dataclasses.replace(
            self,
            inputs=self.inputs[rows],
            targets=self.targets[rows],
            records=tuple(self.records[row] for row in rows),
            owners=None if self.owners is None else tuple(self.owners[row] for row in rows),
        )

    def batch(self, indices: Sequence[int]) -> Batch:
        """Return the records at ``indices`` as one training batch."""
        part = self.take(indices)
        return Batch(part.inputs, part.targets, part.records)

    def counts(self) -> list[int]:
        """Return the number of records of each class; of masks, the number of records that have one."""
        if self.dense:
            return [len(self)]
        return [int(count) for count in torch.bincount(self.targets, minlength=self.classes)]

    def digest(self, purpose: str = "") -> str:
        """Return the SHA-256 of the content (inputs, targets, shapes, number of classes); names and ids do not matter.

        Args:
            purpose: Gives a digest that nobody can tell from another purpose's without the content. That of no purpose is told
                in files people share, so what must stay secret needs one.
        """
        digest = hashlib.sha256(f"gradveil-data-1{purpose} {tuple(self.inputs.shape)} {self.classes}".encode())
        digest.update(self.inputs.contiguous().numpy().tobytes())
        digest.update(self.targets.contiguous().numpy().tobytes())
        return digest.hexdigest()


DATASETS: Registry[Callable[[], Dataset], DataCard] = Registry("dataset", "gradveil.data")


def validate(data: Dataset) -> None:
    """Raise `UsageError` with one sentence that says what to change, unless ``data`` can be used as it is."""
    if data.inputs.dim() < 2:
        raise UsageError(
            f"{data.name!r}: inputs have shape {tuple(data.inputs.shape)}; give one row per record, as "
            "(records, channels, height, width), (records, channels, time) or (records, features)"
        )
    if data.inputs.numel() == 0:
        raise UsageError(f"{data.name!r} is empty: inputs have shape {tuple(data.inputs.shape)}; give at least one record")
    if data.inputs.dtype != torch.float32:
        raise UsageError(f"{data.name!r}: inputs are {data.inputs.dtype}; give float32 in [0, 1] (load_data converts files)")
    check_values(data.name, data.inputs)
    if data.dense:
        _check_masks(data)
    else:
        _check_targets(data)
    _check_lengths(data)


def check_values(name: str, inputs: Tensor) -> None:
    """Raise `UsageError` where inputs are not finite or not in [0, 1]."""
    finite = torch.isfinite(inputs)
    if not bool(finite.all()):
        row = int((~finite).flatten(1).any(1).nonzero()[0])
        bad = int((~finite).sum())
        raise UsageError(f"{name!r}: {bad} input values are NaN or infinite, first in record {row}; drop or repair those records")
    low, high = float(inputs.min()), float(inputs.max())
    if low < 0 or high > 1:
        cure = "divide them by 255" if low >= 0 and 1 < high <= 255 else "rescale them, or let scale='minmax' do it"
        raise UsageError(f"{name!r}: input values run from {low:.4g} to {high:.4g}, but must lie in [0, 1]; {cure}")


def _check_masks(data: Dataset) -> None:
    masks, wanted = data.targets, (len(data.inputs), 1, *data.inputs.shape[2:])
    if data.inputs.dim() != 4 or tuple(masks.shape) != wanted:
        raise UsageError(
            f"{data.name!r}: masks have shape {tuple(masks.shape)} and pictures {tuple(data.inputs.shape)}; give one mask per "
            "picture, as high and as wide"
        )
    if masks.dtype != torch.float32 or not bool(((masks == 0) | (masks == 1)).all()):
        raise UsageError(f"{data.name!r}: masks must be float32 and hold 0 and 1 only (load_data converts files)")
    if data.classes != 1:
        raise UsageError(f"{data.name!r}: masks have one output per pixel, so classes is 1, not {data.classes}; leave it out")
    if bool((masks == masks.flatten()[0]).all()):
        raise UsageError(f"{data.name!r}: all masks are empty, or all are full, so there is nothing to learn; give others")


def _check_targets(data: Dataset) -> None:
    targets = data.targets
    if targets.dtype != torch.int64 or targets.dim() != 1:
        raise UsageError(
            f"{data.name!r}: labels are {targets.dtype} of shape {tuple(targets.shape)}; give one whole class "
            "number (int64) per record"
        )
    if len(targets) != len(data.inputs):
        raise UsageError(f"{data.name!r}: {len(data.inputs)} inputs but {len(targets)} labels; give one label per record")
    low, high = int(targets.min()), int(targets.max())
    if low < 0:
        raise UsageError(f"{data.name!r}: the smallest label is {low}; number the classes from 0")
    if data.classes < 2:
        raise UsageError(
            f"{data.name!r}: all records have the same label, and a model with one class learns nothing; give "
            "records of at least 2 classes, or say how many there are with classes=K"
        )
    if data.classes > MOST_CLASSES:
        raise UsageError(f"{data.name!r}: {data.classes} classes look like ids, not labels; number the classes 0, 1, 2, …")
    if high >= data.classes:
        raise UsageError(f"{data.name!r}: label {high} does not fit {data.classes} classes, numbered 0 to {data.classes - 1}")


def _check_lengths(data: Dataset) -> None:
    count = len(data.inputs)
    if len(data.records) != count:
        raise UsageError(f"{data.name!r}: {count} inputs but {len(data.records)} record ids; give one id per record")
    if data.owners is not None and len(data.owners) != count:
        raise UsageError(f"{data.name!r}: {count} inputs but {len(data.owners)} owners; give one owner per record")
    if len(data.class_names) != data.classes:
        raise UsageError(
            f"{data.name!r}: {data.classes} classes but {len(data.class_names)} class names; give one name per class"
        )
