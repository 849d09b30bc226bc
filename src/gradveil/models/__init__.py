"""The models that are trained and attacked: one small file per family, found by name through `MODELS`.

* `build_model`: a built-in name with settings, or ``module:factory`` of yours, with optional weights; checked by a probe.
* `mlp`, `lenet`, `convnet`, `resnet`: the families; inputs in [0, 1], normalisation inside. `unet`: for masks.
* `split_model`: bottom and top at a named cut, for vertical learning.
* `set_batch_norm_mode`: the explicit choice between running and batch statistics.
"""

from __future__ import annotations

from gradveil.models.base import MODELS, Factory, ModelCard, build_model, parameter_count, probe
from gradveil.models.batch_norm import BATCH_NORM_MODES, batch_norm_layers, batch_norm_mode, set_batch_norm_mode
from gradveil.models.layers import Normalize
from gradveil.models.split import cuts_of, split_model
from gradveil.models.weights import load_weights

__all__ = [
    "BATCH_NORM_MODES",
    "MODELS",
    "Factory",
    "ModelCard",
    "Normalize",
    "batch_norm_layers",
    "batch_norm_mode",
    "build_model",
    "cuts_of",
    "load_weights",
    "parameter_count",
    "probe",
    "set_batch_norm_mode",
    "split_model",
]
