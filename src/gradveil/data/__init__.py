"""Where records come from and who owns them.

* `load_data`: built-in names, .npz, folders of pictures, IDX; every source ends as a validated `Dataset`.
* `load_photos`, `load_digits`: built in, read from installed packages, no download.
* `public_images`: inputs an attacker may rehearse on, never audited records.
* `other_pictures`, `stationary`: what an attacker may learn from who holds none of the audited data.
* `load_segments`: built in, pictures with masks.
* partitions: IID, Dirichlet, by owner, class balance, given sizes.
* divisions: which party of vertical learning has which features.
"""

from __future__ import annotations

from gradveil.data.base import DATASETS, DataCard, Dataset, validate
from gradveil.data.digits import load_digits
from gradveil.data.divisions import DIVISIONS, Columns, Division, LeftRight, TopBottom, Whole, part_of
from gradveil.data.files import load_data
from gradveil.data.masks import foreground
from gradveil.data.partitions import IID, PARTITIONS, ByOwner, ClassBalance, Dirichlet, Partition, Sizes
from gradveil.data.photos import load_photos
from gradveil.data.prior import other_pictures, stationary
from gradveil.data.public import public_images
from gradveil.data.reading import load_source
from gradveil.data.segments import load_segments

__all__ = [
    "DATASETS",
    "DIVISIONS",
    "IID",
    "PARTITIONS",
    "ByOwner",
    "ClassBalance",
    "Columns",
    "DataCard",
    "Dataset",
    "Dirichlet",
    "Division",
    "LeftRight",
    "Partition",
    "Sizes",
    "TopBottom",
    "Whole",
    "foreground",
    "load_data",
    "load_digits",
    "load_photos",
    "load_segments",
    "load_source",
    "other_pictures",
    "part_of",
    "public_images",
    "stationary",
    "validate",
]
