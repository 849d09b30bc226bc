"""What scores of risk, training states and what a run builds once are handed, with hand-made cells."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from gradveil.audit import materials as module
from gradveil.audit import party, risks, state
from gradveil.audit.materials import Materials
from gradveil.audit.risks import Scores, correlate
from gradveil.audit.state import Seen, bring_to_state, order_of_records, seen_by_model
from gradveil.defenses import build_defense
from gradveil.errors import UsageError
from gradveil.randomness import Seed
from gradveil.risk.invloss import MEANING
from gradveil.risk.invre import BETA
from gradveil.study.risks import Assessment, RiskRecord, RiskSide
from tests.unit.audit.small import CELL, people
from tests.unit.stand_ins import fake, noted

HERE = CELL.replace(records=4, seed=5, model="mlp(hidden=4)")


def assessed(*scores: float, mode: str = "dense", notes: tuple[str, ...] = ()) -> Assessment:
    """Return an assessment whose rows differ in every field."""
    records = [
        fake(
            invre=score,
            low=score - 0.125,
            high=score + 0.125,
            score=10 * score + place,
            mode=mode,
            notes=notes,
            gap_rule=f"rule {place}",
        )
        for place, score in enumerate(scores)
    ]
    return Assessment(model="m", defense="d", records=tuple(records))


def test_every_score_stands_beside_its_own_error_contrast_and_undefended_score() -> None:
    defended, bare = (
        assessed(0.5, 0.25, 0.75, notes=("one", "both")),
        assessed(0.875, 0.625, 0.5, mode="gram", notes=("both", "")),
    )
    scores = Scores(defended, bare, 0.375, (3.0, 1.0, 2.0), note="told")
    found = scores.beside(["a", "b", "c"], [0.1, None, 0.3], "informed")
    assert found.records == tuple(
        RiskRecord(
            pseudonym=name,
            invre=own,
            low=own - 0.125,
            high=own + 0.125,
            score=10 * own + place,
            undefended=without,
            error=error,
            contrast=contrast,
        )
        for place, (name, own, without, error, contrast) in enumerate(
            zip("abc", (0.5, 0.25, 0.75), (0.875, 0.625, 0.5), (0.1, None, 0.3), (3.0, 1.0, 2.0), strict=True)
        )
    )
    assert (found.alpha, found.beta, found.gap_rule, found.noise_form) == (0.375, BETA, "rule 0", "inverse")
    assert (found.meaning, found.reason, found.notes) == (MEANING, "", ("told", "one", "both"))
    assert found.defended == RiskSide(mean=0.5, worst=0.75, high=0.875, mode="dense")
    assert found.undefended == RiskSide(mean=2 / 3, worst=0.875, high=1.0, mode="gram")
    whole = scores.beside(["a", "b", "c"], [0.1, 0.9, 0.3], "informed")
    assert whole.correlation == correlate([0.5, 0.25, 0.75], [0.1, 0.9, 0.3], "informed", (3.0, 1.0, 2.0))
    assert whole.correlation.contrast is not None and whole.correlation.attack == "informed" and whole.correlation.n == 3
    for none in (Scores(reason="why"), Scores(defended, None, reason="why"), Scores(None, bare, reason="why")):
        empty = none.beside(["a"], [0.1], "plain")
        assert (empty.reason, empty.meaning, empty.records, empty.defended) == ("why", MEANING, (), None)


def test_scores_too_close_to_be_ranked_are_said() -> None:
    near = risks.LEADING_ERROR * 0.99
    (told,) = risks._too_close(assessed(0.5, 0.5 + near, mode="leading"))
    assert told.startswith("scores from leading singular values are good to about 0.02") and "risk = 'gram'" in told
    assert risks._too_close(assessed(0.5, 0.5 + near, mode="gram")) == []
    assert risks._too_close(assessed(0.5, 0.5 + 1.01 * risks.LEADING_ERROR, mode="leading")) == []
    assert risks._too_close(assessed(0.5, mode="leading")) == []


@pytest.mark.parametrize(
    ("chosen", "inputs", "mode"),
    [("gram", 1024, "gram"), ("gram", 1025, "leading"), ("dense", 5000, "dense"), ("leading", 10, "leading")],
)
def test_the_quick_way_is_exact_up_to_so_many_inputs(
    chosen: str, inputs: int, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(risks, "choose_mode", lambda jacobian: chosen)
    assert risks.quick_mode(fake(inputs=inputs)) == mode


def subject(**changes: Any) -> Any:
    cell = HERE.replace(**changes)
    return fake(cell=cell, dataset=people(), own=people(), indices=(7, 2, 9), materials=Materials())


def test_records_are_scored_each_alone_with_the_defense_and_without(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    made = subject(batch_size=2, clients=2, rounds=3, minibatch=1, local_epochs=1, defense="clipping")
    monkeypatch.setattr(risks, "_assess", lambda *given: noted(asked, given) or f"assessed {given[0].defense}")
    monkeypatch.setattr(risks, "read_alpha", lambda path: 0.25)
    found: Any = risks.risk_of_cell(made)
    alone = made.cell.replace(records=3, batch_size=1, clients=1, rounds=1, minibatch=0)
    assert asked == [(alone, made, 0.25), (alone.replace(defense="none"), made, 0.25)]
    assert (found.defended, found.undefended, found.alpha, found.reason) == ("assessed clipping", "assessed none", 0.25, "")
    inputs = people().inputs.flatten(1).double()
    mean = inputs[[row for row in range(40) if row not in (7, 2, 9)]].mean(0)
    assert list(found.contrasts) == pytest.approx([float((inputs[row] - mean).square().mean()) for row in (7, 2, 9)])
    assert found.note == (
        "scores are those of each record alone in one update; an update here holds 4, which hide one another; "
        "3 rounds are seen, which tell more than one"
    )
    assert found.seconds > 0 and risks.risk_of_cell(subject(risk="off")) is None

    def refused(*given: Any) -> None:
        raise UsageError("no score here")

    monkeypatch.setattr(risks, "_assess", refused)
    none: Any = risks.risk_of_cell(made)
    assert (none.reason, none.defended, none.contrasts) == ("no score here", None, ()) and none.seconds > 0


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, ()),
        ({"batch_size": 2}, ("holds 2",)),
        ({"clients": 2, "rounds": 2}, ("holds 2", "2 rounds")),
        ({"batch_size": 2, "cut": "cut1"}, ()),
    ],
)
def test_what_scores_leave_out_is_said_where_a_record_is_not_alone(changes: dict[str, Any], words: tuple[str, ...]) -> None:
    found = risks._together(HERE.replace(**changes))
    assert bool(found) == bool(words) and all(each in found for each in words)


@pytest.mark.parametrize(("risk", "mode"), [("auto", risks.quick_mode), ("gram", "gram")])
def test_a_score_is_asked_for_with_the_cell_s_model_data_seed_and_memory(
    risk: str, mode: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    made = subject(risk=risk, defense="clipping")
    monkeypatch.setattr(risks, "build_learner", lambda *given: ("learner", *given))
    monkeypatch.setattr(risks, "assess", lambda *given, **more: noted(asked, (given, more)) or "assessed")
    monkeypatch.setattr(risks, "same_update", lambda *given: ("same", *given[:2], id(given[2])))
    known = type(risks._known)(dict)
    monkeypatch.setattr(risks, "_known", known)
    assert risks._assess(made.cell, made, 0.25) == "assessed"  # type: ignore[comparison-overlap]
    (learner, batch, defense), more = asked[0]
    assert learner == ("learner", made.cell, made.dataset, build_defense("clipping"), made.materials)
    assert defense is made.materials.defense("clipping") and more.pop("known") is known[("same", made.cell, learner, id(made))]
    assert torch.equal(batch.inputs, people().inputs[[7, 2, 9]]) and torch.equal(batch.targets, people().targets[[7, 2, 9]])
    assert more == {"alpha": 0.25, "mode": mode, "model": "mlp(hidden=4)", "rows": (7, 2, 9), "seed": Seed(5)}
    for number in range(risks.MOST_KNOWN - 1):
        known[number] = {}
    assert len(known) == risks.MOST_KNOWN
    risks._assess(made.cell, made, 0.25)
    assert len(known) == 1, "forgotten, and begun anew"


def test_what_decides_a_spectrum_is_told_apart() -> None:
    made = subject(defense="clipping")

    def same(cell: Any = made.cell, weight: float = 1.0, name: str = "w", whose: Any = made) -> str:
        return risks.same_update(cell, fake(weights={name: torch.full((2,), weight)}), whose)

    assert same() == same(made.cell.replace(defense="none", ensemble="quick"))
    other = fake(dataset=fake(digest=lambda: "other data"))
    assert len({same(), same(weight=2.0), same(name="v"), same(made.cell.replace(seed=6)), same(whose=other)}) == 5


def test_a_correlation_tells_its_coefficients_with_their_probabilities() -> None:
    x, y, z = (
        [0.1, 0.5, 0.3, 0.9, 0.4, 0.2, 0.6, 0.8],
        [0.4, 0.2, 0.3, 0.1, 0.5, 0.45, 0.15, 0.12],
        [3.0, 1.0, 4.0, 1.5, 9.0, 2.0, 6.0, 5.0],
    )
    found = correlate(x, y, "plain", z)
    pearson, spearman, contrast = stats.pearsonr(x, y), stats.spearmanr(x, y), stats.spearmanr(z, y)
    assert found.pearson is not None and found.spearman is not None and found.contrast is not None and found.partial is not None
    assert [found.pearson.value, found.pearson.p] == pytest.approx([pearson.statistic, pearson.pvalue])
    assert [found.spearman.value, found.spearman.p] == pytest.approx([spearman.statistic, spearman.pvalue])
    assert [found.contrast.value, found.contrast.p] == pytest.approx([contrast.statistic, contrast.pvalue])
    xy, xz, yz = spearman.statistic, stats.spearmanr(x, z).statistic, contrast.statistic
    value = (xy - xz * yz) / math.sqrt((1 - xz**2) * (1 - yz**2))
    t = value * math.sqrt(5 / (1 - value**2))
    assert [found.partial.value, found.partial.p] == pytest.approx([value, 2 * stats.t.sf(abs(t), 5)])
    seven = correlate(x[:7], y[:7]).spearman
    orders = np.abs([stats.spearmanr(x[:7], np.array(y[:7])[list(order)]).statistic for order in ([0, 1, 2, 3, 4, 5, 6],)])
    assert seven is not None and abs(seven.value) == pytest.approx(float(orders[0])) and seven.p is not None
    assert seven.p != pytest.approx(stats.spearmanr(x[:7], y[:7]).pvalue), "counted, not approximated"
    flat = correlate([1.0] * 4, [0.1, 0.2, 0.3, 0.4], "", [1.0, 2.0, 3.0, 4.0])
    assert (flat.pearson, flat.spearman, flat.partial) == (None, None, None) and flat.contrast is not None
    still = correlate([0.1, 0.2, 0.3], [1.0] * 3, "", [1.0, 2.0, 3.0])
    assert (still.pearson, still.contrast) == (None, None)
    holes = correlate([0.1, 0.2, 0.9, 0.4], [0.4, 0.1, None, 0.2], "", [4.0, 1.0, 7.0, 2.0])
    assert holes.n == 3 and holes.contrast is not None and holes.contrast.value == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("enough", "candidates", "first", "words"),
    [
        (30, 10, 10, "30 records, none of them under attack or among"),
        (31, 10, 4, "36 records, none of them under attack; the other"),
        (36, 10, 4, "36 records, none of them under attack; the other"),
        (37, 10, 0, "all 40 records"),
        (36, 2, 4, "36 records, none of them under attack or"),
    ],
)
def test_a_model_is_trained_on_others_wherever_there_are_enough(
    enough: int, candidates: int, first: int, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state, "ENOUGH", enough)
    monkeypatch.setattr(state, "CANDIDATES", candidates)
    cell = HERE.replace(state="trained(steps=1)", batch_size=2, records=3)
    found = seen_by_model(cell, people())
    assert found.rows == tuple(order_of_records(cell, people())[first:]) and words in found.sentence
    assert found.attacked == (first == 0)
    assert seen_by_model(cell.replace(state="untrained"), people()) == Seen()
    given = seen_by_model(cell.replace(state="given"), people())
    assert given.rows == () and "is not known" in given.sentence and not given.attacked


@pytest.mark.usefixtures("untouched_global_rng")
@pytest.mark.parametrize(
    ("said", "size", "rate"), [("trained(steps=2, learning_rate=0.5, batch=3)", 3, 0.5), ("trained(steps=2)", 5, 0.1)]
)
def test_training_before_takes_its_steps_on_drawn_batches(
    said: str, size: int, rate: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    rows = torch.tensor([30, 31, 32, 33, 34])
    monkeypatch.setattr(state, "seen_by_model", lambda *given: Seen(rows=tuple(rows.tolist())))
    monkeypatch.setattr(state, "_noise", lambda learner, count, generator: (count, generator.initial_seed()))

    def gradient(weights: Any, inputs: Any, targets: Any, noise: Any) -> Any:
        asked.append((float(weights["w"]), inputs, targets, noise))
        return {"w": torch.tensor(2.0)}

    learner: Any = fake(weights={"w": torch.tensor(8.0)}, gradient=gradient, replace=lambda weights: weights)
    found: Any = bring_to_state(learner, people(), HERE.replace(state=said))
    generator = Seed(5).child("training").generator("batches")
    noise = Seed(5).child("training").generator("model noise").initial_seed()
    for number, (weight, inputs, targets, drawn) in enumerate(asked):
        chosen = rows[torch.randint(5, (size,), generator=generator)]
        assert weight == pytest.approx(8.0 - 2.0 * rate * number) and drawn == (size, noise)
        assert torch.equal(inputs, people().inputs[chosen]) and torch.equal(targets, people().targets[chosen])
    assert len(asked) == 2 and float(found["w"]) == pytest.approx(8.0 - 4.0 * rate)
    assert bring_to_state(learner, people(), HERE) is learner
    assert bring_to_state(learner, people(), HERE.replace(state="given")) is learner
    for wrong in ("trained(speed=2)", "half"):
        with pytest.raises(UsageError, match="training state"):
            bring_to_state(learner, people(), HERE.replace(state=wrong))


def test_data_defenses_and_models_are_made_once_and_models_given_as_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    monkeypatch.setattr(
        module, "load_source", lambda asked: noted(made, asked) or fake(digest=lambda: noted(made, "digest") or "abc")
    )
    monkeypatch.setattr(module, "build_defense", lambda spelling: noted(made, spelling) or f"built {spelling}")
    monkeypatch.setattr(module, "build_model", lambda spelling, **more: noted(made, (spelling, more)) or torch.nn.Linear(1, 1))
    kept: Any = Materials()
    data = kept.dataset(HERE)
    assert kept.dataset(HERE.replace(records=9)) is data and kept.dataset(HERE.replace(data="photos")) is not data
    assert [kept.digest(HERE), kept.digest(HERE)] == ["abc", "abc"] and made.count("digest") == 1
    assert [kept.defense("x"), kept.defense("x"), kept.defense("y")] == ["built x", "built x", "built y"]
    kept.keep("z", "own z")
    kept.keep("x", "own x")
    assert (kept.defense("z"), kept.defense("x")) == ("own z", "built x") and made.count("x") == 1 and "z" not in made
    one, again, other = kept.model("m", seed=1), kept.model("m", seed=1), kept.model("m", seed=2)
    assert torch.equal(one.weight, again.weight) and one is not again and not torch.equal(one.weight, other.weight)
    assert [each for each in made if isinstance(each, tuple)] == [("m", {"seed": 1}), ("m", {"seed": 2})]
    assert [each.data for each in made if not isinstance(each, str | tuple)] == ["digits", "photos"]


def test_a_party_s_model_is_built_and_trained_with_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    cell = HERE.replace(cut="cut1", parts="left_right", party=1, model="lenet", weights="", sees="embedding", learning_rate=0.25)
    build = vars(party)["build_parties"]
    monkeypatch.setattr(party, "build_parties", lambda *given, **more: noted(asked, (given, more)) or build(*given, **more))
    data = people()

    def train(learner: Any) -> Any:
        asked.append(learner)
        return learner.replace(weights={name: value + 1 for name, value in learner.weights.items()})

    defense = build_defense("none")
    found = party.build_party(cell.replace(model="mlp(hidden=4)"), data, defense, train)
    (model, cut, division), more = asked[0]
    assert (model, cut) == ("mlp(hidden=4)", "cut1") and len(division.places(data.input_shape)) == 2
    assert more == {"input_shape": (1, 6, 6), "classes": 5, "seed": Seed(5).child("model"), "weights": None}
    joined = asked[1]
    assert joined.settings == cell.training()
    for name, value in found.weights.items():
        assert torch.equal(value, joined.weights[f"bottoms.1.{name}"] + 1), name
    with pytest.raises(UsageError, match="no party 2; left_right divides the features among parties 0 to 1"):
        party.build_party(cell.replace(party=2), data, defense, train)
    with pytest.raises(UsageError, match="fits together"):
        party.build_party(cell.replace(sees="embedding_gradient"), data, defense, train)
    assert torch.equal(party.own_part(HERE, data.inputs), data.inputs) and party.own_data(HERE, data) is data
    right = party.own_part(cell, data.inputs)
    assert torch.equal(right.flatten(), data.inputs[..., 3:].flatten()) and torch.equal(party.own_data(cell, data).inputs, right)
