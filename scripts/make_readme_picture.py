"""Make the picture of README.md from the results of ``make audit``; its table comes from ``studies/first_light_audit.toml``.

python scripts/make_readme_picture.py out/first-light
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont

ROOT = Path(__file__).resolve().parent.parent
DEFENSE = "pruning(rate=0.9)"
SIZE, GAP, HEAD = 132, 10, 40


def cells(folder: Path) -> list[dict[str, Any]]:
    """Return the cells of a run, in plan order."""
    run = json.loads((folder / "run.json").read_text())
    return [json.loads((folder / "cells" / f"{key}.json").read_text()) for key in run["cells"]]


def picture(folder: Path, rows: list[dict[str, Any]], out: Path) -> None:
    """Draw the median and the worst record: original, undefended, defended plain and informed, null."""
    by_defense = {row["cell"]["defense"]: row for row in rows}
    arrays = {name: np.load(folder / "cells" / f"{row['key']}.npz", allow_pickle=False) for name, row in by_defense.items()}
    order = np.argsort([record["psnr"] for record in by_defense[DEFENSE]["records"]])
    columns = [
        ("original", arrays["none"]["original"]),
        ("undefended", arrays["none"]["selected"]),
        ("pruned 90 %,\nplain attacker", arrays[DEFENSE]["plain"]),
        ("pruned 90 %,\ninformed attacker", arrays[DEFENSE]["informed"]),
        ("guess without\nthe update", arrays["none"]["null_prior_only"]),
    ]
    chosen = [order[len(order) // 2], order[-1], order[len(order) // 4]]
    sheet = Image.new("RGB", (len(columns) * (SIZE + GAP) + GAP, HEAD + len(chosen) * (SIZE + GAP)), "white")
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(13)
    for c, (title, images) in enumerate(columns):
        x = GAP + c * (SIZE + GAP)
        draw.multiline_text((x, 4), title, fill="black", font=font, spacing=2)
        for r, index in enumerate(chosen):
            pixels = (images[index].transpose(1, 2, 0) * 255).round().clip(0, 255).astype(np.uint8)
            sheet.paste(Image.fromarray(pixels).resize((SIZE, SIZE), Image.Resampling.NEAREST), (x, HEAD + r * (SIZE + GAP)))
    sheet.save(out, optimize=True)


def main() -> None:
    """Draw it."""
    folder = Path(sys.argv[1])
    picture(folder, cells(folder), ROOT / "docs" / "pictures" / "first_light.png")


if __name__ == "__main__":
    main()
