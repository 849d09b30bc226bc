"""Quantisation: every tensor of the update is rounded to a few levels."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from gradveil.adversary import OBSERVED, OpenAdversary, prefixed, with_prefix
from gradveil.defenses.base import DEFENSES, ClientView, Defense, DefenseCard, State
from gradveil.records import Comparison, ModelSpec, Observation, Payload, Role, Update, WhatArrives
from gradveil.study.checks import check_choice, check_whole
from gradveil.tensors import Named, check_finite
from gradveil.wire.quantised import QUANTISED, Grid, decode_quantised, encode_quantised

__all__ = ["MODES", "Mode", "Quantisation", "RoundedAdversary", "SignAdversary", "quantise"]

Mode = Literal["uniform", "qsgd", "sign"]
MODES = ("uniform", "qsgd", "sign")
LEAST_BITS, MOST_BITS = 2, 16
LOW, HIGH, SCALE = "low/", "high/", "scale/"


def quantise(value: Tensor, grid: Grid, generator: torch.Generator | None = None) -> Tensor:
    """Round a tensor to its grid: to the nearest level, or with a generator up or down at random so that the mean is right."""
    found = grid.ends(value)
    positions = grid.positions(value, found)
    if generator is None:
        codes = positions.round()
    else:
        below = positions.floor()
        draws = torch.rand(value.shape, generator=generator, device=value.device, dtype=torch.float64)
        codes = below + (draws < positions - below)
    return grid.values(codes, found)


@dataclass(frozen=True)
class RoundedAdversary(OpenAdversary):
    """Knows the interval that every entry was rounded from, and asks only that the dummies' update falls inside.

    The residual is the distance to that interval: zero wherever the rounding could have come from. Which value inside is the
    right one nobody can tell, so nothing pulls towards the level that was sent. Only for one client: what rounding did to the
    mean of several is not known, and the mean is compared as it is.

    Attributes:
        grid: Of all tensors.
        reach: How far from its level a rounded entry may have been, in steps: 1/2 to the nearest level, 1 at random.
    """

    grid: Grid
    reach: float = 0.5

    def arrives(self, observation: Observation) -> WhatArrives:
        """Say that nothing is exact, all being rounded; incomplete for an aggregate, since the clients' grids are not seen."""
        return super().arrives(observation).replace(exact=frozenset, incomplete=observation.threat.clients > 1)

    def evidence(self, observation: Observation, round_index: int) -> Named:
        """Return the update and the ends of every entry's interval."""
        seen = observation.updates[round_index].weights
        low, high = self.intervals(seen) if observation.threat.clients == 1 else (seen, seen)
        return with_prefix(seen, OBSERVED) | with_prefix(low, LOW) | with_prefix(high, HIGH)

    def intervals(self, seen: Named) -> tuple[Named, Named]:
        """Return what every entry may have been before rounding: at least, at most."""
        widths = {name: self.reach * self.grid.step(self.grid.ends(value)) for name, value in seen.items()}
        return {n: v - widths[n] for n, v in seen.items()}, {n: v + widths[n] for n, v in seen.items()}

    def compare(self, evidence: Named, simulated: Named, variables: Named) -> Comparison:
        """Compare with the nearest update that would have been rounded to what was seen."""
        low, high = prefixed(evidence, LOW), prefixed(evidence, HIGH)
        nearest = {name: torch.minimum(torch.maximum(value, low[name]), high[name]) for name, value in simulated.items()}
        return Comparison(simulated, nearest)


@dataclass(frozen=True)
class SignAdversary(RoundedAdversary):
    """Knows the sign of every entry and the mean of their magnitudes.

    The interval of an entry reaches from zero to all there is, and zeros alone would satisfy every sign; so the mean magnitude
    is compared too, in units in which it weighs as much as the tensor itself.
    """

    def intervals(self, seen: Named) -> tuple[Named, Named]:
        """Return zero and, on the side of the sign, the sum of all magnitudes."""
        most = {name: value * max(1, value.numel()) for name, value in seen.items()}
        return {n: v.clamp_max(0) for n, v in most.items()}, {n: v.clamp_min(0) for n, v in most.items()}

    def compare(self, evidence: Named, simulated: Named, variables: Named) -> Comparison:
        """Compare signs, and mean magnitudes times the root of their number: the length of a tensor of equal magnitudes."""
        signs = super().compare(evidence, simulated, variables)
        return Comparison(
            signs.simulated | with_prefix({n: _equal_length(v) for n, v in simulated.items()}, SCALE),
            signs.observed | with_prefix({n: _equal_length(v) for n, v in prefixed(evidence, OBSERVED).items()}, SCALE),
        )


