"""`cloister protect`: turn a checkpoint into what each party gets."""

from __future__ import annotations

import sys
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cloister.cli import console
from cloister.errors import InvalidParameter, UsageError

if TYPE_CHECKING:
    from cloister.manifest import Manifest

SUMMARY = "Make OUT/developer, OUT/server and OUT/client"
NEEDS_ARGUMENTS = True
WHY_BASE = (
    "An embedding table that others have, or can approximate because the model is a fine-tune of an open one, lets the "
    "server turn every protected token back into the word it stands for. Only you know whether that is so."
)
BASE_CHOICES = (
    "`--base public:NAME` if the model or the one it was tuned from is known to others, `--base secret` if nobody else "
    "has anything close to it."
)


class Transform(StrEnum):
    """How the residual stream is hidden."""

    PERMUTATION = "permutation"
    ORTHOGONAL = "orthogonal"


class Loop(StrEnum):
    """Who runs the generation loop."""

    SERVER = "server"
    TOKEN = "token"


def command(
    source: Annotated[
        Path, typer.Argument(metavar="SRC", help="A Hugging Face checkpoint: a directory, or ORGANISATION/NAME.")
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Where OUT/developer, OUT/server and OUT/client go.")],
    mode: Annotated[str, typer.Option(help="How the model is protected.")] = "permute",
    transform: Annotated[
        Transform, typer.Option(help="permutation as in the paper; orthogonal: a rotation, for pre-norm families.")
    ] = Transform.PERMUTATION,
    base: Annotated[
        str | None,
        typer.Option(metavar="public:NAME|secret", help="Whether others know the base model. Asked if left out."),
    ] = None,
    loop: Annotated[
        Loop, typer.Option(help="server: one message per answer; token: one message per token, no table on the server.")
    ] = Loop.SERVER,
    contexts: Annotated[
        int, typer.Option(min=1, max=1000, help="Independent draws of all keys, one directory each.")
    ] = 1,
    name: Annotated[str | None, typer.Option(help="The model's name as users see it. [default: SRC's name]")] = None,
    expires: Annotated[
        int | None, typer.Option(min=1, max=36500, metavar="DAYS", help="The clients' keys end after this many days.")
    ] = None,
    rotate: Annotated[bool, typer.Option("--rotate", help="Replace the keys of an existing OUT by new ones.")] = False,
    base_checkpoint: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="The public base itself, for the attacks. [default: SRC, the worst case]"),
    ] = None,
    revision: Annotated[str | None, typer.Option(help="Revision of a model on the hub.")] = None,
    resume: Annotated[
        bool, typer.Option("--resume/--no-resume", help="Go on where an interrupted run of the same command stopped.")
    ] = True,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would be written and what it costs; write nothing.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask before replacing keys.")] = False,
    as_json: console.Json = False,
    verbose: console.Verbose = False,
    quiet: console.Quiet = False,
) -> None:
    """Protect the checkpoint SRC: write what the developer, the server and each user get into OUT.

    When it is done it says how many of the users' tokens the known attacks recover from what the server holds and sees.
    With a public base that is all of them: the mode is then called "obfuscation, not privacy" everywhere.

    \b
    Examples:
      cloister protect my-model out --base secret
      cloister protect olmoe-chat out --base public:allenai/OLMoE-1B-7B-0924 --transform orthogonal
      cloister protect my-model out --base secret --loop token --contexts 3 --expires 90
      cloister protect my-model out --base secret --rotate --yes
      cloister protect my-model out --base secret --dry-run --json
    """
    from cloister import modes

    chosen = modes.get(mode)
    base = _base(base)
    if dry_run:
        _plan(source, out, transform.value, base, loop.value, contexts, as_json)
        return
    if rotate and not yes:
        _confirm(f"New keys for {out}: every client directory handed out so far stops working. Go on?")
    console.start_logging()
    manifest = chosen.protect(
        source,
        out,
        transform=transform.value,
        base=base,
        loop=loop.value,
        contexts=contexts,
        name=name,
        expires_days=expires,
        rotate=rotate,
        base_checkpoint=base_checkpoint,
        revision=revision,
        resume=resume,
        progress=console.progress(),
    )
    if as_json:
        console.data({"out": str(out), **asdict(manifest)})
    else:
        print(summary(manifest, out))


def _base(base: str | None) -> str:
    if base is None:
        if not sys.stdin.isatty():
            raise UsageError(f"--base is missing. {WHY_BASE}", advice=f"Say {BASE_CHOICES}", param="base")
        console.note(f"Is the base model known to others? {WHY_BASE}")
        known = typer.confirm("Known to others, or a fine-tune of a model that is?", default=True, err=True)
        base = f"public:{typer.prompt('Its name', err=True).strip()}" if known else "secret"
    if (base != "secret" and not base.removeprefix("public:").strip()) or (":" not in base and base != "secret"):
        raise InvalidParameter(
            f"--base {base!r} is neither public:NAME nor secret. {WHY_BASE}", advice=f"Say {BASE_CHOICES}", param="base"
        )
    return base


def _confirm(question: str) -> None:
    if not sys.stdin.isatty():
        raise UsageError("This replaces keys that are in use.", advice="Say --yes if that is meant.")
    if not typer.confirm(question, err=True):
        raise UsageError("Nothing was changed.")


def _plan(source: Path, out: Path, transform: str, base: str, loop: str, contexts: int, as_json: bool) -> None:
    """`--dry-run`: what `doctor` says about this checkpoint, for the options at hand."""
    from cloister import doctor
    from cloister.manifest import OBFUSCATION, SUBSTITUTION

    report = doctor.checkpoint(source, contexts=contexts)
    reasons = report.against(transform)
    plan: dict[str, Any] = {
        "out": str(out),
        "transform": transform,
        "base": base,
        "label": SUBSTITUTION if base == "secret" else OBFUSCATION,
        "loop": loop,
        "contexts": contexts,
        "fits": not reasons,
        "reasons_against": reasons,
        "cost": report.costs[loop].as_dict() if loop in report.costs else {},
    }
    if as_json:
        console.data(plan)
        return
    print(f"{out} would be written with transform {transform}, base {base} ({plan['label']}), loop {loop}.")
    print("\n".join(f"It would be refused: {reason}" for reason in reasons) or "Nothing stands against it.")
    if loop in report.costs:
        print(report.costs[loop].sentence())


def summary(manifest: Manifest, out: Path) -> str:
    """What was made, and what it is worth."""
    protection, server = manifest.protection, out / "server"
    lines = [
        f"{manifest.model.name} ({manifest.model.family}) is protected: transform {protection.transform}, "
        f"base {protection.base}, loop {protection.loop}.",
        f"What this is worth: {protection.label}.",
        measured(manifest),
        f"Keys end on {manifest.not_after}." if manifest.not_after else "The keys do not expire.",
        "",
        f"  {out / 'developer'}   keep it: all keys",
        f"  {server}      to the cloud:    cloister serve {server}",
        f"  {out / 'client'}      to each user:    cloister gateway {out / 'client'} --server URL",
    ]
    return "\n".join(line for line in lines if line is not None)


def measured(manifest: Manifest) -> str:
    """The measured recovery as one sentence."""
    sentence = manifest.measured.get("sentence")
    if sentence:
        return str(sentence)
    figures = ", ".join(
        f"{key} {value}" for key, value in manifest.measured.items() if not isinstance(value, dict | list)
    )
    return f"Measured on this checkpoint: {figures}." if figures else "Recovery was not measured."
