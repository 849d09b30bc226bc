"""SVDefense: every weight matrix of the update is sent as a truncated singular value decomposition."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, get_args

import torch
from torch import Tensor

from gradveil.adversary import OpenAdversary
from gradveil.defenses.base import DEFENSES, ClientView, Defense, DefenseCard
from gradveil.defenses.svdefense.adversary import TruncationAdversary
from gradveil.defenses.svdefense.tilt import left_is_known, tilted
from gradveil.defenses.svdefense.truncation import ChannelWeights, Truncation, truncate, what_is_read
from gradveil.errors import BadUpdate
from gradveil.records import ModelSpec, Payload, Update
from gradveil.study.checks import check_choice, check_flag, check_number
from gradveil.tensors import check_finite
from gradveil.wire.factors import FACTORS, Factors, decode_factors, encode_factors, entropies_of, matrix_shape

__all__ = ["LEAST_ENTROPY", "SVDefense", "layer_weights_by_entropy"]

LEAST_ENTROPY = 1e-6
"""Less counts as vanished: it leaves 5e-8 of the energy beside the first singular value."""


@DEFENSES.register(
    DefenseCard(
        name="svdefense",
        summary="Sends every weight matrix as a truncated SVD whose rank follows the entropy of its spectrum.",
        paper="Luo, Yau and Song, SVDefense: Effective Defense against Gradient Inversion Attacks via Singular Value "
        "Decomposition",
        url="https://github.com/chenxiang3luo/svdefense",
        cost="per round one product of each weight matrix with itself and one small eigenproblem, in double precision; sends "
        "fewer bytes (not under secure aggregation)",
        weakness="a matrix of rank one passes unchanged, so for one example the linear layers, their inputs and the label arrive "
        "exactly, and what is kept of the others constrains the input too; hardened=True is for that, and still left a patient "
        "attacker some of 16 records",
        acts_on=("wire", "aggregation"),
        ladder=({"beta": 0.6}, {"beta": 0.3}, {"hardened": True}, {"hardened": True, "least_error": 2.0}),
        random=True,
    )
)
@dataclass(frozen=True, kw_only=True)
class SVDefense(Defense):
    """Truncated SVD with channel weights, an adaptive threshold and aggregation weights per layer (Luo, Yau and Song).

    For every matrix W of the update, rows being output channels:

        I = diag(|W_c|),  I W = U S V^T,  s_i = S_i^2 / sum_j S_j^2,  e = - sum_i s_i log s_i,  T = 1 - exp(-beta e)
        k = least k with s_1 + ... + s_k > T,   sent: I, U_k, S_k, V_k^T, e,   read: W_hat = I^+ U_k S_k V_k^T = W V_k V_k^T
        server: p_m = e_m N_m / sum_i e_i N_i per layer, over the clients m of the round with N_m examples

    Rules where the paper is silent:

    * Scalars, vectors, BatchNorm's parameters, empty tensors and single columns have nothing to truncate and are sent as
      they are. A bias is aggregated with the weights of the matrix in its own layer; what has no such matrix, as BatchNorm,
      by examples.
    * A channel below 1e-10 of the largest weight is dead: its row is zero, and the pseudo-inverse I^+ is zero there.
    * A matrix of zeros has entropy 0, rank 1 on the wire, and is read as zeros. One of rank one has e = 0, T = 0, k = 1: it
      passes.
    * k is at least 1 and at most the rank. The logarithm is the natural one. Zeros are left out of the entropy.
    * Where the factors would be larger than the matrix, W_hat is sent as a whole, without I.
    * Where all clients' entropies of a layer vanish, p_m follows the examples. Below 1e-6 they count as vanished: such a spectrum
      has one value and rounding, and rounding must not choose who is heard.

    The ablations of the paper are settings: ``adaptive=False`` is without S (a fixed threshold), ``weights="none"`` without C,
    ``weights="absolute"`` is C(abs), ``layer_wise=False`` without L.

    Hardened: a layer whose truncation leaves almost nothing out must not arrive exactly. With ``rho = |W - W_hat|^2 /
    |W|^2``, the energy that the truncation did take, and ``l_i = W v_i``, every kept vector of both sides is tilted towards a
    fresh random direction across it (n_i, m_i, unit vectors),

        v_i' = v_i + t n_i,   l_i' = l_i + h |l_i| m_i,   h^2 = t^2 / 10,
        (1 + t^2) (1 + h^2) = 1 + max(0, (least_error - rho) / (1 - rho)),

    so that every layer arrives with an expected relative squared error of at least ``least_error``. Right vectors carry the
    features: at batch size 1 the one of a linear layer is its input. Independent noise on the entries would be averaged out over
    the rows. Left vectors must be tilted too: exact ones are the left singular vectors of the gradient however far the right ones
    were tilted, and a patient attacker identified 6 of 16 photographs by them. Where they are known anyway, in a matrix of rank
    one beside its exact bias, or where there is but one row, the right side takes all of it: ``t^2 = (least_error - rho) / (1 -
    rho)``. The tilt is unbiased, so aggregation over clients averages it out, and a layer that the truncation has changed enough
    is not touched. I, the exact row norms, is not sent: the left factor is l_i' instead. Tilting only layers of rank one is not
    enough: the convolutions of a small network identify the record without the linear layer. Biases stay exact, and with them the
    label of a single example; so do the lengths of the l_i.

    Departs from the paper: the hardened variant is ours. I / max(I) multiplies W, and the server multiplies max(I) back, so that
    nothing overflows; S is smaller by that factor, the update is the same. The decomposition comes from a Gram matrix.

    Cost: p^2 q multiplications and an eigenproblem of size p per p × q matrix with p <= q; hardening adds k q random numbers.
    Known weakness: `TruncationAdversary` and, for one example, feature inversion; hardened, several rounds on the same data
    average the tilt out. The theorem of the paper bounds an error from above, so it promises no protection. The server believes
    the entropies within their range, as the paper's does: where honest layers have rank one, a client that claims, or really
    sends, a matrix of many directions decides that layer alone; ``layer_wise=False`` is for clients one does not trust.

    It acts while encoding, after every other defense of a chain has changed the update, so it must be the last of them.

    Attributes:
        beta: Sensitivity of the threshold; larger keeps more.
        weights: Channel weights from ``squared`` or ``absolute`` entries, or ``none``.
        adaptive: Whether the threshold follows the entropy.
        threshold: The share of energy to exceed where it does not.
        layer_wise: Whether aggregation weights follow the entropies; else the numbers of examples.
        hardened: Whether layers are tilted that would arrive too exactly.
        least_error: The relative squared error every layer then has at least.
    """

    lossy_encoding: ClassVar[bool] = True

    beta: float = 0.3
    weights: ChannelWeights = "squared"
    adaptive: bool = True
    threshold: float = 0.8
    layer_wise: bool = True
    hardened: bool = False
    least_error: float = 1.0

    def __post_init__(self) -> None:
        """Refuse settings that mean nothing."""
        check_number("svdefense", "beta", self.beta, open_below=True)
        check_number("svdefense", "threshold", self.threshold, below=1.0)
        check_number("svdefense", "least_error", self.least_error, open_below=True)
        check_choice("svdefense", "weights", self.weights, get_args(ChannelWeights))
        for switch in ("adaptive", "layer_wise", "hardened"):
            check_flag("svdefense", switch, getattr(self, switch))

    @property
    def random(self) -> bool:
        """Only the hardened variant draws randomness."""
        return self.hardened

    def truncated(self, matrix: Tensor) -> Truncation:
        """Truncate one (p, q) matrix as this defense is set."""
        return truncate(matrix, weights=self.weights, beta=self.beta, threshold=None if self.adaptive else self.threshold)

    def encode(self, update: Update, view: ClientView) -> Payload:
        """Truncate every matrix, tilt it where that is asked for and needed, and send the smaller form."""
        check_finite(update.weights)
        generator = view.generator("svdefense tilt") if self.hardened else None
        factors: dict[str, Factors] = {}
        entropies: dict[str, float] = {}
        for name, value in update.weights.items():
            shape = matrix_shape(tuple(value.shape))
            if shape is not None:
                found = self.truncated(value.reshape(shape))
                known = left_is_known(name, shape[0], found.entropy, update.weights)
                factors[name] = self._factors(found, generator, value.dtype, left_is_known=known)
                entropies[name] = found.entropy
        return encode_factors(update, factors, entropies)

    def _factors(
        self, found: Truncation, generator: torch.Generator | None, dtype: torch.dtype, *, left_is_known: bool
    ) -> Factors:
        if generator is None:
            scale = None if found.scale is None else found.scale.to(dtype)
            return Factors(scale, found.left.to(dtype), found.sigma.to(dtype), found.right.to(dtype))
        projected, right = tilted(found, self.least_error, generator, left_is_known=left_is_known)
        sizes = projected.norm(dim=0)
        order = sizes.argsort(descending=True)
        left = projected / sizes.clamp_min(torch.finfo(sizes.dtype).tiny)
        return Factors(None, left[:, order].to(dtype), sizes[order].to(dtype), right[order].to(dtype))

    def decode(self, payload: Payload, spec: ModelSpec) -> Update:
        """Multiply the factors out, after checking every one of them."""
        return decode_factors(payload, spec, scaled=self.weights != "none" and not self.hardened)

    def as_read(self, update: Update, view: ClientView) -> Update:
        """Truncate every matrix by arithmetic alone; a tilt draws as many numbers as are kept, so it needs to know them."""
        if self.hardened:
            return super().as_read(update, view)
        shapes = {name: matrix_shape(tuple(value.shape)) for name, value in update.weights.items()}
        threshold = None if self.adaptive else self.threshold
        read = {
            name: value
            if shape is None
            else what_is_read(value.reshape(shape), self.weights, self.beta, threshold).view_as(value)
            for (name, value), shape in zip(update.weights.items(), shapes.values(), strict=True)
        }
        return update.replace(weights=read)

    @property
    def scheme(self) -> str:
        """Name of the factor scheme."""
        return FACTORS

    def layer_weights(self, payloads: Sequence[Payload]) -> list[dict[str, float]] | None:
        """Weigh every client's layer by its entropy times its examples, or by examples alone where the switch is off."""
        return layer_weights_by_entropy(payloads) if self.layer_wise else None

    def adversary(self) -> OpenAdversary:
        """Return the attacker who compares what was kept."""
        return TruncationAdversary(self.weights, self.least_error if self.hardened else 0.0)


