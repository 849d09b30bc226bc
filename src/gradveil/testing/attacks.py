"""The contract every attack keeps, as named checks that anyone can run on their own.

    from gradveil.testing.attacks import check_attack
    for result in check_attack(MyAttack()):
        print(result.status, result.check, result.message)

A check takes the attack and a `Scene`, and raises `ContractFailure` with one sentence when the promise is broken. A broken
attack makes every defense look good, and one that sees the truth makes every defense look bad; the floor, the null and the checks
on what an attack reads are there to tell.
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gradveil.attacks.base import ATTACKS, Attack, launch
from gradveil.attacks.engine.matching import LIKELIHOOD
from gradveil.attacks.engine.objectives import OBJECTIVES
from gradveil.attacks.gradient_matching import GradientMatching
from gradveil.errors import MissingKnowledge, UsageError
from gradveil.metrics.psnr import peak_signal_to_noise
from gradveil.records import Comparison, Knowledge, Observation, Reconstruction, ThreatModel
from gradveil.registry import config_of
from gradveil.testing.attacks_scene import BRIEF, HOME_STEPS, Scene, best_psnr, home_pictures
from gradveil.testing.contract import CheckResult, NotApplicable, require, require_frozen_dataclass, run_checks

__all__ = ["ATTACK_CHECKS", "Check", "check_attack"]

Check = Callable[[Attack, Scene], None]

STATUSES = ("finished", "stopped early", "not finite")
NULL_MARGIN_DB = 1.0
NULL_RESEMBLANCE = 0.15
SPARE_EVALUATIONS = 8
"""Beyond its steps an attack may look at the model a few times: to recover labels, to measure its start and its end."""


def check_attack(attack: Attack) -> list[CheckResult]:
    """Run all checks on one attack and return what each found."""
    try:
        scene = Scene.of(attack)
    except NotApplicable as reason:
        return [CheckResult("applies_somewhere", "failed", str(reason))]
    return run_checks(ATTACK_CHECKS, attack, scene)


def builds_with_defaults(attack: Attack, scene: Scene) -> None:
    """The class is a frozen dataclass that needs no arguments, and equal settings make equal objects."""
    require_frozen_dataclass(type(attack))


def card_is_complete(attack: Attack, scene: Scene) -> None:
    """The card says what the attack does, what it costs and asks for, and where it must succeed."""
    card = attack.card
    for field in ("name", "summary", "cost", "weakness", "home"):
        require(bool(getattr(card, field).strip()), f"the card has no {field}")
    require(card.summary.endswith("."), "the summary is not a sentence: it does not end with a full stop")
    require(bool(card.paper) == bool(card.url), "a paper needs a link, and a link needs a paper")
    require(not card.url or card.url.startswith("https://"), f"the link {card.url!r} does not start with https://")
    require(card.floor_psnr > 0, "the card has no floor: a score the attack must reach at home")
    require(bool(card.needs) and all(isinstance(item, Knowledge) for item in card.needs), "the card does not say what it needs")
    text = type(attack).__doc__ or ""
    for words in ("Departs from the paper", "Cost", "Known weakness"):
        require(words in text, f"the docstring does not say {words!r}")


def rebuilt_is_equal(attack: Attack, scene: Scene) -> None:
    """Saved as plain values and built again, an attack is equal; an unknown setting is answered with the nearest right one."""
    kind: Any = type(attack)
    config = config_of(attack)
    if config["name"] not in ATTACKS.names() or ATTACKS.get(config["name"]) is not kind:
        config["name"] = f"{kind.__module__}:{kind.__qualname__}"
    rebuilt = ATTACKS.build(config)
    require(rebuilt == attack and type(rebuilt) is kind, f"{attack} saved and built again is {rebuilt}")
    for wrong in [field.name + "s" for field in dataclasses.fields(kind) if field.init] or ["stepz"]:
        try:
            ATTACKS.build({**config, wrong: 1})
        except UsageError as error:
            known = "did you mean" in str(error) or not dataclasses.fields(kind)
            require(known, f"the unknown setting {wrong!r} is refused without a suggestion")
            continue
        require(False, f"the unknown setting {wrong!r} is accepted")


def answers_are_well_formed(attack: Attack, scene: Scene) -> None:
    """Every target gets an answer of the data's shape, finite and inside [0, 1], with labels, a status and honest bookkeeping."""
    found = launch(attack, scene.observe_all(3), scene.context(BRIEF))
    require(
        {candidate.target for candidate in found} == {0, 1, 2}, "not every target has an answer, or one that was not asked for"
    )
    for candidate in found:
        require(candidate.inputs.shape == scene.inputs[:1].shape, f"an answer has shape {tuple(candidate.inputs.shape)}")
        require(bool(torch.isfinite(candidate.inputs).all()), "an answer is not finite")
        require(bool(((candidate.inputs >= 0) & (candidate.inputs <= 1)).all()), "an answer leaves [0, 1]")
        require(candidate.targets.shape[0] == 1, f"labels have shape {tuple(candidate.targets.shape)} for one example")
        require(candidate.status in STATUSES, f"the status {candidate.status!r} is none of {', '.join(STATUSES)}")
        require(bool(candidate.recipe), "an answer does not name its recipe")
        require(not candidate.oracle_labels, "an answer says that true labels were used; none were granted")
        require(not math.isnan(candidate.first_loss + candidate.best_loss), "losses are not reported")


