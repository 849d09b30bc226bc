"""A generator-assisted attack on embeddings, after the idea of PISTE (Xu et al. 2025): an untrained decoder paints the input.

The decoder's weights are optimised instead of pixels. What a convolutional decoder paints easily looks more like a picture than
like noise, and that alone is a prior (the deep image prior of Ulyanov et al. 2018).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from gradveil.adversary import prefixed, with_prefix
from gradveil.attacks.adaptive import adversary_for
from gradveil.attacks.base import ATTACKS, Attack, AttackCard, AttackContext, Cost
from gradveil.attacks.engine.execution import choose_execution
from gradveil.attacks.engine.labels import recover_labels
from gradveil.attacks.engine.loop import Problem, optimise
from gradveil.attacks.engine.objectives import OBJECTIVES
from gradveil.attacks.engine.optimisers import Adam
from gradveil.attacks.engine.priors import total_variation
from gradveil.errors import UsageError, suggest
from gradveil.learning.embedding import EmbeddingLearner
from gradveil.records import Knowledge, Observation, Reconstruction
from gradveil.study.checks import check_whole
from gradveil.tensors import Named

__all__ = ["Decoder", "PisteLike"]

STANCES = ("plain", "informed")
PAINT = "paint/"
UNKNOWN = "unknown/"
HIDDEN = 128


class Decoder(nn.Module):
    """From codes (B, latent) to inputs (B, *shape) in [0, 1]: upsampling convolutions for pictures, a perceptron for the rest."""

    def __init__(self, shape: tuple[int, ...], latent: int, width: int) -> None:
        """Make the layers; `drawn` gives them weights."""
        super().__init__()
        self.shape, self.width = shape, width
        self.picture = len(shape) == 3
        if self.picture:
            self.corner = tuple(-(-length // 4) for length in shape[1:])
            self.start = nn.Linear(latent, width * math.prod(self.corner))
            self.blocks = nn.ModuleList(nn.Conv2d(width, width, 3, padding=1) for _ in range(2))
            self.norms = nn.ModuleList(nn.GroupNorm(1, width) for _ in range(2))
            self.last: nn.Module = nn.Conv2d(width, shape[0], 3, padding=1)
        else:
            self.start, self.last = nn.Linear(latent, HIDDEN), nn.Linear(HIDDEN, math.prod(shape))

    def forward(self, codes: Tensor) -> Tensor:
        """Return the inputs painted from codes."""
        hidden = self.start(codes)
        if not self.picture:
            return torch.sigmoid(self.last(F.leaky_relu(hidden, 0.2))).reshape(-1, *self.shape)
        hidden = hidden.reshape(-1, self.width, *self.corner)
        for convolution, norm in zip(self.blocks, self.norms, strict=True):
            # Nearest-neighbour growth by repetition: unlike interpolate it has forward rules for every transform.
            hidden = hidden.repeat_interleave(2, dim=2).repeat_interleave(2, dim=3)
            hidden = F.leaky_relu(norm(convolution(hidden)), 0.2)
        painted: Tensor = torch.sigmoid(self.last(hidden)[:, :, : self.shape[1], : self.shape[2]])
        return painted

    def drawn(self, generator: torch.Generator) -> Named:
        """Draw weights N(0, 2 / fan-in); biases are zero, norms the identity, and the last layer starts small, at grey."""
        weights: Named = {}
        for name, value in self.named_parameters():
            if value.ndim == 1:
                weights[name] = (
                    torch.ones(value.shape) if name.startswith("norms") and name.endswith("weight") else torch.zeros(value.shape)
                )
                continue
            scale = math.sqrt(2 / value[0].numel()) * (0.1 if name.startswith("last") else 1.0)
            weights[name] = scale * torch.randn(value.shape, generator=generator)
        return weights


@ATTACKS.register(
    AttackCard(
        name="piste_like",
        summary="Fits an untrained decoder until what it paints has the embedding seen.",
        paper="Xu et al., Finding the PISTE: Towards Understanding Privacy Leaks in Vertical Federated Learning Systems, 2025",
        url="https://openreview.net/forum?id=sqV5woW888",
        cost="one backward pass through bottom model and decoder per step and candidate; thousands of steps",
        weakness="knows no real pictures: where the embedding leaves details open it paints smooth ones",
        needs=frozenset({Knowledge.ARCHITECTURE, Knowledge.EXAMPLES}),
        home="sigmoid LeNet cut after its first activation, one 3×16×16 picture, 200 steps",
        floor_psnr=28.0,
    )
)
@dataclass(frozen=True, kw_only=True)
class PisteLike(Attack):
    """Minimise ``|e(G(z)) - e|^2 / |e|^2 + tv TV(G(z))`` by Adam over weights and code of an untrained decoder G.

    Departs from the paper: we had no code of it, and the paper that uses it as a baseline (InvRE) tells only "deep generative
    model, Adam, 2,000 iterations"; so this is a stand-in, and results with it are results with *this* attack. Everything else is
    our choice: the decoder, the relative squared error, total variation. It is not conditional on the label: at prediction time
    nobody has one, and for a decoder fitted to one record a label would be one more constant.

    Cost: 2,000 steps. Known weakness: no knowledge of real pictures beyond what a small decoder paints easily.

    Attributes:
        steps: Evaluations per candidate.
        restarts: Decoders per target.
        learning_rate: Of Adam.
        tv: Weight of total variation, against a matching loss that is 1 where nothing is painted of what was seen.
        latent: Length of the code.
        width: Channels of the decoder.
        stance: ``plain``, or ``informed`` with the defense's own attacker.
    """

    card: ClassVar[AttackCard]
    steps: int = 2000
    restarts: int = 1
    learning_rate: float = 0.003
    tv: float = 1e-4
    latent: int = 32
    width: int = 32
    stance: str = "plain"

    def __post_init__(self) -> None:
        """Refuse settings that mean nothing when the attack is made, not when it runs."""
        if self.stance not in STANCES:
            raise UsageError(f"piste_like has no stance {self.stance!r}{suggest(self.stance, STANCES)}")
        for name in ("steps", "restarts", "latent", "width"):
            check_whole("piste_like", name, getattr(self, name), 1)

    @property
    def stances(self) -> tuple[str, ...]:
        """Plain, or with the defense's own attacker."""
        return STANCES

    def cost(self) -> Cost:
        """Return its steps and restarts."""
        return Cost(self.steps, self.restarts)

    def applies(self, observation: Observation) -> str | None:
        """Return why not, unless an embedding was seen."""
        return None if isinstance(observation.learner, EmbeddingLearner) else "no embedding was seen"

    def run(self, observations: Sequence[Observation], context: AttackContext) -> list[Reconstruction]:
        """Fit one decoder per target and restart, all at once."""
        first = observations[0]
        adversary, learner, steps = adversary_for(self.stance, first), first.learner, context.steps(self.steps)
        with torch.device("meta"):  # structure only: layers with memory would draw their weights from the global generator
            decoder = Decoder(first.input_shape, self.latent, self.width)
        distance = OBJECTIVES.get("relative_l2")

        def paint(leaves: Named) -> Tensor:
            painted: Tensor = functional_call(decoder, prefixed(leaves, PAINT), (leaves["code"],))
            return painted

        def misfit(leaves: Named, constants: Named, inputs: Tensor) -> Tensor:
            unknown = prefixed(leaves, UNKNOWN)
            simulated = adversary.replay(learner, inputs, constants["labels"], unknown)
            return distance(adversary.compare(prefixed(constants, "0|"), simulated, unknown))

        def loss(leaves: Named, constants: Named) -> Tensor:
            inputs, unknown = paint(leaves), prefixed(leaves, UNKNOWN)
            total = misfit(leaves, constants, inputs) + self.tv * total_variation(inputs)
            return total + adversary.penalty(unknown) if unknown else total

        leaves, constants = self._starts(observations, decoder, context)
        size = sum(value[0].numel() for value in leaves.values()) + learner.parameters
        execution = choose_execution(
            context.execution, constants["labels"].device, size, len(leaves["code"]), first.examples, steps
        )
        problem = Problem(loss, leaves, constants)
        outcome = optimise(problem, Adam(learning_rate=self.learning_rate), steps, execution, progress=context.progress)
        found = []
        for row in range(len(leaves["code"])):
            target, restart = divmod(row, self.restarts)
            own = {name: value[row] for name, value in outcome.leaves.items()}
            fixed = {name: value[row] for name, value in constants.items()}
            begun = {name: value[row] for name, value in leaves.items()}
            with torch.no_grad():
                inputs = paint(own)
                first_loss, best_loss = misfit(begun, fixed, paint(begun)), misfit(own, fixed, inputs)
            found.append(
                Reconstruction(
                    inputs=inputs,
                    targets=fixed["labels"],
                    recipe=self.card.name,
                    target=target,
                    stance=self.stance,
                    restart=restart,
                    variables=prefixed(own, UNKNOWN),
                    first_loss=float(first_loss),
                    best_loss=float(best_loss),
                    gradient_norm=float(outcome.gradient_norm[row]),
                    steps=int(outcome.steps[row]),
                    status=outcome.status[row],
                )
            )
        return found

    def _starts(self, observations: Sequence[Observation], decoder: Decoder, context: AttackContext) -> tuple[Named, Named]:
        """Draw decoders and codes, and gather evidence: targets in order, restarts next to each other."""
        adversary = adversary_for(self.stance, observations[0])
        leaves, constants = [], []
        for index, observation in enumerate(observations):
            reference = next(iter(observation.update.weights.values()))
            evidence = with_prefix(adversary.evidence(observation, 0), "0|")
            labels = recover_labels(observation)
            for restart in range(self.restarts):
                generator = context.seed.child(self.card.name, "restart", restart).generator("start", client=index)
                own = with_prefix(decoder.drawn(generator), PAINT)
                own["code"] = torch.randn((observation.examples, self.latent), generator=generator)
                own |= with_prefix(adversary.variables(observation, generator), UNKNOWN)
                leaves.append({name: value.to(reference) for name, value in own.items()})
                constants.append({**evidence, "labels": labels})
        return _stacked(leaves), _stacked(constants)


def _stacked(rows: list[Named]) -> Named:
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
