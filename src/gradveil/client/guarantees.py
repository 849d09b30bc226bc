"""Which differential privacy a defense gives, if any: ε with its unit and its assumptions, or why there is none."""

from __future__ import annotations

import dataclasses
import math

from gradveil.defenses.base import Defense
from gradveil.defenses.chain import parts_of
from gradveil.defenses.clipping import Clipping
from gradveil.defenses.data_noise import DataNoise
from gradveil.defenses.dp_sgd import DPSGD
from gradveil.defenses.entry_dropout import EntryDropout
from gradveil.defenses.example_clipping import ExampleClipping
from gradveil.defenses.gaussian_noise import GaussianNoise
from gradveil.defenses.laplace_noise import LaplaceNoise
from gradveil.defenses.none import NoDefense
from gradveil.defenses.pruning import Pruning
from gradveil.defenses.top_k import TopK
from gradveil.proofs.accountant import Method, epsilon
from gradveil.study.proved import Guarantee, Unit

__all__ = ["privacy_of"]

_AFTER = (NoDefense, Clipping, GaussianNoise, LaplaceNoise, Pruning, TopK, EntryDropout)
"""Look at nothing but the update they are given, so after the noise they reveal nothing more (post-processing)."""
_BEFORE_RECORD = (NoDefense, DataNoise, ExampleClipping)
"""Treat every record by itself, so before per-example clipping they let no record touch another's gradient."""

SUM = (
    "nobody sees anything but sums of {} equal clients, each of whom adds its noise: a client that adds none, or tells it, takes "
    "its share away"
)

_ALWAYS = (
    "the noise is drawn in floating point from a seeded generator, which the proof idealises as real numbers",
    "nothing else about the data is sent: no buffers of the model, and counts of examples are public",
)


def privacy_of(
    defense: Defense,
    *,
    steps: int = 1,
    sampling_rate: float = 1.0,
    delta: float = 1e-5,
    layers: int | None = None,
    method: Method = "rdp",
    summed: int = 1,
) -> Guarantee:
    """Return the differential privacy of a defense, or why it has none.

    Two things are certified: ``dp_sgd`` per record, and ``clipping + gaussian_noise`` on the whole update per client.

    Args:
        defense: A defense or chain.
        steps: Noisy releases a unit takes part in: for ``dp_sgd`` local steps over all rounds (with batches in a fixed order,
            only those that hold the record); for a client the rounds it takes part in.
        sampling_rate: Poisson sampling of records, for ``dp_sgd`` only. Sampling of clients hides nothing from a server that sees
            who sends.
        delta: Probability with which ε may fail.
        layers: Number of layers, needed where ``clipping`` acts on each by itself.
        method: How to bound sampled releases; see `gradveil.proofs.accountant.epsilon`.
        summed: Clients of whom nothing but the sum is seen, each with noise of its own; counts for whole clients alone.
    """
    parts = parts_of(defense)
    for index, part in enumerate(parts):
        if type(part) is DPSGD and part.bound is not None and part.noise_multiplier:
            reason = _blocked(parts, index, index, "record") or _sampling_fault(part, sampling_rate)
            if reason:
                return Guarantee(reason=reason)
            return _certify("record", part.noise_multiplier, steps, sampling_rate, delta, method)
    return _client_level(parts, steps, sampling_rate, delta, layers, method, summed)


def _client_level(
    parts: tuple[Defense, ...], steps: int, sampling_rate: float, delta: float, layers: int | None, method: Method, summed: int
) -> Guarantee:
    pair = next((i for i in range(len(parts) - 1) if _clips(parts[i]) and _adds_noise(parts[i + 1])), None)
    if pair is None:
        return Guarantee(reason=_why_not(parts))
    clipping, noise = parts[pair], parts[pair + 1]
    assert isinstance(clipping, Clipping) and isinstance(noise, GaussianNoise) and clipping.bound is not None
    reason = _blocked(parts, pair, pair + 1, "client")
    if sampling_rate < 1:
        reason = reason or "sampling of clients hides nothing from a server that sees who sends; set sampling_rate to 1"
    if clipping.scope == "layer" and layers is None:
        reason = reason or "every layer is clipped by itself, so the bound grows with their number; say how many layers there are"
    if reason:
        return Guarantee(reason=reason)
    sensitivity = clipping.bound * (math.sqrt(layers) if clipping.scope == "layer" and layers else 1.0)
    proved = _certify("client", noise.own_std * math.sqrt(summed) / sensitivity, steps, 1.0, delta, method)
    if proved.epsilon is None or summed == 1:
        return proved
    return dataclasses.replace(proved, summed=summed, sentence="", assumptions=(*proved.assumptions, SUM.format(summed)))


def _is(part: Defense, *kinds: type[Defense]) -> bool:
    """Whether a part is one of these very classes: what somebody's subclass changes, no proof covers."""
    return type(part) in kinds


def _clips(part: Defense) -> bool:
    return type(part) is Clipping and part.bound is not None


def _adds_noise(part: Defense) -> bool:
    return type(part) is GaussianNoise and part.std > 0


def _blocked(parts: tuple[Defense, ...], first: int, last: int, unit: Unit) -> str:
    """Return why the parts around the mechanism may undo its proof, or nothing."""
    for part in parts[last + 1 :]:
        if not _is(part, *_AFTER):
            return f"{part.card.name!r} comes after the noise, and it is not known to look at the noisy update alone"
    for part in parts[:first]:
        # For a whole client anything may happen before its update is clipped, as long as nothing else is sent.
        sends = part.overrides("encode") or part.overrides("layer_weights")
        if (sends if unit == "client" else not _is(part, *_BEFORE_RECORD)) and not _is(part, NoDefense):
            return f"{part.card.name!r} comes before the clipping, and it is not known to keep one {unit}'s share apart"
    return ""


def _sampling_fault(part: DPSGD, sampling_rate: float) -> str:
    if sampling_rate < 1 and not part.expected_batch:
        return "with Poisson sampling the divisor must not reveal how many records were drawn; set expected_batch"
    return ""


def _certify(unit: Unit, multiplier: float, steps: int, rate: float, delta: float, method: Method) -> Guarantee:
    value = epsilon(noise_multiplier=multiplier, steps=steps, sampling_rate=rate, delta=delta, method=method)
    if not math.isfinite(value):
        return Guarantee(reason="the noise is too small for any bound")
    share = "its gradient" if unit == "record" else "its clipped update"
    assumptions = (
        f"neighbours differ in one {unit}, of which {share} counts as zero; for one {unit} replaced by another, halve the noise "
        "multiplier",
        f"each record is in each of {steps} steps by an independent coin of probability {rate:g} (Poisson sampling)"
        if rate < 1
        else f"the {unit} takes part in at most {steps} noisy release{'s' if steps != 1 else ''}, and no sampling is counted",
        *_ALWAYS,
    )
    return Guarantee(
        epsilon=value,
        delta=delta,
        unit=unit,
        noise_multiplier=multiplier,
        steps=steps,
        sampling_rate=rate,
        method="exact" if rate == 1 else method,
        assumptions=assumptions,
    )


def _why_not(parts: tuple[Defense, ...]) -> str:
    if not any(part.stations() for part in parts):
        return "nothing is done to the update"
    if any(_adds_noise(part) for part in parts):
        return "gaussian_noise covers an update of any size; put clipping right before it"
    if any(type(part) is DPSGD for part in parts):
        return "dp_sgd adds no noise at these settings"
    return "no proof is known for " + " + ".join(part.card.name for part in parts)