def _equal_length(value: Tensor) -> Tensor:
    return value.abs().sum() / math.sqrt(max(1, value.numel()))


@DEFENSES.register(
    DefenseCard(
        name="quantisation",
        summary="Rounds every tensor of the update to a few levels: to the nearest, at random, or to its sign alone.",
        paper="Alistarh, Grubic, Li, Tomioka and Vojnovic, QSGD: Communication-Efficient SGD via Gradient Quantization and "
        "Encoding, NeurIPS 2017",
        url="https://arxiv.org/abs/1610.02132",
        cost="one pass over the weights; sends bits / 32 of the bytes (not under secure aggregation); training slows down at few "
        "bits",
        weakness="rounding is not noise: every entry says which interval it came from, thousands of intervals leave little room, "
        "and rounding at random averages out over rounds on the same data",
        acts_on=("update", "wire"),
        ladder=({"bits": 8}, {"bits": 4}, {"bits": 3}, {"bits": 2}),
        random=True,
    )
)
@dataclass(frozen=True, kw_only=True)
class Quantisation(Defense):
    """Rounding to L = 2^(bits-1) levels of magnitude and a sign: ``sent = sign(u) m round(|u| / m (L - 1)) / (L - 1)``.

    m is the largest magnitude of the tensor, which arrives exactly; a tensor of zeros stays zero. ``uniform`` rounds to the
    nearest level (GQ); ``qsgd`` rounds up or down at random so that the mean is right; ``sign`` sends one bit per entry and the
    mean magnitude: ``sent = sign(u) mean|u|``, a zero counts as plus, and ``bits`` is not used.

    Departs from the paper: QSGD scales by the Euclidean norm of a bucket of entries and codes levels by their frequency; here,
    as in code that attacks it, a tensor is one bucket, scaled by its largest magnitude, and codes have a fixed number of bits.
    signSGD (Bernstein et al. 2018, https://arxiv.org/abs/1802.04434) sends the sign without a scale and lets clients vote; the
    scale is that of Karimireddy et al. 2019, https://arxiv.org/abs/1901.09847, here without error feedback.

    Cost: one pass; bytes fall to bits / 32 (1/32 for signs), but not under secure aggregation: the clients' grids differ, so
    values must be sent, not codes. Known weakness: `RoundedAdversary` uses the intervals, which are exact.

    Attributes:
        mode: ``uniform``, ``qsgd`` or ``sign``.
        bits: Per entry, sign included, from 2 to 16.
    """

    mode: Mode = "uniform"
    bits: int = 4

    def __post_init__(self) -> None:
        """Refuse unknown modes and impossible numbers of bits."""
        check_choice("quantisation", "mode", self.mode, MODES)
        check_whole("quantisation", "bits", self.bits, LEAST_BITS, MOST_BITS)

    @property
    def random(self) -> bool:
        """Only rounding at random draws anything."""
        return self.mode == "qsgd"

    @property
    def grid(self) -> Grid:
        """The levels of every tensor; an odd number where zero is one of them."""
        return Grid(2 if self.mode == "sign" else 2**self.bits - 1)

    def protect_update(self, update: Update, view: ClientView, state: State) -> tuple[Update, State]:
        """Round every weight tensor by itself."""
        check_finite(update.weights)
        generator = view.generator("quantisation") if self.random else None

        def rounded(value: Tensor) -> Tensor:
            if self.mode == "sign":
                scale = value.double().abs().sum() / max(1, value.numel())
                return torch.where(value >= 0, scale, -scale).to(value.dtype)
            return quantise(value, self.grid, generator)

        return update.replace(weights={name: rounded(value) for name, value in update.weights.items()}), state

    def encode(self, update: Update, view: ClientView) -> Payload:
        """Pack the codes."""
        return encode_quantised(update, dict.fromkeys(update.weights, self.grid))

    def decode(self, payload: Payload, spec: ModelSpec) -> Update:
        """Unpack the codes, after checking every one."""
        return decode_quantised(payload, spec, dict.fromkeys(spec.named(Role.WEIGHT), self.grid))

    @property
    def scheme(self) -> str:
        """Name of the quantised scheme."""
        return QUANTISED

    def adversary(self) -> OpenAdversary:
        """Return the attacker who knows the intervals."""
        if self.mode == "sign":
            return SignAdversary(self.grid)
        return RoundedAdversary(self.grid, 1.0 if self.mode == "qsgd" else 0.5)
