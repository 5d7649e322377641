"""Unified models: one checkpoint with the experts of several owners, and a router that sees the context.

    import cloister.unify.moe as moe                        # registers the architectures with transformers

    model = moe.unify(seed, {"bank": state, "clinic": state}, top_k=1)
    moe.set_router(model, vectors)
    model.save_pretrained(folder)                           # AutoModel.from_pretrained(folder) reads it

No privacy code and no network here: what an owner sends is made elsewhere.
"""

from __future__ import annotations

from .architecture import KINDS, PREFIX, classes, find, register
from .blocks import feed_forward_names
from .build import add_owner, owners, remove_owner, set_router, unify
from .export import export_stock
from .passes import Routes, record
from .routing import Context, RoutedFeedForward, Router

__all__ = [
    "KINDS", "PREFIX", "Context", "RoutedFeedForward", "Router", "Routes", "add_owner", "classes", "export_stock",
    "feed_forward_names", "find", "owners", "record", "register", "remove_owner", "set_router", "unify",
]  # fmt: skip

register()
