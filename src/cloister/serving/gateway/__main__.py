"""`python -m cloister.serving.gateway OUT/client --server URL`: `cloister gateway` without the rest of the CLI."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from pathlib import Path

from cloister.errors import CloisterError
from cloister.serving.gateway.running import DEFAULT_PORT, run_gateway
from cloister.serving.http import LogFormatter


def main(arguments: list[str] | None = None) -> int:
    """Parse, call, say what went wrong; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m cloister.serving.gateway", description=__doc__)
    parser.add_argument("client", nargs="+", type=Path, help="client directories that `cloister protect` wrote")
    parser.add_argument("--server", action="append", required=True, help="URL of a server, or a local OUT/server")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=DEFAULT_PORT, help="0: any free port")
    parser.add_argument("--port-file", type=Path, help="the port is written here once requests are taken")
    parser.add_argument("--token-file", type=Path, help="bearer token for the server (or CLOISTER_TOKEN)")
    parser.add_argument("--lazy", action="store_true", help="do not reach the server before the first question")
    parser.add_argument("--insecure-plain-http", action="store_true", help="allow http:// to other machines")
    parser.add_argument("--allow-remote", action="store_true", help="with --host and --api-keys: serve other machines")
    parser.add_argument("--allow-origin", action="append", default=[], help="a site whose pages may call")
    parser.add_argument("--api-keys", type=Path, help="file with one accepted API key a line, mode 0600")
    parser.add_argument("--heartbeat", type=float, default=5.0, help="seconds between comments in a silent stream")
    parser.add_argument("--retry-grace", type=float, default=2.0, help="seconds that work is kept for a retry")
    parser.add_argument("--log-level", default="warning")
    options = parser.parse_args(arguments)
    handler = logging.StreamHandler()
    handler.setFormatter(LogFormatter())
    logging.getLogger("cloister").addHandler(handler)
    logging.getLogger("cloister").setLevel(options.log_level.upper())
    try:
        token = options.token_file.read_text().strip() if options.token_file else os.environ.get("CLOISTER_TOKEN")
        run_gateway(
            options.client,
            options.server,
            host=options.host,
            port=options.port,
            port_file=options.port_file,
            lazy=options.lazy,
            allow_remote=options.allow_remote,
            allow_origins=options.allow_origin,
            api_keys_file=options.api_keys,
            heartbeat=options.heartbeat,
            retry_grace=options.retry_grace,
            token=token or None,
            insecure_plain_http=options.insecure_plain_http,
        )
    except CloisterError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except OSError as error:
        print(f"error: {error.filename or ''}: {error.strerror or error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
