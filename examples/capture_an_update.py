"""Attack an update captured in a running federation. The client below is plain PyTorch and knows nothing of Gradveil.

Run it: ``python examples/capture_an_update.py [FOLDER]``. The last step on the command line:
``gradveil audit --update update.safetensors --data digits --model 'mlp(hidden=32)' --weights model.safetensors``.
"""

import sys
import tempfile
from pathlib import Path

import torch.nn.functional as F
from safetensors.torch import save_file

from gradveil import Seed, Update, build_model, load_data
from gradveil.audit import Cell
from gradveil.audit.captured import audit_captured
from gradveil.wire import encode_dense, write_payload


def main(folder: Path) -> None:
    data = load_data("digits")
    model = build_model("mlp(hidden=32)", input_shape=data.input_shape, classes=data.classes, seed=Seed(1))
    save_file(model.state_dict(), folder / "model.safetensors")

    secret = 42
    F.cross_entropy(model(data.inputs[[secret]]), data.targets[[secret]]).backward()
    gradient = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
    write_payload(encode_dense(Update(gradient, examples=1)), folder / "update.safetensors")

    known = Cell(data="digits", model="mlp(hidden=32)", state="given", weights=str(folder / "model.safetensors"), steps=20)
    found = audit_captured(folder / "update.safetensors", known, folder / "results")
    print("\n".join(found.sentences()))


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp()))
