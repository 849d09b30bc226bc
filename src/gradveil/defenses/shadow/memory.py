"""What a client of the shadow defense remembers from round to round, as named tensors.

* ``keys`` (n,): a number per record, from its id, or from its pixels where records have no ids.
* ``maps`` (n, H, W): the noise map N³ of each record, in single precision.
* ``codes`` (n, L): the latent code of each record, as long as the shadow is still updated.
* ``shadow/...``: the synthesis weights of this client's shadow, as long as it is still updated and once it has changed.

After the termination round only keys and maps are left.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gradveil.adversary import prefixed, with_prefix
from gradveil.defenses.base import State
from gradveil.records import Batch
from gradveil.tensors import Named

__all__ = ["Memory", "record_keys"]

KEYS, MAPS, CODES, SHADOW = "keys", "maps", "codes", "shadow/"


def record_keys(batch: Batch) -> list[int]:
    """Return a 63-bit number per record: of its id, or of its pixels where it has none; equal images are then one record."""
    if batch.records:
        texts = [record.encode() for record in batch.records]
    else:
        texts = [image.detach().cpu().contiguous().numpy().tobytes() for image in batch.inputs]
    return [int.from_bytes(hashlib.sha256(text).digest()[:8], "big") >> 1 for text in texts]


@dataclass(frozen=True, eq=False)
class Memory:
    """The state of the shadow defense between hooks; every change gives a new one.

    Attributes:
        maps: Key to noise map (H, W).
        codes: Key to latent code (L,).
        shadow: Synthesis weights of this client; empty is the generator as it came.
    """

    maps: dict[int, Tensor]
    codes: dict[int, Tensor]
    shadow: Named

    @classmethod
    def read(cls, state: State) -> Memory:
        """Read named tensors; an empty state is an empty memory."""
        if KEYS not in state:
            return cls({}, {}, {})
        keys = state[KEYS].tolist()
        codes = state.get(CODES, ())
        return cls(
            dict(zip(keys, state[MAPS], strict=True)),
            dict(zip(keys, codes, strict=True)) if len(codes) else {},
            prefixed(state, SHADOW),
        )

    def write(self, *, finished: bool) -> State:
        """Return named tensors; a finished shadow needs no codes and no weights any more."""
        if not self.maps:
            return {}
        keys = list(self.maps)
        maps = torch.stack([self.maps[key] for key in keys])
        state: State = {KEYS: torch.tensor(keys, dtype=torch.int64, device=maps.device), MAPS: maps}
        if not finished and all(key in self.codes for key in keys):
            state |= {CODES: torch.stack([self.codes[key] for key in keys]), **with_prefix(self.shadow, SHADOW)}
        return state

    def with_codes(self, keys: Sequence[int], codes: Tensor) -> Memory:
        """Return a memory that also knows these codes."""
        return Memory(self.maps, {**self.codes, **dict(zip(keys, codes, strict=True))}, self.shadow)

    def with_maps(self, keys: Sequence[int], maps: Tensor) -> Memory:
        """Return a memory with these maps, new or renewed."""
        return Memory({**self.maps, **dict(zip(keys, maps, strict=True))}, self.codes, self.shadow)

    def with_shadow(self, weights: Named) -> Memory:
        """Return a memory with another shadow."""
        return Memory(self.maps, self.codes, weights)
