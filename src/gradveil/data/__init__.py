"""Where records come from and who owns them.

* `load_data`: built-in names, .npz, folders of pictures, IDX; every source ends as a validated `Dataset`.
* `load_photos`, `load_digits`: built in, read from installed packages, no download.
* `public_images`: inputs an attacker may rehearse on, never audited records.
* partitions: IID, Dirichlet, by owner, class balance.
"""

from __future__ import annotations

from gradveil.data.base import DATASETS, DataCard, Dataset, validate
from gradveil.data.digits import load_digits
from gradveil.data.files import load_data
from gradveil.data.partitions import IID, PARTITIONS, ByOwner, ClassBalance, Dirichlet, Partition
from gradveil.data.photos import load_photos
from gradveil.data.public import public_images

__all__ = [
    "DATASETS",
    "IID",
    "PARTITIONS",
    "ByOwner",
    "ClassBalance",
    "DataCard",
    "Dataset",
    "Dirichlet",
    "Partition",
    "load_data",
    "load_digits",
    "load_photos",
    "public_images",
    "validate",
]
