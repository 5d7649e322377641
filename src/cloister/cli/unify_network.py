"""`cloister unify coordinator` and `cloister unify join`: a round over the network. Parse, call, print."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Annotated

import typer

from cloister.cli import console
from cloister.cli.unify_common import (
    Certificate,
    KeyFolder,
    Pin,
    Reconsider,
    Round,
    opened,
    rows,
    table,
)
from cloister.cli.unify_privacy import (
    REFERENCES,
    Delta,
    DpEpsilon,
    LearningRate,
    MaxMembership,
    NoMeasure,
    References,
    RoutingEpsilon,
    SelectionEpsilon,
    private_steps,
)

PORT = 9443


def coordinator(
    folder: Round,
    out: Annotated[Path, typer.Argument(metavar="MODEL", help="Where the unified checkpoint goes.")],
    host: Annotated[
        str,
        typer.Option(help="Address to listen on; 0.0.0.0 for all of this machine's.", show_default="this machine only"),
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="The only port that owners need.")] = PORT,
    name: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME", help="Name or address by which owners reach you; repeat it. It is in the certificate."
        ),
    ] = None,
    as_json: console.Json = False,
    verbose: console.Verbose = False,
    quiet: console.Quiet = False,
) -> None:
    """Carry a round over the network: invitations out, contributions in, then build. Run it again to go on.

    Begin the round with `cloister unify invite`. Owners need the address, ROUND/key/tls-certificate.pem, and your key's
    fingerprint. Nobody else gets in. It ends when all have come, or all deadlines are over and the quorum has come.
    Once MODEL is built, the same command tells owners who ask within a minute how the round ended.

    \b
    Examples:
      cloister unify coordinator round model --host 0.0.0.0 --name coordinator.example.org
    """
    from cloister.unify.federation import flower
    from cloister.unify.federation.coordinate import LAST_SECONDS, coordinate, is_built
    from cloister.unify.keys import PublicKey

    flower.require()
    names = name or ([socket.gethostname()] if host in ("0.0.0.0", "::") else [])
    with opened(folder) as round_:

        def announce(port: int, certificate: Path) -> None:
            where = names[0] if names else host
            console.note(
                f"Waiting at {where}:{port}. Your key's fingerprint: {PublicKey(round_.recipe.coordinator).fingerprint}"
            )
            console.note(
                f"Owners run: cloister unify join {where}:{port} EXAMPLES MINE --key KEYS "
                f"--certificate {certificate.name}"
            )
            console.note(f"The certificate is {certificate}.")

        progress = console.progress()
        if built := is_built(round_, out):
            console.note(f"{out} is built. For {LAST_SECONDS:.0f} s owners who ask hear how the round ended.")
        coordinate(round_, host=host, port=port, names=names, progress=progress, announce=announce)
        if not as_json:
            table(round_.book, round_.recipe)
        if not built:
            round_.build(out, wait=False, progress=progress)
    if as_json:
        console.data({"model": str(out), **rows(round_.book, round_.recipe)})
    else:
        print(out)
        console.note(f"Next: cloister protect {out} PROTECTED")


def join(
    address: Annotated[str, typer.Argument(metavar="HOST:PORT", help="Where the coordinator is.")],
    private: Annotated[Path, typer.Argument(metavar="EXAMPLES", help="Your own examples. They stay here.")],
    folder: Annotated[Path, typer.Argument(metavar="MINE", help="Your folder of this round.")],
    certificate: Certificate,
    key_folder: KeyFolder = None,
    coordinator_key: Pin = "",
    dp_epsilon: DpEpsilon = 0.0,
    dp_selection_epsilon: SelectionEpsilon = 0.0,
    dp_routing_epsilon: RoutingEpsilon = 0.0,
    dp_delta: Delta = 1e-5,
    no_measure: NoMeasure = False,
    measure_references: References = REFERENCES,
    max_membership: MaxMembership = 1.0,
    learning_rate: LearningRate = None,
    reconsider: Reconsider = False,
    as_json: console.Json = False,
    verbose: console.Verbose = False,
    quiet: console.Quiet = False,
) -> None:
    """Take part in a round over the network: fetch the invitation, do the work, send the contribution.

    EXAMPLES is a .csv (text,label), .jsonl, .txt or .safetensors (images), as the task wants it. It connects to the
    coordinator and to nobody else; nobody connects to you. Run it again after an interruption and it goes on. What
    leaves is MINE/contribution, which you may read; report.json in it says what it reveals.

    \b
    Examples:
      cloister unify join coordinator.example.org:9443 tickets.csv mine --key my-key --certificate tls-certificate.pem
    """
    from cloister.unify.federation import join as joining
    from cloister.unify.keys import Key
    from cloister.unify.rounds.owner import CONTRIBUTION

    own_steps = private_steps(
        dp_epsilon, dp_selection_epsilon, dp_routing_epsilon, dp_delta,
        measure=not no_measure, references=measure_references, max_membership=max_membership,
        learning_rate=learning_rate,
    )  # fmt: skip
    joining.join(
        address,
        private,
        folder,
        key=Key.load(key_folder or folder / "key"),
        certificate=certificate,
        steps=own_steps,
        coordinator=coordinator_key,
        reconsider=reconsider,
        progress=console.progress(),
    )
    made = folder / CONTRIBUTION
    agreed = _agreed(made)
    if as_json:
        console.data(
            {"state": "received", "contribution": str(made) if made.is_dir() else None, "agreed": agreed or None}
        )
        return
    print("The coordinator has your contribution.")
    if agreed:
        console.note(f"Public examples: SHA-256 {agreed['public']}. {agreed['note']}")


def _agreed(made: Path) -> dict[str, str]:
    """What the contribution that lies here says was agreed on. Nothing if there is none, because it was sent from
    elsewhere, or if an older Cloister wrote it: what the coordinator has does not depend on that."""
    from cloister.unify.rounds.contribution import agreed_on

    try:
        found = agreed_on(made)
    except (OSError, ValueError, KeyError, AttributeError):
        return {}
    return found if {"public", "note"} <= set(found) else {}
