"""Mode `permute` behind the common interface: protect, serve, connect."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cloister.manifest import Manifest
from cloister.modes import Session


class PermuteMode:
    """A checkpoint in secret coordinates, run by any ordinary server (STIP)."""

    name = "permute"
    summary = "a checkpoint in secret coordinates that any ordinary server can run, at plaintext speed, without loss"

    def protect(self, source: str | Path, out: str | Path, **options: Any) -> Manifest:
        """See `cloister.permute.protect.protect`."""
        from cloister.permute.protect import protect

        return protect(source, out, **options)

    def serve(self, directory: str | Path, **options: Any) -> None:
        """See `cloister.serving.server.run_server`."""
        from cloister.serving.server import run_server

        run_server(Path(directory), **options)

    def connect(self, client: str | Path, server: str, **options: Any) -> Session:
        """See `cloister.serving.permute_session.connect_permute`."""
        from cloister.serving.permute_session import connect_permute

        return connect_permute(client, server, **options)
