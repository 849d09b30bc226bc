"""What an attack on a captured update hands on and says, with hand-made records and attackers."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from gradveil.attacks import Referee
from gradveil.attacks.referee import Verdict
from gradveil.audit import captured
from gradveil.audit.captured import FAR, NOISE, SHARE, CapturedResult
from gradveil.audit.cell import STEP_LIMIT
from gradveil.errors import BadUpdate, UsageError
from gradveil.records import Batch, Payload, Reconstruction, Update
from tests.unit.audit.small import CELL
from tests.unit.stand_ins import fake, noted


def record(**changes: Any) -> CapturedResult:
    told: dict[str, Any] = {
        "unexplained": {"unit": SHARE, "best": 0.25, "null": 0.5},
        "cell": {"shares": "gradient", "weights": "w.safetensors", "seed": 7},
        "tries": 12,
        "recipe": "a recipe",
        "stance": "informed",
        "labels": [3, 1],
        "size": 1.0,
        "candidates": 40,
        "nearest": [{"input": 1, "row": 17, "psnr": 31.25, "next_psnr": 12.5}],
    }
    return CapturedResult(Path("out"), {**told, **changes})


@pytest.mark.parametrize(
    ("unit", "best", "null", "explains"),
    [
        (SHARE, 0.25, 0.5, True),
        (SHARE, 0.5, 0.5, False),
        (SHARE, None, 0.5, False),
        (SHARE, 0.99, None, True),
        (SHARE, 1.0, None, False),
        (SHARE, 1.5, 2.0, False),
        (NOISE, 1.5, 2.0, True),
        (NOISE, 99.0, None, True),
        (NOISE, 2.0, 2.0, False),
    ],
)
def test_an_update_is_explained_better_than_by_guesses_and_by_nothing(
    unit: str, best: float | None, null: float | None, explains: bool
) -> None:
    assert record(unexplained={"unit": unit, "best": best, "null": null}).explains is explains


def test_sentences_tell_what_was_left_by_whom_and_the_nearest_records() -> None:
    said = record().sentences()
    assert said[0] == "The best of 12 reconstructions leaves 0.25 of the update unexplained; guesses that never saw it leave 0.5."
    assert said[1] == "It was made by a recipe (informed); the labels it implies: [3, 1]."
    assert said[2] == "Input 1: of 40 records, the nearest is row 17 (31.2 dB), the next 12.5 dB."
    assert said[3].startswith("Whether that record was behind") and len(said) == 4
    bare = record(cell={"shares": "weights", "weights": "", "seed": 7})
    assert "with seed 7" in bare.sentences()[2] and bare.says_training and not record().says_training
    noisy = record(unexplained={"unit": NOISE, "best": None, "null": 3.0}).sentences()
    assert "leaves an unknown part times the power of the known noise unexplained" in noisy[0] and "leave 3." in noisy[0]


@pytest.mark.parametrize(("size", "said"), [(1.0, False), (FAR, False), (1 / FAR, False), (FAR * 1.01, True), (0.99 / FAR, True)])
def test_of_what_nothing_explains_no_record_is_named_and_another_size_is_said(size: float, said: bool) -> None:
    told = record(unexplained={"unit": SHARE, "best": 0.75, "null": 0.5}, size=size).sentences()
    assert len(told) == 2 + said and not any("Input" in each for each in told)
    assert not said or f"is {size:.2g} times as large" in told[-1]


@pytest.mark.parametrize(("noise", "unit", "factor"), [(None, SHARE, 1.0), (0.5, NOISE, 2.0), (0.0, SHARE, 1.0)])
def test_scores_are_told_as_shares_or_as_powers_of_the_noise(noise: float | None, unit: str, factor: float) -> None:
    seen: Any = fake(adversary=fake(arrives=lambda given: fake(noise_std=noise)))
    assert captured._unexplained(seen, 0.25, 0.75) == {"unit": unit, "best": factor * 0.25, "null": factor * 0.75}
    assert captured._unexplained(seen, math.inf, math.nan) == {"unit": unit, "best": None, "null": None}


def test_the_nearest_and_the_next_are_told_for_every_input() -> None:
    candidates = torch.tensor([[0.0], [0.5], [0.9]])
    inputs = torch.tensor([[0.6], [0.0]])
    found = captured._nearest(Reconstruction(inputs, torch.zeros(2), "x"), candidates)
    assert [(row["input"], row["row"]) for row in found] == [(0, 1), (1, 0)]
    assert found[0]["psnr"] == pytest.approx(20.0, abs=1e-3) and found[0]["next_psnr"] == pytest.approx(
        -10 * math.log10(0.09), abs=1e-3
    )
    assert found[1]["psnr"] == pytest.approx(60.0) and found[1]["next_psnr"] == pytest.approx(-10 * math.log10(0.25), abs=1e-3)
    (alone,) = captured._nearest(Reconstruction(inputs[:1], torch.zeros(1), "x"), candidates[:1])
    assert alone["psnr"] == alone["next_psnr"]


def test_guesses_are_public_pictures_with_the_labels_read_off(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(captured, "NULL_TRIES", 2)
    monkeypatch.setattr(
        "gradveil.attacks.engine.labels.recover_labels", lambda *given, **more: noted(asked, (*given, more)) or torch.tensor([4])
    )
    rehearsals = [fake(batch=Batch(torch.full((1, 1), float(place)), torch.tensor([place]))) for place in range(3)]

    def scores(seen: Any, guesses: list[Reconstruction]) -> list[float]:
        asked.append((seen, [float(each.inputs) for each in guesses], {int(each.targets) for each in guesses}))
        return [5.0, 3.0]

    seen: Any = fake()
    assert captured._null_score(fake(rehearsals=rehearsals), seen, fake(scores=scores)) == 3.0
    assert asked == [(seen, {"informed": True}), (seen, [0.0, 1.0], {4})]
    assert math.isnan(captured._null_score(fake(rehearsals=[]), seen, fake(scores=scores)))


def test_the_payload_is_read_as_the_defense_decodes_it() -> None:
    @dataclasses.dataclass(frozen=True)
    class Seen:
        updates: Any = ()
        payloads: Any = ()
        public: Any = None
        own: Any = None
        threat: str = "threat"

    asked: list[Any] = []
    update = Update({"w": torch.ones(2)}, 6, 4)
    learner = fake(model=torch.nn.Linear(1, 1), device=torch.device("cpu"))
    made: Any = fake(
        learner=learner,
        defense=fake(decode=lambda *given: noted(asked, given) or update),
        targets=[fake(observation=Seen(("old",), ("old",), "public"))],
    )
    payload: Any = fake()
    found: Any = captured._observe(made, payload)
    assert asked[0][0] is payload and set(asked[0][1].tensors) == {"weight", "bias"}
    (own,) = found.updates
    assert own.weights["w"].tolist() == [1.0, 1.0] and (own.examples, own.round) == (6, 4)
    assert found.payloads == (payload,) and found.public is None and (found.own, found.threat) == ("public", "threat")
    made.defense.decode = lambda *given: Update({"w": torch.zeros(2)}, 6, 4)
    with pytest.raises(BadUpdate, match="zero everywhere"):
        captured._observe(made, payload)


@pytest.mark.parametrize(("claims", "examples", "said"), [(True, 4, None), (True, 6, 3), (True, 1, 1), (False, 9, None)])
def test_a_file_that_says_nothing_has_the_cell_s_examples(
    claims: bool, examples: int, said: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Opened:
        def __enter__(self) -> Any:
            return fake(metadata=lambda: {"gradveil": "1"} if claims else None)

        def __exit__(self, *_: object) -> None: ...

    monkeypatch.setattr(captured, "safe_open", lambda *given, **more: Opened())
    monkeypatch.setattr(captured, "read_payload", lambda path: Payload("x", {}, examples))
    cell = CELL.replace(records=4, clients=2)
    if said is None:
        assert captured._read(Path("u"), cell).examples == 4
    else:
        with pytest.raises(UsageError, match=f"claims {examples} examples, not 4; say --batch-size {said}"):
            captured._read(Path("u"), cell)


class Records:
    inputs = torch.tensor([[0.0], [0.5], [0.9]])

    def __len__(self) -> int:
        return len(self.inputs)


def test_a_case_is_prepared_and_attacked_with_the_cell_s_own_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def told(name: str, given: Any) -> Any:
        asked[name] = given

    def note(name: str, answer: Any) -> None:
        monkeypatch.setattr(captured, name, lambda *given: told(name, given) or answer)

    rehearsal = fake(batch=Batch(torch.ones(1, 1), torch.tensor([3])), replayed_inputs="replayed", observation="rehearsed")
    dataset = Records()
    target = fake(observation=fake(update=fake(weights={"w": torch.full((4,), 2.0)})))
    subject = fake(
        cell=CELL, rehearsals=[rehearsal], dataset=dataset, targets=[target], context=lambda budget: ("context", budget)
    )
    seen = fake(update=fake(weights={"w": torch.full((4,), 1.0)}), classes=10)
    note("resolve", fake(name="named", rehearsals=5))
    note("load_cell_data", "data")
    note("build_subject", subject)
    note("_observe", seen)
    note("line_up", ["attack"])
    case: Any = captured._prepare("payload", CELL)  # type: ignore[arg-type]
    context = ("context", STEP_LIMIT)
    assert asked["build_subject"] == (CELL, "data", 5) and asked["_observe"] == (subject, "payload")
    assert asked["line_up"][1:] == (seen, context) and asked["resolve"] == (CELL.ensemble,)
    assert (case.subject, case.observation, case.context, case.attacks) == (subject, seen, context, ["attack"])
    chosen = Reconstruction(torch.tensor([[0.5]]), torch.tensor([6]), "best", stance="informed")
    found = [[chosen.replace(recipe="other"), chosen], ["of the rehearsal"]]
    note("attack_all", found)
    note("_unexplained", "unexplained")
    note("_null_score", 0.75)
    referee = fake(select=lambda *given: told("select", given) or Verdict(1, [9.0, 0.125], []))
    monkeypatch.setattr(Referee, "rehearsed", lambda *given: told("rehearsed", given) or referee)
    record, inputs = captured._attack(case)
    assert asked["attack_all"] == (["attack"], [seen, "rehearsed"], context) and inputs is chosen.inputs
    learned = asked["rehearsed"]
    assert learned[0] == ["rehearsed"] and learned[1][0][0] == "replayed" and learned[1][0][1].tolist() == [3]
    assert learned[2][0].tolist() == [[1.0]] and learned[3] == found[1:] and asked["select"] == (seen, found[0])
    assert asked["_unexplained"] == (seen, 0.125, 0.75) and asked["_null_score"] == (subject, seen, referee)
    assert record["cell"] == CELL.as_dict() and (record["recipe"], record["stance"]) == ("best", "informed")
    assert (record["tries"], record["labels"], record["size"], record["candidates"]) == (2, [6], 0.5, 3)
    assert record["nearest"][0]["row"] == 1 and record["unexplained"] == "unexplained"
    seen.classes = 0
    assert captured._attack(case)[0]["labels"] is None
    note("line_up", [])
    with pytest.raises(UsageError, match="no attack of 'named' applies"):
        captured._prepare("payload", CELL)  # type: ignore[arg-type]
