"""The contract every defense keeps, as named checks that anyone can run on their own.

    from gradveil.testing.defenses import check_defense
    for result in check_defense(MyDefense()):
        print(result.status, result.check, result.message)

A check takes the defense and a `Scene`, and raises `ContractFailure` with one sentence when the promise is broken. The attacker's
side of the contract is in `gradveil.testing.defenses_adversary`, the wire's in `gradveil.testing.defenses_wire`.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import random
from collections.abc import Callable

import numpy as np
import torch

from gradveil.client.embedding import vertical_fault
from gradveil.defenses.base import DEFENSES, NEEDS, Defense
from gradveil.defenses.chain import Chain, granularity_of, is_adapted
from gradveil.defenses.none import NoDefense
from gradveil.errors import BadUpdate, UsageError
from gradveil.learning.embedding import EMBEDDING
from gradveil.registry import config_of
from gradveil.tensors import Named
from gradveil.testing.contract import CheckResult, NotApplicable, require, require_frozen_dataclass, run_checks
from gradveil.testing.defenses_adversary import ADVERSARY_CHECKS
from gradveil.testing.defenses_scene import EmbeddingScene, Scene, at, distance, draw_batch
from gradveil.testing.defenses_wire import WIRE_CHECKS

__all__ = ["DEFENSE_CHECKS", "Check", "check_defense"]

Check = Callable[[Defense, Scene], None]

LATER_ROUNDS = (0, 3, 7, 1000)
"""Rounds in which a defense that rests after a while is looked at."""

STATION_WORDS = {
    "configure_training": "training",
    "adapt_model": "model",
    "protect_batch": "data",
    "protect_gradient": "gradient",
    "protect_embedding": "embedding",
    "protect_update": "update",
    "encode": "wire",
    "layer_weights": "aggregation",
    "correct_aggregate": "aggregation",
}


def check_defense(defense: Defense) -> list[CheckResult]:
    """Run all checks on one defense and return what each found."""
    return run_checks(DEFENSE_CHECKS, defense, Scene.of(defense))


def builds_with_defaults(defense: Defense, scene: Scene) -> None:
    """The class is a frozen dataclass that needs no arguments, and equal settings make equal objects."""
    require_frozen_dataclass(type(defense))


def card_is_complete(defense: Defense, scene: Scene) -> None:
    """The card says what the defense does, where, at what cost, what is wrong with it and how strong it can be."""
    card = type(defense).card
    for field in ("name", "summary", "cost", "weakness"):
        require(bool(getattr(card, field).strip()), f"the card has no {field}")
    require(card.summary.endswith("."), "the summary is not a sentence: it does not end with a full stop")
    require(bool(card.paper) == bool(card.url), "a paper needs a link, and a link needs a paper")
    require(not card.url or card.url.startswith("https://"), f"the link {card.url!r} does not start with https://")
    text = type(defense).__doc__ or ""
    for words in ("Departs from the paper", "Cost", "Known weakness"):
        require(words in text, f"the docstring does not say {words!r}")
    said = {STATION_WORDS[hook] for hook in defense.stations() if hook in STATION_WORDS}
    require(set(card.acts_on) == said, f"the card says it acts on {sorted(card.acts_on)}, its hooks say {sorted(said)}")


def ladder_builds(defense: Defense, scene: Scene) -> None:
    """There are three to five rungs, all different; every rung and the off setting are accepted."""
    card = type(defense).card
    idle = not defense.stations()
    require(idle or 3 <= len(card.ladder) <= 5, f"the ladder has {len(card.ladder)} rungs instead of three to five")
    rungs = [at(defense, setting) for setting in card.ladder]
    require(len(set(rungs)) == len(rungs), "two rungs of the ladder are the same")
    if card.off is not None:
        at(defense, card.off)


def names_and_shapes_are_kept(defense: Defense, scene: Scene) -> None:
    """Names and their order, shapes, precision, number of examples and round come out as they went in."""
    for dtype in (torch.float32, torch.float64):
        own = Scene.of(defense, dtype=dtype)
        before = own.update()
        after = own.release(defense, before.weights)
        require(list(after.weights) == list(before.weights), f"names or their order change: {list(after.weights)}")
        for name, value in before.weights.items():
            got = after.weights[name]
            require(got.shape == value.shape, f"{name!r} changes from shape {tuple(value.shape)} to {tuple(got.shape)}")
            require(got.dtype == value.dtype, f"{name!r} changes from {value.dtype} to {got.dtype}")
            require(got.device == value.device, f"{name!r} moves from {value.device} to {got.device}")
        require((after.examples, after.round) == (before.examples, before.round), "the number of examples or the round changes")
        batch, _ = defense.protect_batch(own.batch, own.view(), defense.prepare(own.batch, own.view()))
        require(batch.inputs.shape == own.batch.inputs.shape, f"inputs change shape to {tuple(batch.inputs.shape)}")
        require(bool(((batch.inputs >= 0) & (batch.inputs <= 1)).all()), "inputs leave [0, 1]")


def inputs_are_untouched(defense: Defense, scene: Scene) -> None:
    """Hooks write neither to the update, the batch, the gradient nor the model, and leave no hook on it."""
    view, weights = scene.view(), scene.gradient()
    single = granularity_of(defense) == "example"
    gradient = {name: value.unsqueeze(0).clone() for name, value in weights.items()} if single else scene.gradient()
    shown: dict[str, Named] = {
        "the update": weights,
        "the gradient": gradient,
        "the batch": {"inputs": scene.batch.inputs, "targets": scene.batch.targets},
        "the global weights": scene.learner.weights,
        "the model": dict(scene.learner.model.named_parameters()),
    }
    before = {what: {name: value.detach().clone() for name, value in named.items()} for what, named in shown.items()}
    modes = [(module.training, len(module._forward_hooks)) for module in scene.learner.model.modules()]
    state = defense.prepare(scene.batch, view)
    _, state = defense.protect_batch(scene.batch, view, state)
    _, state = defense.protect_gradient(gradient, view, state)
    if isinstance(scene, EmbeddingScene):
        _, state = defense.protect_embedding(gradient[EMBEDDING], view, state)
    update, state = defense.protect_update(scene.update(weights), view, state)
    defense.encode(update, view)
    for what, named in shown.items():
        for name, value in named.items():
            require(torch.equal(value, before[what][name]), f"{what} is written to: {name!r}")
    now = [(module.training, len(module._forward_hooks)) for module in scene.learner.model.modules()]
    require(now == modes, "the model's mode changes, or a hook is left on it")


def global_generators_are_untouched(defense: Defense, scene: Scene) -> None:
    """Randomness comes from the view alone."""
    before = torch.get_rng_state(), str(np.random.get_state(legacy=False)), random.getstate()
    scene.send(defense)
    scene.release(defense, scene.gradient())
    after = torch.get_rng_state(), str(np.random.get_state(legacy=False)), random.getstate()
    for name, left, right in zip(("torch", "numpy", "random"), before, after, strict=True):
        same = torch.equal(left, right) if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor) else left == right
        require(same, f"the global generator of {name} is moved")


def randomness_is_declared(defense: Defense, scene: Scene) -> None:
    """The same seed gives the same bits; another seed gives others exactly where the defense says it is random."""
    card = type(defense).card
    strongest = at(defense, card.ladder[-1]) if card.ladder else defense
    for one in dict.fromkeys((defense, strongest)):  # equal ones are asked once
        where = scene if is_adapted(one, scene.learner.model) else Scene.of(one)
        first, second = where.send(one, seed=1), where.send(one, seed=1)
        require(_same(first.weights, second.weights), "the same seed gives other bits the second time")
    differs = not _same(first.weights, where.send(strongest, seed=2).weights)
    require(differs or not strongest.random, "the card says random, but another seed gives the same update")
    require(strongest.random or not differs, "the card does not say random, but another seed gives another update")
    require(card.random or not defense.random, "the defense says it is random at these settings, but its card does not")


def keeps_no_memory(defense: Defense, scene: Scene) -> None:
    """What comes out depends on what goes in, not on what went through before."""
    settings = copy.deepcopy(vars(defense))
    other = {name: value.flip(0) * 3 if value.ndim else value * 3 for name, value in scene.gradient().items()}
    first = scene.release(defense, scene.gradient())
    scene.release(defense, other)
    scene.send(defense, batch=draw_batch(7))
    again = scene.release(defense, scene.gradient())
    require(_same(first.weights, again.weights), "the same update comes out differently after another one went through")
    require(repr(settings) == repr(vars(defense)), "the object changes while it is used; state must go in and out of the hooks")


def needs_are_real(defense: Defense, scene: Scene) -> None:
    """What a defense says it needs it cannot do without, and what it does not say it can.

    A caller is refused by what is said here: a need too few lets a client send what is not protected, one too many keeps a
    defense from people who could use it.
    """
    defense = defense.quick()
    needed, derived = defense.needs(), Defense.needs(defense)
    require(needed <= NEEDS.keys(), f"the needs {sorted(needed - NEEDS.keys())} are none of {', '.join(NEEDS)}")
    require(derived <= needed, f"the hooks need {', '.join(sorted(derived - needed))}, and `needs` does not say so")
    # A party has no loss; so for a defense that parties can use, that is where it must do without.
    party = vertical_fault(defense) is None
    scenes = {"batch": scene, "loss": EmbeddingScene.of_party() if party else scene, "public": scene}
    for need in ("batch", "loss", "public"):
        if need not in derived:
            told, differs = need in needed, _does_differently(defense, scenes[need], need)
            require(differs or not told, f"`needs` says {need}, and without it the same is sent")
            require(told or not differs, f"without {need} something else is sent or nothing, and `needs` does not say {need}")


def _does_differently(defense: Defense, scene: Scene, without: str) -> bool:
    """Whether the hooks raise, or give something else, when a caller cannot give one thing."""
    public = draw_batch(5, next(iter(scene.learner.weights.values())).dtype).inputs
    whole = scene.view().replace(public=public if "public" in defense.needs() else None)
    views = {
        "batch": whole.replace(batch=None, raw_batch=None),
        "loss": whole.replace(learner=whole.learner.replace(loss=_no_loss)),
        "public": whole.replace(public=None),
    }
    expected = scene.through_hooks(defense, whole)
    try:
        return not _same(expected, scene.through_hooks(defense, views[without]))
    except (UsageError, NoLoss):
        return True


class NoLoss(Exception):
    """Somebody asked for a loss that the caller does not have."""


def _no_loss(outputs: object, targets: object) -> torch.Tensor:
    raise NoLoss


def off_is_the_identity(defense: Defense, scene: Scene) -> None:
    """At the card's off setting the client sends what it would send without a defense."""
    card = type(defense).card
    if card.off is None:
        raise NotApplicable("the card says the defense has no off setting")
    off = at(defense, card.off)
    raw, sent = scene.send(NoDefense()), scene.send(off)
    # Averaging per-example gradients rounds differently from the gradient of the mean.
    tolerance = 1e-5 if granularity_of(defense) == "example" else 0.0
    gap = distance(sent.weights, raw.weights)
    require(gap <= tolerance, f"at {dict(card.off)} the update differs by {gap:.2g} of its norm instead of not at all")


