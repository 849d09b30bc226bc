"""Networks that defenses and attacks use ready-made: architectures and a store of weights.

* `gradveil.networks.store`: trained weights by name (`gradveil list networks`) or path, verified.
* `gradveil.networks.cards`: what is known of them, without torch.
* `gradveil.networks.evaluation`: Refiner's noise fraction. `gradveil.networks.style`: a generator.

They are trained by `scripts/pretrain.py`, outside the package.
"""
