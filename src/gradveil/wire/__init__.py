"""What crosses the wire: payload encoding and strict validation; no pickle anywhere."""

from gradveil.wire.arrays import payload_from_arrays, payload_from_npy, payload_to_arrays, tensor_from_npy
from gradveil.wire.dense import DENSE, check_payload_head, check_stream, decode_dense, encode_dense, in_order
from gradveil.wire.factors import FACTORS, Factors, decode_factors, encode_factors, entropies_of, factors_of, matrix_shape
from gradveil.wire.files import payload_from_bytes, payload_to_bytes, read_payload, tensor_bytes, write_payload
from gradveil.wire.quantised import QUANTISED, Grid, decode_quantised, encode_quantised
from gradveil.wire.sparse import SPARSE, decode_sparse, encode_sparse

__all__ = [
    "DENSE",
    "FACTORS",
    "QUANTISED",
    "SPARSE",
    "Factors",
    "Grid",
    "check_payload_head",
    "check_stream",
    "decode_dense",
    "decode_factors",
    "decode_quantised",
    "decode_sparse",
    "encode_dense",
    "encode_factors",
    "encode_quantised",
    "encode_sparse",
    "entropies_of",
    "factors_of",
    "in_order",
    "matrix_shape",
    "payload_from_arrays",
    "payload_from_bytes",
    "payload_from_npy",
    "payload_to_arrays",
    "payload_to_bytes",
    "read_payload",
    "tensor_bytes",
    "tensor_from_npy",
    "write_payload",
]
