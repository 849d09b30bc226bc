"""Plans: the grid they span, what they refuse, and that nothing is lost between file and object."""

from __future__ import annotations

import hashlib
import itertools
import json
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradveil.defenses import DEFENSES, build_defense
from gradveil.errors import DefenseOrder, UsageError
from gradveil.run.grid import cells_of, check_inputs, check_plan, defenses_of, sources_of
from gradveil.run.ladders import expand_defense
from gradveil.study.cell import CAME_LATER, CELL_FORMAT, Cell
from gradveil.study.document import KEYS, SECTIONS, toml_text
from gradveil.study.plan import Plan
from gradveil.study.settings import DEFAULT_DEFENSES
from gradveil.study.training import TRAINING_FORMAT, Training

DOCS = Path(__file__).resolve().parents[3] / "docs" / "plans.md"


def write(folder: Path, text: str) -> Path:
    path = folder / "plan.toml"
    path.write_text(text, encoding="utf-8")
    return path


def complaint(path: Path) -> str:
    with pytest.raises(UsageError) as caught:
        check_plan(Plan.from_toml(path))
    return one_sentence(str(caught.value))


def one_sentence(text: str) -> str:
    assert text and "\n" not in text and len(text) < 400
    return text


def test_the_default_plan_is_what_make_audit_runs() -> None:
    cells = cells_of(Plan.default())
    assert [cell.defense for cell in cells] == defenses_of(Plan.default())
    assert len(cells) == len(DEFAULT_DEFENSES)
    assert {(cell.data, cell.model, cell.ensemble, cell.batch_size) for cell in cells} == {("photos", "lenet", "quick", 1)}
    assert all(cell.records >= 16 for cell in cells)


def test_every_combination_is_a_cell_and_defenses_of_a_setting_stand_together() -> None:
    plan = Plan.default(batch_size=[1, 4], local_steps=[1, 2], defense=["none", "pruning"], model=["lenet", "mlp"])
    cells = cells_of(plan)
    points = [(c.model, c.batch_size, c.local_steps, c.defense.partition("(")[0]) for c in cells]
    assert points == list(itertools.product(["lenet", "mlp"], [1, 4], [1, 2], ["none", "pruning"]))
    assert len({cell.key() for cell in cells}) == len(cells)


def test_equal_points_are_one_cell() -> None:
    plan = Plan.default(defense=["gaussian_noise", "gaussian_noise(std=0.01)", " gaussian_noise( std=0.01 ) "], batch_size=[1, 1])
    assert [cell.defense for cell in cells_of(plan)] == ["gaussian_noise(std=0.01)"]


def test_whole_and_real_numbers_are_the_same_strength() -> None:
    assert expand_defense("clipping(bound=1)") == expand_defense("clipping(bound=1.0)") == ["clipping(bound=1.0)"]


@pytest.mark.parametrize("name", [name for name in DEFENSES.names() if name != "none"])
def test_a_ladder_expands_to_its_rungs(name: str) -> None:
    spellings = expand_defense(f"{name}:ladder")
    rungs = [DEFENSES.get(name)(**rung) for rung in DEFENSES.card(name).ladder]
    assert [build_defense(spelling) for spelling in spellings] == rungs
    assert len(set(spellings)) == len(spellings) >= 3


def test_ladders_multiply_in_a_chain_and_keep_other_settings() -> None:
    assert len(expand_defense("clipping:ladder + gaussian_noise:ladder")) == len(DEFENSES.card("clipping").ladder) * len(
        DEFENSES.card("gaussian_noise").ladder
    )
    assert all("scope='layer'" in spelling for spelling in expand_defense("clipping(scope='layer'):ladder"))


