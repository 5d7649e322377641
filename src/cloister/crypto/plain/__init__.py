"""The engine's integers without its privacy: the oracle of its tests, and a simulator fast enough for whole data sets.

`Party` has the interface of the engine's party (`cloister.crypto.computer.Computer`), so that one program runs on both:

    party = Party()
    x = party.share(torch.randn(5000, 64), owner="client")
    y = party.softmax(party.truncate(party.matmul(x, weights, outputs=16)))
    party.reveal(y, to="client")

Below it lie functions of int64 tensors of any shape, on any device, at the scale given (12 fraction bits where nothing
is said), with the names of the engine's steps:

    y = softmax(truncate(matmul(encode(x), weights), 12))

What is deterministic in the engine is equal here; a truncation here rounds to nearest, where the engine's shares decide
between down and up (`SharesRounding` decides like them). A value that the engine's shares could not hold raises
`OutOfRange`, which says where.
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
    Rounding,
    SharesRounding,
    check,
    decode,
    encode,
    share,
    truncate,
    truncate_shares,
)
from cloister.crypto.plain.party import Party
from cloister.crypto.plain.rows import NormPlan, layer_norm, rms_norm, softmax
from cloister.crypto.plain.values import Bits, Values

__all__ = [
    "BOUND",
    "FRACTION",
    "Bits",
    "NormPlan",
    "OutOfRange",
    "P",
    "Party",
    "Rounding",
    "SharesRounding",
    "Values",
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
