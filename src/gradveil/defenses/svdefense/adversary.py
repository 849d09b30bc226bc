"""The attacker who knows SVDefense: a truncated matrix still says exactly what the true one does to its kept directions."""

from __future__ import annotations

import math
from collections.abc import Container
from dataclasses import dataclass

import torch
from torch import Tensor

from gradveil.adversary import OBSERVED, OpenAdversary, prefixed, with_prefix
from gradveil.defenses.svdefense.tilt import EXACT_ENTROPY, LEFT_SHARE, left_is_known
from gradveil.defenses.svdefense.truncation import ChannelWeights
from gradveil.records import Comparison, Observation, Payload, WhatArrives
from gradveil.tensors import Named, norm
from gradveil.wire.factors import entropies_of, factors_of, matrix_shape

__all__ = ["TruncationAdversary"]

RIGHT, LEFT, NORMS, TRUST, SHRINK = "right/", "left/", "norms/", "trust/", "shrink/"
EXACT_TILT = 1e-6
"""Squared length above one of the rows of V^T that rounding to single precision explains."""
NEGLIGIBLE = 1e-5
"""Singular values of a matrix sent as a whole below this share of the largest are rounding."""
PRECISION = 2e-5
"""A tensor with noise counts as if all others were exact to this share of the update.

Smaller trusts noisy tensors less. Of eight records on the sigmoid LeNet, 2e-4 and 2e-5 identified most or all at settings of the
knob up to 0.1; at 1e-3 the noise of one layer hid what the others say from 1e-5 on.
"""
_TINY = 1e-30