def test_an_impossible_chain_is_refused(tmp_path: Path) -> None:
    code = (
        "from dataclasses import dataclass\nfrom gradveil.defenses import Defense, DefenseCard\n"
        "@dataclass(frozen=True, kw_only=True)\nclass Late(Defense):\n    card = DefenseCard(name='late', summary='Late.')\n"
        "    def protect_gradient(self, gradient, view, state):\n        return gradient, state\n"
    )
    (tmp_path / "late.py").write_text(code)
    with pytest.raises(DefenseOrder, match="must come first"):
        expand_defense(f"{tmp_path}/late.py:Late + example_clipping")


def test_state_follows_the_weights(tmp_path: Path) -> None:
    weights = tmp_path / "w.safetensors"
    weights.write_bytes(b"")
    assert [(c.state, c.weights) for c in cells_of(Plan.default(defense="none"))] == [("untrained", "")]
    given = Plan.default(defense="none", weights=str(weights))
    assert [(c.state, c.weights) for c in cells_of(given)] == [("given", str(weights))]
    both = given.override(state=["untrained", "given"])
    assert [(c.state, c.weights) for c in cells_of(both)] == [("untrained", ""), ("given", str(weights))]
    with pytest.raises(UsageError, match="would not be used"):
        cells_of(given.override(state="untrained"))


def test_what_belongs_to_a_replaced_value_goes_with_it() -> None:
    belongings: dict[str, Any] = {"labels": "a.csv", "scale": "minmax", "read": "size=8", "weights": "w.pt"}
    plan = Plan(data="a.npz", model="lenet", state=("untrained", "given"), **belongings)
    other = plan.override(data="photos", model="mlp")
    assert plan.read == "size=8x8"
    assert (other.labels, other.scale, other.read, other.weights, other.state) == ((), "", "", (), ("untrained",))
    assert plan.override(records=3).labels == ("a.csv",)


def test_one_label_file_for_all_or_one_for_each() -> None:
    assert sources_of(Plan.default(data=["a", "b"], labels=["x"])) == [("a", "x"), ("b", "x")]
    assert sources_of(Plan.default(data=["a", "b"], labels=["x", ""])) == [("a", "x"), ("b", "")]
    with pytest.raises(UsageError, match="3 labels for 2 entries of data"):
        Plan.default(data=["a", "b"], labels=["x", "y", "z"])


VALUES: dict[str, Any] = {
    "title": st.text(max_size=20).map(str.strip),
    "seed": st.integers(0, 2**40),
    "records": st.integers(1, 500),
    "learning_rate": st.floats(1e-6, 10),
    "known_labels": st.booleans(),
    "batch_size": st.lists(st.integers(1, 64), min_size=1, max_size=4, unique=True).map(tuple),
    "defense": st.lists(st.sampled_from(DEFAULT_DEFENSES), min_size=1, max_size=3, unique=True).map(tuple),
    "optimizer": st.sampled_from(["sgd", "adam"]),
}


@given(st.fixed_dictionaries({}, optional=VALUES))
def test_a_plan_survives_its_file(values: dict[str, Any]) -> None:
    plan = Plan(**values)
    assert Plan.from_dict(tomllib.loads(plan.to_toml())) == plan
    assert Plan.from_dict(plan.as_dict()) == plan


