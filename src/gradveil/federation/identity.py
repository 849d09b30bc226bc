"""What two runs must have in common for one to continue the other, to the same bits."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from gradveil.data import Dataset
from gradveil.study.federation import FederationSettings

__all__ = ["identity_of", "same_threads"]


def identity_of(settings: FederationSettings, train: Dataset, test: Dataset, **more: Any) -> dict[str, Any]:
    """Return everything that decides the weights after a round; how many rounds there will be does not.

    Args:
        settings: What was asked for.
        train: The training records.
        test: The test records.
        more: What else decides, by name.
    """
    from gradveil.provenance import code_version, own_files_digest

    weights = hashlib.sha256(Path(settings.weights).expanduser().read_bytes()).hexdigest() if settings.weights else ""
    return {
        **{name: value for name, value in settings.as_dict().items() if name != "rounds"},
        **more,
        "training records": train.digest()[:16],
        "test records": test.digest()[:16],
        "content of weights": weights[:16],
        "content of your own files": own_files_digest((settings.model, settings.loss, settings.defense))[:16],
        "gradveil's code": code_version(attacks=False),
        "torch": torch.__version__,
    }


@contextlib.contextmanager
def same_threads(count: int) -> Iterator[None]:
    """Use as many threads as the run began with: sums in another order are other bits."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
