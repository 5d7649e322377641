"""`cloister unify` as people type it: every command once, and what they say about bad input."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from cloister.cli import main

sys.path.insert(0, str(Path(__file__).parents[1] / "unify"))
from tiny import TOPICS, WORDS, decoder, encoder, sentences

QUICK = ["--count", "8", "--epochs", "1", "--rank", "2"]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with a seed, a decoder, labels, public and private examples; commands run in it."""
    folder = tmp_path_factory.mktemp("unify")
    for name, seed in (("seed", encoder()), ("decoder", decoder())):
        seed.model.save_pretrained(folder / name)
        assert seed.tokenizer is not None
        seed.tokenizer.save_pretrained(folder / name)
    for name in TOPICS:
        own = sentences(name, 24)
        rows = [f"{text},{label}" for text, label in zip(own.texts(), own.targets or (), strict=True)]
        (folder / f"{name}.csv").write_text("text,label\n" + "\n".join(rows) + "\n")
        (folder / f"{name}.txt").write_text("\n".join(own.texts()) + "\n")
    (folder / "labels.txt").write_text("\n".join(WORDS[:12]) + "\n")
    public = [text for name in TOPICS for text in sentences(name, 20, seed=7).texts()]
    lines = [json.dumps({"id": f"p{i}", "text": text}) + "\n" for i, text in enumerate(public)]
    (folder / "public.jsonl").write_text("".join(lines))
    (folder / "public.txt").write_text("\n".join(public) + "\n")
    before = Path.cwd()
    os.chdir(folder)
    yield folder
    os.chdir(before)


def call(capsys: pytest.CaptureFixture[str], *words: object, code: int = 0) -> tuple[str, str]:
    found = main([str(word) for word in ("unify", *words)])
    out, err = capsys.readouterr()
    assert found == code, out + err
    assert "Traceback" not in err
    return out, err


def plain(capsys: pytest.CaptureFixture[str], *words: object) -> Any:
    return json.loads(call(capsys, *words, "--json")[0])


def refused(capsys: pytest.CaptureFixture[str], *words: object, code: int = 2) -> str:
    """What a command says that cannot be done; always with something to do about it."""
    err = call(capsys, *words, code=code)[1]
    assert "error: " in err and "what to do: " in err
    return err


def invite(
    capsys: pytest.CaptureFixture[str], folder: str, *more: str, owners: tuple[str, ...] = ("bank", "travel")
) -> None:
    keys = [word for name in owners for word in ("--owner", f"{name}=keys/{name}/party-key.pub")]
    for name in owners:
        call(capsys, "key", f"keys/{name}")
    call(capsys, "invite", "seed", "public.jsonl", folder, *keys, "--labels", "labels.txt", *QUICK, *more)


def contribute(capsys: pytest.CaptureFixture[str], folder: str, name: str, mine: str, *more: str) -> str:
    call(
        capsys,
        "contribute",
        f"{folder}/invitation",
        f"{name}.csv",
        mine,
        "--key",
        f"keys/{name}",
        "--no-measure",
        *more,
    )
    return f"{mine}/contribution"


# By hand --------------------------------------------------------------------------------------------------------------


