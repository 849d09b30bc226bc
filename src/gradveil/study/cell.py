"""One cell of an audit: every setting that decides its result, and the key under which the result is kept."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass
from typing import Any

from gradveil.errors import UsageError
from gradveil.study.declare import key, without_unused
from gradveil.study.local_training import TrainingSettings
from gradveil.study.readers import named, risk_mode, whole
from gradveil.study.settings import Attackers, Common, DataSource, LocalTraining, ModelSource, Vertical

__all__ = ["CAME_LATER", "CELL_FORMAT", "HORIZONTAL", "OF_EPOCHS", "Cell"]

CELL_FORMAT = "gradveil-cell-1"
HORIZONTAL = "none"
"""The cut of a model that is not cut."""
OF_EPOCHS = ("local_epochs", "minibatch", "shuffle", "momentum", "dropout")
"""Settings of local training that cells of older versions lack, which took whole-batch steps without any of this."""
CAME_LATER = (*OF_EPOCHS, "prior")
"""All settings that change a cell's key only where they are used: no older attacker learned from public records."""


@dataclass(frozen=True, kw_only=True)
class Cell(Common, Attackers, Vertical, LocalTraining, ModelSource, DataSource):
    """One point of the grid data × model × training state × batch size × local steps × defense × attack.

    What each setting means stands where it is declared; a cell adds those that no training has.
    """

    state: str = key(
        "untrained",
        named,
        "training state of the model: untrained, given (with weights), or trained(steps=200)",
        section="grid",
        axis=True,
        plan=(),
        docs="`untrained`; `given`, with weights; `trained(steps=200)`, with `learning_rate=` and `batch=` if wanted. Left out: "
        "`given` where there are weights, else `untrained`",
    )
    batch_size: int = key(1, whole(1), "records behind one update", section="grid", axis=True)
    local_steps: int = key(
        1,
        whole(1),
        "local steps behind one update; above 1, weights are shared",
        section="grid",
        axis=True,
        docs="local steps behind one update; above 1, clients share weights instead of a gradient",
    )
    clients: int = key(1, whole(1), "above 1, the attacker sees only the sum of that many clients", section="grid", axis=True)
    rounds: int = key(1, whole(1), "rounds seen on the same records", section="grid", axis=True)
    risk: str = key(
        "auto",
        risk_mode,
        "exposure in dB and InvRE, without an attack: auto, off, or a mode of InvRE (dense, gram, leading)",
        section="audit",
        metavar="MODE",
        docs="[exposure and InvRE, without an attack](risk.md#in-an-audit): `auto` (or `true`) has InvRE exact up to 1,024 input "
        "values and `leading` beyond; `dense`, `gram` and `leading` force a mode; `off` (or `false`) leaves both out. Part of a "
        "cell's key",
    )

    @property
    def shares(self) -> str:
        """``embedding`` of a cut model; ``weights`` after steps, epochs or with an optimiser of its own; else ``gradient``."""
        if self.cut:
            return "embedding"
        return "weights" if self.local_steps > 1 or self.local_epochs or self.optimizer != "sgd" else "gradient"

    @property
    def tells_labels(self) -> bool:
        """Whether what is seen depends on labels: an embedding does not."""
        return not self.cut or self.sees != "embedding"

    @property
    def targets(self) -> int:
        """Number of updates attacked: records over records per update, rounded up."""
        return -(-self.records // (self.batch_size * self.clients))

    def training(self) -> TrainingSettings:
        """Return the settings of local training; a party of vertical learning takes no local steps.

        Raises:
            UsageError: They do not fit together, or not the number of records behind an update.
        """
        if self.cut:
            return TrainingSettings(batch_norm=self.batch_norm, learning_rate=self.learning_rate)
        self._check_minibatch()
        return TrainingSettings(
            shares="weights" if self.shares == "weights" else "gradient",
            local_steps=self.local_steps,
            epochs=self.local_epochs,
            minibatch=self.minibatch,
            shuffle=self.shuffle,
            optimizer=self.optimizer,
            learning_rate=self.learning_rate,
            momentum=self.momentum,
            batch_norm=self.batch_norm,
            dropout=self.dropout,
            clients=self.clients,
        )

    def _check_minibatch(self) -> None:
        steps, size, most = self.local_steps, self.minibatch, self.batch_size
        if self.local_epochs and steps > 1:
            raise UsageError(
                f"local_epochs is {self.local_epochs} and local_steps {steps}, and a client counts one of them; leave one out"
            )
        if size > most:
            raise UsageError(
                f"minibatch is {size}, and batch_size {most}: a step cannot take more records than stand behind an update; set "
                f"minibatch to at most {most}, or raise batch_size"
            )
        if size and not self.local_epochs and steps * size < most:
            raise UsageError(
                f"local_steps is {steps} and minibatch {size}, so only {steps * size} of the {most} records behind an update "
                "would be trained on; set local_epochs, or more local_steps"
            )

    def as_dict(self) -> dict[str, Any]:
        """Return the settings as plain JSON values, in order."""
        return {**dataclasses.asdict(self), "shares": self.shares}

    def key(self, **content: str | int) -> str:
        """Return the 16 hex digits under which the result is kept.

        Args:
            content: What the settings only name: digests of data and weights, the code version, thread count.
        """
        settings = without_unused(Cell, self.as_dict(), CAME_LATER)
        text = json.dumps({"format": CELL_FORMAT, "cell": settings, "content": content}, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def replace(self, **changes: Any) -> Cell:
        """Return a copy with some settings changed."""
        return dataclasses.replace(self, **changes)
