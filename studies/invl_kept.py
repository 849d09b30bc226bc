"""What a kept or shared basis of guided noise costs in protection, in closed form and without an attack.

No plan says it: nothing is attacked; a closed form is evaluated.

InvL-GNP spoils an inverter of rank k by δ Σ_{i≤k} ‖u_iᵀ B‖² / σ_i² in expectation (Theorem 3, its inverse form), with B the
orthonormal directions of the noise; InvL-DNP by δ Σ_{i≤k} ‖v_iᵀ W‖² (Theorem 2). u_i, σ_i, v_i are those of one record at the
weights of the round; B and W may be older, or those of public or class means. Told is the quotient by what the record's own basis
of this round gives. A client has one record for InvL-GNP; class means of InvL-DNP are over ``means`` records of the class.

What the kept bases are held against, with the same number d of directions: the basis of another record in the same round, and
two subspaces drawn at random, exactly and in expectation: E ‖u_iᵀ B‖² is d / p among all p shared values, and d / m in the range
of the record's own Jacobian, the m directions in which the update can move at all when the picture changes.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from gradveil.defenses.invl.singular_noise import (
    average_jacobian,
    noisy_ranks,
    public_centres,
    record_jacobian,
)
from gradveil.federation.setup import build_federation
from gradveil.learning import Learner
from gradveil.spectra.jacobians import Jacobian
from gradveil.spectra.joint import JointJacobian
from gradveil.spectra.layered import joint_push
from gradveil.spectra.spectrum import Spectrum, spectrum
from gradveil.study.federation import FederationSettings
from gradveil.study.local_training import TrainingSettings
from studies.invl_vertical import shrink
from studies.shared import MISSING, table

FORMAT = "gradveil-invl-kept-1"
LOW, HIGH, RULE, MOST = 0.6, 0.95, "sum", 4096
AT_ONCE = 64
COLUMNS = {
    "update_noise_kept": "InvL-GNP: own basis, kept",
    "update_noise_public": "basis at public centres",
    "update_noise_other_record": "fresh basis of another record",
    "update_noise_random": "random, among all shared values",
    "update_noise_random_in_range": "random, in the range of the record's Jacobian",
    "data_noise_kept": "InvL-DNP: own basis, kept",
    "data_noise_class": "basis of the class",
    "data_noise_random": "random",
}


def trained(learner: Learner, inputs: Tensor, targets: Tensor, rounds: int, rate: float, minibatch: int) -> Learner:
    """Take so many steps of Adam on consecutive minibatches."""
    weights = {name: value.clone() for name, value in learner.weights.items()}
    server = torch.optim.Adam(list(weights.values()), lr=rate)
    for index in range(rounds):
        rows = torch.arange(index * minibatch, (index + 1) * minibatch) % len(inputs)
        gradient = learner.gradient(weights, inputs[rows], targets[rows])
        for name, value in weights.items():
            value.grad = gradient[name].detach()
        server.step()
    return learner.replace(weights={name: value.detach() for name, value in weights.items()})


class Own:
    """One record's spectrum at some weights, the range of its noise, and its own two bases."""

    def __init__(self, jacobian: Jacobian) -> None:
        """Decompose it."""
        self.jacobian = jacobian
        self.found: Spectrum = spectrum(jacobian, mode="gram", right=True)
        self.first, self.last = noisy_ranks(self.found, low=LOW, high=HIGH, rule=RULE, most=MOST)
        assert self.found.right is not None
        self.right = self.found.right.T[: self.last]  # v_1 … v_k as rows, float64

    @cached_property
    def left(self) -> Tensor:
        """Return u_1 … u_k as rows: J v_i / σ_i, by layers."""
        push = joint_push(JointJacobian((self.jacobian,)))
        scaled = (self.right / self.found.values[: self.last, None]).to(self.jacobian.at)
        return torch.cat([push(rows.unsqueeze(0))[0] for rows in scaled.split(AT_ONCE)]).double()

    def update_basis(self) -> Tensor:
        """Return u_{j+1} … u_k as rows."""
        return self.left[self.first :]

    def spoiled_by_update_noise(self, basis: Tensor) -> float:
        """Return Σ_{i≤k} ‖u_iᵀ B‖² / σ_i²."""
        seen = (self.left @ basis.T).square().sum(1)
        return float((seen / self.found.values[: self.last].square()).sum())

    def own_update_noise(self) -> float:
        """Return the same of the record's own basis: Σ_{j<i≤k} 1 / σ_i²."""
        return float(self.found.values[self.first : self.last].pow(-2).sum())

    def spoiled_at_random(self, directions: int, among: int) -> float:
        """Return what so many directions, drawn at random in a space of ``among`` dimensions that holds every u_i, give."""
        return directions / among * float(self.found.values[: self.last].pow(-2).sum())

    def spoiled_by_data_noise(self, basis: Tensor) -> float:
        """Return Σ_{i≤k} ‖v_iᵀ W‖² over k, which is what the record's own basis gives."""
        return float((self.right @ basis.T).square().sum()) / self.last


