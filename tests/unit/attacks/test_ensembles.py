"""Ensembles are frozen: two people who name the same one ran the same attackers."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path

import pytest

from gradveil.attacks import ATTACKS, ENSEMBLES, Ensemble, informed_twins, launch, line_up, resolve
from gradveil.attacks.adaptive import CLEARER, CONFUSED, DRAWS, FIRST_STANCES, REFRESH_EVERY, STANCES
from gradveil.attacks.engine.matching import SETTLED
from gradveil.attacks.engine.public_batches import FOLDS, POOL
from gradveil.attacks.engine.regression import QUIET, STRENGTHS, WEIGHINGS
from gradveil.attacks.engine.sketches import ENTRIES
from gradveil.attacks.engine.smooth_relu import sharpness_at
from gradveil.attacks.ensembles import names
from gradveil.attacks.generic.probe import FLOOR, PRIOR
from gradveil.attacks.generic.probe import MOST as PROBES
from gradveil.attacks.generic.rounds import ByRound
from gradveil.attacks.generic.stances import LEAST_SCALE, OUTLIER, PASSES
from gradveil.attacks.inverting_gradients import InvertingGradients
from gradveil.attacks.kernel_regression import LEAST, MOST_VALUES, OF_BATCHES, KernelRegression
from gradveil.attacks.peeling import FEATURE_SHARE, ROUND, ROUNDS, SHARP, SPREAD, Peeling
from gradveil.client.update import run_client
from gradveil.defenses import build_defense
from gradveil.errors import UsageError
from gradveil.randomness import Seed
from gradveil.records import ORDINARY, Knowledge, ThreatModel
from gradveil.registry import config_of
from tests.unit.attacks.scenes import make_batch, make_context, make_learner, observe, own_inputs, simulator

GOLDEN = json.loads((Path(__file__).parents[2] / "golden" / "attacks.json").read_text())


def spelled(ensemble: Ensemble) -> str:
    """Return everything that decides an ensemble, as text."""
    members = [
        {"attack": config_of(m.attack), "stances": m.stances} | ({"where_drowned": True} if m.where_equal else {})
        for m in ensemble.members
    ]
    shared: dict[str, object] = {
        "draws": DRAWS,
        "refresh": REFRESH_EVERY,
        "settled": SETTLED,
        "sharpness": [sharpness_at(s, 10) for s in (0, 10)],
    }
    if ensemble.by_round:
        shared["by_round"] = [CLEARER, CONFUSED, FLOOR, PRIOR, PROBES, OUTLIER, LEAST_SCALE, PASSES]
    if any(isinstance(member.attack, Peeling) for member in ensemble.members):
        shared["peeling"] = [ROUNDS, ROUND, FEATURE_SHARE, SHARP, *SPREAD]
    if any(isinstance(member.attack, KernelRegression) for member in ensemble.members):
        shared["regression"] = [WEIGHINGS, STRENGTHS, QUIET, ENTRIES, FOLDS, POOL, LEAST, OF_BATCHES, MOST_VALUES]
    return json.dumps({"members": members, "rehearsals": ensemble.rehearsals, "shared": shared}, sort_keys=True)


@pytest.mark.parametrize("name", names())
def test_a_published_ensemble_never_changes(name: str) -> None:
    digest = hashlib.sha256(spelled(ENSEMBLES[name]).encode()).hexdigest()[:16]
    frozen = GOLDEN["ensembles"]["value"].get(name)
    assert digest == frozen, (
        f"{name} is now {digest}. If results under this name have been published, keep it and add a new version; "
        "else write the new digest into tests/golden/attacks.json"
    )


def test_a_changed_setting_changes_the_digest() -> None:
    quick = ENSEMBLES["quick-1"]
    other = dataclasses.replace(quick, members=quick.members[1:])
    assert spelled(other) != spelled(quick)


def test_short_names_mean_the_newest_version(monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve("quick").name == "quick-5" and resolve("standard").name == "standard-5"
    assert resolve("strong").name == "strong-2"
    assert resolve("standard-1") is ENSEMBLES["standard-1"]
    for version in ("quick-6", "quick-10"):
        monkeypatch.setitem(ENSEMBLES, version, dataclasses.replace(ENSEMBLES["quick-1"], name=version))
    assert resolve("quick").name == "quick-10"


@pytest.mark.parametrize(
    ("wrong", "words"),
    [("quik", "did you mean 'quick-5'"), ("inverting_gradient", "did you mean 'inverting_gradients'"), ("zzz", "known: ")],
)
def test_an_unknown_name_is_answered_with_the_nearest(wrong: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        resolve(wrong)


def test_one_attack_is_an_ensemble_of_one() -> None:
    alone = resolve("inverting_gradients(steps=7)")
    assert [m.attack for m in alone.members] == [InvertingGradients(steps=7)]
    with pytest.raises(UsageError, match="did you mean 'steps'"):
        resolve("idlg(step=3)")


def test_the_standard_ensemble_holds_every_registered_attack() -> None:
    standard = (resolve("standard"), resolve("standard", "embedding"))
    assert {m.attack.card.name for ensemble in standard for m in ensemble.members} == set(ATTACKS.names())


def test_short_names_mean_other_ensembles_where_an_embedding_is_seen() -> None:
    assert resolve("quick", "embedding").name == "embedding-quick-1"
    assert resolve("standard", "embedding_gradient").name == "embedding-standard-2"
    assert resolve("strong", "embedding").name == "embedding-strong-1"
    assert resolve("quick-1", "embedding").name == "quick-1", "a version names one ensemble, whatever is seen"
    assert resolve("idlg", "embedding").members[0].attack.card.name == "idlg"
    assert resolve("piste_like").members[0].stances == ("plain", "informed")


def stances(ensemble: str, defense: str, **changes: object) -> set[tuple[str, str]]:
    learner = make_learner()
    seen = observe(learner, make_batch(), defense, **changes)  # type: ignore[arg-type]
    context = make_context(simulate=None if defense == "none" else simulator((learner,), defense))
    return {(a.card.name, getattr(a, "stance", "plain")) for a in line_up(resolve(ensemble), seen, context)}


def test_without_a_defense_everyone_is_plain() -> None:
    assert {stance for _, stance in stances("standard", "none")} == {"plain"}


def test_against_a_defense_every_sensible_stance_is_taken() -> None:
    found = {stance for name, stance in stances("quick", "pruning(rate=0.9)") if name == "inverting_gradients"}
    assert found == {"plain", "informed", "straight_through", "zero_mask"}


def test_an_attacker_who_does_not_know_the_defense_does_not_use_it() -> None:
    threat = ThreatModel(knows=ORDINARY - {Knowledge.DEFENSE})
    for defense in ("pruning(rate=0.9)", "gaussian_noise(std=0.1)"):
        assert {stance for _, stance in stances("standard", defense, threat=threat)} <= {"plain", "zero_mask"}


def test_attacks_that_do_not_apply_stay_away() -> None:
    assert "linear_layer" not in {name for name, _ in stances("quick", "none")}
    seen = observe(make_learner("mlp(hidden=8)"), make_batch(2))
    lined_up = {attack.card.name for attack in line_up(resolve("quick"), seen, make_context())}
    assert "linear_layer" in lined_up and "feature_inversion" not in lined_up


def test_where_the_informed_search_is_the_plain_one_only_its_last_touch_is_added() -> None:
    seen = observe(make_learner(), make_batch(), "data_noise(std=0.2)")
    attacks = line_up(resolve("inverting_gradients(steps=5)"), seen, make_context())
    assert [getattr(attack, "stance", "") for attack in attacks] == ["plain"]
    found = launch(attacks[0], [seen], make_context())
    (twin,) = informed_twins(found, [seen])
    assert twin.stance == "informed" and twin.unfinished is not None and bool((twin.unfinished == found[0].inputs).all())
    assert informed_twins(found, [observe(make_learner(), make_batch())]) == []
    assert informed_twins(found, [observe(make_learner(), make_batch(), "clipping(bound=0.01)")]) == []


@pytest.mark.parametrize(
    ("model", "defense", "asked"),
    [
        ("convnet(width=4)", "svdefense", True),
        ("convnet(width=4)", "clipping(bound=1) + svdefense", True),
        ("lenet", "svdefense", False),  # no norms: nothing quiet arrives exactly but biases
        ("convnet(width=4)", "svdefense(hardened=True)", False),  # weighing alike would undo what its attacker knows of exactness
        ("convnet(width=4)", "pruning", False),
    ],
)
def test_weighing_tensors_alike_is_for_updates_that_drown_the_quiet_ones(model: str, defense: str, asked: bool) -> None:
    learner, batch = make_learner(model), make_batch()
    payload = run_client(learner, batch, build_defense(defense), Seed(1)).payload
    seen = observe(learner, batch, defense, payloads=(payload,))
    for name in ("quick", "standard"):
        old, new = (line_up(resolve(f"{name}-{version}"), seen, make_context()) for version in (2, 3))
        more = [attack for attack in new[len(old) :] if isinstance(attack, InvertingGradients)]
        assert new == [*old, *more]
        assert [(attack.title, attack.stance) for attack in more] == ([("smooth_layers", "informed")] if asked else [])
    assert not seen.adversary.arrives(seen.replace(payloads=())).equal_weights  # nobody sees factors in a secure aggregate


def steps_of(name: str, seen: object, context: object) -> int:
    attacks = line_up(resolve(name), seen, context)  # type: ignore[arg-type]
    return sum(attack.cost().steps * attack.cost().restarts for attack in attacks)


@pytest.mark.parametrize("defense", ["none", "gaussian_noise(std=0.001)", "data_noise(std=0.1)", "pruning(rate=0.9)"])
def test_against_the_defenses_of_the_first_audit_the_new_quick_costs_no_more(defense: str) -> None:
    learner = make_learner()
    seen = observe(learner, make_batch(), defense)
    code = None if defense == "none" else simulator((learner,), defense)
    context = make_context(simulate=code, own=own_inputs(), random_defense="noise" in defense)
    assert steps_of("quick-4", seen, context) == steps_of("quick-3", seen, context) > 0


def test_what_is_learned_from_the_clients_code_costs_a_quarter_more_at_most_for_each() -> None:
    for before, now in (("quick-3", "quick-4"), ("standard-3", "standard-4")):
        old, new = ENSEMBLES[before].members, ENSEMBLES[now].members
        assert [m.attack for m in old] == [m.attack for m in new]
        assert all(m.stances == (STANCES if o.stances == FIRST_STANCES else o.stances) for o, m in zip(old, new, strict=True))
    quick = ENSEMBLES["quick-4"]
    (added,) = [m for m in quick.members if m.stances == STANCES]
    # Of the stances there were, plain, informed, one of two kinds of straight through and the mask can run together.
    before = sum(m.attack.cost().steps * min(len(m.stances), 4) for m in ENSEMBLES["quick-2"].members[:4])
    assert added.attack.cost().steps <= 0.25 * before


def test_the_patient_ensemble_takes_four_times_the_steps_twice_the_starts_and_every_stance() -> None:
    standard, strong = ENSEMBLES["standard-4"].members, ENSEMBLES["strong-1"].members
    for one, more in zip(standard, strong, strict=True):
        assert type(one.attack) is type(more.attack) and set(one.stances) <= set(more.stances)
        for name, factor in (("steps", 4), ("restarts", 2)):
            assert getattr(more.attack, name, 0) == factor * getattr(one.attack, name, 0)
    assert sum(set(more.stances) == set(STANCES) for more in strong) == 6
    assert resolve("strong", "update").name == "strong-2" and resolve("strong", "embedding").name == "embedding-strong-1"


def test_rounds_are_taken_one_by_one_where_a_defense_draws_anew() -> None:
    learner, batch = make_learner(), make_batch()

    def titles(defense: str, ensemble: str, rounds: int, random: bool) -> list[str]:
        seen = observe(learner, batch, defense, rounds=(learner,) * (rounds - 1))
        attacks = line_up(resolve(ensemble), seen, make_context(random_defense=random))
        return [f"{each.title}/{each.stance}" for each in attacks if isinstance(each, ByRound)]

    both = ["smooth_to_sharp/plain", "stay_smooth/plain"]
    assert titles("data_noise(std=0.2)", "quick-4", 3, True) == both
    assert titles("data_noise(std=0.2)", "quick-3", 3, True) == [], "a published version never changes"
    assert titles("data_noise(std=0.2)", "quick-4", 1, True) == []
    assert titles("pruning(rate=0.9)", "quick-4", 3, False) == [], "one input explains all rounds"
    assert titles("gaussian_noise(std=0.1)", "quick-4", 3, True) == [], "likelihoods of rounds multiply"
