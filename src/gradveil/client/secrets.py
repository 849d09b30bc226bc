"""Randomness of a real client: from the operating system, fresh for every release, and never handed in from outside.

An experiment draws from a seed, so that anybody can repeat it. A client must not: who knows the seed, or asks twice under one
round number, subtracts the noise. `SecretSeed` stands wherever a `Seed` does.
"""

from __future__ import annotations

import hashlib
import secrets
from dataclasses import dataclass, field
from typing import NoReturn

import numpy as np
import torch

from gradveil.randomness import Seed

__all__ = ["SecretSeed"]

SECRET_BITS = 256
WORDS, WORDS_AT, WORD_BYTES = 624, 24, 8
"""torch keeps the Mersenne Twister as so many words of 32 bits, each in eight bytes, behind so many bytes of its state."""


@dataclass(frozen=True)
class SecretSeed(Seed):
    """The root of one release's randomness: 256 bits of the operating system's.

    A role's generator begins with a state that SHAKE-256 makes of the secret and the role, so all of its 19,937 bits are the
    secret's, not the 63 of a number. One secret serves one release: a client draws a new one for the next, whatever round it is
    told.

    What is left: the generators of torch count on in a way that is no cipher, so who sees raw outputs of one could foretell more
    of the same role in the same release; and noise in floating point has gaps that a proof over real numbers does not know
    (Mironov 2012, https://doi.org/10.1145/2382196.2382264). On a GPU a generator takes 64 bits of the secret.

    >>> first, second = SecretSeed.fresh(), SecretSeed.fresh()
    >>> first.number("noise") == first.number("noise"), first.number("noise") == second.number("noise")
    (True, False)
    """

    value: int = field(repr=False)

    @classmethod
    def fresh(cls) -> SecretSeed:
        """Return a new secret."""
        return cls(secrets.randbits(SECRET_BITS))

    def child(self, *names: object) -> SecretSeed:
        """Return the secret one step further down."""
        return SecretSeed(self.value, self.path + tuple(str(name) for name in names))

    def number(self, role: str, *, client: int = 0, round: int = 0) -> int:  # noqa: A002
        """Return 63 bits behind a role."""
        return int.from_bytes(self._bytes(8, role, client, round), "big") >> 1

    def generator(
        self,
        role: str,
        *,
        client: int = 0,
        round: int = 0,  # noqa: A002
        device: torch.device | str = "cpu",
    ) -> torch.Generator:
        """Return a torch generator for a role; the same one whenever it is asked for within a release."""
        generator = torch.Generator(device=device)
        generator.manual_seed(self.number(role, client=client, round=round))
        if generator.device.type == "cpu":
            state = generator.get_state()
            words = np.frombuffer(self._bytes(4 * WORDS, role, client, round), dtype="<u4").astype("<u8")
            state[WORDS_AT : WORDS_AT + WORD_BYTES * WORDS] = torch.from_numpy(words.view(np.uint8).copy())
            generator.set_state(state)
        return generator

    def numpy(self, role: str, *, client: int = 0, round: int = 0) -> np.random.Generator:  # noqa: A002
        """Return a numpy generator for a role."""
        return np.random.default_rng(int.from_bytes(self._bytes(32, role, client, round), "big"))

    def _bytes(self, count: int, role: str, client: int, round_index: int) -> bytes:
        parts = (*self.path, role, str(client), str(round_index))
        # Lengths first, so that no two lists of names are one text.
        told = b"".join(len(part.encode()).to_bytes(8, "big") + part.encode() for part in parts)
        return hashlib.shake_256(self.value.to_bytes(SECRET_BITS // 8, "big") + told).digest(count)

    def __reduce__(self) -> NoReturn:
        """Stay in this process: a secret that is kept or sent is none."""
        raise TypeError("a secret seed is not written anywhere")
