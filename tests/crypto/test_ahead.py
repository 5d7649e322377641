"""Work done ahead, kept on disk between sessions: two processes make it in one, over TLS, and use it in the next."""

from __future__ import annotations

import shutil
import stat
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cloister.crypto import native
from cloister.errors import BrokenStore, InvalidParameter, UsedUp
from cloister.progress import Progress

if not native.available():
    pytest.skip("the Rust core is not installed here", allow_module_level=True)

sys.path.insert(0, str(Path(__file__).parent))
from two_processes import fixed, refusal, run

from cloister.crypto.engine import Cost, Costs, Demand, ExpertLayer, LinearLayer, Party, Settings, Shares, Store

ONE_PLACE = 1 / 4096
LAYERS = [LinearLayer("query", 5, 64, 24), ExpertLayer("experts", 4, 3, 16, (20, 7))]
REFUSE: dict[str, Any] = {"when_empty": "refuse"}
START_OVER: dict[str, Any] = {"when_behind": "start over"}


def numbers(party: Party, seed: int, shape: tuple[int, ...], size: float) -> Shares:
    values = fixed(seed, shape, size)
    return party.share(values if party.role == "client" else None, owner="client", shape=shape)


def gate(party: Party) -> Any:
    """What a gate does: two of each kind of step that takes correlations."""
    x = numbers(party, 1, (4, 16), 4)
    return [party.reveal(v, to="both") for v in (party.silu(x), party.bits_to_values(party.top_k_mask(x, 3)))]


def right(results: list[np.ndarray]) -> bool:
    x = fixed(1, (4, 16), 4)
    mask = np.zeros_like(x)
    np.put_along_axis(mask, np.argsort(-x, axis=1)[:, :3], 1, axis=1)
    return bool(np.abs(results[0] - x / (1 + np.exp(-x))).max() < 2**-8 and (results[1] == mask).all())


def learn(party: Party) -> Demand:
    party.reset_costs()
    gate(party)
    return party.demand()


def fill(party: Party, demand: Demand) -> Any:
    party.preprocess(demand)
    return party.costs(), party.stored()


def use(party: Party) -> Any:
    return gate(party), party.costs(), party.stored()


def test_what_one_session_makes_the_next_uses_and_pays_for_none_of_it(tmp_path: Path) -> None:
    (demand, also) = run(learn, tmp_path)
    assert demand == also and demand.total > 0
    (made, stored), (theirs, _) = run(fill, tmp_path, demand, store=REFUSE)
    assert made.preprocess.bytes > 100_000 and made.online.bytes == 0
    assert made.preprocess.bytes == theirs.preprocess.bytes
    assert all(there >= wanted for there, wanted in zip(stored.row(), demand.row(), strict=True))
    (results, costs, left), (_, theirs, _) = run(use, tmp_path, store=REFUSE)
    assert right(results)
    assert costs.preprocess == theirs.preprocess == Cost("preprocess", 0, 0, 0, 0, 0.0, "preprocess")
    assert 0 < costs.online.bytes < costs.total.bytes == costs.online.bytes + costs.set_up.bytes
    assert not any("ot" in c.step.split() or "triples" in c.step for c in costs), "nothing is made in this session"
    assert all(a < b for a, b in zip(left.row(), stored.row(), strict=True))
    # Nothing is left for a third, and making it while the user waits was not allowed.
    error, theirs = refusal(use, tmp_path, store=REFUSE)
    assert isinstance(error, UsedUp) and "UsedUp" in theirs


def test_a_store_that_runs_dry_is_extended_where_that_is_allowed(tmp_path: Path) -> None:
    run(fill, tmp_path, Demand(2048, 2048), store={})
    (results, costs, _), _ = run(use, tmp_path, store={})
    assert right(results)
    now = [c for c in costs if "made now" in c.step]
    assert now and all(c.phase == "online" for c in now) and costs.preprocess.bytes == 0


def files(folder: Path) -> list[Path]:
    return [folder, *folder.rglob("*")]


def test_the_folder_and_its_files_belong_to_their_owner_alone(tmp_path: Path) -> None:
    run(fill, tmp_path, Demand(1024), store={})
    for path in files(tmp_path / "client" / "store"):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path
    (tmp_path / "server" / "store" / "key").chmod(0o755)
    with pytest.raises(AssertionError, match=r"UnusableFolder.*others can reach"):
        run(fill, tmp_path, Demand(1024), store={})


def test_a_copied_folder_is_refused_by_both_or_everything_stored_is_thrown_away(tmp_path: Path) -> None:
    run(fill, tmp_path, Demand(200_000, 200_000, 200_000, 200_000, 100_000), store={})
    folder, copy = tmp_path / "client" / "store", tmp_path / "copy"
    shutil.copytree(folder, copy)
    run(use, tmp_path, store={})
    shutil.rmtree(folder)
    shutil.copytree(copy, folder)
    error, theirs = refusal(use, tmp_path, store={})
    assert isinstance(error, BrokenStore) and error.code == "broken_store"
    assert "copied or restored" in str(error) and "never copy or restore" in error.advice
    assert "BrokenStore" in theirs and "copied or restored" in theirs
    (why, results, costs), _ = run(start_over, tmp_path, store=START_OVER)
    assert "restored" in why and right(results) and any("made now" in c.step for c in costs)


