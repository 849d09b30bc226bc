"""A payload as named arrays and a head: what frameworks carry that know numpy, and no payloads.

arrays, head = payload_to_arrays(payload)           # {"weights::conv.weight": array, ...}, one line of JSON
payload = payload_from_arrays(arrays, head)         # where the framework hands over arrays
payload = payload_from_npy(contents, head)          # where it hands over the bytes of .npy files

Whatever comes back was written by somebody else, so nothing but `BadUpdate` is raised, and lengths and headers are checked before
anything is allocated: memory is never more than what has arrived. A header is read by one strict pattern, not evaluated; arrays
of objects, which are pickles, have no place in it. numpy has no bfloat16, so that travels as its bits, and the head says which.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gradveil.errors import BadUpdate, UsageError
from gradveil.records import Payload
from gradveil.tensors import Named
from gradveil.wire.head import flat_tensors, head_as_json, payload_of

__all__ = ["payload_from_arrays", "payload_from_npy", "payload_to_arrays", "tensor_from_npy"]

Array: TypeAlias = NDArray[Any]

LONGEST_HEAD = 2**20
"""Characters; the head of a model with a thousand layers has some fifty thousand where all of them are bfloat16."""
MOST_ARRAYS = 2**20
MOST_AXES = 32
_MAGIC = b"\x93NUMPY\x01\x00"
_LONGEST_HEADER = 1024
_HEADER = re.compile(
    rb"\{'descr': '([<|][a-zA-Z][0-9]{1,2})', 'fortran_order': (False|True), "
    rb"'shape': \(((?:[0-9]{1,19}, )*(?:[0-9]{1,19},?)?)\), \} *\n"
)
_DTYPES = {
    **{b"<f2": torch.float16, b"<f4": torch.float32, b"<f8": torch.float64, b"<c8": torch.complex64},
    **{b"|i1": torch.int8, b"<i2": torch.int16, b"<i4": torch.int32, b"<i8": torch.int64},
    **{b"|u1": torch.uint8, b"|b1": torch.bool},
}
_NUMPY = {np.dtype(name.decode()) for name in _DTYPES}
_BITS = "bfloat16"
"""Key of the head: names of arrays whose 16-bit integers are the bits of bfloat16."""


def payload_to_arrays(payload: Payload) -> tuple[dict[str, Array], str]:
    """Return a payload's tensors as arrays of their own, by name, and its head."""
    flat = {name: value.detach().cpu() for name, value in flat_tensors(payload).items()}
    halves = sorted(name for name, value in flat.items() if value.dtype == torch.bfloat16)
    more = {_BITS: halves} if halves else {}
    return {name: _as_array(name, value) for name, value in flat.items()}, head_as_json(payload, **more)


def payload_from_arrays(arrays: Mapping[str, Any], head: str) -> Payload:
    """Read what `payload_to_arrays` wrote, or raise `BadUpdate`."""
    _check_count(arrays)
    return _payload({name: _from_array(name, value) for name, value in arrays.items()}, head)


def payload_from_npy(contents: Mapping[str, bytes], head: str) -> Payload:
    """Read the same where every array comes as the content of a ``.npy`` file, or raise `BadUpdate`."""
    _check_count(contents)
    return _payload({name: tensor_from_npy(content, name) for name, content in contents.items()}, head)


