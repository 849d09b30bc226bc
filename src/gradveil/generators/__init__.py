"""Networks that defenses and attacks use ready-made: architecture, training, measurement, and a store of weights.

* `load_network`: trained weights by name (`gradveil list networks`) or path, verified.
* `EvaluationNetwork`: Refiner's noise fraction. `DCGAN`, `StyleGenerator`: generators.
* Training lives in `gradveil.generators.pretraining`, behind `gradveil pretrain`; it reads data, so nothing here imports it.
"""

from __future__ import annotations

from gradveil.generators.base import NETWORKS, NetworkCard
from gradveil.generators.dcgan import DCGAN
from gradveil.generators.evaluation import EvaluationNetwork
from gradveil.generators.store import load_network, network_card
from gradveil.generators.style import StyleGenerator

__all__ = ["DCGAN", "NETWORKS", "EvaluationNetwork", "NetworkCard", "StyleGenerator", "load_network", "network_card"]
