"""Every setting, declared once, in groups that cells, trainings and plans are composed of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from gradveil.study import readers
from gradveil.study.declare import again, key
from gradveil.study.local_training import OPTIMIZERS
from gradveil.study.readers import below_one, choice, flag, named, positive, reading, share, text, whole

__all__ = ["DEFAULT_DEFENSES", "Attackers", "Common", "DataSource", "Federation", "LocalTraining", "ModelSource", "Vertical"]

EXECUTIONS = ("auto", "batched", "looped", "captured", "compiled")
DEFAULT_DEFENSES = (
    "none",
    "gaussian_noise(std=0.001)",
    "data_noise(std=0.1)",
    "clipping(bound=1.0) + gaussian_noise(std=0.001)",
    "pruning(rate=0.9)",
    "svdefense",
)
"""What the built-in example compares."""


@dataclass(frozen=True, kw_only=True)
class DataSource:
    """Which records, and how they are read."""

    data: str = key(
        "photos",
        named,
        "built-in name, .npz, .npy, IDX or folder of pictures",
        section="data",
        toml="source",
        axis=True,
        docs="a built-in name (`gradveil list datasets`), an `.npz`, `.npy` or IDX file, or a folder of pictures",
    )
    labels: str = key(
        "",
        text,
        "label file (.csv, .npy or IDX)",
        section="data",
        axis=True,
        docs="label file (`.csv`, `.npy` or IDX), where the source holds no labels; one for all sources, or one for each",
    )
    scale: str = key(
        "",
        choice("", "auto", "minmax", "none"),
        "how values of files come to [0, 1]: auto, minmax or none",
        section="data",
        docs="how values of files come to [0, 1]: `auto` divides bytes by 255, `minmax` stretches, `none` takes them as they are",
    )
    read: str = key(
        "",
        reading,
        "how files are read otherwise, as in 'size=64x64, owner_column=patient'",
        section="data",
        metavar="SETTINGS",
        docs='how files are read otherwise, as in `"size=64x64, owner_column=patient"`; see [data](data.md#your-files)',
    )


@dataclass(frozen=True, kw_only=True)
class ModelSource:
    """What is trained."""

    model: str = key(
        "lenet",
        named,
        "built-in model with settings, module:factory or file.py:factory",
        section="grid",
        axis=True,
        docs="a built-in model with settings, `lenet(activation='relu')`, or yours: `package.module:factory`, `file.py:factory`",
    )
    weights: str = key(
        "",
        text,
        "weights file (.safetensors, .pt or .pth)",
        section="grid",
        axis=True,
        docs="weights file for the state `given`: `.safetensors`, or a state dict as `.pt` or `.pth`; one for all models, or one "
        "for each",
    )
    loss: str = key(
        "cross_entropy",
        named,
        "registered loss or module:function",
        section="training",
        docs="a registered loss (`gradveil list losses`) or `module:function`",
    )


@dataclass(frozen=True, kw_only=True)
class LocalTraining:
    """How a client takes its local steps."""

    batch_norm: Literal["eval", "train"] = key(
        "eval",
        choice("eval", "train"),
        "statistics that BatchNorm uses: eval takes the running ones, train those of the batch",
        section="training",
        docs="`eval` uses running statistics, `train` those of the batch",
    )
    optimizer: Literal["sgd", "adam"] = key(
        "sgd",
        choice(*OPTIMIZERS),
        "of the local steps: sgd or adam",
        section="training",
        docs="of the local steps: `sgd`, `adam`",
    )
    learning_rate: float = key(0.01, positive, "of the local steps", section="training")
    local_epochs: int = key(
        0,
        whole(0),
        "passes of a client over its records, instead of local steps",
        section="training",
        docs="passes of a client over the records of one update, each in minibatches, after which it shares weights; 0 counts "
        "`local_steps` instead",
    )
    minibatch: int = key(
        0,
        whole(0),
        "records of one local step; 0 takes all of a client's",
        section="training",
        docs="records of one local step; 0 takes all that stand behind the update",
    )
    shuffle: bool = key(
        False,
        flag,
        "whether a client draws a new order of its records for every later epoch",
        section="training",
        docs="whether a client draws a new order of its records for every epoch after the first, which nobody else knows; else "
        "all epochs go through them in one order",
    )
    momentum: float = key(0.0, below_one, "of the local steps, fresh in every round; sgd only", section="training")
    dropout: bool = key(
        False,
        flag,
        "whether clients train with the dropout layers of the model on",
        section="training",
        docs="whether clients train with the dropout layers of the model on; masks are drawn by each client, and attackers do "
        "not know them",
    )


@dataclass(frozen=True, kw_only=True)
class Vertical:
    """Where a model is cut, and which party is attacked."""

    cut: str = key(
        "",
        named,
        "where models are cut, as in cut1; none is horizontal learning, beside it",
        section="vertical",
        axis=True,
        docs="where models are cut, `cut1`, `cut2`, …; `none` is horizontal learning in the same grid",
    )
    parts: str = key(
        "whole",
        named,
        "who owns which features: whole, left_right, top_bottom, columns(parties=2)",
        section="vertical",
        docs="who owns which features: `whole`, `left_right`, `top_bottom`, `columns(parties=2)`",
    )
    party: int = key(0, whole(0), "which party is attacked, counted from 0", section="vertical")
    sees: Literal["embedding", "embedding_gradient"] = key(
        "embedding",
        choice("embedding", "embedding_gradient"),
        "what is seen of it: embedding at prediction; embedding_gradient: in training, its gradient too",
        section="vertical",
        docs="`embedding` at prediction; `embedding_gradient`: in training, also the gradient that comes back (`whole` only)",
    )


@dataclass(frozen=True, kw_only=True)
class Attackers:
    """Who attacks, how long, and what they know."""

    records: int = key(
        16,
        whole(1),
        "how many records are attacked",
        section="audit",
        docs="how many records are attacked; 59 with none identified hold a limit of 5 %",
    )
    ensemble: str = key(
        "quick",
        named,
        "named ensemble (quick, standard, strong) or one attack; a list compares them",
        section="audit",
        axis=True,
        docs="`quick`, `standard`, `strong` (for a GPU), a version such as `quick-1`, "
        "or one attack such as `inverting_gradients(steps=500)`",
    )
    steps: int = key(0, whole(0), "cap on optimisation steps per recipe; 0 leaves the ensemble's own", section="audit")
    execution: str = key(
        "auto",
        choice(*EXECUTIONS),
        "how attacks are batched; auto decides by device and model",
        section="audit",
        docs="`batched`, `looped`, `compiled` or `captured` (recorded once and replayed, on a GPU only); `auto` decides by "
        "device and model. Part of a cell's key",
    )
    lists: str = key(
        "auto",
        readers.list_size,
        "candidates on the lists of attackers who hold one: auto, off, or how many",
        section="audit",
        metavar="SIZE",
        docs="candidates on the [lists](levels.md#list) of attackers who hold one: `auto` is 256, or as many as there are or a "
        "dear defense leaves time for; a number; `off` (or 0) leaves them out. Part of a cell's key",
    )
    prior: str = key(
        "same",
        choice("same", "other", "none"),
        "records the attacker learns from: same (data), other, or none",
        section="audit",
        axis=True,
        docs="public records that attackers [learn from](attacks.md#what-attackers-learn-from): `same` are those of the audited "
        "data that are neither attacked nor candidates, `other` other pictures, `none` draws from a law with a spectrum of 1/f²",
    )
    known_labels: bool = key(False, flag, "whether the attacker is given the true labels", section="training")
    bn_statistics: bool = key(
        False,
        flag,
        "whether uploads carry BatchNorm statistics, which the attacker then uses",
        section="training",
        docs='whether uploads carry BatchNorm statistics, which the attacker then uses; needs `batch_norm = "train"`',
    )


@dataclass(frozen=True, kw_only=True)
class Common:
    """What every piece of work has: a defense, a seed and a device."""

    defense: str = key(
        "none",
        named,
        "defense or chain, as in 'clipping(bound=1.0) + gaussian_noise(std=0.01)'; name:ladder runs all its strengths",
        section="grid",
        axis=True,
        plan=DEFAULT_DEFENSES,
        docs="a defense, or a chain of them, see below",
    )
    seed: int = key(
        0, whole(0), "root of all randomness", section="audit", docs="root of all randomness; the same seed gives the same result"
    )
    device: str = key(
        "cpu",
        readers.device,
        "where to compute: auto takes a GPU if there is one; cpu, cuda",
        section="audit",
        plan="auto",
        docs="`auto` takes a GPU if there is one; `cpu`, `cuda`",
    )


@dataclass(frozen=True, kw_only=True)
class Federation(LocalTraining):
    """Who trains together, for how long, and what the server does."""

    rounds: int = key(20, whole(1), "federated rounds of one training")
    clients: int = key(10, whole(1), "clients that share the data")
    clients_per_round: int = key(
        10, whole(1), "clients that train in one round", docs="clients that train in one round, drawn anew each time"
    )
    partition: str = key(
        "iid",
        named,
        "who owns what: iid, dirichlet(alpha=0.5), by_owner, class_balance(rho=0.5)",
        docs="who owns what: `iid`, `dirichlet(alpha=0.5)`, `by_owner`, `class_balance(rho=0.5)`; see [data.md](data.md)",
    )
    local_epochs: int = again(
        LocalTraining,
        "local_epochs",
        1,
        meaning="passes of a client over its records in one round",
        docs="passes of a client over its records in one round",
    )
    local_steps: int = key(
        0,
        whole(0),
        "local steps of a client in one round, instead of passes",
        docs="local steps of a client in one round; above 0 it wins over `local_epochs`",
    )
    minibatch: int = again(LocalTraining, "minibatch", 32, docs="records of one local step; 0 takes all of a client's")
    learning_rate: float = again(LocalTraining, "learning_rate", 0.1)
    batch_norm: Literal["eval", "train"] = again(LocalTraining, "batch_norm", "train")
    aggregation: Literal["fedavg", "scaffold"] = key(
        "fedavg",
        choice("fedavg", "scaffold"),
        "how the server combines what it receives: fedavg or scaffold",
        docs="how the server combines what it receives: `fedavg`, `scaffold`",
    )
    server_optimizer: Literal["sgd", "adam"] = key(
        "sgd", choice(*OPTIMIZERS), "of the server, on the aggregate as if it were a gradient: sgd or adam"
    )
    server_learning_rate: float = key(1.0, positive, "1 with plain sgd is federated averaging; adam wants about 0.01")
    server_momentum: float = key(0.0, below_one, "for the server's sgd")
    test_share: float = key(
        0.2,
        share,
        "share of the records kept back to measure accuracy on",
        docs="share of the records that is kept back to measure accuracy on, where the data has no test split of its own",
    )
    evaluate_every: int = key(
        1,
        whole(1),
        "rounds between two looks at the accuracy",
        docs="rounds between two looks at the accuracy; the last round always counts",
    )
