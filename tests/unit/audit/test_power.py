"""A planted leak means the same whatever the defense, and the attackers who face it are those of the cell."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from gradveil.adversary import OpenAdversary
from gradveil.audit.materials import Materials
from gradveil.audit.power import blend, measure_rung, plant
from gradveil.storage.partial import PartialWork
from gradveil.study.cell import Cell
from gradveil.study.codec import decode, encode
from gradveil.study.rung import RungRecord, RungTask
from gradveil.tensors import Named, flatten, norm
from tests.unit.audit.small import make_subject

SMALL = Cell(data="digits", model="mlp(hidden=16)", records=8, ensemble="linear_layer", device="cpu", risk="off", lists="off")


def tensors(*values: float) -> Named:
    return {"a": torch.tensor(values[:2]), "b": torch.tensor(values[2:])}


def cosine(left: Named, right: Named) -> float:
    return float(torch.nn.functional.cosine_similarity(flatten(left), flatten(right), dim=0))


def test_the_ends_of_the_scale_are_release_and_raw_update_exactly() -> None:
    release, raw = tensors(3.0, 0.0, 0.0, 4.0), tensors(0.0, 0.1, 0.0, 0.0)
    assert all(torch.equal(value, release[name]) for name, value in blend(release, raw, 0.0).items())
    assert all(torch.equal(value, raw[name]) for name, value in blend(release, raw, 1.0).items())


@pytest.mark.parametrize("loudness", [1e-3, 1.0, 30.0])
@pytest.mark.parametrize("leak", [0.01, 0.5, 0.9])
def test_a_weight_is_the_same_share_of_the_loudness_whatever_the_release_sends(loudness: float, leak: float) -> None:
    release, raw = tensors(loudness, 0.0, 0.0, 0.0), tensors(0.0, 0.0, 2.0, 0.0)
    seen = blend(release, raw, leak)
    part = float(norm({"b": seen["b"]})) / float(norm({"a": seen["a"]}))
    assert part == pytest.approx(leak / (1 - leak), rel=1e-4)
    low, high = sorted((loudness, 2.0))
    assert 0.5 * low <= float(norm(seen)) <= high  # of the scale of an update, whatever the weight


def test_silence_leaks_at_its_weight_and_nothing_cannot_leak() -> None:
    silent, raw = tensors(0.0, 0.0, 0.0, 0.0), tensors(0.0, 0.0, 2.0, 0.0)
    assert float(norm(blend(silent, raw, 0.5))) == pytest.approx(1.0)
    assert all(torch.equal(value, raw[name]) for name, value in blend(raw, silent, 0.5).items())


@pytest.mark.parametrize(
    "changes",
    [
        {"defense": "gaussian_noise(std=1.0)"},
        {"defense": "quantisation(bits=2)"},
        {"defense": "top_k(keep=0.01)", "clients": 2},
        {"defense": "top_k(keep=0.01)", "rounds": 2},
        {"defense": "embedding_noise(delta=1.0)", "cut": "cut1"},
        {"defense": "data_noise(std=0.3)"},  # what is left in is the raw record's update, not that of the noisy one
        {"defense": "dp_sgd(noise_multiplier=1.0)", "batch_size": 2},
        {"defense": "clipping(bound=0.1) + gaussian_noise(std=0.1)", "batch_size": 2, "clients": 2},
        {"defense": "svdefense"},
    ],
)
def test_the_whole_update_is_what_a_client_without_a_defense_sends(changes: dict[str, Any]) -> None:
    bare = make_subject(**(changes | {"defense": "none"}))
    leaking = plant(make_subject(**changes), 1.0)
    for target, other in zip(leaking.targets, bare.targets, strict=True):
        # After the first round the server has moved along other updates.
        for name, value in other.observation.updates[0].weights.items():
            assert torch.allclose(target.observation.updates[0].weights[name], value, atol=1e-6), name


def test_of_a_model_that_the_defense_changes_the_raw_update_is_that_of_the_changed_model() -> None:
    subject = make_subject(defense="precode", rehearsals=1)
    whole = plant(subject, 1.0).targets[0]
    assert whole.observation.update.weights.keys() == subject.targets[0].observation.update.weights.keys()
    learner, batch = whole.observation.learner, whole.batch
    raw = OpenAdversary().replay(learner, batch.inputs, batch.targets, {})
    assert all(torch.equal(raw[name], value) for name, value in whole.observation.update.weights.items())


def test_a_leak_draws_what_is_seen_towards_the_raw_update_and_nothing_else_changes() -> None:
    subject, bare = make_subject(defense="gaussian_noise(std=0.5)", rehearsals=1), make_subject()
    raw = bare.targets[0].observation.update.weights
    near = [cosine(plant(subject, leak).targets[0].observation.update.weights, raw) for leak in (0.0, 0.1, 0.5, 0.9, 1.0)]
    assert near == sorted(near) and near[-1] == pytest.approx(1.0)
    leaking = plant(subject, 0.5)
    assert leaking.rehearsals == subject.rehearsals
    before, after = subject.targets[0].observation, leaking.targets[0].observation
    assert after.payloads is before.payloads and after.adversary == before.adversary and after.learners == before.learners


def test_a_rung_says_what_was_found_beside_a_null_and_who_looked() -> None:
    record = measure_rung(RungTask(cell=SMALL), key="0" * 16)
    assert (record.rung.identified.count, record.rung.identified.n, record.rung.leak) == (8, 8, 0.0)
    assert record.rung.broken and record.rung.null is not None and record.rung.null.value <= 1 / 8
    assert record.rung.psnr is not None and record.rung.psnr > 50
    assert record.checks == () and record.settings.ensemble == "linear_layer"


def test_drowned_in_noise_only_a_loud_leak_is_found() -> None:
    drowned = SMALL.replace(defense="gaussian_noise(std=3.0)")
    found = {leak: measure_rung(RungTask(cell=drowned, leak=leak)).rung for leak in (0.0, 0.01, 0.9, 1.0)}
    assert found[0.0].identified.count <= 1 and found[0.01].identified.count <= 1
    assert found[1.0].identified.count == 8 and found[1.0].broken
    assert not found[0.0].broken and not found[0.01].broken
    assert found[0.01].identified.count <= found[0.9].identified.count


def test_the_lower_end_allows_for_the_choice_among_attackers() -> None:
    one = measure_rung(RungTask(cell=SMALL)).rung.identified
    assert one.low < 0.6756  # that of one attacker who found eight of eight
    assert one.high == 1.0


@pytest.mark.parametrize("place", [0, 1])
def test_a_killed_rung_goes_on_behind_the_last_attacker(place: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task = RungTask(cell=SMALL.replace(ensemble="inverting_gradients(steps=4)", defense="pruning(rate=0.5)"), leak=0.5)
    whole = measure_rung(task)
    put = PartialWork.put

    def dying(self: PartialWork, at: int, *rest: object) -> None:
        put(self, at, *rest)  # type: ignore[arg-type]
        if at == place:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(PartialWork, "put", dying)
        with pytest.raises(KeyboardInterrupt):
            measure_rung(task, work=tmp_path / "work")
    assert len(list((tmp_path / "work").iterdir())) == place + 1
    told: list[tuple[int, int]] = []
    again = measure_rung(task, work=tmp_path / "work", materials=Materials(), report=lambda *steps: told.append(steps))
    assert encode(again) == encode(whole)
    assert told and told[-1][0] <= told[-1][1] == told[0][1]  # what was done before is neither planned nor done again


def test_a_rung_is_read_as_it_was_written() -> None:
    record = measure_rung(RungTask(cell=SMALL, leak=1.0), key="0" * 16)
    assert encode(decode(RungRecord, encode(record))) == encode(record)
    assert {check.name for check in record.checks} >= {"canary_found", "no_oracle"}
