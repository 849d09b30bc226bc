"""Speed and quality beside the public package `breaching` 0.1.2: the same attack on the same updates, in one run, interleaved.

    pip install --no-deps breaching==0.1.2 && pip install hydra-core
    python -m benchmarks.against_breaching --data cifar10.npz --rounds 5 --out FILE
    python -m benchmarks.against_breaching --data cifar10.npz --device cuda --model resnet18 --images 0 --out FILE

Both sides attack undefended gradients of one untrained network with the inverting-gradients recipe (cosine, total variation,
signed Adam at 0.1 with the published decay, pictures kept in [0, 1], best iterate kept) and know the labels; one record per
update. `breaching` attacks one update after the other, as its interface does: its restarts run in sequence too, and several
queries or several images of one user share one unknown. Gradveil attacks one update, and many at once, in the execution it
chooses by itself: recorded on a GPU, and on a CPU not compiled below 400,000 candidate-steps. Seconds are those of the whole
call, preparation and final scoring included; rates take the fastest round.

What could favour one side:

* `breaching`: reading its configuration and building its attacker are not timed. It starts where Gradveil starts, at
  N(0.5, 0.25²), not at its own N(0, 1), two thirds of which lie outside the box. Mean 0 and deviation 1 stand in for those of
  the data, so that both search one box. cuDNN may try all its algorithms in its turns, as its own scripts let it. It multiplies
  as precisely as Gradveil does; torch's default is coarser and would blur the loss of a LeNet. The first ``--tv`` is the power
  of ten that was best for `breaching` on three other images; the second was best for Gradveil.
* Gradveil: network and pictures are small, so many fit at once. With ``--breaching-steps`` below ``--rate-steps``, the fixed
  costs of `breaching`, some three evaluations, weigh more.
* Left as each has it: `breaching` reads its loss back from the GPU in every step, adds differences between the border and zero
  to the total variation, keeps the point after the best step rather than the best point, and computes one minus the cosine, which
  float32 cannot tell from zero when the angle is small (so its last iterate is shown too). Gradveil computes the same number
  from differences, checks that an attack changed nothing it was shown, and evaluates the loss three times more.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import importlib.metadata
import importlib.util
import os
import statistics
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness import Timer, arguments, finish, read
from gradveil.attacks import launch
from gradveil.attacks.engine.execution import COARSE_FROM, choose_execution
from gradveil.attacks.ensembles import STANDARD
from gradveil.attacks.inverting_gradients import InvertingGradients
from gradveil.audit.scene import Subject, build_subject
from gradveil.data import load_data
from gradveil.errors import GradveilError
from gradveil.metrics.psnr import peak_signal_to_noise
from gradveil.study.cell import Cell
from gradveil.tensors import Named, matrix_products

Way = Callable[[], Tensor]
"""Runs one whole attack and returns the pictures it found, (count, C, H, W)."""

TARGETS = {("cpu", "lenet"): 16, ("cuda", "lenet"): 512, ("cpu", "resnet18"): 2, ("cuda", "resnet18"): 32}
WARM_UP = 20


def import_breaching() -> Any:
    """Return the package; where torchvision is missing, names that it needs at import, and nothing else, stand in for it.

    They are a base class of DenseNets and an empty module of transforms; the attack measured here uses neither.
    """
    if importlib.util.find_spec("torchvision") is None:
        names = ("torchvision", "torchvision.models", "torchvision.models.densenet", "torchvision.transforms")
        stand_in = {name: types.ModuleType(name) for name in names}
        vars(stand_in["torchvision.models.densenet"])["_DenseLayer"] = torch.nn.Module
        vars(stand_in["torchvision.models"])["densenet"] = stand_in["torchvision.models.densenet"]
        vars(stand_in["torchvision"]).update(
            models=stand_in["torchvision.models"], transforms=stand_in["torchvision.transforms"], __version__="stand-in"
        )
        sys.modules.update(stand_in)
    return importlib.import_module("breaching")


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Drop what the other package prints and warns of."""
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@dataclass(frozen=True)
class Bench:
    """The updates under attack, the other package, and where Gradveil's searches start."""

    breaching: Any
    subject: Subject
    starts: Tensor
    device: torch.device

    def theirs(self, index: int, steps: int, tv: float | None = None, ends: list[Tensor] | None = None) -> Way:
        """Return the other package's attack on one update, by default with its own ``tv``; ``ends`` gets its last iterate."""
        learner, seen = self.subject.learner, self.subject.targets[index].observation
        changes = [f"optim.max_iterations={steps}"] + ([] if tv is None else [f"regularization.total_variation.scale={tv}"])
        with quiet():
            settings = self.breaching.get_attack_config("invertinggradients", changes)
        model = copy.deepcopy(learner.model).requires_grad_(True)
        setup = {"device": self.device, "dtype": torch.float}
        attacker = self.breaching.attacks.prepare_attack(model, torch.nn.CrossEntropyLoss(), settings, setup)
        begin, kept = attacker._initialize_data, [] if ends is None else ends
        names, channels = [name for name, _ in model.named_parameters()], seen.input_shape[0]
        about = types.SimpleNamespace(shape=seen.input_shape, mean=[0.0] * channels, std=[1.0] * channels, modality="vision")
        payload = {
            "parameters": [learner.weights[name] for name in names],
            "buffers": [learner.buffers[name] for name, _ in model.named_buffers()],
            "metadata": about,
        }
        shared = {
            "gradients": [seen.update.weights[name] for name in names],
            "buffers": None,
            "metadata": {"num_data_points": 1, "labels": seen.labels, "local_hyperparams": None},
        }

        def run() -> Tensor:
            searches = torch.backends.cudnn.benchmark
            torch.backends.cudnn.benchmark = True
            try:
                with matrix_products(self.device, coarse=learner.parameters >= COARSE_FROM):
                    found, _ = attacker.reconstruct([payload], [shared], {}, initial_data=self.starts[index])
            finally:
                torch.backends.cudnn.benchmark = searches
            pictures: Tensor = found["data"]
            return pictures

        def remembered(shape: Any) -> Any:
            kept.append(begin(shape))  # the search moves this very tensor
            return kept[-1]

        attacker._initialize_data = remembered
        return run

    def ours(self, attack: InvertingGradients, count: int) -> Way:
        """Return one of our recipes on the first ``count`` updates at once."""
        observations = [target.observation for target in self.subject.targets[:count]]
        context = self.subject.context(attack.steps)
        return lambda: torch.cat([one.inputs for one in launch(attack, observations, context)])

    def timed(self, way: Way) -> tuple[Tensor, float]:
        """Return the pictures and the seconds of the whole call."""
        pictures: list[Tensor] = []
        seconds = Timer(self.device)("way", lambda: pictures.append(way()))
        return pictures[0], seconds

    def psnr(self, pictures: Tensor, first: int) -> list[float]:
        """Return the PSNR of pictures of consecutive targets, the first of which is number ``first``."""
        truth = torch.cat([target.batch.inputs for target in self.subject.targets[first : first + len(pictures)]])
        return [round(float(value), 2) for value in peak_signal_to_noise(pictures.cpu().clamp(0, 1), truth)]


