"""Pack a folder of results into the one file that is published, or a file into a folder again.

    python -m scripts.pack_results out/NAME [results/NAME.json.xz]
    python -m scripts.pack_results results/NAME.json.xz out/NAME

For measurements of speed, whose scripts in ``benchmarks/`` write single files; `gradveil study run` packs by itself.
"""

from __future__ import annotations

import sys
from pathlib import Path

from gradveil.storage.files import json_bytes
from gradveil.storage.study_file import is_study_file, pack_folder, read_study, unpack_study, write_study
from gradveil.study.published import Layout, Study

ROOT = Path(__file__).resolve().parents[1]


def pack(folder: Path, out: Path) -> Path:
    """Pack one folder; what ``studies/NAME.toml`` says of its table, if there is one, goes with it."""
    name = out.name.removesuffix(".json.xz")
    file = ROOT / "studies" / f"{name}.toml"
    layout = Study.from_toml(file).layout if file.is_file() else Layout(table="none")
    return write_study(out, pack_folder(folder, name, layout.as_dict()))


def unpack(file: Path, folder: Path) -> Path:
    """Write all that a file holds as a folder."""
    content = read_study(file)
    if content.get("cells"):
        unpack_study(content, folder)
    for name, document in content["documents"].items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(json_bytes(document))
    return folder


def main(words: list[str]) -> int:
    """Do what the first word asks for: a file is unpacked, a folder packed."""
    given = Path(words[0])
    name = given.name.removesuffix(".json.xz")
    if is_study_file(given):
        print(unpack(given, Path(words[1]) if len(words) > 1 else Path("out", name)))
    else:
        print(pack(given, Path(words[1]) if len(words) > 1 else ROOT / "results" / f"{name}.json.xz"))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
