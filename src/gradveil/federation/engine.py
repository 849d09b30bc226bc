"""Federated training in one process: plain PyTorch, nothing to start.

result = train(FederationSettings(data="photos", model="lenet", defense="pruning(rate=0.9)", rounds=5))
result.final_accuracy, result.bytes_up
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from gradveil.data import Dataset
from gradveil.errors import NotYetSupported
from gradveil.federation.history import RoundRecord, TrainingResult
from gradveil.federation.settings import FederationSettings

__all__ = ["FederationSettings", "RoundRecord", "TrainingResult", "train"]


def train(
    settings: FederationSettings,
    *,
    dataset: Dataset | None = None,
    test: Dataset | None = None,
    out: Path | None = None,
    on_round: Callable[[RoundRecord], None] | None = None,
    stop_after: int | None = None,
) -> TrainingResult:
    """Train a model federatedly and return what happened.

    Args:
        settings: What to train, and how.
        dataset: Training records, where they are already loaded.
        test: Test records, where they are already loaded.
        out: Folder to keep results in and to continue from; None keeps nothing on disk.
        on_round: Told after every round.
        stop_after: Stop after this many rounds in all; the same folder continues.
    """
    raise NotYetSupported("federated training is being written")
