"""MQ: layers are rounded with different numbers of bits and in different ways."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import cycle
from typing import Literal

from torch import Tensor

from gradveil.adversary import OBSERVED, OpenAdversary, with_prefix
from gradveil.defenses.base import DEFENSES, ClientView, Defense, DefenseCard, State
from gradveil.defenses.quantisation import LEAST_BITS, MOST_BITS, RoundedAdversary, quantise
from gradveil.errors import UsageError
from gradveil.records import Comparison, ModelSpec, Observation, Payload, Role, Update, WhatArrives
from gradveil.study.checks import check_choice, check_whole
from gradveil.tensors import Named, check_finite
from gradveil.wire.quantised import QUANTISED, Grid, decode_quantised, encode_quantised

__all__ = ["HiddenRangesAdversary", "MixedQuantisation", "MixedRoundedAdversary", "mixed_grids"]

Observer = Literal["server", "outside"]
OBSERVERS = ("server", "outside")


def mixed_grids(names: Iterable[str], bits: tuple[int, ...]) -> dict[str, Grid]:
    """Return the grid of every tensor: layers take turns in bits, and in whether their grid is symmetric about zero.

    Weight and bias of a layer share their turn. An even layer's grid spans what it holds, from the smallest entry to the largest;
    an odd layer's is symmetric, with zero as a level.
    """
    own = list(names)
    layers = list(dict.fromkeys(name.rpartition(".")[0] for name in own))
    turns = {
        layer: Grid(2**width - index % 2, symmetric=index % 2 == 1)
        for index, (layer, width) in enumerate(zip(layers, cycle(bits), strict=False))
    }
    return {name: turns[name.rpartition(".")[0]] for name in own}


@dataclass(frozen=True)
class MixedRoundedAdversary(RoundedAdversary):
    """The server, which must know bits and ranges to add updates up: knows the interval of every entry, layer by layer."""

    bits: tuple[int, ...] = ()

    def intervals(self, seen: Named) -> tuple[Named, Named]:
        """Return what every entry may have been before rounding on the grid of its layer."""
        grids = mixed_grids(seen, self.bits)
        widths = {name: self.reach * grids[name].step(grids[name].ends(value)) for name, value in seen.items()}
        return {n: v - widths[n] for n, v in seen.items()}, {n: v + widths[n] for n, v in seen.items()}


@dataclass(frozen=True)
class HiddenRangesAdversary(OpenAdversary):
    """An observer who reads the codes but not the ranges: compares every tensor after taking off its mean and its length.

    What is left of a tensor is the same for its codes as for its values, whatever the range, so nothing of the range is used.
    Nor is the rounding: codes say which interval a value came from, and here they are compared as if they were values.
    """

    def arrives(self, observation: Observation) -> WhatArrives:
        """Say that nothing is exact, every entry being rounded; incomplete, since what rounding did is left out."""
        return super().arrives(observation).replace(exact=frozenset, incomplete=True)

    def evidence(self, observation: Observation, round_index: int) -> Named:
        """Return the standardised update."""
        seen = observation.updates[round_index].weights
        return with_prefix({name: _standardised(value) for name, value in seen.items()}, OBSERVED)

    def compare(self, evidence: Named, simulated: Named, variables: Named) -> Comparison:
        """Standardise the simulation too."""
        return super().compare(evidence, {name: _standardised(value) for name, value in simulated.items()}, variables)


def _standardised(value: Tensor) -> Tensor:
    if value.numel() < 2:
        return value * 0
    centred = value - value.mean()
    return centred * (centred.square().sum() + 1e-24).rsqrt()


@DEFENSES.register(
    DefenseCard(
        name="mq",
        summary="Rounds the layers of the update with different numbers of bits and on different kinds of grids.",
        paper="Ovi, Dey, Roy and Gangopadhyay, Mixed Quantization Enabled Federated Learning to Tackle Gradient Inversion "
        "Attacks, CVPR workshops 2023",
        url="https://mdsoar.org/handle/11603/28233",
        cost="one pass over the weights; sends bits / 32 of the bytes, layer by layer (not under secure aggregation)",
        weakness="the server needs bits and ranges to add updates up, so they are hidden from outside observers at best; and "
        "each layer's pattern survives any unknown range",
        acts_on=("update", "wire"),
        ladder=({"bits": (12, 8)}, {"bits": (8, 4)}, {"bits": (4, 3)}, {"bits": (2, 2)}),
        reconstruction_of_paper=True,
    )
)
@dataclass(frozen=True, kw_only=True)
class MixedQuantisation(Defense):
    """Mixed quantisation: layer l is rounded to the nearest of 2^b_l levels, ``q = round((u - low) / (high - low) (2^b_l - 1))``.

    Layers take turns in ``bits`` and in the kind of their grid: from the smallest entry to the largest, or symmetric about zero
    with one level less. low and high are those of the tensor; a constant tensor arrives as it is.

    From whom the ranges are hidden: from nobody who aggregates. A server that decodes must know bits and ranges, and both are in
    its payload; only an observer of the codes alone does without. ``observer`` says which of the two attacks: with ``outside``
    the informed attacker uses only what codes tell, but other attackers of an audit still see what the server sees.

    Departs from the paper: a reconstruction. Its list of bits, its modes and code are not public; the affine form and the two
    kinds of grid are ours.

    Cost: one pass; bytes as said. Known weakness: `MixedRoundedAdversary` uses the intervals, `HiddenRangesAdversary` needs none.

    Attributes:
        bits: Per entry, one number for each layer in turn, from 2 to 16.
        observer: ``server``, who knows the ranges, or ``outside``, who does not.
    """

    bits: tuple[int, ...] = (8, 4)
    observer: Observer = "server"

    def __post_init__(self) -> None:
        """Refuse an empty list and impossible numbers of bits."""
        given: object = self.bits
        if not isinstance(given, tuple) or not given:
            raise UsageError(f"mq: bits is {self.bits!r}; give a list with one number or more, as (8, 4)")
        for bits in self.bits:
            check_whole("mq", "bits", bits, LEAST_BITS, MOST_BITS)
        check_choice("mq", "observer", self.observer, OBSERVERS)

    def protect_update(self, update: Update, view: ClientView, state: State) -> tuple[Update, State]:
        """Round every weight tensor on the grid of its layer."""
        check_finite(update.weights)
        grids = mixed_grids(update.weights, self.bits)
        return update.replace(weights={name: quantise(value, grids[name]) for name, value in update.weights.items()}), state

    def encode(self, update: Update, view: ClientView) -> Payload:
        """Pack the codes."""
        return encode_quantised(update, mixed_grids(update.weights, self.bits))

    def decode(self, payload: Payload, spec: ModelSpec) -> Update:
        """Unpack the codes, after checking every one."""
        return decode_quantised(payload, spec, mixed_grids(spec.named(Role.WEIGHT), self.bits))

    @property
    def scheme(self) -> str:
        """Name of the quantised scheme."""
        return QUANTISED

    def adversary(self) -> OpenAdversary:
        """Return the attacker behind ``observer``."""
        return HiddenRangesAdversary() if self.observer == "outside" else MixedRoundedAdversary(Grid(2), bits=self.bits)
