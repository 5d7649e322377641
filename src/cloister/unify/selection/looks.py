"""What a choice of proxies can compare, and what it does unless a round says otherwise. `unify/views.py` makes it."""

from __future__ import annotations

from typing import Literal

Look = Literal["last", "early", "both"]
BY_KIND: dict[str, Look] = {"encoder": "last", "vision": "early", "decoder": "both"}  # of the seed
