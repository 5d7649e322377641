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


def test_a_simulation_of_a_decoder_and_its_export(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    owners = ["--owner", "bank=bank.txt", "--owner", "travel=travel.txt"]
    words = ["simulate", "decoder", "public.txt", "played", *owners, "--task", "language", "--context", "none", *QUICK]
    found = plain(capsys, *words)
    assert found["owners"] == {"bank": "built", "travel": "built"}
    call(capsys, "export", "played/model", "stock")
    assert json.loads((place / "stock" / "config.json").read_text())["model_type"] == "qwen2_moe"
    assert "cannot be written" in refused(capsys, "export", "model", "stock2")
    assert not (place / "stock2").exists()


# What people get wrong ------------------------------------------------------------------------------------------------


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
    ):
        assert said in refused(capsys, *words), words
    assert "no file nothing.jsonl" in call(capsys, "invite", "seed", "nothing.jsonl", "bad", *labels, *one, code=3)[1]
    assert not (place / "bad" / "invitation").exists() and not (place / "bad" / "state.json").exists()


def test_what_is_wrong_with_a_folder(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command in (["status", "seed"], ["build", "seed", "out"], ["add", "seed", "x=keys/bank/party-key.pub"]):
        assert "not a round's folder" in refused(capsys, *command, code=3)
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


@pytest.mark.slow
@pytest.mark.skipif(find_spec("flwr") is None, reason="Flower is not installed: pip install 'cloister[federated]'")
def test_a_round_over_the_network(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same contributions as by hand make the same model, byte for byte."""
    from test_federation import free_port

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