def set_up(package: Any, cell: Cell, data: str) -> Bench:
    """Make the updates, and look where Gradveil's recipe starts, so that the other side can start there too."""
    subject = build_subject(cell, load_data(data, split=None if data == "photos" else "test"), rehearsals=0)
    starts: list[Tensor] = []

    def look(_: int, leaves: Named) -> None:
        starts.append(leaves["inputs"].clone())

    launch(InvertingGradients(steps=1), [t.observation for t in subject.targets], replace(subject.context(1), watch=look))
    return Bench(package, subject, starts[0], torch.device(cell.device))


def measure_rates(bench: Bench, steps: int, their_steps: int, rounds: int) -> dict[str, Any]:
    """Return attack steps × images per second of each way: interleaved, the fastest of the rounds."""
    counts = {"breaching": 1} | {f"gradveil, {count} at once": count for count in (1, len(bench.subject.targets))}
    spent = {name: their_steps if name == "breaching" else steps for name in counts}

    def way(name: str, steps: int) -> Way:
        return bench.theirs(0, steps) if name == "breaching" else bench.ours(InvertingGradients(steps=steps), counts[name])

    for name in counts:
        way(name, WARM_UP)()
    ways = {name: way(name, spent[name]) for name in counts}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, run in ways.items():
            seconds[name].append(round(bench.timed(run)[1], 3))
    rates = {name: round(spent[name] * count / min(seconds[name]), 1) for name, count in counts.items()}
    size = bench.subject.learner.parameters
    modes = {name: choose_execution("auto", bench.device, size, count, 1, steps).mode for name, count in counts.items()}
    return {
        "steps": spent,
        "execution": modes | {"breaching": "loop"},
        "seconds_of_rounds": seconds,
        "steps_per_second": rates,
        "ratio_to_breaching": {name: round(rate / rates["breaching"], 2) for name, rate in rates.items()},
    }