def layer_weights_by_entropy(payloads: Sequence[Payload]) -> list[dict[str, float]]:
    """Return, per payload, ``p = e N / sum e N`` of every tensor; by examples where all entropies of a layer vanish.

    A tensor without an entropy takes that of the one matrix in its own layer (``head.bias`` that of ``head.weight``); where
    there is none, or more than one, it goes by examples. The weights of every tensor sum to one.

    Raises:
        BadUpdate: There are no payloads, they name different tensors, or an entropy or a number of examples is no weight.
    """
    if not payloads:
        raise BadUpdate("there are no payloads to weigh")
    names = [_tensor_names(payload) for payload in payloads]
    entropies = [entropies_of(payload) for payload in payloads]
    for own, known in zip(names, entropies, strict=True):
        if own != names[0] or known.keys() != entropies[0].keys():
            odd = sorted(set(own) ^ set(names[0]) or known.keys() ^ entropies[0].keys())
            raise BadUpdate(f"the clients' payloads name different tensors or entropies: {odd}")
        wrong = next((name for name, value in known.items() if not (math.isfinite(value) and value >= 0)), None)
        if wrong is not None:
            raise BadUpdate(
                f"the entropy of {wrong!r} is {known[wrong]}, so it is no weight; it must be a finite number, at least 0"
            )
    examples = [float(payload.examples) for payload in payloads]
    if not all(math.isfinite(count) and count > 0 for count in examples):
        raise BadUpdate(f"the clients claim {[payload.examples for payload in payloads]} examples; each needs at least one")
    owners = _owners(names[0], set(entropies[0]))
    weights: list[dict[str, float]] = [{} for _ in payloads]
    for name in names[0]:
        owner = owners[name]
        told = [known[owner] for known in entropies] if owner else []
        vanished = max(told, default=0.0) < LEAST_ENTROPY
        raw = examples if vanished else [entropy * count for entropy, count in zip(told, examples, strict=True)]
        largest = max(raw)
        total = math.fsum(value / largest for value in raw)
        for shares, value in zip(weights, raw, strict=True):
            shares[name] = value / largest / total
    return weights


def _tensor_names(payload: Payload) -> list[str]:
    return sorted({*payload.streams.get("weights", {}), *payload.streams.get("left", {})})


def _owners(names: Sequence[str], matrices: set[str]) -> dict[str, str | None]:
    """Return, for every tensor, the matrix whose entropy weighs it, or None."""
    layers: dict[str, list[str]] = {}
    for name in sorted(matrices):
        layers.setdefault(name.rpartition(".")[0], []).append(name)
    found: dict[str, str | None] = {}
    for name in names:
        mates = layers.get(name.rpartition(".")[0], [])
        found[name] = name if name in matrices else mates[0] if len(mates) == 1 and "." in name else None
    return found