def nothing_shown_is_changed(attack: Attack, scene: Scene) -> None:
    """Model, weights and updates stay as they were, and no hook is left on the model."""
    observations = scene.observe_all(2)
    module = scene.learner.model
    shown = [*scene.learner.weights.values(), *scene.learner.buffers.values(), *module.state_dict().values()]
    shown += [value for observation in observations for value in observation.update.weights.values()]
    before = [value.detach().clone() for value in shown]
    state = _bearing(module)
    launch(attack, observations, scene.context(BRIEF))
    require(all(torch.equal(a, b) for a, b in zip(shown, before, strict=True)), "the model or the update is written to")
    require(_bearing(module) == state, "the model's mode changes, or a hook is left on it")


def global_generators_are_untouched(attack: Attack, scene: Scene) -> None:
    """Randomness comes from the context alone."""
    observations = scene.observe_all(2)
    before = torch.get_rng_state(), str(np.random.get_state(legacy=False)), random.getstate()
    launch(attack, observations, scene.context(BRIEF))
    after = torch.get_rng_state(), str(np.random.get_state(legacy=False)), random.getstate()
    require(torch.equal(before[0], after[0]), "the global generator of torch is moved")
    require(before[1:] == after[1:], "the global generator of numpy or random is moved")


def same_seed_same_bits(attack: Attack, scene: Scene) -> None:
    """The same seed gives the same bits."""
    first, second = (launch(attack, scene.observe_all(2), scene.context(BRIEF)) for _ in range(2))
    require(_same(first, second), "the same seed gives another answer the second time")


def missing_knowledge_is_named(attack: Attack, scene: Scene) -> None:
    """Where something the card asks for is withheld, the refusal names it."""
    for item in attack.card.needs:
        threat = ThreatModel(knows=frozenset(Knowledge) - {item})
        try:
            launch(attack, [scene.observe(0, threat=threat, labels=scene.labels[:1])], scene.context(2))
        except MissingKnowledge as error:
            require(str(item) in str(error), f"the refusal does not name what is missing, {item}: {error}")
            continue
        require(False, f"the attack runs although {item} is withheld")


