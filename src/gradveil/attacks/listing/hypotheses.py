"""What an attacker with a list believes may have happened: one candidate was in the update, beside others known or unknown."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gradveil.randomness import Seed

__all__ = ["Hypotheses"]


@dataclass(frozen=True, kw_only=True)
class Hypotheses:
    """A list of candidates, and how an update would hold one of them.

    Attributes:
        inputs: (N, ...) the candidates.
        labels: (N, ...) their labels.
        size: Records behind one update, over all clients of an aggregate.
        others: Inputs and labels of the ``size - 1`` other records, in their order, where the attacker knows them; else
            companions are drawn from the list, since to this attacker they are noise.
        place: Where among the records of the update the candidate stands.
        seed: Where companions are drawn from.
    """

    inputs: Tensor
    labels: Tensor
    size: int = 1
    others: tuple[Tensor, Tensor] | None = None
    place: int = 0
    seed: Seed

    def __len__(self) -> int:
        """Return the number of candidates."""
        return len(self.inputs)

    @property
    def varies(self) -> bool:
        """Whether the other records change from draw to draw."""
        return self.size > 1 and self.others is None

    def companions(self, index: int, draw: int) -> list[int]:
        """Return which candidates fill the update beside one of them.

        Those of one draw are the same for all candidates but themselves, so that what they add cancels between candidates.
        """
        if not self.varies:
            return []
        order = self.seed.numpy("companions", round=draw).permutation(len(self))
        return [int(other) for other in order[: self.size] if int(other) != index][: self.size - 1]

    def batch(self, index: int, draw: int) -> tuple[Tensor, Tensor]:
        """Return the records of an update that holds one candidate."""
        own = self.inputs[index : index + 1], self.labels[index : index + 1]
        if self.size == 1:
            return own
        rows = self.companions(index, draw)
        others = self.others or (self.inputs[rows], self.labels[rows])
        inputs, labels = (
            torch.cat([other[: self.place], mine, other[self.place :]]) for other, mine in zip(others, own, strict=True)
        )
        return inputs, labels

    def replace(self, **changes: Any) -> Hypotheses:
        """Return a copy with some fields changed."""
        return dataclasses.replace(self, **changes)