def start_over(party: Party) -> Any:
    assert party.stored() == Demand()
    return party.started_over, gate(party), party.costs()


def weights(number: int) -> Any:
    if number == 0:
        return np.rint(fixed(4, (64, 24), 3000)).astype(np.int32)
    both = np.rint(fixed(5, (4, 20, 16), 3000)).astype(np.int16)
    return [both, both[:, :7]]


def prepare(party: Party, passes: int, folder: Path) -> Any:
    text = (folder / f"{party.role}.progress").open("w")
    progress = Progress(stream=text, interval=0)
    party.prepare(LAYERS, None if party.role == "client" else weights, passes=passes, progress=progress)
    text.close()
    return party.costs(), [party.prepared(layer) for layer in LAYERS]


def linear(party: Party, name: bool) -> Any:
    server = party.role == "server"
    x, y = numbers(party, 2, (5, 64), 100), numbers(party, 3, (4, 3, 16), 100)
    party.meet()
    party.reset_costs()
    one = party.matmul(x, weights(0) if server else None, outputs=24, prepared="query" if name else None)
    given = weights(1) if server else None
    many = party.batched_matmul(y, given, outputs=(20, 7), prepared="experts" if name else None)
    costs = party.costs()
    return [party.reveal_integers(v, to="client") for v in (one, *many)], costs


def test_prepared_layers_are_the_layers_and_cost_one_message(tmp_path: Path) -> None:
    (made, left), _ = run(prepare, tmp_path, 2, tmp_path, store=REFUSE)
    assert left == [2, 2] and made.preprocess.bytes > 10_000 and made.online.bytes == 0
    assert "4/4 layers" in (tmp_path / "client.progress").read_text()
    x = np.rint(fixed(2, (5, 64), 100) * 4096).astype(np.int64)
    y = np.rint(fixed(3, (4, 3, 16), 100) * 4096).astype(np.int64)
    for _ in range(2):
        (got, costs), (nothing, _) = run(linear, tmp_path, True, store=REFUSE)
        assert nothing == [None] * 3
        assert np.abs(got[0] - x @ weights(0).astype(np.int64)).max() <= 1
        for ours, w in zip(got[1:], weights(1), strict=True):
            assert (ours == y @ w.astype(np.int64).transpose(0, 2, 1)).all()
        inputs = 41 * (x.size + y.size) // 8
        assert costs.preprocess.bytes == 0 and inputs < costs.online.bytes_sent < inputs + 200
        assert costs.online.rounds == 1, "one reservation for the whole pass"
    error, theirs = refusal(linear, tmp_path, True, store=REFUSE)
    assert isinstance(error, UsedUp) and "query" in str(error) and "UsedUp" in theirs


def in_memory(party: Party, folder: Path) -> Any:
    prepare(party, 1, folder)
    party.preprocess(Demand(1000, 1000, 1000, 1000, 1000))
    stored = party.stored()
    first, costs = linear(party, True)
    again, whole = linear(party, True)
    return first, again, costs.online.bytes, whole.online.bytes, stored


def test_without_a_store_what_is_made_lasts_as_long_as_the_session(tmp_path: Path) -> None:
    (first, again, cheap, whole, stored), _ = run(in_memory, tmp_path, tmp_path)
    assert all(np.abs(a - b).max() <= 2 for a, b in zip(first, again, strict=True))
    assert cheap < 5_000 < whole and min(stored.row()) >= 1000


class Stop(Exception):
    pass


def stopped(party: Party) -> str:
    def stop(kind: str, there: int, wanted: int) -> None:
        raise Stop(f"{there} of {wanted} {kind}")

    try:
        party._native.preprocess(Demand(1 << 19).row(), stop)
    except Stop as error:
        party._native.abandon()
        return str(error)
    return "not stopped"


def test_what_a_listener_raises_ends_the_work_and_reaches_the_caller(tmp_path: Path) -> None:
    told = run(stopped, tmp_path, store={})
    assert told == ("262144 of 524288 pads-from-client",) * 2
    (_, stored), _ = run(fill, tmp_path, Demand(), store={})
    assert stored.pads_from_client == 1 << 18, "what was kept by both is not lost"


def test_sums_of_costs_and_demands() -> None:
    costs = Costs(
        [
            Cost("hello", 1, 2, 1, 1, 0.5, "set up"),
            Cost("preprocess/triples", 10, 20, 1, 2, 1.5, "preprocess"),
            Cost("silu", 100, 200, 1, 3, 2.5, "online"),
        ]
    )
    assert costs.online == Cost("online", 100, 200, 1, 3, 2.5, "online")
    assert costs.total == Cost("total", 111, 222, 3, 6, 4.5, "total")
    assert costs.set_up.bytes + costs.preprocess.bytes + costs.online.bytes == costs.total.bytes
    assert 2 * Demand(1, 2) + Demand(triples=5) == Demand(2, 4, 0, 0, 5)


def test_a_store_with_unknown_wishes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidParameter, match="not known"):
        store = Store(tmp_path, when_empty="wait")  # type: ignore[arg-type]
        Settings(insecure_loopback=True, model=bytes([1]) * 32, store=store).as_native()