def asks_only_for_declared_knowledge(attack: Attack, scene: Scene) -> None:
    """What the card does not ask for is not used: traps in its place are not sprung, and wrong labels change nothing."""
    needs = attack.card.needs
    clean, planted = [], []
    for index in range(2):
        own = scene.labels[index : index + 1] if Knowledge.LABELS in needs else None
        seen = scene.observe(index, threat=ThreatModel(knows=needs), labels=own)
        clean.append(seen)
        wrong = own if own is not None else (scene.labels[index : index + 1] + 5) % seen.classes
        planted.append(seen.replace(labels=wrong, adversary=seen.adversary if Knowledge.DEFENSE in needs else _Trap()))
    simulate = None if Knowledge.DEFENSE in needs else _trapped_simulate
    expected = launch(attack, clean, scene.context(BRIEF))
    found = launch(attack, planted, scene.context(BRIEF, simulate=simulate))
    require(_same(expected, found), "the answer changes with labels that the attack was not granted")


def random_update_tells_nothing(attack: Attack, scene: Scene) -> None:
    """From an update made of noise the attack gets no further than a guess without it; else it sees the truth."""
    truth = scene.inputs
    found = launch(attack, [scene.observe_noise(index) for index in range(len(truth))], scene.context(HOME_STEPS // 3))
    guesses = [torch.full_like(truth, 0.5), home_pictures().mean(0, keepdim=True).expand_as(truth)]
    bar = torch.stack([peak_signal_to_noise(guess, truth) for guess in guesses]).max(0).values
    gain = float((best_psnr(found, truth) - bar).max())
    require(gain <= NULL_MARGIN_DB, f"from a random update it comes {gain:.1f} dB closer to the truth than guessing")
    # A trace of the truth in a bad picture is below any guess in decibels, but it resembles its own truth more than the others.
    table = torch.stack([_resemblance(candidate.inputs, truth) for candidate in found])
    own = table[range(len(found)), [candidate.target for candidate in found]]
    excess = float((own - (table.sum(1) - own) / (len(truth) - 1)).mean())
    require(
        excess <= NULL_RESEMBLANCE, f"from a random update its answers correlate with their own truths by {excess:.2f} too much"
    )


def reaches_its_floor(attack: Attack, scene: Scene) -> None:
    """At home, without a defense, the attack reaches the score on its card; else it would make every defense look good."""
    found = launch(attack, scene.observe_all(), scene.context(HOME_STEPS))
    median = float(best_psnr(found, scene.inputs).quantile(0.5))
    require(median >= attack.card.floor_psnr, f"at home the median is {median:.1f} dB, below {attack.card.floor_psnr:.1f} dB")


def matching_is_alive(attack: Attack, scene: Scene) -> None:
    """An attack that searches has a slope to follow, and what it minimises falls."""
    for candidate in _searching(launch(attack, scene.observe_all(2), scene.context(3 * BRIEF))):
        slope = candidate.gradient_norm
        require(
            math.isfinite(slope) and slope > 0, f"the matching loss has slope {slope} at the start: detached from the dummies"
        )
        moved = candidate.best_loss < 0.999 * candidate.first_loss
        require(moved, f"the matching loss never fell: {candidate.first_loss:.3g} at the start, {candidate.best_loss:.3g} kept")


def stops_within_budget(attack: Attack, scene: Scene) -> None:
    """The attack looks at the model no more often than its budget allows, and says how often."""
    for budget in (1, 7):
        counting = scene.through(_Counting)
        counter = counting.learner.model
        observations = counting.observe_all(2)
        assert isinstance(counter, _Counting)
        counter.calls = 0
        done: list[int] = []
        found = launch(attack, observations, counting.context(budget, progress=done.append))
        spent = max(candidate.steps for candidate in found)
        require(spent <= budget, f"a budget of {budget} steps is said to be spent on {spent}")
        most = budget + SPARE_EVALUATIONS
        require(counter.calls <= most, f"with a budget of {budget} steps the model is looked at {counter.calls} times")
        wanted = sum(candidate.steps for candidate in found)
        require(sum(done) >= wanted, f"{wanted} steps are done, but progress tells of {sum(done)}")


def best_so_far_survives_what_is_not_finite(attack: Attack, scene: Scene) -> None:
    """Where values stop being finite on the way to the truth, the attack returns the best it had, and says so."""
    _searching(launch(attack, scene.observe_all(1), scene.context(2)))
    direction = scene.inputs[:1] - 0.5
    direction = direction / direction.square().sum()
    sent = scene.through(lambda model: _Wall(model, direction, float("inf"))).observe(0)
    walled = scene.through(lambda model: _Wall(model, direction, 0.4)).learner
    seen = sent.replace(learners=(walled,))
    for candidate in attack.run([seen], scene.context(HOME_STEPS // 3)):
        require(bool(torch.isfinite(candidate.inputs).all()), "an answer is not finite before it is made presentable")
        require(candidate.best_loss < candidate.first_loss, "what was reached before values stopped being finite is lost")
        require(candidate.status in STATUSES, f"the status {candidate.status!r} is none of {', '.join(STATUSES)}")


def company_does_not_matter(attack: Attack, scene: Scene) -> None:
    """A target's answer is the same, up to rounding, whoever is attacked beside it."""
    exact = scene.exactly()
    a, b, c, d = exact.observe_all()
    together = _by_target(attack.run([a, b, c], exact.context(BRIEF)))
    pairs = [(together[0], _by_target(attack.run([a], exact.context(BRIEF)))[0], "alone")]
    pairs += [(together[1], _by_target(attack.run([d, b], exact.context(BRIEF)))[1], "in other company")]
    for left, right, where in pairs:
        gap = max(float((x.inputs - y.inputs).abs().max()) for x, y in zip(left, right, strict=True))
        require(gap < 1e-6, f"attacked {where}, a target's answer differs by {gap:.2g}")


def stances_and_cost_are_told(attack: Attack, scene: Scene) -> None:
    """Every stance it says it takes it can be set to, no other; and it spends no more steps and candidates than it says."""
    for stance in attack.stances:
        turned = attack.with_stance(stance)
        require(turned.stance == stance and type(turned) is type(attack), f"with stance {stance!r} it has {turned.stance!r}")
    try:
        attack.with_stance("no such stance")
        require(False, "it takes a stance that there is not")
    except UsageError:
        pass
    cost, found = attack.cost(), launch(attack, scene.observe_all(2), scene.context(BRIEF))
    spent, most = max(candidate.steps for candidate in found), max(len(own) for own in _by_target(found).values())
    require(spent <= cost.steps, f"it says that a candidate costs {cost.steps} steps, and spends {spent}")
    require(most <= cost.restarts, f"it says that a target costs {cost.restarts} candidates, and makes {most}")


def best_restart_is_kept(attack: Attack, scene: Scene) -> None:
    """More restarts never end with a worse matching loss."""
    restarting: Any = attack
    if "restarts" not in {field.name for field in dataclasses.fields(restarting)}:
        raise NotApplicable("the attack has no restarts")
    exact = scene.exactly()
    once, thrice = (
        _by_target(dataclasses.replace(restarting, restarts=count).run(exact.observe_all(), exact.context(BRIEF)))
        for count in (1, 3)
    )
    for target, alone in once.items():
        first, best = alone[0].best_loss, min(candidate.best_loss for candidate in thrice[target])
        require(best <= first * (1 + 1e-6), f"one restart reaches a loss of {first:.4g}, three end with {best:.4g}")


def best_iterate_is_kept(attack: Attack, scene: Scene) -> None:
    """The loss reported is that of the answer, and going on never makes it worse."""
    kind: Any = attack
    if not isinstance(attack, GradientMatching) or kind.recipe().objective == LIKELIHOOD:
        raise NotApplicable("the attack is no recipe, so its loss cannot be computed from outside")
    exact = scene.exactly()
    names = {field.name for field in dataclasses.fields(kind)}
    # Without schedules a short run is the beginning of a long one; without a prior the best iterate is the best match; and with
    # a stride that is too long the last iterate is not.
    plain = {
        "schedule": "constant",
        "learning_rate": 0.5,
        "tv": 0.0,
        "tv_end": None,
        "relative": False,
        "smooth_relu": False,
    }
    attack = dataclasses.replace(kind, **{name: value for name, value in plain.items() if name in names})
    before = float("inf")
    for budget in range(20, 24):
        (candidate,) = attack.run(exact.observe_all(1), exact.context(budget))[:1]
        if candidate.stance == "plain" and kind.recipe().labels != "joint":
            found = _recomputed(kind.recipe().objective, exact.observe(0), candidate)
            require(
                math.isclose(found, candidate.best_loss, rel_tol=1e-6),
                f"loss {candidate.best_loss:.4g} is reported for {found:.4g}",
            )
        require(candidate.best_loss <= before * (1 + 1e-6), f"{budget} steps end with a larger loss than {budget - 1}")
        before = candidate.best_loss


def _recomputed(objective: str, observation: Observation, candidate: Reconstruction) -> float:
    simulated = observation.learner.update(candidate.inputs, candidate.targets)
    return float(OBJECTIVES.get(objective)(Comparison(simulated, observation.update.weights)))


def _resemblance(picture: Tensor, truths: Tensor) -> Tensor:
    """Return the correlation over pixels of one picture with every truth."""
    flat = torch.cat([picture.to(truths), truths]).double().flatten(1)
    return torch.nan_to_num(torch.corrcoef(flat)[0, 1:])


def _searching(found: Sequence[Reconstruction]) -> Sequence[Reconstruction]:
    if all(candidate.steps == 0 for candidate in found):
        raise NotApplicable("the attack takes no steps")
    return found


def _by_target(found: Sequence[Reconstruction]) -> dict[int, list[Reconstruction]]:
    return {target: [c for c in found if c.target == target] for target in sorted({c.target for c in found})}


def _same(left: Sequence[Reconstruction], right: Sequence[Reconstruction]) -> bool:
    pairs = zip(left, right, strict=True)
    return all(torch.equal(a.inputs, b.inputs) and torch.equal(a.targets, b.targets) for a, b in pairs)


def _bearing(module: nn.Module) -> list[tuple[bool, int]]:
    return [(part.training, len(part._forward_hooks) + len(part._forward_pre_hooks)) for part in module.modules()]


class _Trap:
    """An adversary model that must not be looked at."""

    def __getattr__(self, name: str) -> Any:
        raise MissingKnowledge(f"the attack looks at {name!r} of an adversary model it did not ask for")


def _trapped_simulate(inputs: Tensor, targets: Tensor, draw: int) -> Any:
    raise MissingKnowledge("the attack uses the defended client, which it did not ask for")


class _Counting(nn.Module):
    """Counts how often a model is looked at."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.calls = model, 0

    def forward(self, inputs: Tensor) -> Any:
        self.calls += 1
        return self.model(inputs)


class _Wall(nn.Module):
    """Answers NaN to inputs that have gone a share ``limit`` of the way from grey to the truth."""

    direction: Tensor

    def __init__(self, model: nn.Module, direction: Tensor, limit: float) -> None:
        super().__init__()
        self.model, self.limit = model, limit
        self.register_buffer("direction", direction)

    def forward(self, inputs: Tensor) -> Any:
        gone = ((inputs - 0.5) * self.direction).sum()
        return self.model(inputs + torch.where(gone > self.limit, float("nan"), 0.0))


ATTACK_CHECKS: tuple[Check, ...] = (
    builds_with_defaults,
    card_is_complete,
    rebuilt_is_equal,
    answers_are_well_formed,
    nothing_shown_is_changed,
    global_generators_are_untouched,
    same_seed_same_bits,
    missing_knowledge_is_named,
    asks_only_for_declared_knowledge,
    random_update_tells_nothing,
    reaches_its_floor,
    matching_is_alive,
    stops_within_budget,
    best_so_far_survives_what_is_not_finite,
    company_does_not_matter,
    stances_and_cost_are_told,
    best_restart_is_kept,
    best_iterate_is_kept,
)