def more_strength_distorts_more(defense: Defense, scene: Scene) -> None:
    """Along the ladder the update moves further and further from the raw one, and the strongest rung does change it."""
    card = type(defense).card
    if not defense.stations():
        raise NotApplicable("the defense does nothing anywhere")
    if defense.overrides("adapt_model"):
        raise NotApplicable("the defense changes the model, so there is no raw update to compare with")
    require(bool(card.ladder), "the ladder has no rung, so nothing shows which way it turns")
    drawn = any(at(defense, setting).random for setting in card.ladder)
    seeds = range(1, 4) if drawn else range(1, 2)
    raw = {seed: scene.send(NoDefense(), seed).weights for seed in seeds}

    def distortion(setting: object, rounds: tuple[int, ...]) -> float:
        rung = at(defense, setting)
        pairs = [(scene.send(rung, seed, round_index=each).weights, raw[seed]) for seed in seeds for each in rounds]
        return math.fsum(distance(sent, own) for sent, own in pairs) / len(pairs)

    found = [distortion(setting, (0,)) for setting in card.ladder]
    if max(found) == min(found) > 0:
        # Strength may be how long a defense lasts: then rungs differ in later rounds only.
        found = [distortion(setting, LATER_ROUNDS) for setting in card.ladder]
    slack = 0.9 if drawn else 1 - 1e-6
    for setting, weaker, stronger in zip(card.ladder[1:], found, found[1:], strict=False):
        require(
            stronger >= slack * weaker, f"{dict(setting)} distorts by {stronger:.3g}, less than the {weaker:.3g} of a weaker rung"
        )
    require(found[-1] > found[0], f"the strongest rung distorts by {found[-1]:.3g}, no more than the weakest")


