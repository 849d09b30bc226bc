"""A model's tensors as Flower carries them: the entries of its state dict, by name."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from flwr.app import Array, ArrayRecord
from torch import nn

from gradveil.errors import BadUpdate, UnsupportedModel
from gradveil.records import ModelSpec, Role
from gradveil.tensors import Named, check_finite
from gradveil.wire.arrays import tensor_from_npy

__all__ = ["Layout", "npy_of"]

NUMPY = "numpy.ndarray"
"""How Flower calls arrays that are contents of .npy files; it knows no other kind."""


@dataclass(frozen=True)
class Layout:
    """What stands in a model's state dict.

    Attributes:
        spec: Every tensor of its own, with shape, precision and role.
        order: All names of the state dict.
        tied: Names under which a tensor stands once more, and its first name.
    """

    spec: ModelSpec
    order: tuple[str, ...]
    tied: Mapping[str, str]

    @classmethod
    def of(cls, model: nn.Module) -> Layout:
        """Read the layout off a model."""
        told, first, tied = ModelSpec.of(model).tensors, dict[int, str](), dict[str, str]()
        state = model.state_dict(keep_vars=True)
        for name, value in state.items():
            if id(value) in first:
                tied[name] = first[id(value)]
            elif name in told:
                first[id(value)] = name
            else:
                raise UnsupportedModel(f"the state dict has {name!r}, which is no weight and no buffer; leave it out")
        return cls(ModelSpec({name: told[name] for name in told if name in first.values()}), tuple(state), tied)

    def read(self, record: ArrayRecord, what: str) -> Named:
        """Return the tensors of a whole state dict, or raise `BadUpdate` with the first fault."""
        missing, unknown = sorted(set(self.order) - set(record)), sorted(set(record) - set(self.order))
        if missing or unknown:
            raise BadUpdate(f"{what} lack {missing or 'nothing'} and have unexpected {unknown or 'nothing'}")
        found = {}
        for name, array in record.items():
            value = tensor_from_npy(npy_of(array, name), name, turned=True)
            expected = self.spec.tensors[self.tied.get(name, name)]
            if tuple(value.shape) != expected.shape or value.dtype != expected.dtype:
                raise BadUpdate(
                    f"in {what} {name!r} is {tuple(value.shape)} of {value.dtype}, and in the model {expected.shape} of "
                    f"{expected.dtype}; does the server's strategy stand in `Veiled`?"
                )
            found[name] = value
        for name, one in self.tied.items():
            if not torch.equal(found[name], found[one]):
                raise BadUpdate(f"in {what} {name!r} and {one!r} differ, and in the model they are one tensor")
        check_finite({name: found[name] for name in self.spec.named(Role.WEIGHT)}, what)
        return {name: found[name] for name in self.spec.tensors}

    def write(self, tensors: Named) -> ArrayRecord:
        """Return the whole state dict as a record, in the model's own precision, which strategies do not keep."""
        return ArrayRecord({name: self._array(self.tied.get(name, name), tensors) for name in self.order})

    def _array(self, name: str, tensors: Named) -> Array:
        return Array(tensors[name].detach().cpu().contiguous().numpy())

    def as_returned(self, record: ArrayRecord) -> Named:
        """Return what a strategy answered with, cast back to the model's precision: averaging makes counters float64."""
        found = {}
        for name, expected in self.spec.tensors.items():
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                value = torch.from_numpy(record[name].numpy().copy())
            whole = value if expected.dtype.is_floating_point else value.round()
            found[name] = whole.to(expected.dtype).reshape(expected.shape)
        check_finite({name: found[name] for name in self.spec.named(Role.WEIGHT)}, "the strategy's new weights")
        return found

    def split(self, tensors: Named) -> tuple[Named, Named]:
        """Return weights and the rest."""
        weights = self.spec.named(Role.WEIGHT)
        return {n: v for n, v in tensors.items() if n in weights}, {n: v for n, v in tensors.items() if n not in weights}


def npy_of(array: Array, name: str) -> bytes:
    """Return the content of an array, unread."""
    if array.stype != NUMPY:
        raise BadUpdate(f"{name!r} is a {str(array.stype)[:40]!r}; send {NUMPY!r}")
    return array.data
