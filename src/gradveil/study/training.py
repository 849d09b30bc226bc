"""One federated training of an audit: every setting that decides its result, and the key under which the result is kept."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass
from typing import Any

from gradveil.study.declare import again, part_of, without_unused
from gradveil.study.federation import FederationSettings, UtilitySettings
from gradveil.study.settings import Federation, Vertical

__all__ = ["BASELINE", "TRAINING_FORMAT", "Training"]

TRAINING_FORMAT = "gradveil-utility-1"
BASELINE = "none"


@dataclass(frozen=True, kw_only=True)
class Training(FederationSettings):
    """One federated training: clients who share updates or, where the model is cut, the parties of vertical learning."""

    cut: str = again(Vertical, "cut", "")
    parts: str = again(Vertical, "parts", "whole")

    def __post_init__(self) -> None:
        """Check what a federation checks; where the model is cut was checked with the cell."""
        self.federation()

    @classmethod
    def of(cls, utility: UtilitySettings, **settings: Any) -> Training:
        """Return a training as an audit asks for it; how many seeds it asks for plays no part in one of them."""
        return cls(**dataclasses.asdict(part_of(Federation, utility)), **settings)

    def as_dict(self) -> dict[str, Any]:
        """Return the settings as plain JSON values; of a model that is not cut, without who owns which features."""
        hidden = set() if self.cut else {"cut", "parts"}
        return {name: value for name, value in dataclasses.asdict(self).items() if name not in hidden}

    def key(self, **content: str | int) -> str:
        """Return the 16 hex digits under which the result is kept.

        Args:
            content: What the settings only name: digests of data and weights, the code version, thread count.
        """
        settings = without_unused(Training, self.as_dict(), ("shuffle", "dropout"))
        text = json.dumps({"format": TRAINING_FORMAT, "training": settings, "content": content}, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def undefended(self) -> Training:
        """Return the training it is paired with."""
        return dataclasses.replace(self, defense=BASELINE)

    def federation(self) -> FederationSettings:
        """Return the settings as the training engines take them; where the model is cut is told apart."""
        return part_of(FederationSettings, self)
