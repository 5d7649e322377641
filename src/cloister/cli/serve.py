"""`cloister serve`: serve OUT/server."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from cloister.cli import attestation, console
from cloister.errors import UsageError

SUMMARY = "Serve OUT/server"
NEEDS_ARGUMENTS = True
PORT = 8420


class Tls(StrEnum):
    """Where the certificate comes from when no file is given."""

    SELF_SIGNED = "self-signed"


class Dtype(StrEnum):
    """The arithmetic of the model."""

    AUTO = "auto"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


def command(
    directory: Annotated[Path, typer.Argument(metavar="OUT/server", help="The server directory that `protect` wrote.")],
    host: Annotated[
        str, typer.Option(help="Address to listen on. Anything but loopback needs TLS and --tokens.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 takes a free one.")] = PORT,
    tokens: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Access tokens, one `name sha256-hex` per line; see docs/serving.md."),
    ] = None,
    new_token: Annotated[
        str | None, typer.Option(metavar="NAME", help="Add a token to the --tokens file, print it, and stop.")
    ] = None,
    ssl_certfile: Annotated[Path | None, typer.Option(metavar="FILE", help="TLS certificate chain, PEM.")] = None,
    ssl_keyfile: Annotated[Path | None, typer.Option(metavar="FILE", help="Its private key, PEM.")] = None,
    tls: Annotated[Tls | None, typer.Option(help="Make a certificate; clients pin its fingerprint.")] = None,
    served_model_name: Annotated[str | None, typer.Option(metavar="NAME", help="The model's name in the API.")] = None,
    max_model_len: Annotated[int | None, typer.Option(min=1, help="Longest sequence. [default: the model's]")] = None,
    max_concurrent: Annotated[
        int, typer.Option(min=1, help="Requests worked on at once; more wait or get a 503.")
    ] = 64,
    max_body_mb: Annotated[int, typer.Option(min=1, help="Largest request.")] = 64,
    dtype: Annotated[Dtype, typer.Option(help="Arithmetic of the model.")] = Dtype.AUTO,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or mps.")] = "auto",
    threads: Annotated[int | None, typer.Option(min=1, help="Cores to use. [default: all]")] = None,
    attest: Annotated[
        str | None, typer.Option(metavar="PROVIDER", help="Prove what runs here: simulated, tdx or snp.")
    ] = None,
    json_logs: Annotated[bool, typer.Option("--json-logs", help="Log lines as JSON.")] = False,
    port_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the URL here once the server answers.")
    ] = None,
    verbose: console.Verbose = False,
    quiet: console.Quiet = False,
) -> None:
    """Serve OUT/server until interrupted: the OpenAI-style API that the gateway and vLLM's clients speak.

    The server works in a permuted vocabulary and never sees text. It has no tokenizer.

    \b
    Examples:
      cloister serve out/server
      cloister serve out/server --tokens tokens.txt --new-token alice
      cloister serve out/server --host 0.0.0.0 --tls self-signed --tokens tokens.txt
      cloister serve out/server --dtype bfloat16 --threads 8 --max-model-len 4096
    """
    from cloister.serving.server import create_token, run_server

    if new_token is not None:
        if tokens is None:
            raise UsageError("--new-token needs --tokens FILE.", advice="Name the file that holds the tokens' hashes.")
        print(create_token(tokens, new_token))
        console.note(f"This is the only time that it is shown. {tokens} holds its hash.")
        return
    certificate = ssl_certfile
    if tls is Tls.SELF_SIGNED:
        from cloister.serving.server.tls import self_signed

        certificate = self_signed(_tls_folder(), host)[0]
    run_server(
        directory,
        host=host,
        port=port,
        announce=_announce,
        tokens=tokens,
        ssl_certfile=ssl_certfile,
        ssl_keyfile=ssl_keyfile,
        tls_self_signed=_tls_folder() if tls is Tls.SELF_SIGNED else None,
        served_model_name=served_model_name or "",
        max_model_len=max_model_len or 0,
        max_slots=max_concurrent,
        max_body_bytes=max_body_mb * 2**20,
        dtype=dtype.value,
        device=device,
        threads=threads or 0,
        attest=attestation.collector(attest, certificate) if attest else None,
        log_json=json_logs,
        log_level="debug" if console.Settings.verbose else "warning" if console.Settings.quiet else "info",
        port_file=port_file,
    )


def _announce(url: str, fingerprint: str) -> None:
    console.note(f"Serving at {url}. Ctrl-C ends it.")
    if fingerprint:
        console.note(f"Clients pin this certificate, SHA-256 {fingerprint}")


def _tls_folder() -> Path:
    """The key pair stays on this machine, away from OUT/server, which may be copied about."""
    from platformdirs import user_data_path

    return user_data_path("cloister") / "tls"
