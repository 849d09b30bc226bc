"""From a plan to its cells: every name is looked up, and every point of the grid checked, before any work begins.

A plan checks its form by itself and knows no defense, model or attack; whether the things it names exist is asked here.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

from gradveil.attacks.ensembles import resolve
from gradveil.audit.materials import Materials
from gradveil.audit.scene import build_learner, check_masks
from gradveil.data import DATASETS, DIVISIONS, PARTITIONS
from gradveil.errors import UsageError, suggest
from gradveil.learning.losses import loss_by_name
from gradveil.models import MODELS
from gradveil.randomness import Seed
from gradveil.registry import parse_call
from gradveil.run.ladders import expand_defense, look_up
from gradveil.run.trainings import check_trainings
from gradveil.run.vertical_grid import check_cuts, fitting_cells
from gradveil.study.cell import HORIZONTAL, OF_EPOCHS, Cell
from gradveil.study.checks import check_number
from gradveil.study.limits import parse_limit
from gradveil.study.plan import Plan
from gradveil.study.settings import DEFAULT_DEFENSES, DataSource
from gradveil.study.training import Training
from gradveil.tensors import find_device

__all__ = ["cells_of", "check_inputs", "check_plan", "defenses_of"]

STATES = ("untrained", "given", "trained")
TRAINED_SETTINGS = ("steps", "learning_rate", "batch")


def defenses_of(plan: Plan, materials: Materials | None = None) -> list[str]:
    """Return all defenses with ladders expanded, in one spelling each."""
    return list(dict.fromkeys(spelling for text in plan.defense for spelling in expand_defense(text, materials)))


def check_plan(plan: Plan, materials: Materials | None = None) -> list[str]:
    """Look up every name, without loading data or building models, and return the spellings of all defenses.

    Raises:
        UsageError: With the nearest right name.
    """
    defenses = defenses_of(plan, materials)
    for model in plan.model:
        name, _ = parse_call(model)
        if ":" not in name:
            MODELS.get(name)
    for ensemble in plan.ensemble:
        look_up(ensemble, resolve)
    look_up(plan.loss, loss_by_name)
    look_up(plan.parts, DIVISIONS.build)
    _check_files(plan)
    if plan.bn_statistics and plan.batch_norm != "train":
        raise UsageError("bn_statistics: with batch_norm = 'eval' statistics stay as they are; set batch_norm = 'train'")
    _check_limits(plan, defenses)
    _check_utility(plan)
    find_device(plan.device)
    return defenses


def _check_files(plan: Plan) -> None:
    for source in plan.data:
        if source not in DATASETS.names() and not Path(source).exists():
            hint = suggest(source, DATASETS.names())
            raise UsageError(f"{source!r} is neither built-in data nor a file or folder{hint}")
    for kind, files in (("label", plan.labels), ("weights", plan.weights)):
        for file in files:
            if file and not Path(file).is_file():
                raise UsageError(f"there is no {kind} file {file!r}")


def _check_limits(plan: Plan, defenses: list[str]) -> None:
    for text in plan.fail_if:
        limit = parse_limit(text)
        if limit.metric in ("invre", "exposure") and plan.risk == "off":
            raise UsageError(f"the limit {text!r} needs scores of risk, and risk is off; set it to auto")
        if not any(limit.covers(spelling) for spelling in defenses):
            raise UsageError(f"the limit {text!r} fits none of the defenses {', '.join(defenses)}; name one of them in brackets")


def _check_utility(plan: Plan) -> None:
    if plan.utility is not None:
        look_up(plan.utility.partition, PARTITIONS.build)
        Training.of(plan.utility, data=plan.data[0], model=plan.model[0])


def check_inputs(plan: Plan, materials: Materials | None = None) -> list[Cell]:
    """Load all data and build all models once, so that the last cell cannot fail for what could be seen before the first.

    Returns:
        The cells of the plan.

    Raises:
        UsageError: One sentence about shapes, values, weights or too few records.
    """
    materials = materials or Materials()
    cells = cells_of(plan, materials)
    seed = Seed(plan.seed).child("model")
    for source, labels in sources_of(plan):
        data = materials.dataset(DataSource(data=source, labels=labels, scale=plan.scale, read=plan.read))
        units = [size * clients for size in plan.batch_size for clients in plan.clients]
        wanted = max(-(-plan.records // unit) * unit for unit in units)
        if wanted > len(data):
            cure = "lower records, batch_size or clients"
            raise UsageError(f"the audit needs {wanted} records and {source!r} has {len(data)}; {cure}")
        if plan.lists.isdigit() and int(plan.lists) > len(data):
            cure = "lower it, or leave it at auto for as many as there are"
            raise UsageError(f"lists is {plan.lists}, and {source!r} has {len(data)} records to put on a list; {cure}")
        check_masks(data, plan.known_labels)
        shapes: dict[str, Any] = {"input_shape": data.input_shape, "classes": data.classes, "dense": data.dense}
        for model, weights, _ in _models(plan):
            materials.model(model, seed=seed, weights=weights or None, **shapes)
    check_cuts(cells, materials)
    _check_clients(cells, materials)
    if plan.utility is not None:
        check_trainings(cells, plan.utility)
    return cells


def _check_clients(cells: list[Cell], materials: Materials) -> None:
    """Build local training once where it asks something of the model: dropout layers, or statistics of small minibatches."""
    bare = {"defense": "none", "ensemble": "", "rounds": 1, "device": "cpu"}
    for cell in cells:
        if not cell.cut and (cell.dropout or cell.batch_norm == "train"):
            once = cell.replace(state="given" if cell.weights else "untrained", **bare)
            build_learner(once, materials.dataset(cell), materials.defense("none"), materials)


def sources_of(plan: Plan) -> list[tuple[str, str]]:
    return list(zip(plan.data, _spread(plan.labels, len(plan.data)), strict=True))


def _models(plan: Plan) -> list[tuple[str, str, str]]:
    """Return model, weights and state of every point; weights belong to the state ``given``."""
    points = []
    for model, weights in zip(plan.model, _spread(plan.weights, len(plan.model)), strict=True):
        states = [_check_state(state) for state in plan.state] or ["given" if weights else "untrained"]
        if weights and "given" not in states:
            raise UsageError(f"the weights {weights!r} would not be used: add 'given' to state, or leave them out")
        if "given" in states and not weights:
            raise UsageError(f"the state 'given' needs weights for model {model!r}; name a weights file")
        points += [(model, weights if state == "given" else "", state) for state in states]
    return points


def cells_of(plan: Plan, materials: Materials | None = None) -> list[Cell]:
    """Return every point of the grid, defenses of one setting next to each other; all names are looked up first."""
    materials = materials or Materials()
    defenses = check_plan(plan, materials)
    grid = itertools.product(
        sources_of(plan),
        _models(plan),
        plan.batch_size,
        plan.local_steps,
        plan.clients,
        plan.rounds,
        plan.cut or (HORIZONTAL,),
        plan.ensemble,
        plan.prior,
        defenses,
    )
    common: dict[str, Any] = {
        "scale": plan.scale,
        "read": plan.read,
        "records": plan.records,
        "seed": plan.seed,
        "batch_norm": plan.batch_norm,
        "loss": plan.loss,
        "optimizer": plan.optimizer,
        "learning_rate": plan.learning_rate,
        **{name: getattr(plan, name) for name in OF_EPOCHS},
        "known_labels": plan.known_labels,
        "bn_statistics": plan.bn_statistics,
        "steps": plan.steps,
        "execution": plan.execution,
        "risk": plan.risk,
        "lists": plan.lists,
        "device": find_device(plan.device),
    }
    vertical: dict[str, Any] = {"parts": plan.parts, "party": plan.party, "sees": plan.sees}
    cells = [
        Cell(
            data=source,
            labels=labels,
            model=model,
            weights=weights,
            state=state,
            batch_size=size,
            local_steps=steps,
            clients=clients,
            rounds=rounds,
            ensemble=ensemble,
            prior=prior,
            defense=defense,
            **common,
            **({"cut": cut, **vertical} if cut != HORIZONTAL else {}),
        )
        for (source, labels), (model, weights, state), size, steps, clients, rounds, cut, ensemble, prior, defense in grid
    ]
    for cell in cells:
        cell.training()  # refuses settings of local training that do not fit together
    fitting = fitting_cells(list(dict.fromkeys(cells)), materials, strict=plan.defense != DEFAULT_DEFENSES) if plan.cut else cells
    return list(dict.fromkeys(fitting))


def _check_state(state: str) -> str:
    name, settings = parse_call(state)
    if name not in STATES:
        raise UsageError(f"there is no training state {name!r}{suggest(name, STATES)}")
    known = TRAINED_SETTINGS if name == "trained" else ()
    for key, value in settings.items():
        if key not in known:
            raise UsageError(f"training state {name!r} has no setting {key!r}{suggest(key, known)}")
        check_number(f"training state {state!r}", key, value, open_below=True, ask="give")
    return state


def _spread(values: tuple[str, ...], count: int) -> tuple[str, ...]:
    return values if len(values) == count else (values or ("",)) * count