def odd_updates_survive(defense: Defense, scene: Scene) -> None:
    """Zero, constant, tiny and huge updates come out finite."""
    like = scene.gradient()
    odd = {
        "zero": {name: torch.zeros_like(value) for name, value in like.items()},
        "constant": {name: torch.full_like(value, 0.5) for name, value in like.items()},
        "tiny": {name: value * 1e-30 for name, value in like.items()},
        "huge": {name: value * 1e25 for name, value in like.items()},
    }
    for what, weights in odd.items():
        try:
            sent = scene.release(defense, weights)
        except BadUpdate as error:
            require(False, f"a {what} update is refused or comes out broken: {error}")
        finite = all(bool(torch.isfinite(value).all()) for value in sent.weights.values())
        require(finite, f"a {what} update comes out with entries that are not finite")


def scalar_is_one_entry(defense: Defense, scene: Scene) -> None:
    """A scalar is protected as a tensor of one entry is, and empty tensors are allowed."""
    # Flower's clipping helper edits list items in place, so it never clips a scalar: the case this check comes from.
    if isinstance(scene, EmbeddingScene):
        raise NotApplicable("an embedding is one tensor with a row per record, never a scalar")
    for size in (20.0, 0.0):
        numbers = {"first": torch.tensor(size), "second": torch.linspace(1, 2, 6) * size, "none": torch.empty(0)}
        try:
            sent = scene.release(defense, numbers).weights
        except BadUpdate:
            # A defense that follows the model may refuse tensors the model does not have; the model's own are then looked at.
            own = scene.release(defense, scene.gradient()).weights
            moved = {name: bool((value != scene.gradient()[name]).any()) for name, value in own.items()}
            require(own["gain"].shape == () and own["unused"].shape == (0,), "the model's scalar or empty tensor changes shape")
            require(moved["gain"] or not any(moved.values()), "the model's scalar is left unprotected")
            continue
        flat = scene.release(defense, {**numbers, "first": torch.tensor([size])}).weights
        require(sent["first"].shape == (), f"a scalar comes out with shape {tuple(sent['first'].shape)}")
        same = torch.allclose(sent["first"], flat["first"].reshape(()), rtol=1e-5, atol=1e-7)
        require(same, f"a scalar of {size:g} becomes {float(sent['first'])}, as a tensor of one entry {float(flat['first'])}")


