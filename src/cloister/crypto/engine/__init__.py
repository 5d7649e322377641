"""Two parties, one computation: `Party.connect` and `Listener.accept` open a session, its methods compute on shares.

    # the server                                        # the client
    listener = Listener("127.0.0.1", 7000)              party = Party.connect("127.0.0.1", 7000, settings)
    party = listener.accept(settings)
    x = party.share(None, owner="client", shape=(8,))   x = party.share(values, owner="client", shape=(8,))
    y = party.silu(x)                                   y = party.silu(x)
    party.reveal(y, to="client")                        print(party.reveal(y, to="client"))

Both parties call the same methods in the same order with the same public arguments; each holds `Shares` that mean
nothing alone. Security is semi-honest (docs/crypto-engine.md).
"""

from __future__ import annotations

from cloister.crypto.ahead import Cost, Costs, Demand, ExpertLayer, Layer, LinearLayer
from cloister.crypto.engine.identity import Identity
from cloister.crypto.engine.party import Listener, Party
from cloister.crypto.engine.settings import Settings, Store
from cloister.crypto.engine.shares import Bits, Shares, decode, encode
from cloister.crypto.fixed import FRACTION_BITS, PRIME, VALUE_BOUND

__all__ = [
    "FRACTION_BITS",
    "PRIME",
    "VALUE_BOUND",
    "Bits",
    "Cost",
    "Costs",
    "Demand",
    "ExpertLayer",
    "Identity",
    "Layer",
    "LinearLayer",
    "Listener",
    "Party",
    "Settings",
    "Shares",
    "Store",
    "decode",
    "encode",
]
