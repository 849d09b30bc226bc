"""Spectra of d(gradient)/d(input): the usual way against ours, interleaved, with time and peak memory.

The usual way is a chunked ``torch.func.jacrev`` and ``torch.linalg.svd``, in float32 as in the InvRE paper. Ours are ``gram``
(exact, in float64) and ``leading``. Every measurement is a process of its own, so that its peak memory is its own; ways are
interleaved and the fastest of each counts. On a machine that others use too, ``--clock cpu`` counts processor time.

    python -m benchmarks.risk_spectra --rounds 3
    python -m benchmarks.risk_spectra --rounds 1 --clock cpu --out results.json

Large models, some pictures one after another, with peak memory of the device: ``gram`` of ResNet-18 at 32 pixels, in double
precision and with tangents in single precision, each compared with ``leading``; and ``leading`` alone, as at 224 pixels.

    python -m benchmarks.risk_spectra --large gram --device cuda --images 4
    python -m benchmarks.risk_spectra --large leading --device cuda --data imagenet/ --read label_column=NAME --leading 32
    python -m benchmarks.risk_spectra --large leading --images 1 --leading 16

Many records, one by one and together, interleaved; the fastest of each way counts. ``--cut`` takes embeddings, not gradients.

    python -m benchmarks.risk_spectra --many 16 --mode leading --clock cpu --threads 1
    python -m benchmarks.risk_spectra --many 8 --model resnet18 --mode gram --device cuda --out many.json
    python -m benchmarks.risk_spectra --many 8 --model resnet18 --mode leading --leading 16 --device cuda
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.func import jacrev

from benchmarks.harness import arguments, finish, read
from gradveil.data import load_data
from gradveil.learning import EmbeddingLearner, Learner, loss_by_name
from gradveil.models import build_model, split_model
from gradveil.randomness import Seed
from gradveil.risk.calibration import built_in_calibration
from gradveil.risk.invre import risk_score
from gradveil.spectra.jacobians import Jacobian, gradient_jacobian, gradient_jacobians, load_forward_mode
from gradveil.spectra.spectrum import Spectrum, records_at_once, spectra_of, spectrum
from gradveil.study.reading import read_options

WAYS = ("dense", "gram", "leading")
ROWS = 256


def release(model: str, row: int) -> tuple[Learner, Tensor, Tensor]:
    """Return a learner of ten classes, one photo and its label."""
    data = load_data("photos")
    built = build_model(model, input_shape=data.input_shape, classes=10, seed=Seed(0))
    return Learner.of(built, loss_by_name("cross_entropy")), data.inputs[row], data.targets[row] % 10


def usual(learner: Learner, record: Tensor, target: Tensor) -> Spectrum:
    """Form the Jacobian by chunks of rows and decompose it."""

    def flat(x: Tensor) -> Tensor:
        update = learner.update(x.reshape(1, *record.shape), target.unsqueeze(0))
        return torch.cat([value.reshape(-1) for value in update.values()])

    point = record.reshape(-1)
    J = jacrev(flat, chunk_size=ROWS)(point).detach()
    _, values, right = torch.linalg.svd(J, full_matrices=False)
    energy = float(point.double().square().sum())
    sigma, along = values.double(), (right @ point).double()
    return Spectrum(sigma, along, J.shape[1], J.shape[0], energy, float(sigma.square().sum()), "dense")


def one(way: str, model: str, row: int) -> dict[str, Any]:
    """Measure one way in this process."""
    torch.set_num_threads(1)
    learner, record, target = release(model, row)
    load_forward_mode()
    ways: dict[str, Callable[[], Spectrum]] = {
        "dense": lambda: usual(learner, record, target),
        "gram": lambda: spectrum(gradient_jacobian(learner, record, target), mode="gram"),
        "leading": lambda: spectrum(gradient_jacobian(learner, record, target, dtype=torch.float32), mode="leading"),
    }
    # What torch loads on first use is not part of any way.
    small = build_model("lenet", input_shape=(3, 8, 8), classes=10, seed=Seed(0))
    own = Learner.of(small, loss_by_name("cross_entropy"))
    spectrum(gradient_jacobian(own, record[:, :8, :8], target, dtype=torch.float32), mode="leading")
    usual(own, record[:, :8, :8], target)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    wall, cpu = time.perf_counter(), time.process_time()
    found = ways[way]()
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    score = risk_score(found, alpha=built_in_calibration().alpha)
    return {"way": way, "wall": wall, "cpu": cpu, "peak_mb": peak / 1024, "invre": score.invre, "score": score.score}


def large(asked: argparse.Namespace) -> dict[str, Any]:
    """Measure pictures one after another on one device."""
    device = torch.device(asked.device)
    data = load_data(asked.data, **read_options(asked.read))
    built = build_model(asked.model, input_shape=data.input_shape, classes=10, seed=Seed(0))
    learner = Learner.of(built, loss_by_name("cross_entropy")).to(device)
    load_forward_mode()
    alpha = built_in_calibration().alpha
    runs = []
    for dtype in [getattr(torch, name) for name in asked.precision.split(",")] if asked.large == "gram" else [torch.float32]:
        for row in range(asked.row, asked.row + asked.images):
            jacobian = gradient_jacobian(learner, data.inputs[row], data.targets[row] % 10, dtype=dtype)
            told = {"row": row, "dtype": str(dtype).removeprefix("torch."), **_timed(jacobian, asked.large, asked, alpha)}
            if asked.large == "gram":
                single = gradient_jacobian(learner, data.inputs[row], data.targets[row] % 10, dtype=torch.float32)
                near = _timed(single, "leading", asked, alpha)
                told |= {"leading_seconds": near["seconds"], "leading_error": abs(near["invre"] - told["invre"])}
            runs.append(told)
            print(json.dumps(told), flush=True)
    return {
        "model": asked.model,
        "mode": asked.large,
        "input_shape": list(data.input_shape),
        "parameters": learner.parameters,
        "runs": runs,
    }


def _timed(jacobian: Jacobian, mode: str, asked: argparse.Namespace, alpha: float) -> dict[str, Any]:
    """Take one spectrum, with time, peak memory and what it says."""
    cuda = jacobian.at.device.type == "cuda"
    if asked.at_once:
        each = 8 * (jacobian.outputs + jacobian.inputs) * jacobian.at.element_size()
        jacobian = replace(jacobian, working_bytes=asked.at_once * each if mode == "leading" else 0)
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    wall, cpu = time.perf_counter(), time.process_time()
    found = spectrum(jacobian, mode=mode, leading=asked.leading)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    peak = torch.cuda.max_memory_allocated() if cuda else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    score = risk_score(found, alpha=alpha)
    return {
        "seconds": round(wall, 2),
        "cpu_seconds": round(cpu, 2),
        "peak_gb": round(peak / 1e9, 2),
        "self_check": found.disagreement,
        "found": len(found.values),
        "invre": score.invre,
        "low": score.low,
        "high": score.high,
        "score": score.score,
        "rank": score.rank,
    }


def many(asked: argparse.Namespace) -> dict[str, Any]:
    """Measure records one by one and together, interleaved, on one device."""
    device, mode = torch.device(asked.device), asked.mode
    data = load_data(asked.data, **read_options(asked.read))
    built = build_model(asked.model, input_shape=data.input_shape, classes=10, seed=Seed(0))
    loss = loss_by_name("cross_entropy")
    learner = (EmbeddingLearner.of_bottom(split_model(built, asked.cut)[0], loss) if asked.cut else Learner.of(built, loss)).to(
        device
    )
    load_forward_mode()
    dtype = torch.float32 if mode == "leading" else getattr(torch, asked.precision.split(",")[0])
    rows = slice(asked.row, asked.row + asked.many)
    seeds = [Seed(0).child("risk", index) for index in range(asked.many)]
    runs: dict[str, list[dict[str, float]]] = {"one by one": [], "together": []}
    found: dict[str, list[Spectrum]] = {}
    at_once = 0
    for _ in range(asked.rounds):
        for way in runs:
            jacobians = gradient_jacobians(learner, data.inputs[rows], data.targets[rows] % 10, dtype=dtype)
            at_once = at_once or records_at_once(jacobians[0], mode, together=True, most_bytes=asked.most_bytes)
            if device.type == "cuda":
                torch.cuda.synchronize()
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
            wall, cpu = time.perf_counter(), time.process_time()
            found[way] = spectra_of(
                jacobians,
                mode=mode,
                leading=asked.leading,
                seeds=seeds,
                together=way == "together",
                most_bytes=asked.most_bytes,
            )
            wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
            told = {"wall": wall, "cpu": cpu}
            if device.type == "cuda":
                told["peak_gb"] = round(torch.cuda.max_memory_allocated() / 1e9, 2)
            runs[way].append(told)
            print(json.dumps({"way": way, **told}), flush=True)
    best = {way: min(each[asked.clock] for each in own) / asked.many for way, own in runs.items()}
    return {
        "model": asked.model,
        "cut": asked.cut,
        "mode": mode,
        "dtype": str(dtype).removeprefix("torch."),
        "input_shape": list(data.input_shape),
        "shared_values": found["together"][0].outputs,
        "records": asked.many,
        "at_once": min(at_once, asked.many),
        "seconds_a_record": best,
        "speedup": best["one by one"] / best["together"],
        "peak_gb": {way: max(each.get("peak_gb", 0.0) for each in own) for way, own in runs.items()}
        if device.type == "cuda"
        else {"process": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9, 2)},
        "self_check": max(each.disagreement for own in found.values() for each in own),
        **_differences(found["one by one"], found["together"]),
        "runs": runs,
    }


def _differences(alone: list[Spectrum], together: list[Spectrum]) -> dict[str, float]:
    """Return how far apart the two ways are at most, over all records."""
    alpha = built_in_calibration().alpha
    pairs = list(zip(alone, together, strict=True))
    scores = [(risk_score(one, alpha=alpha).invre, risk_score(other, alpha=alpha).invre) for one, other in pairs]
    return {
        "mean_invre": sum(score for _, score in scores) / len(scores),
        "invre_difference": max(abs(one - other) for one, other in scores),
        "value_difference": max(
            float((one.values[:count] - other.values[:count]).abs().max() / one.values[0].clamp(min=1e-300))
            for one, other in pairs
            for count in [min(len(one.values), len(other.values))]
        ),
    }


def main() -> None:
    parser = arguments(__doc__, rounds=3)
    parser.add_argument("--model", default="lenet")
    parser.add_argument("--row", type=int, default=0)
    parser.add_argument("--only", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--large", choices=("gram", "leading"), help="one mode on a large model, picture by picture")
    parser.add_argument("--many", type=int, default=0, metavar="N", help="N records one by one and together")
    parser.add_argument("--mode", choices=WAYS, default="gram", help="with --many")
    parser.add_argument("--cut", default="", help="with --many: the embedding at this cut, as in cut1")
    parser.add_argument("--most-bytes", type=int, default=0, help="with --many: memory for one program; 0 decides itself")
    parser.add_argument("--data", default="photos")
    parser.add_argument("--read", default="", help="how it is read, as in gradveil audit --read")
    parser.add_argument("--images", type=int, default=1)
    parser.add_argument("--leading", type=int, default=16, help="triplets sought")
    parser.add_argument("--precision", default="float32,float64", help="of the tangents, with --large gram")
    parser.add_argument("--at-once", type=int, default=0, help="products at once in mode leading; 0 lets memory decide")
    asked = read(parser)
    if asked.large or asked.many:
        if asked.large:
            asked.model = "resnet18" if asked.model == "lenet" else asked.model
        finish("risk_spectra", large(asked) if asked.large else many(asked), asked)
        return
    if asked.only:
        print(json.dumps(one(asked.only, asked.model, asked.row)))
        return
    runs: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
    for _ in range(asked.rounds):
        for way in WAYS:
            command = [
                sys.executable,
                "-m",
                "benchmarks.risk_spectra",
                "--only",
                way,
                "--model",
                asked.model,
                "--row",
                str(asked.row),
            ]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            runs[way].append(json.loads(done.stdout.splitlines()[-1]))
            print(runs[way][-1], flush=True)
    best = {way: min(each[asked.clock] for each in found) for way, found in runs.items()}
    memory = {way: min(each["peak_mb"] for each in found) for way, found in runs.items()}
    result = {
        "model": asked.model,
        "seconds": best,
        "peak_mb": memory,
        "gram_speedup": best["dense"] / best["gram"],
        "leading_speedup": best["dense"] / best["leading"],
        "gram_memory_ratio": memory["gram"] / memory["dense"],
        "invre": {way: found[0]["invre"] for way, found in runs.items()},
    }
    finish("risk_spectra", {**result, "runs": runs}, asked)


if __name__ == "__main__":
    main()
