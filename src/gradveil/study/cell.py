"""One cell of an audit: every setting that decides its result, and the key under which the result is kept."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass
from typing import Any

from gradveil.study.local_training import TrainingSettings

__all__ = ["CELL_FORMAT", "HORIZONTAL", "Cell"]

CELL_FORMAT = "gradveil-cell-1"
HORIZONTAL = "none"
"""The cut of a model that is not cut."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One point of the grid data × model × training state × batch size × local steps × defense × attack.

    Attributes:
        data: Built-in name or path.
        labels: Path of a labels file, or empty.
        scale: How values of files are brought to [0, 1]; see `gradveil.data.load_data`.
        read: How files are read otherwise; see `gradveil.data.reading`.
        model: Built-in spelling or ``module:factory``.
        weights: Path of a weights file, or empty.
        state: ``untrained``; ``trained(steps=N)`` after N steps of SGD on the audited data; ``given`` with weights.
        batch_size: Records behind one update.
        local_steps: Local steps behind one update; more than one shares weights.
        clients: More than one: the attacker sees only the sum over that many clients.
        rounds: Rounds seen on the same records.
        defense: Spelling of the defense or chain.
        ensemble: Named ensemble (``quick``, ``standard``) or the spelling of one attack.
        records: Records attacked.
        seed: Root of all randomness.
        batch_norm: ``eval`` or ``train``.
        loss: Registered loss or ``module:function``.
        optimizer: Of the local steps.
        learning_rate: Of the local steps.
        known_labels: Whether the attacker is given the labels.
        bn_statistics: Whether uploads carry BatchNorm statistics, which the attacker then uses.
        steps: Cap on optimisation steps per recipe; 0 leaves the ensemble's own.
        execution: ``auto``, ``batched``, ``looped``, ``captured``, ``compiled``.
        device: ``cpu`` or ``cuda``.
        cut: Where the model is cut for vertical learning; empty is horizontal learning, which shares updates.
        parts: Who owns which features, as in ``left_right``; for cut models only.
        party: Which party is attacked.
        sees: What the attacker sees of that party: ``embedding``, or ``embedding_gradient``.
        risk: How risk without an attack is scored: ``auto``, ``dense``, ``gram``, ``leading``, or ``off``.
    """

    data: str = "photos"
    labels: str = ""
    scale: str = ""
    read: str = ""
    model: str = "lenet"
    weights: str = ""
    state: str = "untrained"
    batch_size: int = 1
    local_steps: int = 1
    clients: int = 1
    rounds: int = 1
    defense: str = "none"
    ensemble: str = "quick"
    records: int = 16
    seed: int = 0
    batch_norm: str = "eval"
    loss: str = "cross_entropy"
    optimizer: str = "sgd"
    learning_rate: float = 0.01
    known_labels: bool = False
    bn_statistics: bool = False
    steps: int = 0
    execution: str = "auto"
    device: str = "cpu"
    cut: str = ""
    parts: str = "whole"
    party: int = 0
    sees: str = "embedding"
    risk: str = "auto"

    @property
    def shares(self) -> str:
        """``embedding`` of a cut model; ``weights`` after local steps or with an optimiser of its own; else ``gradient``."""
        if self.cut:
            return "embedding"
        return "weights" if self.local_steps > 1 or self.optimizer != "sgd" else "gradient"

    @property
    def tells_labels(self) -> bool:
        """Whether what is seen depends on labels: an embedding does not."""
        return not self.cut or self.sees != "embedding"

    @property
    def targets(self) -> int:
        """Number of updates attacked: records over records per update, rounded up."""
        return -(-self.records // (self.batch_size * self.clients))

    def training(self) -> TrainingSettings:
        """Return the settings of local training; a party of vertical learning takes no local steps."""
        if self.cut:
            return TrainingSettings(batch_norm=self.batch_norm, learning_rate=self.learning_rate)  # type: ignore[arg-type]
        return TrainingSettings(
            shares=self.shares,  # type: ignore[arg-type]
            local_steps=self.local_steps,
            optimizer=self.optimizer,  # type: ignore[arg-type]
            learning_rate=self.learning_rate,
            batch_norm=self.batch_norm,  # type: ignore[arg-type]
            clients=self.clients,
        )

    def as_dict(self) -> dict[str, Any]:
        """Return the settings as plain JSON values, in order."""
        return {**dataclasses.asdict(self), "shares": self.shares}

    def key(self, **content: str | int) -> str:
        """Return the 16 hex digits under which the result is kept.

        Args:
            content: What the settings only name: digests of data and weights, the code version, thread count.
        """
        settings = self.as_dict()
        text = json.dumps({"format": CELL_FORMAT, "cell": settings, "content": content}, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def replace(self, **changes: Any) -> Cell:
        """Return a copy with some settings changed."""
        return dataclasses.replace(self, **changes)