@dataclass(frozen=True)
class TruncationAdversary(OpenAdversary):
    """Compares a dummy gradient g with what was sent only where the two coincide at the truth.

    With ``A = D W`` (D the channel weights), ``A ≈ U S V^T`` and ``L = W V``, three relations hold exactly:

    * ``g V = L``: what W does to the kept right vectors. It is the same as ``g V V^T = W_hat``, in fewer numbers.
    * ``(D^2 L)^T g = (D^2 L)^T W_hat``: the kept left vectors are orthogonal, weighted by D, to all that was cut off. D is
      that of the dummy, which is the client's at the truth, so the relation needs no I on the wire.
    * the row norms of g are I: L2 norms with squared weights, L1 norms with absolute ones, nothing without or where I was
      not sent.

    V is read off the factors, or by an SVD off a matrix that was sent as a whole. Matching W_hat directly has no such
    property: g is not truncated, and a truncation of it is another function at every step.

    The hardened defense adds to each row of V^T a vector of a length t that can be read off the row, ``|v'|^2 = 1 + t^2``, and
    one of known relative length h to each column of L, ``h^2 = LEFT_SHARE t^2`` or zero where `left_is_known`. That is noise of
    relative size t √(k / q) and h on the first relation and of t and h / √p on the second, which also shrinks by 1 + h^2; so
    relations are weighted by how exact they are. ``D L = U S`` are the left singular vectors and values of A, so a fourth
    relation needs no V:

    * ``A A^T U = U S^2`` with A = D g: p numbers per kept direction, with noise h from the left side only.

    The feature behind the last layer is still read off its noisy gradient by feature inversion: nothing about that attack asks
    for exactness.

    What arrives of a ReLU convolution is mostly the mean direction of its inputs, which hardly differs between pictures. Under
    one cosine the quiet exact tensors, BatchNorm's foremost, are drowned; a recipe that weighs tensors alike (``relative_l2``)
    and stays smooth finds more, and `arrives` asks for it by ``equal_weights``. It also cancels the weights of exactness above,
    so it is no recipe for the hardened defense; and on a LeNet, which has no norms, it finds less than the others.

    Under secure aggregation nobody sees factors; then this attacker compares as one who ignores the truncation and says that
    it is incomplete. The generic straight-through attacker covers that case.

    The entropies, one number per layer, are used for nothing but telling exact layers.

    Attributes:
        weights: How the defense weighs channels.
        least_error: The hardened defense's knob; 0 is the plain one.
    """

    weights: ChannelWeights = "squared"
    least_error: float = 0.0

    def arrives(self, observation: Observation) -> WhatArrives:
        """Say what is exact, that it is incomplete where a secure aggregate hides the factors, and how a search should weigh.

        Tensors should weigh alike where weights of norms arrive, exactly, beside truncated matrices: vectors that are no biases.
        """
        norms = [n for n, v in observation.update.weights.items() if v.dim() == 1 and not n.endswith("bias")]
        return (
            super()
            .arrives(observation)
            .replace(
                exact=lambda: self._exact(observation),
                incomplete=not observation.payloads,
                equal_weights=bool(norms) and not self.least_error and bool(observation.payloads),
            )
        )

    def evidence(self, observation: Observation, round_index: int) -> Named:
        """Return the update and, per matrix, kept directions padded to full rank, what W does to them, norms and trust."""
        seen = observation.updates[round_index].weights
        found = with_prefix(seen, OBSERVED)
        if not observation.payloads:
            return found
        payload = observation.payloads[round_index]
        precision = PRECISION * float(norm({name: value.double() for name, value in seen.items()}))
        for name, value in seen.items():
            shape = matrix_shape(tuple(value.shape))
            if shape is None:
                continue
            own = self._read(payload, name, value.reshape(shape), seen)
            # Of the right and the left side, on each of the three relations that are noisy.
            shares = torch.tensor([[own.rank / shape[1], 1.0], [1.0, 1.0 / shape[0]], [0.0, 1.0]], dtype=torch.float64)
            tilts = torch.tensor([own.right_tilt, own.left_tilt], dtype=torch.float64)
            noise = float(value.norm()) * (shares @ tilts.square()).sqrt()
            trust = precision / (precision**2 + noise.square()).sqrt().clamp_min(_TINY) if precision else torch.ones_like(noise)
            found |= {RIGHT + name: own.right, LEFT + name: own.left, NORMS + name: own.norms, TRUST + name: trust.to(value)}
            found[SHRINK + name] = (1 / (1 + tilts[1].square())).to(value)
        return found

    def compare(self, evidence: Named, simulated: Named, variables: Named) -> Comparison:
        """Apply the relations to every matrix; compare the rest as it is."""
        kinds = OBSERVED, RIGHT, LEFT, NORMS, TRUST, SHRINK
        observed, right, left, norms, trust, shrink = (prefixed(evidence, kind) for kind in kinds)
        ours: Named = {}
        theirs: Named = {}
        for name, value in simulated.items():
            if name not in right:
                ours[name], theirs[name] = value, observed[name]
                continue
            matrix, seen = (each.reshape(each.shape[0], -1) for each in (value, observed[name]))  # (p, q)
            along, across = trust[name][0], trust[name][1]
            ours[name], theirs[name] = along * (matrix @ right[name].T), along * left[name]  # (p, r)
            # Detached: at the truth the relation holds for the true D, and slopes through D only bend the way there.
            kept = self._row_energies(matrix.detach()) * left[name]
            kept = across * kept / (kept.square().sum() + _TINY).sqrt()
            ours[f"{name} across"], theirs[f"{name} across"] = kept.T @ matrix, shrink[name] * (kept.T @ seen)  # (r, q)
            if self.least_error:
                both = self._squared(matrix, left[name], trust[name][2], shrink[name])
                ours[f"{name} squared"], theirs[f"{name} squared"] = both  # (p, r) each
            elif self.weights != "none":
                told = norms[name]
                sent = (told.amax() > 0).to(told)
                ours[f"{name} norms"], theirs[f"{name} norms"] = sent * self._row_norms(matrix, told), told
        return Comparison(ours, theirs)

    def _squared(self, matrix: Tensor, left: Tensor, trust: Tensor, shrink: Tensor) -> tuple[Tensor, Tensor]:
        """Return both sides of A A^T u = s^2 u over s^2, for the kept left vectors u, in units of the norm of what arrived."""
        weights = self._row_energies(matrix.detach()).sqrt()
        weighted, kept = weights * matrix, weights * left  # A (p, q) and U S (p, r)
        squares = kept.square().sum(0)
        there = (squares > NEGLIGIBLE**2 * squares.sum()).to(kept)  # zeros fill up to the largest rank
        units = there * kept / (squares + _TINY).sqrt()
        size = trust * (left.square().sum() + _TINY).sqrt()
        return size * (weighted @ (weighted.T @ (units / (shrink * squares + _TINY)))), size * units

    def _row_energies(self, matrix: Tensor) -> Tensor:
        """Return D^2 up to a factor, as a column."""
        if self.weights == "none":
            return torch.ones_like(matrix[:, :1])
        energies = (matrix.square() if self.weights == "squared" else matrix.abs()).sum(1, keepdim=True)
        return energies / (energies.amax() + _TINY)

    def _row_norms(self, matrix: Tensor, told: Tensor) -> Tensor:
        """Return the dummy's row norms, smooth where a row is zero; L1 norms as if all entries had the size of their mean."""
        if self.weights == "squared":
            return (matrix.square().sum(1) + 1e-12 * told.amax().square() + _TINY).sqrt()
        return matrix.abs().sum(1) / math.sqrt(matrix.shape[1])

    def _exact(self, observation: Observation) -> frozenset[str]:
        """Return the tensors that are not truncated and, unhardened, those of rank one or full rank."""
        weights = observation.update.weights
        names = {name for name, value in weights.items() if matrix_shape(tuple(value.shape)) is None}
        if self.least_error or not observation.payloads:
            return frozenset(names)
        payload = observation.payloads[0]
        for name, entropy in entropies_of(payload).items():
            matrix = weights[name].reshape(len(weights[name]), -1)
            if entropy < EXACT_ENTROPY or self._read(payload, name, matrix, weights).rank == min(matrix.shape):
                names.add(name)
        return frozenset(names)

    def _read(self, payload: Payload, name: str, matrix: Tensor, others: Container[str]) -> _Kept:
        factors = factors_of(payload, name)
        wide, norms = matrix.double(), torch.zeros_like(matrix[:, 0])
        if factors is None:
            left, sigma, right = torch.linalg.svd(wide, full_matrices=False)
            keep = sigma > NEGLIGIBLE * sigma[0]
            # Of a tilted matrix sent as a whole nobody knows how far it was tilted; it is at most this.
            tilt = math.sqrt(self.least_error)
            return _Kept.padded(right[keep], (left * sigma)[:, keep], norms, (tilt, math.sqrt(LEFT_SHARE) * tilt), matrix)
        right = factors.right.double()
        if factors.scale is not None:
            told = factors.scale
            norms = told if self.weights == "squared" else told.square() / math.sqrt(matrix.shape[1])
        if not self.least_error:
            return _Kept.padded(right, wide @ right.T, norms, (0.0, 0.0), matrix)
        longer = float(right.square().sum(1).mean()) - 1
        tilt = math.sqrt(longer) if longer > EXACT_TILT else 0.0
        left_tilt = 0.0 if left_is_known(name, len(matrix), entropies_of(payload)[name], others) else math.sqrt(LEFT_SHARE) * tilt
        return _Kept.padded(right, factors.left.double() * factors.sigma.double(), norms, (tilt, left_tilt), matrix)


@dataclass(frozen=True)
class _Kept:
    """What one matrix discloses: V^T (r, q) and W V (p, r), zero beyond the rank sent, row norms, tilts and rank."""

    right: Tensor
    left: Tensor
    norms: Tensor
    right_tilt: float
    left_tilt: float
    rank: int

    @classmethod
    def padded(cls, right: Tensor, left: Tensor, norms: Tensor, tilts: tuple[float, float], like: Tensor) -> _Kept:
        """Pad with zeros to the largest rank there can be, so that many observations stack."""
        rows, columns = like.shape
        most, rank = min(rows, columns), len(right)
        whole_right, whole_left = right.new_zeros((most, columns)), left.new_zeros((rows, most))
        whole_right[:rank], whole_left[:, :rank] = right, left
        return cls(whole_right.to(like), whole_left.to(like), norms, *tilts, rank)
