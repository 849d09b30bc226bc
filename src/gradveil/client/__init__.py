"""What one party does: local training, defense, payload. The light door for federations: nothing here loads data or attacks.

defense = build_defense("svdefense")
result = run_client(learner, batch, defense, seed)      # result.payload crosses the wire, result.state is kept
"""

from gradveil.client.embedding import PartyResult, run_party
from gradveil.client.local_training import LocalTraining
from gradveil.client.needs import unmet_need
from gradveil.client.send import Sent, send
from gradveil.client.update import ClientResult, run_client
from gradveil.defenses.chain import adapt, build_defense

__all__ = [
    "ClientResult",
    "LocalTraining",
    "PartyResult",
    "Sent",
    "adapt",
    "build_defense",
    "run_client",
    "run_party",
    "send",
    "unmet_need",
]
