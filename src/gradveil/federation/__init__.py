"""Federated training: the server that trusts nobody, aggregation, the embedded engine, and vertical learning."""

from gradveil.federation.aggregation import aggregate
from gradveil.federation.engine import run_training
from gradveil.federation.parties import JoinedModel, build_parties
from gradveil.federation.scaffold import Scaffold
from gradveil.federation.server import Reception, Server, receive
from gradveil.federation.vertical import VerticalFederation, VerticalState

__all__ = [
    "JoinedModel",
    "Reception",
    "Scaffold",
    "Server",
    "VerticalFederation",
    "VerticalState",
    "aggregate",
    "build_parties",
    "receive",
    "run_training",
]
