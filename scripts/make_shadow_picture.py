"""Draw the picture of docs/shadow.md: x, imagined, M, N¹, N², N and x + N, one X-ray per line, like Figure 5 of the paper.

python -m scripts.make_shadow_picture pneumoniamnist.npz
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import torch
from PIL import Image

from gradveil.defenses.base import ClientView
from gradveil.defenses.shadow.defense import Shadow
from gradveil.defenses.shadow.fit import choose_generator, generator_on, imagine, styles_of
from gradveil.defenses.shadow.noise import error_map, inverse_softmax, relative_noise
from gradveil.federation.setup import build_federation
from gradveil.randomness import Seed
from gradveil.study.published import ScriptedStudy, load_study
from studies.shadow_xray import FEDAVG, load, settings

ROOT = Path(__file__).resolve().parents[1]
PICTURE = ROOT / "docs" / "pictures" / "shadow_noise_maps.png"


def draw(data_file: str, out: Path) -> None:
    """Write the noise maps of six records in the first round."""
    study = load_study(ROOT / "studies" / "shadow_xray.toml")
    assert isinstance(study, ScriptedStudy)
    options = SimpleNamespace(**study.settings | {"data": data_file})
    data, test, _ = load(options)
    federation = build_federation(settings(FEDAVG, options), data, test)
    defense = Shadow(rounds=options.rounds, latent_steps=options.latent_steps)
    batch = data.batch(list(range(0, len(data), max(1, len(data) // 6)))[:6])
    batch = batch.replace(inputs=batch.inputs.to(options.device), targets=batch.targets.to(options.device))
    view = ClientView(learner=federation.learner, seed=Seed(options.seed), weights=federation.learner.weights)
    noise, state = defense.noise(batch, view, {})
    network = generator_on(choose_generator("auto", batch.inputs), batch.inputs.device, max(batch.inputs.shape[2:]))
    weights = {name.removeprefix("shadow/"): value for name, value in state.items() if name.startswith("shadow/")}
    with torch.no_grad():
        imagined = imagine(network, styles_of(network, state["codes"]), weights, batch.inputs)
    errors = error_map(batch.inputs, imagined)
    maps = (errors, inverse_softmax(errors.double(), defense.temperature), relative_noise(errors, defense.temperature))
    columns = [batch.inputs, imagined, *(_levels(each.unsqueeze(1)) for each in (*maps, noise.squeeze(1)))]
    columns.append((batch.inputs + noise).clamp(0, 1))
    grey = torch.cat([column.mean(1).float().cpu() for column in columns], dim=2)  # (B, H, 7 W)
    array = (255 * grey.reshape(-1, grey.shape[-1])).round().byte().numpy()
    Image.fromarray(array).resize((4 * array.shape[1], 4 * array.shape[0]), Image.Resampling.NEAREST).save(out, optimize=True)


def _levels(maps: torch.Tensor) -> torch.Tensor:
    low, high = maps.amin((1, 2, 3), keepdim=True), maps.amax((1, 2, 3), keepdim=True)
    return (maps - low) / (high - low).clamp_min(1e-12)


if __name__ == "__main__":
    draw(sys.argv[1], PICTURE)
