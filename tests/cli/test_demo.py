"""The demo is real: its answer is the plain model's, and the attack on its request reads what it says it reads."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytest.importorskip("torch", reason="the demo runs models")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("transform", ["permutation", "orthogonal"])
def test_the_demo_keeps_its_word(transform: str) -> None:
    question = "My card was stolen last night, what should I do?"
    parts = [] if transform == "permutation" else ["--part", "chat"]
    done = subprocess.run(
        [sys.executable, "-m", "cloister", "demo", question, "--yes", "--json", "-q", "--transform", transform, *parts],
        capture_output=True,
        text=True,
        timeout=580,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    chat = found["chat"]
    assert chat["equal"] and chat["answer"] == chat["plain_answer"] != ""
    assert chat["protected"]["public_base"]["label"] == "obfuscation, not privacy"
    assert chat["protected"]["secret_base"]["label"] != "obfuscation, not privacy"
    assert len(chat["server_saw"]) == chat["worked_out"]["tokens"]
    assert chat["worked_out"]["recovered"] == chat["worked_out"]["tokens"], "a public base hides nothing"
    assert question in chat["worked_out"]["text"]
    assert chat["ledger"]["totals"]["bytes_sent"] > 0
    assert found["modes"]["crypto"] == "not in this release"
    if "embeddings" in found:
        assert found["embeddings"]["max_difference"] < 1e-4
    if isinstance(unified := found.get("unify"), dict):
        assert all(unified["unified"][owner] > unified["seed"][owner] for owner in unified["owners"])
        assert all(max(routes, key=routes.get) == owner for owner, routes in unified["routes"].items())
        assert unified["asked"]["label"] == unified["asked"]["plain"] and unified["asked"]["max_difference"] < 1e-4