def not_finite_is_refused(defense: Defense, scene: Scene) -> None:
    """An update with a NaN or an infinity raises `BadUpdate` before it reaches the server's model."""
    for bad in (math.nan, math.inf):
        weights = scene.gradient()
        name = next(iter(weights))
        weights[name] = weights[name].clone()
        weights[name].view(-1)[0] = bad
        try:
            scene.release(defense, weights)
        except BadUpdate:
            continue
        require(False, f"an update with an entry of {bad} is sent as if nothing were wrong")


def rebuilt_is_equal(defense: Defense, scene: Scene) -> None:
    """Saved as plain values and built again, a defense is equal; an unknown setting is answered with the nearest right one."""
    kind = type(defense)
    config = config_of(defense)
    if config["name"] not in DEFENSES.names() or DEFENSES.get(config["name"]) is not kind:
        config["name"] = f"{kind.__module__}:{kind.__qualname__}"
    rebuilt = DEFENSES.build(config)
    require(rebuilt == defense and type(rebuilt) is kind, f"{defense} saved and built again is {rebuilt}")
    for field in (each for each in dataclasses.fields(kind) if each.init):
        wrong = field.name + "s"
        try:
            DEFENSES.build({**config, wrong: 1})
        except UsageError as error:
            require("did you mean" in str(error), f"the unknown setting {wrong!r} is refused without a suggestion")
            continue
        require(False, f"the unknown setting {wrong!r} is accepted")


def none_in_a_chain_changes_nothing(defense: Defense, scene: Scene) -> None:
    """A chain with ``none`` on either side sends the same bits."""
    alone = scene.send(defense)
    for parts in ((NoDefense(), defense), (defense, NoDefense())):
        chained = scene.send(Chain(parts=parts))
        where = "before" if parts[1] is defense else "after"
        require(_same(alone.weights, chained.weights), f"'none' {where} the defense changes what is sent")


def _same(left: Named, right: Named) -> bool:
    return left.keys() == right.keys() and all(torch.equal(value, right[name]) for name, value in left.items())


DEFENSE_CHECKS: tuple[Check, ...] = (
    builds_with_defaults,
    card_is_complete,
    ladder_builds,
    names_and_shapes_are_kept,
    inputs_are_untouched,
    global_generators_are_untouched,
    randomness_is_declared,
    keeps_no_memory,
    needs_are_real,
    off_is_the_identity,
    more_strength_distorts_more,
    odd_updates_survive,
    scalar_is_one_entry,
    not_finite_is_refused,
    rebuilt_is_equal,
    none_in_a_chain_changes_nothing,
    *WIRE_CHECKS,
    *ADVERSARY_CHECKS,
)