def test_a_round_by_hand(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = plain(capsys, "key", "keys/bank")
    assert made["fingerprint"] == plain(capsys, "key", "keys/bank")["fingerprint"] and len(made["fingerprint"]) == 64
    invite(capsys, "round")
    assert [row["state"] for row in plain(capsys, "status", "round")["owners"]] == ["invited", "invited"]
    brought = [contribute(capsys, "round", name, f"mine-{name}") for name in ("bank", "travel")]
    own = plain(capsys, "status", "mine-bank")
    assert own["party"] == "owner" and own["owners"][0]["says"] == "working (the contribution is ready)"
    assert "the quorum is 2" in refused(capsys, "build", "round", "model", brought[0], "--now", code=5)
    assert not (place / "model").exists()
    out, err = call(capsys, "build", "round", "model", *brought)
    assert out.strip() == "model" and "bank, received" in err
    assert {row["state"] for row in plain(capsys, "status", "round")["owners"]} == {"built"}
    out, _ = call(capsys, "status", "round")
    assert "built" in out and "2 taken, quorum 2, 0 awaited" in out
    assert json.loads((place / "model" / "config.json").read_text())["owners"] == ["bank", "travel"]


def test_one_more_and_one_fewer(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    call(capsys, "key", "keys/kitchen")
    call(capsys, "add", "round", "kitchen=keys/kitchen/party-key.pub", "--days", "3")
    brought = contribute(capsys, "round", "kitchen", "mine-kitchen")
    call(capsys, "build", "round", "larger", brought, "--onto", "model")
    assert json.loads((place / "larger" / "config.json").read_text())["owners"] == ["bank", "travel", "kitchen"]
    call(capsys, "remove", "larger", "bank", "--out", "smaller")
    assert json.loads((place / "smaller" / "config.json").read_text())["owners"] == ["travel", "kitchen"]
    call(capsys, "remove", "round", "kitchen")
    assert {row["owner"]: row["state"] for row in plain(capsys, "status", "round")["owners"]}["kitchen"] == "left"


def test_an_owner_who_joins_later_with_labels_of_its_own(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from cloister.unify import labels

    (place / "bank-labels.txt").write_text("\n".join(TOPICS["bank"]))
    (place / "kitchen-labels.txt").write_text("\n".join(TOPICS["kitchen"]))
    for name in ("bank", "kitchen"):
        call(capsys, "key", f"keys/{name}")
    owner = ["--owner", "bank=keys/bank/party-key.pub", "--labels", "bank-labels.txt"]
    call(capsys, "invite", "seed", "public.jsonl", "round-6", *owner, *QUICK)
    call(capsys, "build", "round-6", "model-6", contribute(capsys, "round-6", "bank", "sixth-bank"))
    words = ["add", "round-6", "kitchen=keys/kitchen/party-key.pub"]
    assert "is no owner" in refused(capsys, *words, "--owner-labels", "travel=kitchen-labels.txt")
    assert "There is no task" in refused(capsys, *words, "--owner-task", "kitchen=cooking")
    assert "need the labels" in refused(capsys, *words, "--owner-task", "kitchen=classify")
    call(capsys, *words, "--owner-labels", "kitchen=kitchen-labels.txt")
    words = ["contribute", "round-6/invitation", "kitchen.csv", "sixth-kitchen", "--key", "keys/kitchen"]
    made = plain(capsys, *words, "--no-measure")
    recipe = json.loads((place / "round-6" / "invitation" / "recipe.json").read_text())
    assert made["agreed"]["public"] == recipe["terms"]["public"]
    assert recipe["terms"]["public"] in call(capsys, *words, "--no-measure")[1]
    call(capsys, "build", "round-6", "larger-6", made["contribution"], "--onto", "model-6")
    assert set(labels.read(place / "larger-6").names) == {*TOPICS["bank"], *TOPICS["kitchen"]}


def unified_encoder(place: Path) -> None:
    """What no stock architecture expresses."""
    import cloister.unify.moe as moe
    from cloister.unify.seeds import Seed

    seed = Seed.load(place / "seed").model
    own = dict(seed.named_parameters())
    state = {name: own[name].detach() for name in moe.feed_forward_names(seed)}
    moe.unify(seed, {"bank": state}).save_pretrained(place / "encoder")


def test_a_simulation_of_a_decoder_and_its_export(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    owners = ["--owner", "bank=bank.txt", "--owner", "travel=travel.txt"]
    words = ["simulate", "decoder", "public.txt", "played", *owners, "--task", "language", "--context", "none", *QUICK]
    found = plain(capsys, *words)
    assert found["owners"] == {"bank": "built", "travel": "built"}
    before = (place / "played" / "model" / "model.safetensors").stat().st_mtime_ns
    assert plain(capsys, *words, "--measure-references", "2") == found
    assert (place / "played" / "model" / "model.safetensors").stat().st_mtime_ns == before
    for name in ("bank", "travel"):
        assert (place / "played" / "owners" / name / "work" / "disclosure" / "report.json").exists()
    call(capsys, "export", "played/model", "stock")
    assert json.loads((place / "stock" / "config.json").read_text())["model_type"] == "qwen2_moe"
    unified_encoder(place)
    assert "cannot be written" in refused(capsys, "export", "encoder", "stock2")
    assert not (place / "stock2").exists()


def test_a_simulation_is_not_taken_for_another_one(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What `played` holds was made without privacy, for one epoch, of these files."""
    words = ["simulate", "decoder", "public.txt", "played", "--task", "language", "--context", "none"]
    owners = ["--owner", "bank=bank.txt", "--owner", "travel=travel.txt"]
    swapped = ["--owner", "bank=bank.txt", "--owner", "travel=kitchen.txt"]
    assert "another expert" in refused(capsys, *words, *owners, "--count", "8", "--rank", "2", "--steps", "3")
    assert "in two ways" in refused(capsys, *words, *owners, *QUICK, "--steps", "3")
    assert "made of other examples than kitchen.txt" in refused(capsys, *words, *swapped, *QUICK)
    if find_spec("opacus") and find_spec("dp_accounting"):
        said = refused(capsys, *words, *owners, *QUICK, "--dp-epsilon", "4")
        assert "no differential privacy instead of expert epsilon 4" in said and "alone bounds nothing" in said
    shutil.rmtree(place / "played" / "model")
    assert plain(capsys, *words, *owners, *QUICK)["owners"] == {"bank": "built", "travel": "built"}
    nothing = ["--owner", "bank=bank.txt", "--owner", "travel=nothing.txt"]
    words[3] = "failing"
    said = refused(capsys, *words, *nothing, *QUICK, code=3)
    assert "1 of 2 owners" in said and "- travel: There is no nothing.txt" in said


def test_the_same_number_of_steps_for_every_owner(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    call(capsys, "key", "keys/bank")
    words = ["invite", "seed", "public.jsonl", "fixed", "--owner", "bank=keys/bank/party-key.pub"]
    found = plain(capsys, *words, "--labels", "labels.txt", "--steps", "3", "--count", "8")
    assert found["recipe"]["terms"]["expert"]["steps"] == 3
    from safetensors.numpy import load_file

    contribute(capsys, "fixed", "bank", "fixed-bank")
    losses = load_file(place / "fixed-bank" / "work" / "training" / "training.safetensors")["losses"]
    assert len(losses) == 3


# What people get wrong ------------------------------------------------------------------------------------------------


def test_settings_without_an_option_of_their_own(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    call(capsys, "key", "keys/bank")
    words = ["invite", "seed", "public.jsonl", "set", "--owner", "bank=keys/bank/party-key.pub", *QUICK]
    words += ["--labels", "labels.txt"]
    for name, said in (
        ("expert.rank=3", "an option of its own"),
        ("expert.speed=3", "sets nothing"),
        ("expert.lr", "expert.lr"),
        ("expert.lr=quick", "terms.expert.lr"),
        ("router.blend=1.5", "router.blend"),
        ("selection.look=twice", "selection.look"),
        ("selection.pool=4", "cannot be chosen from a pool of 4"),
    ):
        assert said in refused(capsys, *words, "--set", name), name
    assert "set twice" in refused(capsys, *words, "--set", "expert.lr=0.1", "--set", "expert.lr=0.2")
    given = ["--set", "expert.lr=0.002", "--set", "router.start=inside", "--set", "selection.look=both"]
    terms = plain(capsys, *words, *given)["recipe"]["terms"]
    assert (terms["expert"]["lr"], terms["router"]["start"], terms["selection"]["look"]) == (0.002, "inside", "both")
    assert terms["expert"]["rank"] == 2
    # What was left to the kind of seed is written out: the digest of the terms covers it.
    assert (terms["router"]["share"], terms["router"]["epochs"], terms["expert"]["proxy_weight"]) == (0.4, 0.2, 0.15)
    made = contribute(capsys, "set", "bank", "set-bank", "--learning-rate", "0.0005")
    again = ["contribute", "set/invitation", "bank.csv", "set-bank", "--key", "keys/bank", "--no-measure"]
    assert "learning rate 0.0005" in refused(capsys, *again, "--learning-rate", "0.001")
    assert "is no learning rate" in refused(capsys, *again, "--learning-rate", "0")
    call(capsys, "build", "set", "set-model", made)


def test_what_is_wrong_with_an_invitation(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = ["invite", "seed", "public.jsonl", "bad", *QUICK]
    one = ["--owner", "bank=keys/bank/party-key.pub"]
    labels = ["--labels", "labels.txt"]
    for words, said in (
        ([*base, *labels, "--owner", "bank"], "is not NAME=KEY"),
        ([*base, *labels, *one, *one], "named twice"),
        ([*base, *labels, "--owner", "bank=nothing.pub"], "cannot be read"),
        ([*base, *labels, "--owner", "bank=labels.txt"], "not a party's public key"),
        ([*base, *labels, "--owner", "Big Bank=keys/bank/party-key.pub"], "small letters"),
        ([*base, *labels, *one, "--owner", "travel=keys/bank/party-key.pub"], "same key"),
        ([*base, *labels, *one, "--quorum", "3"], "quorum is 3 of 1"),
        ([*base, *one], "need the labels"),
        ([*base, *one, "--labels", "nothing.txt"], "nothing.txt cannot be read"),
        (["invite", "nothing", "public.jsonl", "bad", *labels, *one], "nothing"),
        ([*base, *labels, *one, "--days", "1e12"], "not in the range"),
    ):
        assert said in refused(capsys, *words), words
    assert "no file nothing.jsonl" in call(capsys, "invite", "seed", "nothing.jsonl", "bad", *labels, *one, code=3)[1]
    assert not (place / "bad" / "invitation").exists() and not (place / "bad" / "state.json").exists()


def test_what_is_wrong_with_a_folder(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command in (["status", "seed"], ["build", "seed", "out"], ["add", "seed", "x=keys/bank/party-key.pub"]):
        assert "not a round's folder" in refused(capsys, *command, code=3)
    assert "There is no folder nothing" in refused(capsys, "build", "round", "out", "nothing")
    assert "not a unified model" in refused(capsys, "remove", "seed", "bank", "--out", "out")
    assert "needs --out" in refused(capsys, "remove", "model", "bank")
    assert "owns no expert" in refused(capsys, "remove", "model", "nobody", "--out", "out")
    assert "exists and is not empty" in refused(capsys, "remove", "model", "bank", "--out", "seed")
    words = ["contribute", "round/invitation", "bank.csv", "new", "--no-measure"]
    assert "There is no key" in refused(capsys, *words)
    assert "There is no nothing.csv" in refused(capsys, words[0], words[1], "nothing.csv", "new", "--key", "keys/bank")
    call(capsys, "key", "keys/other")
    assert "Nobody with this key is invited" in refused(capsys, *words, "--key", "keys/other", code=4)
    assert "another coordinator" in refused(capsys, *words, "--key", "keys/bank", "--coordinator-key", "0" * 64, code=4)
    assert not (place / "out").exists()


def test_a_contribution_that_was_changed(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Refused with the reason, and the round goes on without it."""
    invite(capsys, "round-2", "--quorum", "1")
    good, bad = (contribute(capsys, "round-2", name, f"second-{name}") for name in ("bank", "travel"))
    (place / bad / "proxies.json").write_text("{}")
    _, err = call(capsys, "build", "round-2", "model-2", good, bad, "--now")
    assert "travel, refused: " in err and "proxies.json" in err
    assert json.loads((place / "model-2" / "config.json").read_text())["owners"] == ["bank"]
    rows = {row["owner"]: row for row in plain(capsys, "status", "round-2")["owners"]}
    assert rows["travel"]["state"] == "refused" and any(
        "proxies.json" in reason for reason in rows["travel"]["reasons"]
    )
    assert "exists and is not empty" in refused(capsys, "build", "round-2", "model-2", "--now")


# Interrupted ----------------------------------------------------------------------------------------------------------


def start(*words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "cloister", "unify", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def test_ctrl_c_leaves_nothing_half_written(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    invite(capsys, "round-3", "--epochs", "1000")
    words = ["contribute", "round-3/invitation", "bank.csv", "third", "--key", "keys/bank", "--no-measure"]
    process = start(*words)
    state, deadline = place / "third" / "state.json", time.monotonic() + 600
    while "training" not in (state.read_text() if state.exists() else "") and time.monotonic() < deadline:
        assert process.poll() is None, process.communicate()
        time.sleep(0.1)
    assert "Another command is working" in refused(capsys, *words, code=6)
    assert plain(capsys, "status", "third")["owners"][0]["says"] == "working (training the expert)"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=300)
    # torch may have made Python note the signal, which then ends by it; a shell shows 130 for both
    assert process.returncode in (130, -signal.SIGINT) and "Stopped." in err and out == "", err
    assert not (place / "third" / "contribution").exists() and not list((place / "third").rglob("*.partial"))


# Over the network -----------------------------------------------------------------------------------------------------


def test_what_is_wrong_on_the_network(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["join", "localhost:1", "bank.csv", "net", "--key", "keys/bank", "--certificate"]
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "flwr", None)
        assert "Flower is not installed" in refused(capsys, *words, "labels.txt")
        assert "Flower is not installed" in refused(capsys, "coordinator", "round", "out")
    if find_spec("flwr") is not None:
        assert "it is no certificate" in refused(capsys, *words, "labels.txt")
        assert "nothing.pem cannot be read" in refused(capsys, *words, "nothing.pem")
        assert "There is no nothing.csv" in refused(capsys, *words[:2], "nothing.csv", *words[3:], "labels.txt")
        assert "not a round's folder" in refused(capsys, "coordinator", "seed", "out", code=3)
    assert "--certificate" in call(capsys, *words[:-1], code=2)[1]


def test_who_joined_hears_so_whatever_lies_in_its_folder(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The contribution was sent by hand, from elsewhere, or an older Cloister made it: nothing is noted then."""
    from cloister.unify.federation import join as joining

    monkeypatch.setattr(joining, "join", lambda *_, **__: None)
    call(capsys, "key", "keys/bank")
    words = ["join", "localhost:1", "bank.csv", "gone", "--key", "keys/bank", "--certificate", "labels.txt"]
    made = place / "gone" / "contribution"
    for report in (None, "{}", "{", "[]", '{"agreed": 1}', '{"agreed": {"terms": "x"}}'):
        if report is not None:
            made.mkdir(parents=True, exist_ok=True)
            (made / "report.json").write_text(report)
        out, err = call(capsys, *words)
        assert "has your contribution" in out and "SHA-256" not in err
        told = {"state": "received", "contribution": None if report is None else "gone/contribution", "agreed": None}
        assert plain(capsys, *words) == told
    (made / "report.json").write_text('{"agreed": {"terms": "x", "public": "abc", "note": "Compare."}}')
    assert "Public examples: SHA-256 abc. Compare." in call(capsys, *words)[1]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(find_spec("flwr") is None, reason="Flower is not installed: pip install 'cloister[federated]'")
def test_a_round_over_the_network(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same contributions as by hand make the same model, byte for byte; the same command builds it only once."""
    from test_federation import free_port

    from cloister.unify.federation import coordinate

    port = str(free_port())
    invite(capsys, "round-4")
    shutil.copytree(place / "round-4", place / "round-5")
    coordinator = start("coordinator", "round-4", "model-4", "--port", port)
    certificate, deadline = place / "round-4" / "key" / "tls-certificate.pem", time.monotonic() + 600
    while not certificate.exists() and time.monotonic() < deadline:
        assert coordinator.poll() is None, coordinator.communicate()
        time.sleep(0.1)
    owners = [
        start("join", f"localhost:{port}", f"{name}.csv", f"fourth-{name}", "--key", f"keys/{name}",
              "--certificate", str(certificate), "--no-measure")
        for name in ("bank", "travel")
    ]  # fmt: skip
    for process in (*owners, coordinator):
        out, err = process.communicate(timeout=600)
        assert process.returncode == 0, err
    assert out.strip().endswith("model-4") and "2 taken, quorum 2, 0 awaited" in out
    assert plain(capsys, "status", "fourth-bank")["owners"][0]["state"] == "received"
    call(capsys, "build", "round-5", "model-5", "fourth-bank/contribution", "fourth-travel/contribution")
    for path in sorted((place / "model-5").iterdir()):
        assert path.read_bytes() == (place / "model-4" / path.name).read_bytes(), path.name
    monkeypatch.setattr(coordinate, "coordinate", lambda *_, **__: None)  # which tells the owners, for a minute
    out, err = call(capsys, "coordinator", "round-4", "model-4", "--port", port)
    assert "model-4 is built" in err and "model-4" in out
    assert "is not the model of the owners" in refused(capsys, "coordinator", "round-4", "seed", "--port", port)
