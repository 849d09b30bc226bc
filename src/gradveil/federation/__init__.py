"""Federated training: the honest client, the server that trusts nobody, aggregation, and the embedded engine."""

from gradveil.federation.aggregation import aggregate
from gradveil.federation.client import ClientResult, run_client
from gradveil.federation.engine import FederationSettings, RoundRecord, TrainingResult, train
from gradveil.federation.local_training import LocalTraining
from gradveil.federation.scaffold import Scaffold
from gradveil.federation.server import Reception, Server, receive

__all__ = [
    "ClientResult",
    "FederationSettings",
    "LocalTraining",
    "Reception",
    "RoundRecord",
    "Scaffold",
    "Server",
    "TrainingResult",
    "aggregate",
    "receive",
    "run_client",
    "train",
]
