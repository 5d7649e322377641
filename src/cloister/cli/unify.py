"""`cloister unify`: one Mixture-of-Experts model of several owners. Parse, call, print."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from cloister.cli import console, unify_network
from cloister.cli.unify_common import (
    MOST_DAYS,
    Choosing,
    Context,
    Count,
    Epochs,
    Fallback,
    FixedSteps,
    KeyFolder,
    Kind,
    Labels,
    Method,
    MethodOption,
    MoreSettings,
    Pin,
    PublicSource,
    Quorum,
    Rank,
    Reconsider,
    Round,
    RoutingVectors,
    SeedSource,
    SelectionOption,
    Sight,
    TaskKind,
    TopK,
    Vectors,
    invited,
    opened,
    pairs,
    rows,
    steps,
    table,
    task_of,
    terms_of,
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
    show,
)
from cloister.cli.unify_tasks import OwnerLabels, OwnerTasks, evaluate, tasks_of, with_tasks
from cloister.errors import NotFound, UsageError

HELP = """One model from experts whose owners cannot pool their data (MetaMoE).

Each owner trains an expert at home. What leaves is the expert, the numbers of some public examples, and a report that
says what these reveal. A coordinator makes one checkpoint of the experts; `cloister protect` takes it in every mode.
Weights that were trained on private data reveal something about it: `--dp-selection-epsilon` and `--dp-epsilon`
together bound how much of one example.

\b
By hand, folders in and folders out:
  each owner       cloister unify key KEYS                                then sends KEYS/party-key.pub
  coordinator      cloister unify invite SEED PUBLIC ROUND --owner bank=bank.pub --owner clinic=clinic.pub ...
  each owner       cloister unify contribute INVITATION tickets.csv MINE --key KEYS
                                                                          then sends MINE/contribution
  coordinator      cloister unify build ROUND MODEL bank/contribution clinic/contribution
\b
Over the network, with TLS and the same keys (pip install 'cloister[federated]'):
  coordinator      cloister unify coordinator ROUND MODEL --host 0.0.0.0 --name coordinator.example.org
  each owner       cloister unify join coordinator.example.org:9443 tickets.csv MINE --key KEYS --certificate FILE
\b
All on one machine, to try it:
  cloister unify simulate SEED PUBLIC OUT --owner bank=bank.csv --owner clinic=clinic.csv --labels labels.txt
