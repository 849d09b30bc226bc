"""Pack a folder of results into the one file that is published.

    python -m scripts.pack_results out/NAME [results/NAME.json.gz]

For measurements that no plan says, whose scripts in ``benchmarks/`` write folders; `gradveil study run` packs by itself.
"""

from __future__ import annotations

import sys
from pathlib import Path

from gradveil.storage.study_file import pack_folder, write_study
from gradveil.study.published import Layout, Study

ROOT = Path(__file__).resolve().parents[1]


def main(words: list[str]) -> int:
    """Pack one folder; what ``studies/NAME.toml`` says of its table, if there is one, goes with it."""
    folder = Path(words[0])
    out = Path(words[1]) if len(words) > 1 else ROOT / "results" / f"{folder.name}.json.gz"
    name = out.name.removesuffix(".json.gz")
    file = ROOT / "studies" / f"{name}.toml"
    layout = Study.from_toml(file).layout if file.is_file() else Layout(table="none")
    print(write_study(out, pack_folder(folder, name, layout.as_dict())))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