def tensor_from_npy(content: bytes, name: str = "an array", *, turned: bool = False) -> Tensor:
    """Return a tensor of its own from the content of a ``.npy`` file, or raise `BadUpdate`.

    Args:
        content: What arrived.
        name: Of the tensor, for the message.
        turned: Whether columns may come before rows ("Fortran order"), as `numpy.save` writes a transposed matrix. A payload's do
            not.
    """
    if not isinstance(content, bytes):
        raise BadUpdate(f"{name!r} is no content of a .npy file")
    length = int.from_bytes(content[8:10], "little")
    header = None
    if content[:8] == _MAGIC and length <= _LONGEST_HEADER:
        header = _HEADER.fullmatch(content[10 : 10 + length])
    if header is None:
        raise BadUpdate(f"{name!r} has no header of a plain .npy file of version 1.0")
    kind, fortran = header[1], header[2] == b"True"
    if kind not in _DTYPES:
        raise BadUpdate(f"{name!r} has entries of type {kind.decode()!r}; send numbers of a common precision, lowest byte first")
    if fortran and not turned:
        raise BadUpdate(f"{name!r} comes column by column; send it row by row")
    shape = tuple(int(each) for each in header[3].replace(b" ", b"").split(b",") if each)
    dtype = np.dtype(kind.decode())
    # Python's whole numbers do not overflow, so a header that claims any size is compared before it is believed.
    wanted, there = math.prod(shape) * dtype.itemsize, len(content) - 10 - length
    if wanted != there:
        raise BadUpdate(f"{name!r} claims {_few(shape)} entries of {dtype.itemsize} bytes, and {there} bytes came")
    _check_shape(name, shape)
    flat = np.frombuffer(content, dtype=dtype, offset=10 + length)
    _check_flags(name, flat)
    whole = flat.reshape(shape[::-1]).T if fortran else flat.reshape(shape)
    return torch.from_numpy(whole.copy(order="C"))


def _payload(flat: Named, head: object) -> Payload:
    if not isinstance(head, str) or len(head) > LONGEST_HEAD:
        raise BadUpdate(f"the payload's head is no text of at most {LONGEST_HEAD} characters")
    try:
        read = json.loads(head, object_pairs_hook=_each_once)
    except (ValueError, RecursionError) as error:
        raise BadUpdate(f"the payload's head is no JSON object: {type(error).__name__}") from error
    halves = read.get(_BITS, []) if isinstance(read, dict) else []
    if not isinstance(halves, list) or not all(isinstance(name, str) and name in flat for name in halves):
        raise BadUpdate("the payload's head names tensors of bfloat16 that are not there")
    for name in dict.fromkeys(halves):
        if flat[name].dtype != torch.int16:
            raise BadUpdate(f"{name!r} should be the 16 bits of bfloat16, and is {flat[name].dtype}")
        flat[name] = flat[name].view(torch.bfloat16)
    return payload_of(read, flat)


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Refuse a name that stands twice: two readers could believe two different values."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name stands twice")
    return found


def _as_array(name: str, value: Tensor) -> Array:
    if value.dtype == torch.bfloat16:
        value = value.contiguous().view(torch.int16)
    try:
        array = value.numpy()
    except TypeError:
        array = None
    if array is None or array.dtype not in _NUMPY:
        raise UsageError(f"{name!r} is {value.dtype}, which numpy cannot hold; convert the model to float32 or bfloat16")
    return np.array(array, order="C")


def _from_array(name: str, value: Any) -> Tensor:
    if not isinstance(value, np.ndarray) or value.dtype not in _NUMPY:
        kind = value.dtype if isinstance(value, np.ndarray) else type(value).__name__
        raise BadUpdate(f"{name!r} is {str(kind)[:40]}; send an array of numbers of a common precision, lowest byte first")
    _check_shape(name, value.shape)
    # A view of one entry may claim any size without having it.
    if not value.flags.c_contiguous:
        raise BadUpdate(f"{name!r} is a view of other memory; send it row by row")
    _check_flags(name, value.reshape(-1))
    return torch.from_numpy(np.array(value, order="C"))


def _check_count(given: Mapping[str, Any]) -> None:
    if len(given) > MOST_ARRAYS or not all(isinstance(name, str) for name in given):
        raise BadUpdate(f"the payload has {len(given)} tensors; at most {MOST_ARRAYS}, named by texts, are read")


def _check_shape(name: str, shape: tuple[int, ...]) -> None:
    """Refuse what torch has no words for; without entries, sizes cost nothing and may claim anything."""
    if len(shape) > MOST_AXES or math.prod(max(size, 1) for size in shape) >= 2**59:
        raise BadUpdate(f"{name!r} has {len(shape)} axes of sizes {_few(shape)}, which no update has")


def _check_flags(name: str, flat: Array) -> None:
    if flat.dtype == np.bool_ and bool((flat.view(np.uint8) > 1).any()):
        raise BadUpdate(f"{name!r} has truth values that are neither 0 nor 1")


def _few(shape: tuple[int, ...]) -> str:
    return " × ".join(str(size) for size in shape[:6]) + (" × …" if len(shape) > 6 else "") or "one"