@given(st.text())
def test_every_text_can_be_written(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        return  # a lone surrogate is no text
    assert tomllib.loads(f"x = {toml_text(text)}") == {"x": text}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[grid]\nbatchsize = 4", "[grid] has no key 'batchsize'; did you mean 'batch_size'?"),
        ("[grd]\nmodel = 'lenet'", "there is no section [grd]; did you mean 'grid'?"),
        ("[audit]\ndefense = 'none'", "[audit] has no key 'defense'; it belongs in [grid]"),
        ("[audit]\ndefnse = 'none'", "did you mean 'defense' in [grid]?"),
        ("seed = 3", "'seed' stands outside a section; it belongs in [audit]"),
        ("grid = 3", "write it as a section"),
        ("[audit]\nseed = -1", "seed in [audit] is -1; give a whole number of at least 0"),
        ("[audit]\nseed = true", "seed in [audit] is True"),
        ("[audit]\nseed = [1, 2]", "seed in [audit] is a list"),
        ("[audit]\nrecords = 0", "records in [audit] is 0; give a whole number of at least 1"),
        ("[audit]\nrecords = 1e3", "give a whole number"),
        ("[audit]\ndevice = 'cda'", "did you mean 'cuda'?"),
        ("[audit]\nexecution = 'batch'", "did you mean 'batched'?"),
        ("[audit]\nfail_if = 'identifed>0.05'", "did you mean 'identified'?"),
        ("[audit]\nensemble = 'quik'", "there is no ensemble or attack called 'quik'; did you mean"),
        ("[data]\nsource = 'photo'", "did you mean 'photos'?"),
        ("[data]\nsource = 'nowhere/x.npz'", "neither built-in data nor a file or folder"),
        ("[data]\nsource = 'photos'\nlabels = 'nope.csv'", "there is no label file"),
        ("[data]\nscale = 'minmx'", "did you mean 'minmax'?"),
        ("[training]\nloss = 'cross_entrpy'", "did you mean 'cross_entropy'?"),
        ("[training]\nlearning_rate = 0", "learning_rate in [training] is 0; give a number above 0"),
        ("[training]\nlearning_rate = nan", "give a number above 0"),
        ("[training]\nknown_labels = 'no'", "write true or false"),
        ("[training]\nbatch_norm = 'evl'", "did you mean 'eval'?"),
        ("[grid]\nbatch_size = []", "batch_size in [grid] is an empty list"),
        ("[grid]\nbatch_size = [1, 0]", "batch_size in [grid] is 0"),
        ("[grid]\nmodel = 3", "give it as text in quotes"),
        ("[grid]\nmodel = ''", "model in [grid] is empty"),
        ("[grid]\nmodel = 'lenett'", "there is no model called 'lenett'; did you mean 'lenet'?"),
        ("[grid]\nweights = 'nope.safetensors'", "there is no weights file"),
        ("[grid]\ndefense = 'gausian_noise'", "did you mean 'gaussian_noise'?"),
        ("[grid]\ndefense = 'gaussian_noise(sdt=1)'", "did you mean 'std'?"),
        ("[grid]\ndefense = 'gaussian_noise(std=-1)'", "std is -1"),
        ("[grid]\ndefense = 'gaussian_noise(std=0.1'", "cannot read"),
        ("[grid]\ndefense = 'gaussian_noise:lader'", "only ':ladder' may follow"),
        ("[grid]\ndefense = 'none +'", "names no method"),
        ("[grid\nmodel = 'lenet'", "cannot be read as TOML"),
        ("[grid]\nmodel = 'lenet'\nmodel = 'mlp'", "cannot be read as TOML"),
    ],
)
def test_a_wrong_plan_gets_one_sentence(text: str, says: str, tmp_path: Path) -> None:
    assert says in complaint(write(tmp_path, text))


@pytest.mark.parametrize(
    ("training", "says"),
    [
        ({"local_epochs": 2, "local_steps": [1, 4]}, "local_epochs is 2 and local_steps 4"),
        ({"minibatch": 8, "local_epochs": 1, "batch_size": [8, 4]}, "set minibatch to at most 4"),
        ({"minibatch": 2, "batch_size": 8}, "only 2 of the 8 records"),
        ({"momentum": 0.9, "optimizer": "adam", "local_epochs": 1}, "adam has its own"),
        ({"shuffle": True, "local_steps": 4}, "count local_epochs instead"),
        ({"cut": ["cut1"], "local_epochs": 1, "defense": ["none"]}, "leave local_epochs, minibatch and dropout out"),
    ],
)
def test_a_training_that_means_nothing_gets_one_sentence(training: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError) as caught:
        cells_of(Plan.default(**training))
    assert says in one_sentence(str(caught.value))


