"""A defense in a Flower app, by a few lines; nothing else of Gradveil changes there.

@app.train(mods=[protect(Net(), "svdefense")])                                  # on the client
strategy = Veiled(FedAvg(), Net(), "svdefense")                                 # on the server

`protect` carries out every defense that needs nothing but the finished update; `train` is a train function for all of them.
Names are looked up when they are asked for: a client loads nothing of the server's.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gradveil.flower.protecting import protect
    from gradveil.flower.training import train
    from gradveil.flower.veiled import Veiled

__all__ = ["Veiled", "protect", "train"]

_HOMES = {"protect": "protecting", "train": "training", "Veiled": "veiled"}

if importlib.util.find_spec("flwr") is None:
    raise ImportError("gradveil.flower needs Flower, which is not installed; install it with: pip install 'gradveil[flower]'")


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
