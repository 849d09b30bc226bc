"""Peeling: where max pooling scrambles the gradient, find the features behind the first pool, then the image that has them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from gradveil.adversary import prefixed, with_prefix
from gradveil.attacks.base import ATTACKS, Attack, AttackCard, AttackContext, Cost
from gradveil.attacks.engine.execution import COARSE_FROM, Execution, choose_execution
from gradveil.attacks.engine.label_belief import label_hypotheses
from gradveil.attacks.engine.loop import Problem, optimise
from gradveil.attacks.engine.matrix_convolution import quicker
from gradveil.attacks.engine.objectives import OBJECTIVES
from gradveil.attacks.engine.optimisers import Adam
from gradveil.attacks.engine.priors import total_variation
from gradveil.attacks.engine.smooth_relu import SHARPNESS, all_children, sharpness_at, smooth_learner, with_sharpness
from gradveil.attacks.engine.soft_pool import plain_pool, with_soft_pools
from gradveil.learning.learner import Learner
from gradveil.records import Comparison, Knowledge, Observation, Reconstruction
from gradveil.study.checks import check_number
from gradveil.tensors import Named, matrix_products

__all__ = ["Peeling"]

ROUNDS = 3
ROUND = 300
"""Steps below which a further round takes more than it gives."""
FEATURE_SHARE = 0.55
SETTLED = 0.9
SHARP = 100.0
SPREAD = (0.5, 25.0)
"""Sharpness of the spread pool at the start and at the end of a search for the image."""


@dataclass(frozen=True)
class _Peeled:
    """A network cut behind its first max pool.

    Attributes:
        bottom: Up to and with the pool, its slope spread.
        top: The rest, smooth; its weights bear the names they have in the update, after ``prefix``.
        prefix: What names in the update begin with.
        rectified: Whether what leaves the pool cannot be negative.
    """

    bottom: Learner
    top: Learner
    prefix: str
    rectified: bool


def _row_of_layers(learner: Learner) -> tuple[str, nn.Sequential] | None:
    """Return the ``nn.Sequential`` that holds all weights, with the prefix of its names."""
    for name, module in learner.model.named_modules():
        prefix = f"{name}." if name else ""
        if isinstance(module, nn.Sequential) and all(weight.startswith(prefix) for weight in learner.weights):
            return prefix, module
    return None


def _bare(named: Named, prefix: str) -> Named:
    return {name.removeprefix(prefix): value for name, value in named.items() if name.startswith(prefix)}


def _peel(learner: Learner, input_shape: tuple[int, ...]) -> _Peeled | str:
    """Cut a network, or say why it cannot be cut."""
    row = _row_of_layers(learner)
    if row is None:
        return "the model is not one row of layers (nn.Sequential)"
    prefix, layers = row
    children = all_children(layers)
    if len(learner.weights) < sum(1 for _, layer in children for _ in layer.parameters()):
        return "layers of the model share their weights"
    cut = next((index + 1 for index, (_, layer) in enumerate(children) if plain_pool(layer)), 0)
    if not cut:
        return "the model's row of layers has no max pooling, or its windows overlap"
    reference = next(iter(learner.weights.values()))
    hard, soft = [], []
    for chosen, spread in ((children[:cut], True), (children[cut:], False)):
        own = nn.Sequential()
        for name, layer in chosen:
            own.add_module(name, layer)
        names = {name for name, _ in (*own.named_parameters(), *own.named_buffers())}
        weights = {n: v for n, v in _bare(learner.weights, prefix).items() if n in names}
        buffers = {n: v for n, v in _bare(learner.buffers, prefix).items() if n in names}
        hard.append(learner.replace(model=own, weights=weights, buffers=buffers))
        model = with_soft_pools(own, spread=spread)
        added = {n: b.to(reference) for n, b in model.named_buffers() if n.endswith(SHARPNESS)}
        soft.append(learner.replace(model=model, weights=weights, buffers=buffers | added))
    bottom, top = soft
    if not top.weights:
        return "no weights come after the first pool"
    probe = torch.linspace(0, 1, math.prod(input_shape)).to(reference).reshape(1, *input_shape)
    if not _same_outputs(learner, hard, probe):
        return "the model does more than its row of layers"
    return _Peeled(bottom, smooth_learner(top), prefix, cut > 1 and isinstance(children[cut - 2][1], nn.ReLU))


def _same_outputs(learner: Learner, parts: Sequence[Learner], probe: Tensor) -> bool:
    """Whether the parts one after another do what the model does; a wrapper may do more than call its layers."""
    with torch.no_grad():
        whole = learner.forward(learner.weights, probe)
        try:
            for part in parts:
                probe = part.forward(part.weights, probe)
        except (RuntimeError, ValueError):
            return False  # the wrapper gives its layers something else than its input
    if not (isinstance(whole, Tensor) and isinstance(probe, Tensor)) or whole.shape != probe.shape:
        return False
    # Rounding only: of some networks the whole input moves the outputs by less than a ten-thousandth.
    return bool((whole - probe).norm() <= 100 * torch.finfo(whole.dtype).eps * whole.norm())


@ATTACKS.register(
    AttackCard(
        name="peeling",
        summary="Finds the features behind the first max pool from the gradients of later layers, then the image that has them.",
        cost="per step a double backward pass through the layers behind the first pool, or one through those before",
        weakness="one example, one gradient, a row of layers with max pooling; contrast comes back too low",
        needs=frozenset({Knowledge.ARCHITECTURE, Knowledge.EXAMPLES}),
        home="small ReLU network with max pooling, one 3×16×16 picture, 200 steps",
        floor_psnr=14.0,
    )
)
@dataclass(frozen=True, kw_only=True)
class Peeling(Attack):
    """Minimise ``sum_l |g_l(h) - g_l|^2 / |g_l|^2`` over features h, then ``|b(x) - h|^2 + tv TV(x)`` over images x, in turn.

    g_l are the gradients of the layers behind the first max pool, b the layers up to it. Matching all gradients in the image
    fails there: which entry of a pool is largest jumps with the smallest change of the image, and all gradients before the pool
    with it. Behind it there are fewer jumps, and more gradients than features. Both searches use the
    stand-ins of `gradveil.attacks.engine.soft_pool`. Every round starts the features from those of the image so far: pictures are
    smoother than features, so this corrects entries that the last round got wrong.

    Departs from the paper: there is none; the idea of solving layer by layer is that of R-GAP (Zhu and Blaschko, 2021).

    Cost: a few passes per step, of a part of the network. Known weakness: scale matters, so clipping ends it; and
        normalisation hides contrast, which the prior then makes too low.

    Attributes:
        steps: Evaluations per candidate, of both searches and all rounds together.
        restarts: Starts per target.
        learning_rate: Of Adam on the image; half of it on the features.
        tv: Weight of total variation at the start of a search, in units of the misfit of the first features.
        tv_end: Weight at its end.
    """

    card: ClassVar[AttackCard]
    steps: int = 1800
    restarts: int = 1
    learning_rate: float = 0.1
    tv: float = 1.0
    tv_end: float = 0.02
    stance: str = "plain"

    def __post_init__(self) -> None:
        """Refuse a weight that cannot change geometrically."""
        for name in ("tv", "tv_end"):
            check_number("peeling", name, getattr(self, name), open_below=True)

    @property
    def stances(self) -> tuple[str, ...]:
        """Plain; or informed, which searches with every label that the defense leaves plausible and compares as before."""
        return ("plain", "informed")

    def hypotheses(self, observation: Observation, context: AttackContext) -> int:
        """Return the number of plausible labels."""
        return len(label_hypotheses(observation.clearest, self.stance, context))

    def cost(self) -> Cost:
        """Return its steps and restarts."""
        return Cost(self.steps, self.restarts)

    def applies(self, observation: Observation) -> str | None:
        """Return why not, unless one gradient of one example through a row of layers with max pooling was seen."""
        learner = observation.learner
        if observation.examples != 1:
            return "more than one example stands behind the update"
        if observation.threat.sees != "update" or learner.settings.shares != "gradient":
            return "no single gradient was seen"
        if learner.noise:
            return "the model draws noise"
        if observation.classes == 0 and not _labels_given(observation):
            return "the targets are no classes, so they cannot be recovered, and they were not given"
        peeled = _peel(learner, observation.input_shape)
        return peeled if isinstance(peeled, str) else None

    def run(self, observations: Sequence[Observation], context: AttackContext) -> list[Reconstruction]:
        """Peel all observations at once."""
        learner = observations[0].learner
        with matrix_products(learner.device, coarse=learner.parameters >= COARSE_FROM):
            return self._run(observations, context)

    def _run(self, observations: Sequence[Observation], context: AttackContext) -> list[Reconstruction]:
        observations = [observation.clearest for observation in observations]
        first = observations[0]
        parts = _peel(first.learner, first.input_shape)
        assert isinstance(parts, _Peeled)  # `applies` has checked
        bottom, top = (quicker(part, first.input_shape) for part in (parts.bottom, parts.top))
        parts = replace(parts, bottom=bottom, top=top)
        places, images, seen = self._starts(observations, parts, context)
        plan = _plan(context.steps(self.steps))
        # Every round searches twice, each time by a program of its own: recording that pays on a GPU, compiling it nowhere.
        longest = max(image_steps for _, image_steps in plan) if images.device.type == "cuda" else 0
        execution = choose_execution(context.execution, images.device, first.learner.parameters, images.shape[0], 1, longest)
        search = _Search(self, parts, images, seen, execution, context)
        begin = images
        features = search.first_features()
        unit = search.unit(images, features)
        spent = torch.zeros(images.shape[0], dtype=torch.int64)
        status = ["finished"] * images.shape[0]
        for number, (feature_steps, image_steps) in enumerate(plan):
            if number:
                features = search.features_of(images)
            if feature_steps:
                features, steps, ends = search.features(features, feature_steps, 2.0 if number else 1.0)
                spent, status = spent + steps.cpu(), _worst(status, ends)
            images, steps, ends = search.images(images, features, unit, image_steps)
            spent, status = spent + steps.cpu(), _worst(status, ends)
        slope, before = search.measure(begin)
        _, after = search.measure(images)
        return [
            Reconstruction(
                inputs=images[row],
                targets=seen["labels"][row],
                recipe=self.card.name,
                target=target,
                stance=self.stance,
                restart=restart,
                hypothesis=hypothesis,
                first_loss=float(before[row]),
                best_loss=float(after[row]),
                gradient_norm=float(slope[row]),
                steps=int(spent[row]),
                status=status[row],
                oracle_labels=_labels_given(observations[target]),
            )
            for row, (target, hypothesis, restart) in enumerate(places)
        ]

    def _starts(
        self, observations: Sequence[Observation], parts: _Peeled, context: AttackContext
    ) -> tuple[list[tuple[int, int, int]], Tensor, Named]:
        """Draw the images to begin with, and gather what was seen of the top and its labels.

        First comes, of every candidate, its target, its hypothesis about the label and its restart.
        """
        places, images, rows = [], [], []
        for index, observation in enumerate(observations):
            update = observation.update.weights
            choices = label_hypotheses(observation, self.stance, context)
            for hypothesis, restart in itertools.product(range(len(choices)), range(self.restarts)):
                generator = context.seed.child(self.card.name, restart).generator("start", client=index)
                noise = torch.randn((1, *observation.input_shape), generator=generator)
                own = {name: update[parts.prefix + name] for name in parts.top.weights}
                # Normalisation blows a grey picture up to whatever noise is in it; so the start has contrast of its own.
                images.append((0.5 + 0.1 * noise).clamp(0, 1).to(next(iter(own.values()))))
                places.append((index, hypothesis, restart))
                rows.append({"labels": choices[hypothesis], **with_prefix(own, "seen|")})
        return places, torch.stack(images), {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


@dataclass(frozen=True)
class _Search:
    """Both searches on all candidates."""

    attack: Peeling
    parts: _Peeled
    begin: Tensor
    seen: Named
    execution: Execution
    context: AttackContext

    def features_of(self, images: Tensor) -> Tensor:
        """Return (N, 1, C, ...) what the pool gives for images; its sharpness moves slopes only."""
        with torch.no_grad():
            return torch.stack([self.parts.bottom.forward(self.parts.bottom.weights, image) for image in images])

    def first_features(self) -> Tensor:
        """Return the mean over places of what the pool gives for the first images: right in size, all but silent on places."""
        found = self.features_of(self.begin)
        level = found.mean(tuple(range(3, found.ndim)), keepdim=True)
        return level + 0.1 * (found - level)

    def unit(self, images: Tensor, features: Tensor) -> Tensor:
        """Return one over the misfit of the first images, per candidate."""
        return 1 / (self.features_of(images) - features).square().flatten(1).sum(1).clamp_min(1e-30)

    def features(self, start: Tensor, steps: int, sharpness: float) -> tuple[Tensor, Tensor, list[str]]:
        """Search for features whose gradients are those seen."""
        constants = {**self.seen, SHARPNESS: start.new_full((start.shape[0],), sharpness)}

        def loss(leaves: Named, constants: Named) -> Tensor:
            return self._mismatch(leaves["features"], constants)

        def refresh(step: int, leaves: Named, constants: Named) -> Named:
            now = sharpness_at(step, steps, start=sharpness, end=SHARP, settle=SETTLED)
            return {**constants, SHARPNESS: torch.full_like(constants[SHARPNESS], now)}

        rate = Adam(learning_rate=self.attack.learning_rate / 2, schedule="cosine")
        problem = Problem(loss, {"features": start}, constants, refresh=refresh, tracks=_settled(steps))
        outcome = optimise(problem, rate, steps, self.execution, progress=self.context.progress)
        found = outcome.leaves["features"]
        return found.abs() if self.parts.rectified else found, outcome.steps, outcome.status

    def images(self, start: Tensor, features: Tensor, unit: Tensor, steps: int) -> tuple[Tensor, Tensor, list[str]]:
        """Search for images that have the features."""
        attack, bottom, one = self.attack, self.parts.bottom, torch.ones_like(unit)
        constants = {"features": features, "unit": unit, "tv": one * attack.tv, SHARPNESS: one * SPREAD[0]}

        def loss(leaves: Named, constants: Named) -> Tensor:
            spread = with_sharpness(bottom, constants[SHARPNESS])
            found: Tensor = spread.forward(spread.weights, leaves["inputs"])
            misfit = (found - constants["features"]).square().sum()
            return misfit * constants["unit"] + constants["tv"] * total_variation(leaves["inputs"])

        def refresh(step: int, leaves: Named, constants: Named) -> Named:
            share = min(1.0, step / max(1.0, SETTLED * steps))
            now = sharpness_at(step, steps, start=SPREAD[0], end=SPREAD[1], settle=SETTLED)
            return {**constants, "tv": one * attack.tv * (attack.tv_end / attack.tv) ** share, SHARPNESS: one * now}

        problem = Problem(loss, {"inputs": start}, constants, frozenset({"inputs"}), refresh, _settled(steps))
        rate = Adam(learning_rate=attack.learning_rate, schedule="cosine")
        outcome = optimise(problem, rate, steps, self.execution, progress=self.context.progress)
        return outcome.leaves["inputs"], outcome.steps, outcome.status

    def measure(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Return slope and value of the mismatch of the top's gradients at images."""
        bottom = self.parts.bottom

        def mismatch(row: Tensor, constants: Named) -> Tensor:
            image = row.reshape(images.shape[1:])
            spread = with_sharpness(bottom, constants["spread"])
            return self._mismatch(spread.forward(spread.weights, image), constants)

        one = images.new_ones(images.shape[0])
        constants = {**self.seen, SHARPNESS: one * SHARP, "spread": one * SPREAD[0]}
        gradients, values = self.execution.once().prepare(mismatch)(images.flatten(1), constants)
        return gradients.norm(dim=1), values

    def _mismatch(self, features: Tensor, constants: Named) -> Tensor:
        top = with_sharpness(self.parts.top, constants[SHARPNESS])
        # A reflected start has somewhere to go; one cut off at zero would have no slope there.
        features = features.abs() if self.parts.rectified else features
        simulated = top.gradient(top.weights, features, constants["labels"])
        return OBJECTIVES.get("relative_l2")(Comparison(simulated, prefixed(constants, "seen|")))


def _labels_given(observation: Observation) -> bool:
    return Knowledge.LABELS in observation.threat.knows and observation.labels is not None


def _plan(steps: int) -> list[tuple[int, int]]:
    """Return steps for features and for images, round by round; together no more than ``steps``."""
    rounds = max(1, min(ROUNDS, steps // ROUND))
    each = steps // rounds
    features = int(FEATURE_SHARE * each)
    return [(features, each - features)] * rounds


def _settled(steps: int) -> Callable[[int], bool]:
    """Losses are comparable only once schedules have settled."""
    begin = min(math.ceil(SETTLED * steps), steps - 1)
    return lambda step: step >= begin


def _worst(before: list[str], now: list[str]) -> list[str]:
    return [new if new == "not finite" else old for old, new in zip(before, now, strict=True)]