def measure_quality(bench: Bench, steps: int, images: int, weights: list[float]) -> list[dict[str, Any]]:
    """Return seconds per record and PSNR of the same few images for each side, in turns, with published and equal settings."""
    many = len(bench.subject.targets)
    published, sharp = InvertingGradients(steps=steps), replace(STANDARD.members[0].attack, steps=steps, restarts=1)
    rows: dict[tuple[str, str], list[Way]] = {}
    ends: dict[tuple[str, str], list[Tensor]] = {}

    def add(theirs: str, ours: str, tv: float | None) -> None:
        last = ends.setdefault(("breaching", theirs), [])
        rows["breaching", theirs] = [bench.theirs(index, steps, tv, last) for index in range(images)]
        rows["gradveil", ours] = [bench.ours(published if tv is None else replace(published, tv=tv), many)]

    add("as shipped, tv 0.2", f"as shipped, tv {published.tv:g}", None)
    for tv in weights:
        add(f"tv {tv:g}", f"tv {tv:g}", tv)
    rows["gradveil", "smooth_to_sharp"] = [bench.ours(sharp, many)]
    seconds, values = dict.fromkeys(rows, 0.0), {key: list[float]() for key in rows}
    for turn in range(images):
        for key, ways in rows.items():
            if turn < len(ways):
                pictures, spent = bench.timed(ways[turn])
                seconds[key] += spent
                values[key] += bench.psnr(pictures, turn)
    return [
        {
            "package": key[0],
            "recipe": key[1],
            "steps": steps,
            "at_once": many if key[0] == "gradveil" else 1,
            "seconds_per_record": round(seconds[key] / len(values[key]), 4),
            "median_psnr": round(statistics.median(values[key][:images]), 2),
            "psnr": values[key][:images],
            "median_psnr_of_all": round(statistics.median(values[key]), 2),
        }
        | ({"psnr_of_last_iterate": bench.psnr(torch.cat(ends[key]).detach(), 0)} if key in ends else {})
        for key in rows
    ]


def main() -> int:
    """Measure and print, and write JSON where asked."""
    parser = arguments(__doc__, rounds=3)
    parser.add_argument("--data", default="photos", help="an .npz with x_test and y_test; without it, the built-in photos")
    parser.add_argument("--model", default="lenet", choices=("lenet", "resnet18"))
    parser.add_argument("--targets", type=int, default=0, help="images at once; 0 chooses by device and model")
    parser.add_argument("--rate-steps", type=int, default=300)
    parser.add_argument("--breaching-steps", type=int, default=0, help="its own number of steps for the rate; 0 means the same")
    parser.add_argument("--images", type=int, default=4, help="images whose quality is compared; 0 leaves quality out")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--tv", type=float, nargs="+", default=[1e-7, 1e-9], help="weights of total variation given to both")
    options = read(parser)
    targets = max(options.targets or TARGETS[options.device, options.model], options.images)
    cell = Cell(model=options.model, device=options.device, records=targets, known_labels=True)
    try:
        with quiet():
            package = import_breaching()
        bench = set_up(package, cell, options.data)
    except ImportError as error:
        sys.stderr.write(f"breaching cannot be imported ({error}); install it with --no-deps, and hydra-core beside it.\n")
        return 2
    except GradveilError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    result = {
        "model": options.model,
        "data": Path(options.data).name,
        "targets": targets,
        "rates": measure_rates(bench, options.rate_steps, options.breaching_steps or options.rate_steps, options.rounds),
        "quality": measure_quality(bench, options.steps, options.images, options.tv) if options.images else [],
        "breaching": importlib.metadata.version("breaching"),
    }
    finish("against_breaching", result, options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
