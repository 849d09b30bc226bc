"""One federated training of an audit: every setting that decides its result, and the key under which the result is kept."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass
from typing import Any

from gradveil.study.federation import FederationSettings
from gradveil.study.utility import UtilitySettings

__all__ = ["BASELINE", "TRAINING_FORMAT", "Training"]

TRAINING_FORMAT = "gradveil-utility-1"
BASELINE = "none"


@dataclass(frozen=True, kw_only=True)
class Training:
    """One federated training: every setting that decides its result.

    Attributes:
        data: Built-in name or path.
        labels: Path of a labels file, or empty.
        scale: How values of files are brought to [0, 1].
        read: How files are read otherwise; see `gradveil.data.reading`.
        model: Built-in spelling or ``module:factory``.
        weights: Path of the weights it starts from, or empty for fresh ones.
        defense: Spelling of the defense or chain.
        seed: Root of all randomness.
        device: ``cpu`` or ``cuda``.
        loss: Registered loss or ``module:function``.
        cut: Where the model is cut for vertical learning; empty trains clients who share updates.
        parts: Who owns which features of a cut model.
        utility: How the federation trains; the number of seeds plays no part in one training.
    """

    data: str
    labels: str = ""
    scale: str = ""
    read: str = ""
    model: str
    weights: str = ""
    defense: str = BASELINE
    seed: int = 0
    device: str = "cpu"
    loss: str = "cross_entropy"
    cut: str = ""
    parts: str = "whole"
    utility: UtilitySettings

    def as_dict(self) -> dict[str, Any]:
        """Return the settings as plain JSON values, in order."""
        hidden = {"utility"} if self.cut else {"utility", "cut", "parts"}
        own = {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.name not in hidden}
        return own | {name: value for name, value in self.utility.as_dict().items() if name != "seeds"}

    def key(self, **content: str | int) -> str:
        """Return the 16 hex digits under which the result is kept.

        Args:
            content: What the settings only name: digests of data and weights, the code version, thread count.
        """
        text = json.dumps({"format": TRAINING_FORMAT, "training": self.as_dict(), "content": content}, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def undefended(self) -> Training:
        """Return the training it is paired with."""
        return dataclasses.replace(self, defense=BASELINE)

    def federation(self) -> FederationSettings:
        """Return the settings as the training engines take them; where the model is cut is told apart."""
        return FederationSettings(**{name: value for name, value in self.as_dict().items() if name not in ("cut", "parts")})
