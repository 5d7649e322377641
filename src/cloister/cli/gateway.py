"""`cloister gateway`: the OpenAI API and the chat page on the user's machine."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from cloister.cli import attestation, console

SUMMARY = "OpenAI API and chat page on the user's machine"
NEEDS_ARGUMENTS = True
PORT = 8421


def command(
    clients: Annotated[
        list[Path], typer.Argument(metavar="CLIENT_DIR...", help="Client directories that `protect` wrote.")
    ],
    server: Annotated[
        list[str],
        typer.Option(metavar="URL", help="The server of each client directory, in the same order; or one for all."),
    ],
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 takes a free one.")] = PORT,
    host: Annotated[str, typer.Option(help="Address to listen on; see --allow-remote.")] = "127.0.0.1",
    allow_remote: Annotated[
        bool, typer.Option("--allow-remote", help="Allow a --host that others can reach; needs --api-keys.")
    ] = False,
    insecure_plain_http: Annotated[
        bool, typer.Option("--insecure-plain-http", help="Allow a server on another machine without TLS.")
    ] = False,
    lazy: Annotated[bool, typer.Option("--lazy", help="Start although a server does not answer yet.")] = False,
    allow_origin: Annotated[
        list[str] | None,
        typer.Option(metavar="ORIGIN", help="Let pages of this origin use the gateway; may be repeated."),
    ] = None,
    api_keys: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Accept these keys only, one a line. [default: any key, on loopback]"),
    ] = None,
    attestation_policy: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="What the server must prove before anything is sent; see docs/attestation.md."
        ),
    ] = None,
    port_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the URL here once the gateway answers.")
    ] = None,
    verbose: console.Verbose = False,
    quiet: console.Quiet = False,
) -> None:
    """Run the OpenAI-compatible API on this machine, and a chat page that shows what leaves it.

    Text, tokenizer and keys stay here. A server's access token is read from CLOISTER_SERVER_TOKEN.

    \b
    Examples:
      cloister gateway out/client --server https://models.example:8420
      cloister gateway a/client b/client --server https://a.example:8420 --server https://b.example:8420
      cloister gateway out/client --server http://127.0.0.1:8420 --port 0 --port-file gateway.url
    """
    from cloister.serving.gateway import run_gateway

    console.start_logging()
    options: dict[str, Any] = {"insecure_plain_http": insecure_plain_http}
    if token := os.environ.get("CLOISTER_SERVER_TOKEN"):
        options["token"] = token
    if attestation_policy is not None:
        options["verify_attestation"] = attestation.verifier(attestation_policy)
    run_gateway(
        clients,
        server,
        host=host,
        port=port,
        lazy=lazy,
        allow_remote=allow_remote,
        allow_origins=allow_origin or [],
        api_keys_file=api_keys,
        port_file=port_file,
        say=console.note,
        **options,
    )