def record_rows(
    learners: dict[int, Learner],
    record: Tensor,
    target: Tensor,
    mean: Tensor,
    public: dict[int, Tensor],
    other: dict[int, Tensor],
) -> list[dict[str, Any]]:
    """Return the quotients of one record at every age of its basis, and leave its fresh bases in ``other`` for the next one."""
    old = Own(record_jacobian(learners[0], record, target))
    old_update = old.update_basis()
    rows = []
    for age, learner in learners.items():
        now = old if age == 0 else Own(record_jacobian(learner, record, target))
        of_class = Own(record_jacobian(learner, mean, target)) if age == max(learners) else None
        own, directions = now.own_update_noise(), len(old_update)
        outputs, inputs = now.jacobian.outputs, now.jacobian.inputs
        rows.append(
            {
                "age": age,
                "j": now.first,
                "k": now.last,
                "update_noise_kept": now.spoiled_by_update_noise(old_update) / own,
                "update_noise_public": now.spoiled_by_update_noise(public[age]) / own if age in public else None,
                "update_noise_other_record": now.spoiled_by_update_noise(other[age]) / own if age in other else None,
                "update_noise_random": now.spoiled_at_random(directions, outputs) / own,
                "update_noise_random_in_range": now.spoiled_at_random(directions, min(inputs, outputs)) / own,
                "data_noise_kept": now.spoiled_by_data_noise(old.right),
                "data_noise_class": now.spoiled_by_data_noise(of_class.right) if of_class else None,
                "data_noise_random": now.last / inputs,
            }
        )
        other[age] = now.update_basis()
    return rows


def units(settings: SimpleNamespace) -> list[str]:
    """Name the only unit: a record is held against the one before it."""
    return ["kept"]


def measure(unit: str, options: SimpleNamespace, work: Path) -> dict[str, Any]:
    """Take the quotients of all records at all ages."""
    data_file = work / "shrunk.npz"
    shrink(Path(options.data), data_file, options.factor)
    begun = time.process_time()
    settings = FederationSettings(
        data=str(data_file), model=options.model, clients=1, clients_per_round=1, rounds=1, seed=options.seed
    )
    federation = build_federation(settings)
    first = federation.learner.replace(settings=TrainingSettings(shares="gradient"))
    data = (federation.inputs, federation.targets)
    ages = sorted({0, *options.rounds})
    learners = {age: trained(first, *data, age, options.server_rate, options.minibatch) for age in ages}
    last = learners[ages[-1]]
    public = {ages[-1]: Own(average_jacobian(last, *public_centres(last, federation.public))).update_basis()}
    rows: list[list[dict[str, Any]]] = []
    other: dict[int, Tensor] = {}
    for index in range(options.records):
        # From the end: the first records are those that the network was trained on.
        place = len(data[0]) - 1 - index
        target = data[1][place]
        members = [each for each in range(len(data[0]) - 1, -1, -1) if data[1][each] == target][: options.means]
        rows.append(record_rows(learners, data[0][place], target, data[0][members].mean(0), public, other))
    kinds = [kind for kind in rows[0][0] if "noise" in kind]
    columns = {(age, kind): [own[place][kind] for own in rows] for place, age in enumerate(ages) for kind in kinds}
    means = {
        at: statistics.fmean(known) for at, found in columns.items() if (known := [each for each in found if each is not None])
    }
    by_age = {str(age): {kind: means[age, kind] for kind in kinds if (age, kind) in means} for age in ages}
    return {
        "format": FORMAT,
        "n": options.records,
        "processor_seconds": round(time.process_time() - begun, 1),
        "mean": by_age,
        "records": rows,
    }


def tables(documents: Mapping[str, Any]) -> dict[str, str]:
    """Show what is left at every age of the basis, as means over records."""
    (found,) = documents.values()
    ages = sorted(found["mean"], key=int)
    values = [[found["mean"][age].get(name) for name in COLUMNS] for age in ages]
    rows = [
        [age, *(MISSING if value is None else f"{value:.2f}" for value in row)] for age, row in zip(ages, values, strict=True)
    ]
    return {"": table(["rounds kept", *COLUMNS.values()], rows)}
