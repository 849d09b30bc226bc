"""Attackers who hold a list of candidates and rank them by how well each explains an update through the defense."""

from gradveil.attacks.listing.client import ListClient
from gradveil.attacks.listing.evidence import Evidence, Ranking
from gradveil.attacks.listing.generic import generic_evidence
from gradveil.attacks.listing.hypotheses import Hypotheses
from gradveil.attacks.listing.own import affordable, own_evidence
from gradveil.attacks.listing.presence import Presence

__all__ = ["Evidence", "Hypotheses", "ListClient", "Presence", "Ranking", "affordable", "generic_evidence", "own_evidence"]
