"""Flower's programs as we start them: `python -m cloister.unify.federation superlink|supernode PARENT OPTIONS...`.

They end when the process that started them does, however that ends.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

from .flower import DOOR_FILE, LOG_FILE


def main() -> None:
    """Run one of them with the options that are left."""
    program, parent = sys.argv[1], int(sys.argv[2])
    sys.argv = [f"flower-{program}", *sys.argv[3:]]
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    if program == "superlink":
        _superlink()
    else:
        from flwr.supernode.cli.flower_supernode import flower_supernode

        flower_supernode()
    os._exit(1)  # the connection is lost; a thread of Flower's would keep the process, of which we would learn nothing


def _superlink() -> None:
    """Flower gives its application to uvicorn; on the way we put our guard around it and our gate before it."""
    import uvicorn
    from flwr.superlink.cli.flower_superlink import flower_superlink

    from .gate import Gate
    from .guard import Door, Guard, Log

    door = Door.read(Path(os.environ[DOOR_FILE]))
    gate = Gate(door.host, door.port, door.inner)
    ordinary = uvicorn.run

    def run(app: Any, **settings: Any) -> None:
        def replace(key: bytes) -> None:
            state = app.state.linkstate_factory.state()
            node = state.get_node_id_by_public_key(key)
            if node is not None:
                state.deactivate_node(node)

        log = Log(Path(os.environ[LOG_FILE]))
        guard = Guard(app, door, log, trust=gate.trust, address=gate.address, replace=replace)
        try:
            gate.start()
        except OSError as error:
            print(f"Nobody can listen on {door.host} port {door.port}: {error.strerror}.", flush=True)
            os._exit(1)
        ordinary(guard, **{**settings, "access_log": False, "server_header": False})

    uvicorn.run = run
    flower_superlink()


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.2)
    os._exit(1)


if __name__ == "__main__":
    main()
