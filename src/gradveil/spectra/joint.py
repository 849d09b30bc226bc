"""The Jacobians of several records of one client as one block-diagonal matrix, so that one program makes all their products.

One record's products keep a GPU waiting for work; those of several, mapped over records and directions, do not. What may go
together, and how many at once, is decided here.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor
from torch.func import vmap

from gradveil.spectra.jacobians import Jacobian, Own, as_vector

__all__ = ["JointJacobian", "kin", "memory", "stacked"]

CPU_BYTES = 2 * 2**30
"""What the records that go together may take on a CPU."""
FREE_SHARE = 0.5
"""The part of a GPU's free memory that they may take."""


@dataclass(frozen=True, eq=False)
class JointJacobian:
    """J = diag(J_1, …, J_R) of records that are shared by the same function.

    Letters: R records, n directions of each, m input values, p shared values.

    Attributes:
        members: The Jacobians of the records, all of one `kin`.
        working_bytes: As in `Jacobian`.
    """

    members: tuple[Jacobian, ...]
    working_bytes: int = 0

    def __len__(self) -> int:
        """Return the number of records."""
        return len(self.members)

    @cached_property
    def whole(self) -> Jacobian:
        """All records as one input; of a single record its own Jacobian, whose products are not mapped over records."""
        first = self.members[0]
        if len(self) == 1:
            return replace(first, working_bytes=self.working_bytes) if self.working_bytes else first
        law, share, own = first.law, first.share, stacked([member.own for member in self.members])

        def of_one(x: Tensor, *parts: dict[str, Tensor]) -> Tensor:
            return as_vector(share(x) if law is None else law.share(x, parts))

        for member in self.members:
            member.forget()  # what each keeps for reverse mode, all together keep again
        points = torch.stack([member.at for member in self.members])
        return Jacobian(lambda x: vmap(of_one)(x, *own), points, working_bytes=self.working_bytes or first.working_bytes)

    @cached_property
    def at(self) -> Tensor:
        """The records, (R, m)."""
        return torch.stack([member.at.reshape(-1) for member in self.members])

    @property
    def inputs(self) -> int:
        """Number m of input values of each record."""
        return self.members[0].inputs

    @cached_property
    def outputs(self) -> int:
        """Number p of values that are shared about each record."""
        return self.whole.outputs // len(self)

    @property
    def room(self) -> int:
        """Bytes a batch of products may take."""
        return self.whole.room

    def push(self, directions: Tensor) -> Tensor:
        """Return J_r v for directions (R, n, m) of each record, as (R, n, p)."""
        return self._apart(self.whole.push(self._along(directions)))

    def pull(self, weights: Tensor) -> Tensor:
        """Return J_rᵀ u for weights (R, n, p) of each record, as (R, n, m)."""
        return self._apart(self.whole.pull(self._along(weights)))

    def _along(self, rows: Tensor) -> Tensor:
        """(R, n, ·) -> (n, R·); of what `_apart` made no copy."""
        return rows.transpose(0, 1).reshape(rows.shape[1], -1)

    def _apart(self, rows: Tensor) -> Tensor:
        """(n, R·) -> (R, n, ·)."""
        return rows.reshape(len(rows), len(self), -1).transpose(0, 1)


def stacked(owns: Sequence[Own]) -> Own:
    """Return what several records put into their law, with an axis for the record in front."""
    return tuple({name: torch.stack([own[place][name] for own in owns]) for name in part} for place, part in enumerate(owns[0]))


def kin(jacobian: Jacobian) -> Hashable:
    """Return what records must have in common to go together: function, shapes, precision and device."""
    function = id(jacobian.share) if jacobian.law is None else id(jacobian.law)
    shapes = tuple((name, value.shape, value.dtype) for part in jacobian.own for name, value in part.items())
    return function, jacobian.at.shape, jacobian.at.dtype, jacobian.at.device, jacobian.working_bytes, shapes


def memory(device: torch.device) -> int:
    """Return the bytes that records which go together may take.

    A power of two, since free memory differs a little from run to run, and what goes together decides the last bits of a result.
    """
    if device.type != "cuda":
        return CPU_BYTES
    free = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return 1 << (int(free * FREE_SHARE).bit_length() - 1)
