"""Federated training: the honest client, the server that trusts nobody, aggregation, the engine, and vertical learning."""

from gradveil.federation.aggregation import aggregate
from gradveil.federation.client import ClientResult, run_client
from gradveil.federation.engine import FederationSettings, RoundRecord, TrainingResult, train
from gradveil.federation.local_training import LocalTraining
from gradveil.federation.parties import JoinedModel, build_parties, run_party
from gradveil.federation.scaffold import Scaffold
from gradveil.federation.server import Reception, Server, receive
from gradveil.federation.vertical import VerticalFederation, VerticalState

__all__ = [
    "ClientResult",
    "FederationSettings",
    "JoinedModel",
    "LocalTraining",
    "Reception",
    "RoundRecord",
    "Scaffold",
    "Server",
    "TrainingResult",
    "VerticalFederation",
    "VerticalState",
    "aggregate",
    "build_parties",
    "receive",
    "run_client",
    "run_party",
    "train",
]