def test_models_that_cannot_train_so_are_found_before_any_work(tmp_path: Path) -> None:
    net = tmp_path / "net.py"
    net.write_text(
        "from torch import nn\n"
        "def flat(classes):\n    return nn.Sequential(nn.Flatten(), nn.Linear(64, 4), nn.BatchNorm1d(4), nn.Linear(4, classes))\n"
    )
    plan = Plan.default(data="digits", model=f"{net}:flat", batch_size=5, minibatch=2, local_epochs=1, defense=["none"])
    check_inputs(plan)
    with pytest.raises(UsageError, match="the last minibatch holds one record, and BatchNorm layer '2' in train mode"):
        check_inputs(plan.replace(batch_norm="train"))
    check_inputs(plan.replace(batch_norm="train", minibatch=3))
    with pytest.raises(UsageError, match="a local step takes one record"):
        check_inputs(plan.replace(batch_norm="train", minibatch=0, local_epochs=0, batch_size=(1,)))
    with pytest.raises(UsageError, match="the model has no dropout layer"):
        check_inputs(plan.replace(dropout=True))


def test_epochs_of_an_audit_stand_in_the_table_of_training(tmp_path: Path) -> None:
    text = "[grid]\nbatch_size = 40\ndefense = 'none'\n[training]\nlocal_epochs = 2\nminibatch = 4\n"
    text += "shuffle = true\nmomentum = 0.9\n"
    (cell,) = cells_of(Plan.from_toml(write(tmp_path, text)))
    assert (cell.shares, cell.training().steps(40), cell.training().sizes(10)) == ("weights", 20, [4, 4, 2] * 2)
    assert (cell.training().shuffle, cell.training().momentum) == (True, 0.9)
    utility = Plan.from_toml(write(tmp_path, text + "[utility]\n")).utility
    assert utility is not None and (utility.local_epochs, utility.minibatch, utility.shuffle) == (1, 16, False)


def test_settings_that_came_later_change_no_key_where_they_are_not_used() -> None:
    content: dict[str, str | int] = {"code": "c", "data": "d", "threads": 1}
    for kind, later, name in ((Cell, CAME_LATER, "cell"), (Training, ("shuffle", "dropout"), "training")):
        known = {key: value for key, value in kind().as_dict().items() if key not in later}
        head = {"cell": CELL_FORMAT, "training": TRAINING_FORMAT}[name]
        text = json.dumps({"format": head, name: known, "content": content}, sort_keys=True)
        assert kind().key(**content) == hashlib.sha256(text.encode()).hexdigest()[:16]
    others = {"local_epochs": 1, "minibatch": 1, "shuffle": True, "momentum": 0.5, "dropout": True, "prior": "none"}
    keys = {Cell(**{name: value}).key(**content) for name, value in others.items()}  # type: ignore[arg-type]
    assert len(keys | {Cell().key(**content)}) == 7


@pytest.mark.parametrize(
    ("state", "says"),
    [
        ("traned(steps=3)", "did you mean 'trained'?"),
        ("trained(step=3)", "did you mean 'steps'?"),
        ("trained(steps=0)", "give a number above 0"),
        ("given", "needs weights"),
    ],
)
def test_a_wrong_state_gets_one_sentence(state: str, says: str) -> None:
    with pytest.raises(UsageError) as caught:
        cells_of(Plan.default(state=state))
    assert says in one_sentence(str(caught.value))


def test_a_plan_that_is_no_text_gets_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    path.write_bytes(b"\xff\xfe\x00")
    assert "cannot be read as TOML" in complaint(path)
    assert "No such file" in complaint(tmp_path / "none.toml")
    assert "cannot read the plan" in complaint(tmp_path)


