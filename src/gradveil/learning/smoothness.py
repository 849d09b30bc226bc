"""Whether the gradient of a model's weights changes smoothly with the input: asked of every operation a forward pass runs.

Where an activation has a kink, as ReLU has, the gradient of the weights jumps. A theorem that rests on the derivative of what is
sent then sees nothing of the jumps, while an attacker reads the input off them. So operations are looked at as torch runs
them, whatever module or function they come from: those known to be smooth, those known to have kinks, and all others, of which
nothing is claimed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from gradveil.learning.learner import Learner

__all__ = ["why_not_smooth"]

SMOOTH = """
    _adaptive_avg_pool2d _log_softmax _safe_softmax _softmax adaptive_avg_pool1d add addbmm addmm addmv avg_pool1d avg_pool2d
    avg_pool3d baddbmm bmm convolution cos cumsum div dot einsum erf exp expm1 gelu glu linear log1p log_sigmoid_forward
    log_softmax logsumexp matmul mean mish mkldnn_rnn_layer mm mul mv native_batch_norm native_dropout native_group_norm
    native_layer_norm neg rsqrt rsub sigmoid silu sin softmax softplus square sub sum tanh upsample_bicubic2d
    upsample_bilinear2d upsample_linear1d upsample_nearest1d upsample_nearest2d var var_mean
    _scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_efficient_attention _scaled_dot_product_flash_attention
    _native_batch_norm_legit _native_batch_norm_legit_no_training cudnn_batch_norm _fused_rms_norm
"""
"""Names of operations whose derivative is Lipschitz where training goes."""
MOVES = """
    _reshape_alias _to_copy _unsafe_view alias arange as_strided bernoulli cat channel_shuffle clone constant_pad_nd
    contiguous copy copy_ detach empty empty_like expand fill_ flatten flip full full_like gather index_select lift_fresh
    new_empty new_full new_ones new_zeros ones ones_like permute pixel_shuffle pixel_unshuffle rand rand_like randn randn_like
    reflection_pad1d reflection_pad2d replication_pad2d reshape roll scalar_tensor select slice split split_with_sizes squeeze
    stack t transpose tril triu unbind unfold im2col col2im unsqueeze view zero_ zeros zeros_like
"""
"""Moves values, or makes some that do not depend on the input."""
KINKED = {
    "relu": "ReLU",
    "leaky_relu": "leaky ReLU",
    "_prelu_kernel": "PReLU",
    "prelu": "PReLU",
    "rrelu_with_noise": "randomised ReLU",
    "rrelu_with_noise_functional": "randomised ReLU",
    "threshold": "threshold",
    "hardtanh": "hard tanh",
    "hardsigmoid": "hard sigmoid",
    "hardswish": "hard swish",
    "softshrink": "shrinkage",
    "hardshrink": "shrinkage",
    "abs": "absolute value",
    "clamp": "clamp",
    "clamp_min": "clamp",
    "clamp_max": "clamp",
    "max": "maximum",
    "min": "minimum",
    "amax": "maximum",
    "amin": "minimum",
    "maximum": "maximum",
    "minimum": "minimum",
    "sort": "sorting",
    "topk": "sorting",
    "median": "median",
    "round": "rounding",
    "floor": "rounding",
    "ceil": "rounding",
    "trunc": "rounding",
    "sign": "sign",
    "sgn": "sign",
    **{f"{kind}max_pool{axes}d": "max pooling" for kind in ("", "adaptive_") for axes in "123"},
    **{f"max_pool{axes}d_with_indices": "max pooling" for axes in "23"},
}
"""What is known to have kinks or jumps, in words."""


def why_not_smooth(learner: Learner, inputs: Tensor, targets: Tensor) -> str:
    """Return why the gradient of the weights may not be smooth in the input; empty where every operation is known to be.

    Args:
        learner: Model, weights and loss; its forward pass with the loss is run once.
        inputs: (n, ...) a batch, of which one record is enough.
        targets: (n, ...) its labels.
    """
    watched = _Watch()
    with torch.no_grad(), watched:
        learner.objective(learner.weights, inputs, targets)
    if watched.kinks:
        return f"the network has kinks ({', '.join(dict.fromkeys(watched.kinks))})"
    if watched.unknown:
        return f"cannot tell whether the network is smooth: it uses {', '.join(dict.fromkeys(watched.unknown))}"
    return ""


class _Watch(TorchDispatchMode):
    """Notes every operation that has kinks, or of which nothing is known."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kinks: list[str] = []
        self.unknown: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        result = func(*args, **given)
        name = func.overloadpacket.__name__
        if any(value.is_floating_point() for value in _tensors((args, given))):  # of labels and places nothing is differentiated
            self._note(name, args, given, result)
        return result

    def _note(self, name: str, args: tuple[Any, ...], given: Mapping[str, Any], result: Any) -> None:
        plain = name[:-1] if name.endswith("_") and not name.startswith("__") else name
        if plain in ASKED:
            if word := ASKED[plain](args, given):
                self.kinks.append(word)
        elif plain in KINKED:
            self.kinks.append(KINKED[plain])
        elif {name, plain} & set(MOVES.split()):
            if any(not value.is_floating_point() for value in _tensors(result)):
                self.unknown.append(f"{name} to whole numbers")
        elif plain not in SMOOTH.split():
            self.unknown.append(name)


def _elu(args: tuple[Any, ...], given: Mapping[str, Any]) -> str:
    """Tell whether the two sides of an ELU meet with the same slope, as with alpha 1."""
    told = dict(zip(("alpha", "scale", "input_scale"), args[1:], strict=False)) | dict(given)
    alpha, inner = told.get("alpha", 1), told.get("input_scale", 1)
    return "" if abs(float(alpha) * float(inner) - 1) < 1e-9 else "ELU with a bend"


def _power(args: tuple[Any, ...], given: Mapping[str, Any]) -> str:
    """Tell whether a power is a whole one from 1 on."""
    exponent = args[1] if len(args) > 1 else given.get("exponent")
    return "" if isinstance(exponent, (int, float)) and exponent >= 1 and float(exponent).is_integer() else "a power"


ASKED: dict[str, Callable[[tuple[Any, ...], Mapping[str, Any]], str]] = {
    "elu": _elu,
    "celu": lambda args, given: "",
    "pow": _power,
}
"""Operations that are smooth for some of their settings."""


def _tensors(values: Any) -> Iterable[Tensor]:
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, Mapping):
        for value in values.values():
            yield from _tensors(value)
    elif isinstance(values, (tuple, list)):
        for value in values:
            yield from _tensors(value)
