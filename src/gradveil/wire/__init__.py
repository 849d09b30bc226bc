"""What crosses the wire: payload encoding and strict validation; no pickle anywhere."""

from gradveil.wire.dense import DENSE, check_payload_head, check_stream, decode_dense, encode_dense, in_order
from gradveil.wire.files import payload_from_bytes, payload_to_bytes, read_payload, tensor_bytes, write_payload
from gradveil.wire.quantised import QUANTISED, Grid, decode_quantised, encode_quantised
from gradveil.wire.sparse import SPARSE, decode_sparse, encode_sparse

__all__ = [
    "DENSE",
    "QUANTISED",
    "SPARSE",
    "Grid",
    "check_payload_head",
    "check_stream",
    "decode_dense",
    "decode_quantised",
    "decode_sparse",
    "encode_dense",
    "encode_quantised",
    "encode_sparse",
    "in_order",
    "payload_from_bytes",
    "payload_to_bytes",
    "read_payload",
    "tensor_bytes",
    "write_payload",
]
