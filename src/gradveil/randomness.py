"""One seed gives an independent generator per role, client and round.

The key is hashed, so neighbouring seeds and roles are unrelated, and asking for one generator never changes another. The global
generators of torch, numpy and random are never touched.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
import torch

__all__ = ["Seed"]


@dataclass(frozen=True)
class Seed:
    """A root seed and the path of names that leads from it.

    >>> root = Seed(7)
    >>> a = root.generator("noise", client=1, round=2)
    >>> b = root.generator("noise", client=1, round=2)
    >>> bool((torch.rand(3, generator=a) == torch.rand(3, generator=b)).all())
    True
    """

    value: int
    path: tuple[str, ...] = ()

    def child(self, *names: object) -> Seed:
        """Return the seed one step further down, for handing to a part that draws on its own."""
        return Seed(self.value, self.path + tuple(str(name) for name in names))

    def number(self, role: str, *, client: int = 0, round: int = 0) -> int:  # noqa: A002
        """Return the 63-bit number behind ``(role, client, round)``."""
        key = "\x1f".join((str(self.value), *self.path, role, str(client), str(round)))
        return int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big") >> 1

    def generator(
        self,
        role: str,
        *,
        client: int = 0,
        round: int = 0,  # noqa: A002
        device: torch.device | str = "cpu",
    ) -> torch.Generator:
        """Return a fresh torch generator for ``(role, client, round)``."""
        generator = torch.Generator(device=device)
        generator.manual_seed(self.number(role, client=client, round=round))
        return generator

    def numpy(self, role: str, *, client: int = 0, round: int = 0) -> np.random.Generator:  # noqa: A002
        """Return a fresh numpy generator for ``(role, client, round)``."""
        return np.random.default_rng(self.number(role, client=client, round=round))
