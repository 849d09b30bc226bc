"""What a defense promises about the attacker who knows it: an attacker that cannot tell the truth from noise proves nothing."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.func import grad, grad_and_value, vmap

from gradveil.adversary import OpenAdversary
from gradveil.attacks.engine.execution import Execution
from gradveil.attacks.engine.loop import Problem, optimise
from gradveil.attacks.engine.optimisers import Adam
from gradveil.defenses.base import Defense
from gradveil.defenses.none import NoDefense
from gradveil.learning.learner import Learner
from gradveil.learning.losses import cross_entropy
from gradveil.records import AdversaryModel, Batch, Observation, Reconstruction
from gradveil.study.local_training import TrainingSettings
from gradveil.tensors import Named, stack
from gradveil.testing.contract import NotApplicable, require
from gradveil.testing.defenses_scene import Scene, at, draw_batch

__all__ = ["ADVERSARY_CHECKS", "relative_residual"]

TRUTHS = 5
GUESSES = 4
FIT_STEPS = 60
ENOUGH = 0.9
"""Share of (truth, guess) pairs in which the truth must leave the smaller residual."""

ARRIVES = 1e-6
"""Unexplained shares below this are those of rounding."""
BETTER = 0.9
"""Share of what comparing updates leaves unexplained that an attacker who knows the defense may leave at most."""

LOCAL_TRAINING = TrainingSettings(shares="weights", local_steps=2, learning_rate=0.05)


def relative_residual(
    adversary: AdversaryModel, learner: Learner, evidence: Named, inputs: Tensor, targets: Tensor, variables: Named
) -> Tensor:
    """Return ‖simulated - observed‖² / ‖observed‖² over all compared tensors."""
    comparison = adversary.compare(evidence, adversary.replay(learner, inputs, targets, variables), variables)
    gap = torch.stack([value.square().sum() for value in comparison.residuals().values()]).sum()
    size = torch.stack([value.square().sum() for value in comparison.observed.values()]).sum()
    return gap / size.clamp(min=1e-30)


def adversary_gives_finite_numbers(defense: Defense, scene: Scene) -> None:
    """Evidence, replay, comparison, penalty, noise and finished inputs are finite and of the right kind."""
    observation = scene.observe(defense, 1, scene.batch)
    adversary = observation.adversary
    evidence, variables = _evidence(observation)
    comparison = adversary.compare(
        evidence, adversary.replay(scene.learner, scene.batch.inputs, scene.batch.targets, variables), variables
    )
    require(bool(comparison.simulated), "the attacker compares nothing")
    require(comparison.simulated.keys() == comparison.observed.keys(), "simulated and observed names differ")
    for what, named in (("evidence", evidence), ("simulated", comparison.simulated), ("observed", comparison.observed)):
        for name, value in named.items():
            require(bool(torch.isfinite(value).all()), f"{what} {name!r} is not finite")
    require(bool(torch.isfinite(adversary.penalty(variables))), "the penalty is not finite")
    told, std = adversary.arrives(observation), adversary.arrives(observation).noise_std
    require(std is None or std > 0, f"the noise is said to be {std}; it must be above zero, or None where there is none")
    for name in ("incomplete", "equal_weights", "plain_search", "raw_inputs"):
        require(isinstance(getattr(told, name), bool), f"{name} is neither True nor False")
    require(callable(told.exact), "exact is no function that names tensors; write exact=frozenset, or exact=lambda: names")
    told_round = told.least_protected_round
    require(0 <= told_round < len(observation.updates), f"least_protected_round is {told_round}, and there is no such round")
    rebuilt = Reconstruction(scene.batch.inputs.clone(), scene.batch.targets, "truth", variables=variables)
    finished = adversary.finish(rebuilt, observation).inputs
    require(finished.shape == scene.batch.inputs.shape, f"finishing changes the shape to {tuple(finished.shape)}")
    require(bool(((finished >= 0) & (finished <= 1)).all()), "finished inputs leave [0, 1]")


def exact_is_exact(defense: Defense, scene: Scene) -> None:
    """Tensors said to be exact are the raw gradient of one example up to a positive factor per layer."""
    one = Batch(scene.batch.inputs[:1], scene.batch.targets[:1])
    raw = scene.send(NoDefense(), batch=scene.trained(defense, 1, one)).weights
    observation = scene.observe(defense, 1, one)
    names = defense.adversary().arrives(observation).exact()
    unknown = names - observation.update.weights.keys()
    require(not unknown, f"tensors said to be exact are not in the update: {sorted(unknown)}")
    for layer in sorted({name.rpartition(".")[0] for name in names}):
        own = [name for name in raw if name in names and name.rpartition(".")[0] == layer]
        sent = torch.cat([observation.update.weights[name].double().reshape(-1) for name in own])
        true = torch.cat([raw[name].double().reshape(-1) for name in own])
        slack = 1 - torch.cosine_similarity(sent, true, dim=0) if bool(true.any()) else sent.abs().sum()
        require(
            bool(slack < 1e-9), f"{own} are said to be exact, but one minus their cosine with the raw gradient is {slack:.2g}"
        )


def noise_is_as_told(defense: Defense, scene: Scene) -> None:
    """Where the attacker says how strong the noise is, the truth leaves a residual of that size.

    Noise may depend on the data, so what is told for each update counts for that update.
    """
    expected, squares, entries = 0.0, 0.0, 0
    for seed in range(TRUTHS):
        truth = draw_batch(seed)
        observation = scene.observe(defense, seed, truth)
        told = observation.adversary.arrives(observation).noise_std
        if told is None:
            require(entries == 0, "the attacker knows the noise of one update and not of another")
            raise NotApplicable("the attacker knows of no noise on the update")
        evidence, variables = _evidence(observation)
        replayed = observation.adversary.replay(scene.learner, truth.inputs, truth.targets, variables)
        for residual in observation.adversary.compare(evidence, replayed, variables).residuals().values():
            squares, entries = squares + float(residual.double().square().sum()), entries + residual.numel()
            expected += told**2 * residual.numel()
    told, found = math.sqrt(expected / entries), math.sqrt(squares / entries)
    require(0.8 < found / told < 1.25, f"the noise is said to be {told:.3g} per entry; at the truth it is {found:.3g}")


def adversary_is_safe_under_vmap(defense: Defense, scene: Scene) -> None:
    """Many candidates at once give what one after the other gives."""
    observations = [scene.observe(defense, seed, draw_batch(seed)) for seed in (1, 2, 3)]
    adversary = observations[0].adversary
    gathered = [_evidence(observation) for observation in observations]
    guesses = [draw_batch(10 + index) for index in range(3)]
    inputs, targets = torch.stack([guess.inputs for guess in guesses]), torch.stack([guess.targets for guess in guesses])

    def score(x: Tensor, evidence: Named, variables: Named, y: Tensor) -> Tensor:
        return relative_residual(adversary, scene.learner, evidence, x, y, variables)

    alone = [grad_and_value(score)(x, *pair, y) for x, pair, y in zip(inputs, gathered, targets, strict=True)]
    variables = stack([pair[1] for pair in gathered]) if gathered[0][1] else {}
    slopes, values = vmap(grad_and_value(score), in_dims=(0, 0, 0 if variables else None, 0))(
        inputs, stack([pair[0] for pair in gathered]), variables, targets
    )
    expected = torch.stack([value for _, value in alone])
    require(
        torch.allclose(values, expected, rtol=1e-3), f"under vmap residuals are {values.tolist()} instead of {expected.tolist()}"
    )
    steep = torch.stack([slope for slope, _ in alone])
    require(bool((slopes - steep).norm() <= 1e-3 * steep.norm()), "under vmap the gradients of the residuals differ")


def adversary_points_somewhere(defense: Defense, scene: Scene) -> None:
    """The residual has a finite gradient with respect to the dummies that is not zero: the replay is not detached from them."""
    observation = scene.observe(defense, 1, scene.batch)
    evidence, variables = _evidence(observation)
    guess = draw_batch(20)

    def score(inputs: Tensor) -> Tensor:
        return relative_residual(observation.adversary, scene.learner, evidence, inputs, guess.targets, variables)

    slope = grad(score)(guess.inputs)
    require(bool(torch.isfinite(slope).all()), "the gradient of the residual is not finite")
    require(bool(slope.abs().max() > 0), "the residual does not move with the dummies: the replay is detached from them")


def adversary_prefers_the_truth(defense: Defense, scene: Scene) -> None:
    """The true inputs leave a smaller residual than random ones, for a gradient and for local training.

    The unknowns of the attacker are fitted to either: nobody who does not know a learning rate is asked to guess it.
    """
    card = type(defense).card
    # Strong noise hides the truth from everyone; the weakest rung is where an attacker has no excuse.
    weakest = at(defense, card.ladder[0]) if card.ladder else defense
    for one in dict.fromkeys((weakest,) if weakest.random or defense.random else (weakest, defense)):
        for settings in (TrainingSettings(), LOCAL_TRAINING):
            won = _share_won(one, Scene.of(one, settings=settings))
            what = "a gradient" if settings.shares == "gradient" else "local training"
            require(won >= ENOUGH, f"{one} with {what}: the truth beats random inputs in only {won:.0%} of the cases")


def _share_won(defense: Defense, scene: Scene) -> float:
    seen, candidates, targets = [], [], []
    for seed in range(TRUTHS):
        truth = draw_batch(seed)
        guesses = [draw_batch(50 + seed * GUESSES + guess) for guess in range(GUESSES)]
        seen.append(scene.observe(defense, seed, truth))
        candidates.append(torch.stack([truth.inputs, *(guess.inputs for guess in guesses)]))
        targets.append(truth.targets)
    wins = sum(best < other for best, *others in _fitted_residuals(seen, candidates, targets) for other in others)
    return wins / (TRUTHS * GUESSES)


def _fitted_residuals(seen: list[Observation], candidates: list[Tensor], targets: list[Tensor]) -> list[list[float]]:
    """Return each candidate's residual by observation, the smallest that the attacker's unknowns can make it from their start."""
    adversary, learner = seen[0].adversary, seen[0].learner
    gathered = [_evidence(observation) for observation in seen]
    if not gathered[0][1]:
        return [
            [float(relative_residual(adversary, learner, evidence, inputs, labels, {})) for inputs in own]
            for (evidence, _), own, labels in zip(gathered, candidates, targets, strict=True)
        ]
    # All observations are fitted at once: one after the other takes as many times as long.
    count = len(candidates[0])
    starts = {n: v.repeat_interleave(count, 0) for n, v in stack([variables for _, variables in gathered]).items()}
    constants = {f"evidence {n}": v.repeat_interleave(count, 0) for n, v in stack([own for own, _ in gathered]).items()}
    constants |= {"inputs": torch.cat(candidates), "targets": torch.stack(targets).repeat_interleave(count, 0)}

    def residual(leaves: Named, constants: Named) -> Tensor:
        evidence = {n.removeprefix("evidence "): v for n, v in constants.items() if n.startswith("evidence ")}
        return relative_residual(adversary, learner, evidence, constants["inputs"], constants["targets"], leaves)

    problem = Problem(residual, starts, constants)
    found = optimise(problem, Adam(learning_rate=0.1), FIT_STEPS, Execution("batched", count * len(seen))).best_loss
    return [each.tolist() for each in found.split(count)]


def adversary_undoes_something(defense: Defense, scene: Scene) -> None:
    """Where more than scale is changed, the attacker's comparison coincides better at the truth than comparing updates does.

    An attacker who searches as one who ignores the defense makes it look strong, whatever it is worth. Excused are those who
    know the law of the noise, since their search maximises its likelihood, and those who say that they are incomplete, since
    their rows are flagged. Once is enough, at the given setting or the strongest, for a steep loss or a common one: noise far
    below a steep gradient cannot be told from it, and who ignores the defense does so everywhere.
    """
    card = type(defense).card
    strongest = at(defense, card.ladder[-1]) if card.ladder else defense
    excuses, idle = [], []
    for one in dict.fromkeys((defense, strongest)):
        for place in (scene, Scene.of(one, loss=cross_entropy)):
            plain, own, excuse = _left_at_truth(one, place)
            if plain < ARRIVES or excuse:
                excuses.append(excuse if plain >= ARRIVES else "what arrives is what was computed, but for its scale")
                break
            if own < BETTER * plain:
                return
            idle.append(f"{one} changes {plain:.2g} of the update and its attacker leaves {own:.2g} unexplained at the truth,")
    require(
        not idle,
        f"{' '.join(idle[:1])} so informed: none ran; let adversary() replay the defense (on_gradient, on_update) or compare "
        "what survives it",
    )
    raise NotApplicable(excuses[-1])


def _left_at_truth(defense: Defense, scene: Scene) -> tuple[float, float, str]:
    """Return the share of the update that the truth leaves unexplained, in the mean, to plain and own attackers, and any excuse.

    Scale is free for both, and so are the unknowns of the defense's own.
    """
    plain, own, excuse = 0.0, 0.0, ""
    for seed in range(TRUTHS):
        raw = draw_batch(seed)
        observation = scene.observe(defense, seed, raw)
        told = observation.adversary.arrives(observation)
        if told.noise_std is not None:
            excuse = "the attacker knows the noise, and searches by its likelihood"
        elif told.incomplete:
            excuse = "the attacker says itself that it is incomplete"
        truth = scene.trained(defense, seed, raw).inputs
        plain += _unexplained(OpenAdversary(), observation, truth, raw.targets, {})
        replayed = raw.inputs if told.raw_inputs else truth
        variables = _evidence(observation)[1]
        ((fitted,),) = _fitted_residuals([observation], [replayed[None]], [raw.targets])
        own += min(fitted, _unexplained(observation.adversary, observation, replayed, raw.targets, variables))
    return plain / TRUTHS, own / TRUTHS, excuse


def _unexplained(adversary: AdversaryModel, seen: Observation, inputs: Tensor, targets: Tensor, variables: Named) -> float:
    """Return one minus the squared cosine between the two sides of a comparison, plus it where they point apart.

    No search looks at scale, and every search looks at the sign: an update that is turned round explains nothing.
    """
    evidence, learner = adversary.evidence(seen, 0), seen.learner
    both = adversary.compare(evidence, adversary.replay(learner, inputs, targets, variables), variables)
    left, right = (torch.cat([side[n].double().reshape(-1) for n in both.simulated]) for side in (both.simulated, both.observed))
    size, along = left.square().sum() * right.square().sum(), left @ right
    return float(1 - along * along.abs() / size) if float(size) > 0 else float(bool(left.any()) or bool(right.any()))


def _evidence(observation: Observation) -> tuple[Named, Named]:
    generator = torch.Generator().manual_seed(3)
    adversary = observation.adversary
    return adversary.evidence(observation, 0), adversary.variables(observation, generator)


ADVERSARY_CHECKS = (
    adversary_gives_finite_numbers,
    adversary_is_safe_under_vmap,
    adversary_points_somewhere,
    exact_is_exact,
    noise_is_as_told,
    adversary_prefers_the_truth,
    adversary_undoes_something,
)
