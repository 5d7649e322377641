"""Which public examples stand for an owner's private ones: relevance, a pool, a diverse choice. See `choose`."""

from __future__ import annotations

from .choose import Chosen, Selection, choose
from .private import Privacy, dp_relevance
from .relevance import relevance

__all__ = ["Chosen", "Privacy", "Selection", "choose", "dp_relevance", "relevance"]
