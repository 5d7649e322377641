"""The engine's integers without its privacy: the oracle of its tests, and a simulator fast enough for whole data sets.

Every function takes and returns int64 tensors of any shape, on any device, at the scale given (12 fraction bits where
nothing is said), and has the name of the engine's step. What is deterministic in the engine is equal here; a truncation
here rounds to nearest, where the engine's shares decide between down and up. A value that the engine's shares could not
hold raises `OutOfRange`, which says where.

    x = encode(torch.randn(4, 2048))
    y = softmax(truncate(matmul(x, w), 12))
    decode(y)
"""

from cloister.crypto.plain.arithmetic import (
    dispatch,
    equal,
    inner_products,
    less_than,
    matmul,
    maximum,
    multiply,
    multiply_truncate,
    one_hot,
    rank,
    select,
    square,
    top_k_mask,
)
from cloister.crypto.plain.functions import exp, gelu, reciprocal, relu, rsqrt, silu
from cloister.crypto.plain.numbers import (
    BOUND,
    FRACTION,
    OutOfRange,
    P,
    check,
    decode,
    encode,
    share,
    truncate,
    truncate_shares,
)
from cloister.crypto.plain.rows import NormPlan, layer_norm, rms_norm, softmax

__all__ = [
    "BOUND",
    "FRACTION",
    "NormPlan",
    "OutOfRange",
    "P",
    "check",
    "decode",
    "dispatch",
    "encode",
    "equal",
    "exp",
    "gelu",
    "inner_products",
    "layer_norm",
    "less_than",
    "matmul",
    "maximum",
    "multiply",
    "multiply_truncate",
    "one_hot",
    "rank",
    "reciprocal",
    "relu",
    "rms_norm",
    "rsqrt",
    "select",
    "share",
    "silu",
    "softmax",
    "square",
    "top_k_mask",
    "truncate",
    "truncate_shares",
]
