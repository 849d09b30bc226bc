"""What defenses that zero entries of the update share: the sparse wire format, and an attacker who sees where the zeros are."""

from __future__ import annotations

from dataclasses import dataclass

from gradveil.adversary import MASK, OBSERVED, OpenAdversary, prefixed, with_prefix
from gradveil.defenses.base import ClientView, Defense
from gradveil.learning.learner import Learner
from gradveil.records import Comparison, ModelSpec, Observation, Payload, Update, WhatArrives
from gradveil.tensors import Named, scale
from gradveil.wire.sparse import SPARSE, decode_sparse, encode_sparse

__all__ = ["SparseUpdateDefense", "ZeroedEntriesAdversary"]


@dataclass(frozen=True)
class ZeroedEntriesAdversary(OpenAdversary):
    """Reads the mask off the zeros that were seen and compares only the rest, where the update arrived as it was.

    For one client that is all there is to know. In a secure aggregate the clients' masks differ and only their union is seen.

    Attributes:
        factor: What the entries that are left were multiplied with.
    """

    factor: float = 1.0

    def arrives(self, observation: Observation) -> WhatArrives:
        """Say that the tensors without a single zero are exact.

        Incomplete for an aggregate: an entry that only some clients sent is not their mean, and nobody sees which.
        """
        weights = observation.update.weights
        return (
            super()
            .arrives(observation)
            .replace(
                exact=lambda: frozenset(name for name, value in weights.items() if bool((value != 0).all())),
                incomplete=observation.threat.clients > 1,
            )
        )

    def evidence(self, observation: Observation, round_index: int) -> Named:
        """Return the update and the mask of its entries that are not zero."""
        seen = observation.updates[round_index].weights
        return with_prefix(seen, OBSERVED) | with_prefix({name: (value != 0).to(value) for name, value in seen.items()}, MASK)

    def on_update(self, update: Named, learner: Learner, variables: Named) -> Named:
        """Rescale as the defense does."""
        return update if self.factor == 1.0 else scale(update, self.factor)

    def compare(self, evidence: Named, simulated: Named, variables: Named) -> Comparison:
        """Compare where something was seen."""
        mask = prefixed(evidence, MASK)
        return Comparison({name: value * mask[name] for name, value in simulated.items()}, prefixed(evidence, OBSERVED))


@dataclass(frozen=True, kw_only=True)
class SparseUpdateDefense(Defense):
    """Abstract: a defense whose updates hold many zeros and are sent sparse wherever that is smaller."""

    def encode(self, update: Update, view: ClientView) -> Payload:
        """Send only what is not zero, where that is smaller."""
        return encode_sparse(update)

    def decode(self, payload: Payload, spec: ModelSpec) -> Update:
        """Fill the zeros in, after checking every position and value."""
        return decode_sparse(payload, spec)

    @property
    def scheme(self) -> str:
        """Name of the sparse scheme."""
        return SPARSE