"""
LOOK: dict[str, Any] = {"help_option_names": ["-h", "--help"], "max_content_width": 110}

app = typer.Typer(help=HELP, no_args_is_help=True, rich_markup_mode=None, context_settings=LOOK)


@app.command()
def key(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Where the key goes.")],
    as_json: console.Json = False,
    verbose: console.Verbose = False,
    quiet: console.Quiet = False,
) -> None:
    """Make your key, or show the fingerprint of the one that is there.

    Send party-key.pub to the coordinator and compare the fingerprint by telephone. party-key.pem stays with you.

    \b
    Examples:
      cloister unify key my-key
    """
    from cloister.unify.keys import PUBLIC, Key

    found = Key.at(folder)
    if as_json:
        console.data({"public": str(folder / PUBLIC), "fingerprint": found.fingerprint})
    else:
        print(f"{folder / PUBLIC}  fingerprint {found.fingerprint}")


@app.command(no_args_is_help=True)
def invite(
    seed: SeedSource,
    public: PublicSource,
    folder: Annotated[Path, typer.Argument(metavar="ROUND", help="Where the round goes.")],
    owner: Annotated[list[str], typer.Option(metavar="NAME=KEY", help="An owner and its party-key.pub; repeat it.")],
    task: TaskKind = Kind.CLASSIFY,
    labels: Labels = None,
    owner_task: OwnerTasks = None,
    owner_labels: OwnerLabels = None,
    quorum: Quorum = None,
    days: Annotated[float, typer.Option(min=0, max=MOST_DAYS, help="Days until the deadline.")] = 14,
    count: Count = 500,
    selection: SelectionOption = Choosing.DPP,
    method: MethodOption = Method.LORA,
    rank: Rank = 16,
    epochs: Epochs = None,
    fixed_steps: FixedSteps = None,
    top_k: TopK = 1,
    fallback: Fallback = False,
    routing_vectors: RoutingVectors = Vectors.PROXIES,
    context: Context = Sight.AUTO,
    more: MoreSettings = None,
    name_seed: Annotated[
        bool, typer.Option("--name-seed", help="Name the seed (ORG/NAME) and do not put it into the invitation.")
    ] = False,
    title: Annotated[str, typer.Option(help="What the round is called.")] = "",
    licence: Annotated[str, typer.Option(help="Licence of the public examples.")] = "",
    key_folder: KeyFolder = None,
    as_json: console.Json = False,
    verbose: console.Verbose = False,
    quiet: console.Quiet = False,
) -> None:
    """Begin a round: write ROUND/invitation, the same folder for every owner.

    PUBLIC is a .jsonl (text, or question and choices), .csv (text,label), .txt or .safetensors (images) that everybody
    may see. Owners send you their party-key.pub first: `cloister unify key`.

    \b
    Examples:
      cloister unify invite minilm alpaca.jsonl round --owner a=a.pub --owner b=b.pub --labels labels.txt
      cloister unify invite small-decoder wiki.txt round --task language --owner a=a.pub --owner b=b.pub --quorum 1
    """
    from cloister import hub
    from cloister.unify.keys import Key
    from cloister.unify.rounds.begin import begin
    from cloister.unify.rounds.coordinator import INVITATION

    owners = [invited(name, path) for name, path in pairs(owner, "NAME=KEY").items()]
    owners = with_tasks(owners, tasks_of([one.name for one in owners], task, owner_task, owner_labels))
    own = Key.at(key_folder or folder / "key")
    round_ = begin(
        folder,
        hub.resolve(seed),
        public,
        owners,
        key=own,
        steps=steps(),
        task=task_of(task, labels),
        terms=terms_of(
            count, selection, method, rank, epochs, fixed_steps, top_k, fallback, routing_vectors, context, more
        ),
        quorum=quorum or len(owners),
        days=days,
        title=title,
        seed_name=seed if name_seed else "",
        licence=licence,
    )
    if as_json:
        console.data(
            {"invitation": str(folder / INVITATION), "coordinator": own.fingerprint, "recipe": round_.recipe.plain()}
        )
        return
    print(f"{folder / INVITATION}   give this folder to every owner")
    print(f"Your key has the fingerprint {own.fingerprint}; tell it to them by another way.")
    print(f"{len(owners)} invited, quorum {round_.recipe.quorum}, until {round_.recipe.deadline.isoformat()}.")


@app.command(no_args_is_help=True)
def contribute(
    invitation: Annotated[Path, typer.Argument(metavar="INVITATION", help="The folder that the coordinator gave you.")],
    private: Annotated[Path, typer.Argument(metavar="EXAMPLES", help="Your own examples. They stay here.")],
    folder: Annotated[Path, typer.Argument(metavar="MINE", help="Your folder of this round.")],
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
    """Make MINE/contribution: choose public examples, train the expert, report what leaves. Run it again to go on.

    EXAMPLES is a .csv (text,label), .jsonl, .txt or .safetensors (images), as the task wants it.
    Your examples, losses and times stay in MINE; only MINE/contribution is meant to leave. Before that it is attacked,
    and you are shown what it reveals: a few times the training's time, less with --no-measure. How far the expert has
    moved from the seed tells roughly how many examples you have, unless the round fixes the steps (`invite --steps`).

    \b
    Examples:
      cloister unify contribute invitation tickets.csv mine --key my-key
      cloister unify contribute invitation tickets.csv mine --key my-key --dp-epsilon 8 --dp-selection-epsilon 1
      cloister unify contribute invitation tickets.csv mine --key my-key --measure-references 16
    """
    from cloister.unify.keys import Key
    from cloister.unify.rounds import disclose, owner
    from cloister.unify.rounds.contribution import agreed_on
    from cloister.unify.rounds.state import alone

    own_steps = private_steps(
        dp_epsilon, dp_selection_epsilon, dp_routing_epsilon, dp_delta,
        measure=not no_measure, references=measure_references, max_membership=max_membership,
        learning_rate=learning_rate,
    )  # fmt: skip
    progress = console.progress()
    own_key = Key.load(key_folder or folder / "key")
    with alone(folder):
        made = owner.contribute(
            invitation,
            private,
            folder,
            key=own_key,
            steps=own_steps,
            coordinator=coordinator_key,
            progress=progress,
            reconsider=reconsider,
        )
        home = (
            None if no_measure else disclose.measured(invitation, private, folder, steps=own_steps, progress=progress)
        )
    files = {path.name: path.stat().st_size for path in sorted(made.iterdir())}
    agreed = agreed_on(made)
    if as_json:
        console.data({"contribution": str(made), "files": files, "agreed": agreed, "reveals": home})
        return
    if home is not None:
        show(home, disclose.page(folder))
    print(made)
    console.note(f"Public examples: SHA-256 {agreed['public']}. {agreed['note']}")
    console.note("This folder is what leaves; nothing has been sent. Read the report, then send the folder.")


@app.command(no_args_is_help=True)
def build(
    folder: Round,
    out: Annotated[Path, typer.Argument(metavar="MODEL", help="Where the unified checkpoint goes.")],
    contributions: Annotated[
        list[Path] | None, typer.Argument(metavar="[CONTRIBUTION]...", help="Folders that owners have sent.")
    ] = None,
    now: Annotated[bool, typer.Option("--now", help="Do not wait for owners who may still come.")] = False,
    onto: Annotated[
        Path | None,
        typer.Option(metavar="MODEL", help="Add newcomers to this model; the others' experts stay as they are."),
    ] = None,
    as_json: console.Json = False,
    verbose: console.Verbose = False,
    quiet: console.Quiet = False,
) -> None:
    """Check contributions and make one model of those that are good.

    A contribution that is not what was agreed is refused with every reason, and the round goes on without it. It has
    come when the last of its files was written on this disk, so you may build long after the deadline.

    \b
    Examples:
      cloister unify build round model inbox/bank inbox/clinic
      cloister unify build round model --now
      cloister unify build round larger-model inbox/newcomer --onto model
    """
    if gone := [str(path) for path in contributions or [] if not path.is_dir()]:
        raise NotFound(f"There is no folder {', '.join(gone)}.", advice="Give the folders that owners have sent.")
    with opened(folder) as round_:
        for path in contributions or []:
            name, entry = round_.receive(path)
            console.note(f"{path}: {name or 'nobody who is invited'}, {entry.sentence()}")
        round_.build(out, onto=onto, wait=not now, progress=console.progress())
    if as_json:
        console.data({"model": str(out), **rows(round_.book, round_.recipe)})
    else:
        print(out)
        console.note(f"Next: cloister protect {out} PROTECTED")


@app.command(no_args_is_help=True)
def simulate(
    seed: SeedSource,
    public: PublicSource,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Where all parties' folders and OUT/model go.")],
    owner: Annotated[list[str], typer.Option(metavar="NAME=EXAMPLES", help="An owner and its examples; repeat it.")],
    task: TaskKind = Kind.CLASSIFY,
    labels: Labels = None,
    owner_task: OwnerTasks = None,
    owner_labels: OwnerLabels = None,
    quorum: Quorum = None,
    count: Count = 500,
    selection: SelectionOption = Choosing.DPP,
    method: MethodOption = Method.LORA,
    rank: Rank = 16,
    epochs: Epochs = None,
    fixed_steps: FixedSteps = None,
    top_k: TopK = 1,
    fallback: Fallback = False,
    routing_vectors: RoutingVectors = Vectors.PROXIES,
    context: Context = Sight.AUTO,
    more: MoreSettings = None,
    dp_epsilon: DpEpsilon = 0.0,
    dp_selection_epsilon: SelectionEpsilon = 0.0,
    dp_routing_epsilon: RoutingEpsilon = 0.0,
    dp_delta: Delta = 1e-5,
    measure_references: References = 0,
    as_json: console.Json = False,
    verbose: console.Verbose = False,
    quiet: console.Quiet = False,
) -> None:
    """Play all parties on this machine: the same files, checks and result as if they were apart. No network.

    The same command again goes on where it stopped. OUT holds one simulation: what was made with other options, or of
    other examples, is not taken for what is asked now.

    \b
    Examples:
      cloister unify simulate minilm alpaca.jsonl out --owner a=a.csv --owner b=b.csv --labels labels.txt
    """
    from cloister import hub
    from cloister.unify.rounds import simulate as simulation

    private = pairs(owner, "NAME=EXAMPLES")
    own_steps = private_steps(
        dp_epsilon, dp_selection_epsilon, dp_routing_epsilon, dp_delta, references=measure_references
    )
    round_ = simulation.prepare(
        out,
        hub.resolve(seed),
        public,
        private,
        steps=own_steps,
        terms=terms_of(
            count, selection, method, rank, epochs, fixed_steps, top_k, fallback, routing_vectors, context, more
        ),
        task=task_of(task, labels),
        tasks=tasks_of(list(private), task, owner_task, owner_labels),
        quorum=quorum or 0,
    )
    progress = console.progress()
    told = simulation.run(out, round_, private, out / simulation.MODEL, steps=own_steps, progress=progress)
    if measure_references:
        simulation.measure(out, round_, private, steps=own_steps, progress=progress)
    if as_json:
        console.data({"model": str(out / simulation.MODEL), "owners": told})
        return
    for name, what in told.items():
        console.note(f"{name}: {what}")
    print(out / simulation.MODEL)


@app.command(no_args_is_help=True)
def status(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="ROUND or MINE.")],
    as_json: console.Json = False,
    verbose: console.Verbose = False,
    quiet: console.Quiet = False,
) -> None:
    """Who is where in a round, and why somebody was refused. Works on the coordinator's folder and on an owner's.

    \b
    Examples:
      cloister unify status round
      cloister unify status mine --json
    """
    from cloister.unify.rounds import invitation
    from cloister.unify.rounds.coordinator import INVITATION
    from cloister.unify.rounds.state import Book

    book = Book.load(folder)
    recipe = invitation.read(folder / INVITATION, whole=False).recipe if book.state.party == "coordinator" else None
    if as_json:
        console.data(rows(book, recipe))
    else:
        table(book, recipe)


@app.command(no_args_is_help=True)
def add(
    folder: Round,
    owner: Annotated[str, typer.Argument(metavar="NAME=KEY", help="The owner and its party-key.pub.")],
    days: Annotated[
        float | None, typer.Option(min=0, max=MOST_DAYS, help="Its deadline, in days from now. [default: the round's]")
    ] = None,
    owner_task: OwnerTasks = None,
    owner_labels: OwnerLabels = None,
    key_folder: KeyFolder = None,
    verbose: console.Verbose = False,
    quiet: console.Quiet = False,
) -> None:
    """Invite one more owner, or give one another deadline. What others have sent stays good.

    Then hand out ROUND/invitation, and put the newcomer's expert beside the others with `build --onto MODEL`. Labels
    that the round does not have yet come with it: --owner-labels.

    \b
    Examples:
      cloister unify add round harbour=harbour.pub --days 7
      cloister unify add round harbour=harbour.pub --owner-labels harbour=ships.txt
    """
    from datetime import timedelta

    from cloister.unify.keys import Key
    from cloister.unify.rounds.coordinator import INVITATION
    from cloister.unify.rounds.state import now

    ((name, path),) = pairs([owner], "NAME=KEY").items()
    until = None if days is None else now() + timedelta(days=days)
    with opened(folder) as round_:
        tasks = tasks_of([name], Kind(round_.recipe.terms.task.kind), owner_task, owner_labels)
        (one,) = with_tasks([invited(name, path, until)], tasks)
        round_.add(one, Key.load(key_folder or folder / "key"))
    print(folder / INVITATION)


@app.command(no_args_is_help=True)
def remove(
    folder: Annotated[Path, typer.Argument(metavar="ROUND|MODEL", help="A round, or a unified model.")],
    owner: Annotated[str, typer.Argument(metavar="OWNER", help="Who leaves.")],
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="For a model: where the smaller one goes.")] = None,
    verbose: console.Verbose = False,
    quiet: console.Quiet = False,
) -> None:
    """Take an owner out: of a round (what it sent is deleted), or its expert out of a model.

    A model of texts keeps a part of the expert in the others' experts, and the joint training has seen the owner's
    chosen public examples; names of labels that were the owner's alone stay as well. To be without all this, take the
    owner out of the round and build again; no expert is trained again for that.

    \b
    Examples:
      cloister unify remove round harbour
      cloister unify remove model harbour --out smaller-model
    """
    from cloister import storage
    from cloister.unify.artefacts import write_json
    from cloister.unify.rounds.provenance import PROVENANCE, read_provenance, without
    from cloister.unify.rounds.state import STATE

    if (folder / STATE).exists():
        with opened(folder) as round_:
            round_.remove(owner)
        print(f"{owner} has left {folder}.")
        return
    if out is None:
        raise UsageError("A model needs --out.", advice="Say where the smaller model goes.")
    made = read_provenance(folder)
    if owner not in made["owners"]:
        raise UsageError(f"{owner} owns no expert of {folder}.", advice=f"`{PROVENANCE}` in it names its owners.")
    with storage.fresh_directory(out) as partial:
        steps().remove(folder, owner, partial)
        write_json(partial / PROVENANCE, without(made, owner))
    print(out)
    if made.get("share"):
        console.note(
            f"The other experts still hold {made['share']} of what {owner}'s expert learned. To be without it: "
            f"cloister unify remove ROUND {owner}, then cloister unify build ROUND MODEL."
        )


@app.command(no_args_is_help=True)
def export(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="A unified model whose router sees no context.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Where the stock checkpoint goes.")],
    verbose: console.Verbose = False,
    quiet: console.Quiet = False,
) -> None:
    """Write a unified decoder in a stock architecture, for vLLM and others. What cannot be expressed there is refused.

    \b
    Examples:
      cloister unify export model stock-model
    """
    from cloister import storage

    with storage.fresh_directory(out) as partial:
        steps().export(model, partial)
    print(out)


app.command(no_args_is_help=True)(evaluate)
app.command(no_args_is_help=True)(unify_network.coordinator)
app.command(no_args_is_help=True)(unify_network.join)