def test_paths_start_at_the_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "plans"
    (folder / "scans").mkdir(parents=True)
    text = '[data]\nsource = ["photos", "scans", "x.npz", "/abs/y.npz"]\nlabels = ["", "l.csv", "", ""]\n'
    text += '[grid]\nmodel = ["net.py:make(width=2)", "package.net:make"]\ndefense = "mine.py:Noise(std=1) + none"'
    write(folder, text)
    monkeypatch.chdir(tmp_path)
    plan = Plan.from_toml(Path("plans/plan.toml"))
    assert plan.data == ("photos", "plans/scans", "plans/x.npz", "/abs/y.npz")
    assert plan.labels == ("", "plans/l.csv", "", "")
    assert plan.model == ("plans/net.py:make(width=2)", "package.net:make")
    assert plan.defense == ("plans/mine.py:Noise(std=1) + none",)
    write(folder, """[grid]\ndefense = "refiner(network='own.safetensors', epsilon=0.1) + shadow(generator='/abs/g.json')\"""")
    moved = Plan.from_toml(Path("plans/plan.toml")).defense
    assert moved == ("refiner(network='plans/own.safetensors', epsilon=0.1) + shadow(generator='/abs/g.json')",)
    write(folder, text)
    monkeypatch.chdir(folder)
    assert Plan.from_toml(Path("plan.toml")).data == ("photos", "scans", "x.npz", "/abs/y.npz")


def test_a_defense_of_the_users_own_is_found_and_spelt_so_that_it_is_found_again(tmp_path: Path) -> None:
    code = (
        "from dataclasses import dataclass\nfrom gradveil.defenses import Defense, DefenseCard\n"
        "@dataclass(frozen=True, kw_only=True)\nclass Mine(Defense):\n"
        "    card = DefenseCard(name='mine', summary='Mine.')\n    strength: float = 1.0\n"
    )
    (tmp_path / "my_defense.py").write_text(code)
    (tmp_path / "broken.py").write_text("1 / 0\n")
    own = f"{tmp_path}/my_defense.py:Mine(strength=2)"
    assert expand_defense(own) == [f"{tmp_path}/my_defense.py:Mine(strength=2.0)"]
    for wrong, says in {
        f"{tmp_path}/broken.py:Mine": "ZeroDivisionError",
        f"{tmp_path}/my_defense.py:Mien": "did you mean 'Mine'?",
        f"{tmp_path}/my_defense.py:dataclass": "not a defense class",
        f"{own}:ladder": "has no ladder",
        "gradveil.randomness:Seed(value=1)": "is no defense",
    }.items():
        with pytest.raises(UsageError) as caught:
            expand_defense(wrong)
        assert says in one_sentence(str(caught.value))


def test_data_and_models_are_tried_before_any_work(tmp_path: Path) -> None:
    check_inputs(Plan.default(model=["lenet", "mlp"], data=["photos", "digits"]))
    with pytest.raises(UsageError, match="the audit needs 512 records and 'photos' has 501"):
        check_inputs(Plan.default(records=500, batch_size=[1, 16]))
    with pytest.raises(UsageError, match="activation"):
        check_inputs(Plan.default(model="lenet(activation='rell')"))
    bad = {
        "nan": (np.full((4, 8, 8, 3), np.nan, np.float32), "NaN"),
        "range": (np.full((4, 8, 8, 3), 7.0, np.float32), "must lie in [0, 1]"),
        "empty": (np.zeros((0, 8, 8, 3), np.float32), "is empty"),
    }
    for name, (inputs, says) in bad.items():
        np.savez(tmp_path / f"{name}.npz", x=inputs, y=np.arange(len(inputs)) % 2)
        with pytest.raises(UsageError) as caught:
            check_inputs(Plan.default(data=str(tmp_path / f"{name}.npz"), model="mlp"))
        assert says in one_sentence(str(caught.value))


def test_every_key_is_documented() -> None:
    text = DOCS.read_text(encoding="utf-8")
    assert [key.toml for key in KEYS if f"| `{key.toml}` |" not in text] == []
    assert [section for section in SECTIONS if f"`[{section}]`" not in text] == []


def test_the_documented_plan_is_a_plan() -> None:
    text = DOCS.read_text(encoding="utf-8")
    block = text.split("```toml\n")[1].split("```")[0]
    assert len(cells_of(Plan.from_dict(tomllib.loads(block)))) == 12
