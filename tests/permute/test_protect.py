"""`protect` with bad input, a full disk, an interruption and a rotation: nothing lost, nothing half-written."""

from __future__ import annotations

import errno
import json
import stat
import struct
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from cloister import manifest as manifests
from cloister import storage
from cloister.errors import (
    BrokenCheckpoint,
    BrokenManifest,
    DiskFull,
    ExpiredKey,
    FormatVersion,
    UnsupportedModel,
    UsageError,
)
from cloister.permute import checkpoint as checkpoints
from cloister.permute import contexts, selfcheck
from cloister.permute.entropy import MasterKey
from cloister.permute.protect import check_server, protect


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return selfcheck.make_tiny("OlmoeForCausalLM", tmp_path_factory.mktemp("plain"))


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """The same model in several files."""
    from transformers import OlmoeForCausalLM

    one = selfcheck.make_tiny("OlmoeForCausalLM", tmp_path / "one")
    OlmoeForCausalLM.from_pretrained(one).save_pretrained(tmp_path / "sharded", max_shard_size="40kB")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 3
    return tmp_path / "sharded"


def copy(directory: Path, to: Path) -> Path:
    to.mkdir()
    for path in directory.iterdir():
        (to / path.name).write_bytes(path.read_bytes())
    return to


# ---- what is written -------------------------------------------------------------------------------------------


def test_three_directories_and_their_secrets(plain: Path, tmp_path: Path) -> None:
    manifest = protect(plain, tmp_path / "out", base="secret", measure=False)
    out = tmp_path / "out"
    assert {path.name for path in out.iterdir()} == {"developer", "server", "client"}
    for secret in (out / "developer" / "key", out / "client" / "client.safetensors"):
        assert stat.S_IMODE(secret.stat().st_mode) == 0o600
    for role in ("developer", "server", "client"):
        assert manifests.read(out / role, role=role).protection.key_id == manifest.protection.key_id
    names = {path.name for path in (out / "server").iterdir()}
    assert not any("tokenizer" in name or "key" in name for name in names)
    assert "needs Cloister's client" in (out / "server" / "README.md").read_text()


def test_no_secret_in_what_is_printed(plain: Path, tmp_path: Path) -> None:
    key = MasterKey.fresh()
    assert key.expose_secret().hex() not in repr(key)
    assert repr(key.expose_secret())[2:-1] not in f"{key!r} {key}"
    protect(plain, tmp_path / "out", base="secret", measure=False)
    secret = (tmp_path / "out" / "developer" / "key").read_bytes()
    for role in ("server", "client"):
        for path in (tmp_path / "out" / role).rglob("*"):
            assert path.is_dir() or secret not in path.read_bytes()
    assert str(list(secret)) not in str(manifests.read(tmp_path / "out" / "developer"))


def test_the_server_never_gets_the_plain_table_or_head(plain: Path, tmp_path: Path) -> None:
    protect(plain, tmp_path / "out", base="secret", loop="token", measure=False)
    before, after = load_file(plain / "model.safetensors"), load_file(tmp_path / "out" / "server" / "model.safetensors")
    assert not after["model.embed_tokens.weight"].any()
    for name, tensor in before.items():
        if tensor.ndim == 2:
            assert name not in after or not np.array_equal(tensor, after[name]), name


def test_a_tied_head_is_untied_and_has_its_own_order(tmp_path: Path) -> None:
    plain = selfcheck.make_tiny("Qwen2ForCausalLM", tmp_path / "plain")
    assert json.loads((plain / "config.json").read_text())["tie_word_embeddings"]
    protect(plain, tmp_path / "out", base="secret", measure=False)
    config = json.loads((tmp_path / "out" / "server" / "config.json").read_text())
    assert config["tie_word_embeddings"] is False
    assert "lm_head.weight" in load_file(tmp_path / "out" / "server" / "model.safetensors")


def test_special_tokens_speak_the_permuted_vocabulary(plain: Path, tmp_path: Path) -> None:
    source = copy(plain, tmp_path / "source")
    (source / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 7], "bos_token_id": 1}))
    protect(source, tmp_path / "out", base="secret", measure=False)
    to_server = load_file(tmp_path / "out" / "client" / "client.safetensors")["vocab_to_server"]
    generation = json.loads((tmp_path / "out" / "server" / "generation_config.json").read_text())
    assert generation["eos_token_id"] == [int(to_server[3]), int(to_server[7])]
    assert generation["bos_token_id"] == int(to_server[1])


def test_words_and_plain_ids_in_the_configuration_stay_at_home(plain: Path, tmp_path: Path) -> None:
    """Older configurations carry settings of generation: ids of the plain vocabulary, and words."""
    source = copy(plain, tmp_path / "source")
    config = json.loads((source / "config.json").read_text())
    told = {"bad_words_ids": [[17, 18]], "prefix": "Dear ", "stop_strings": ["END"], "finetuning_task": "triage"}
    (source / "config.json").write_text(json.dumps(config | told))
    (source / "generation_config.json").write_text(json.dumps(told))
    protect(source, tmp_path / "out", base="secret", measure=False)
    for name in ("config.json", "generation_config.json"):
        assert not told.keys() & json.loads((tmp_path / "out" / "server" / name).read_text()).keys()


def test_the_order_within_a_file_does_not_tell_which_expert_was_which(tmp_path: Path) -> None:
    plain = selfcheck.make_tiny("OlmoeForCausalLM", tmp_path / "plain")
    protect(plain, tmp_path / "out", base="secret", measure=False)
    raw = (tmp_path / "out" / "server" / "model.safetensors").read_bytes()
    header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    names = [name for name in header if name.startswith("model.layers.0.mlp.experts.")]
    assert len(names) == 24 and names == sorted(names)


def test_class_names_stay_with_the_client(tmp_path: Path) -> None:
    plain = selfcheck.make_tiny("BertForSequenceClassification", tmp_path / "plain")
    config = json.loads((plain / "config.json").read_text())
    config["id2label"] = {str(i): f"diagnosis {i}" for i in range(5)}
    (plain / "config.json").write_text(json.dumps(config))
    protect(plain, tmp_path / "out", base="secret", measure=False)
    assert "diagnosis" not in (tmp_path / "out" / "server" / "config.json").read_text()


def test_licence_is_carried_over_and_named(plain: Path, tmp_path: Path) -> None:
    source = copy(plain, tmp_path / "source")
    (source / "LICENSE").write_text("the terms")
    (source / "README.md").write_text("---\nlicense: cc-by-4.0\n---\n# base\n")
    protect(source, tmp_path / "out", base="public:somebody/base", measure=False)
    card = (tmp_path / "out" / "server" / "README.md").read_text()
    assert (tmp_path / "out" / "server" / "LICENSE").read_text() == "the terms"
    assert "license: cc-by-4.0" in card
    assert "base_model: somebody/base" in card
    assert "obfuscation, not privacy" in card


def test_the_developer_can_check_what_the_server_holds(plain: Path, tmp_path: Path) -> None:
    protect(plain, tmp_path / "out", base="secret", measure=False)
    server, key = tmp_path / "out" / "server", MasterKey((tmp_path / "out" / "developer" / "key").read_bytes())
    assert check_server(server, key)
    assert not check_server(server, MasterKey.fresh())
    data = bytearray((server / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (server / "model.safetensors").write_bytes(data)
    assert not check_server(server, key)


def test_files_do_not_tell_which_expert_was_which(sharded: Path, tmp_path: Path) -> None:
    """Each name lies in the same file, at the same place among its kind, whatever the key: only numbers differ."""
    orders = []
    for index in range(2):
        protect(sharded, tmp_path / f"out{index}", base="secret", measure=False)
        orders.append(checkpoints.Checkpoint(tmp_path / f"out{index}" / "server").shards)
    assert orders[0] == orders[1]
    assert {file: set(names) for file, names in orders[0]} == {
        file: set(names) for file, names in checkpoints.Checkpoint(sharded).shards
    }


def test_two_runs_draw_different_keys(plain: Path, tmp_path: Path) -> None:
    a = protect(plain, tmp_path / "a", base="secret", measure=False)
    b = protect(plain, tmp_path / "b", base="secret", measure=False)
    assert a.protection.key_id != b.protection.key_id
    assert a.identity.weights_digest != b.identity.weights_digest


# ---- asked for what cannot be ----------------------------------------------------------------------------------


@pytest.mark.parametrize("base", ["", "public", "public:", "yes"])
def test_the_base_must_be_declared(plain: Path, tmp_path: Path, base: str) -> None:
    with pytest.raises(UsageError, match="base"):
        protect(plain, tmp_path / "out", base=base)


def test_unsupported_architecture_lists_every_reason(plain: Path, tmp_path: Path) -> None:
    source = copy(plain, tmp_path / "source")
    config = json.loads((source / "config.json").read_text())
    config.update(
        model_type="mamba", architectures=["MambaForCausalLM"], quantization_config={"bits": 4}, auto_map={"A": "b"}
    )
    (source / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModel) as caught:
        protect(source, tmp_path / "out", base="secret")
    assert len(caught.value.reasons) == 3
    assert all(word in str(caught.value) for word in ("mamba", "quantized", "auto_map"))


def test_output_that_exists_is_not_overwritten(plain: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("keep")
    with pytest.raises(UsageError, match="not empty"):
        protect(plain, tmp_path / "out", base="secret", measure=False)
    assert (tmp_path / "out" / "mine").read_text() == "keep"


# ---- broken checkpoints ----------------------------------------------------------------------------------------


def test_checkpoint_with_unknown_tensors(plain: Path, tmp_path: Path) -> None:
    source = copy(plain, tmp_path / "source")
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.0.adapter.weight"] = np.zeros((4, 4), dtype=np.float32)
    tensors["model.norm.weight"] = np.zeros(3, dtype=np.float32)
    del tensors["model.layers.1.mlp.experts.3.up_proj.weight"]
    save_file(tensors, source / "model.safetensors")
    with pytest.raises(BrokenCheckpoint) as caught:
        protect(source, tmp_path / "out", base="secret")
    for part in ("unknown tensor model.layers.0.adapter.weight", "model.norm.weight has shape", "experts.3.up_proj"):
        assert part in str(caught.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kept", [0, 4, 100, 5000])
def test_truncated_checkpoint(plain: Path, tmp_path: Path, kept: int) -> None:
    source = copy(plain, tmp_path / "source")
    data = (source / "model.safetensors").read_bytes()
    (source / "model.safetensors").write_bytes(data[:kept] if kept != 5000 else data[:-5000])
    with pytest.raises(BrokenCheckpoint, match=r"truncated|damaged"):
        protect(source, tmp_path / "out", base="secret")


def test_missing_shard_is_named(sharded: Path, tmp_path: Path) -> None:
    lost = sorted(sharded.glob("*.safetensors"))[1]
    lost.unlink()
    with pytest.raises(BrokenCheckpoint, match=lost.name):
        protect(sharded, tmp_path / "out", base="secret")


@pytest.mark.parametrize(
    "header",
    [
        b"[]",
        b'{"a": 3}',
        b'{"a": {"dtype": "F32", "shape": [1000000000000], "data_offsets": [0, 4]}}',
        b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}',
        b'{"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, -4]}}',
        b'{"a": {"dtype": "EVIL", "shape": [1], "data_offsets": [0, 4]}}',
        b"\xff\xfe",
    ],
)
def test_hostile_headers(plain: Path, tmp_path: Path, header: bytes) -> None:
    source = copy(plain, tmp_path / "source")
    (source / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(8))
    with pytest.raises(BrokenCheckpoint):
        protect(source, tmp_path / "out", base="secret")


def test_index_that_points_outside(sharded: Path, tmp_path: Path) -> None:
    index = json.loads((sharded / checkpoints.INDEX).read_text())
    first = next(iter(index["weight_map"]))
    index["weight_map"][first] = "../../secret.safetensors"
    (sharded / checkpoints.INDEX).write_text(json.dumps(index))
    with pytest.raises(BrokenCheckpoint, match="outside"):
        protect(sharded, tmp_path / "out", base="secret")


def test_pickled_checkpoint_is_not_loaded(plain: Path, tmp_path: Path) -> None:
    source = copy(plain, tmp_path / "source")
    (source / "model.safetensors").rename(source / "pytorch_model.bin")
    with pytest.raises(BrokenCheckpoint, match="pickle"):
        protect(source, tmp_path / "out", base="secret")


# ---- faults in the middle --------------------------------------------------------------------------------------


def test_disk_full_keeps_what_is_complete_and_goes_on_later(
    sharded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = checkpoints.write_shard, []

    def failing(path: Path, *args: object, **options: object) -> str:
        calls.append(path.name)
        if len(calls) == 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(path, *args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr("cloister.permute.protect.write_shard", failing)
    with pytest.raises(DiskFull, match="No space"):
        protect(sharded, tmp_path / "out", base="secret", measure=False)
    assert not (tmp_path / "out").exists()
    partial = storage.partial_path(tmp_path / "out")
    key = next(partial.rglob("key")).read_bytes()
    finished = {path.name: path.stat().st_mtime_ns for path in partial.rglob("*.safetensors")}
    assert len(finished) == 2

    monkeypatch.setattr("cloister.permute.protect.write_shard", real)
    protect(sharded, tmp_path / "out", base="secret", measure=False)
    assert (tmp_path / "out" / "developer" / "key").read_bytes() == key
    for name, written in finished.items():
        assert (tmp_path / "out" / "server" / name).stat().st_mtime_ns == written
    assert not partial.exists()
    found = selfcheck.compare(sharded, tmp_path / "out" / "server", tmp_path / "out" / "client", inputs=20, greedy=8)
    assert found.top1 == 1.0


def test_killed_in_the_middle_of_a_file(sharded: Path, tmp_path: Path) -> None:
    """A real process, really killed; the next run ends the work and nothing of the broken file is used."""
    import signal
    import subprocess
    import sys

    script = (
        "import sys, time\n"
        "from cloister.permute import rewrite, protect\n"
        "real, seen = rewrite.Rewriter.pieces, [0]\n"
        "def slow(self, *a):\n"
        "    seen[0] += 1\n"
        "    if seen[0] == 30: print('half way', flush=True); time.sleep(60)\n"
        "    yield from real(self, *a)\n"
        "rewrite.Rewriter.pieces = slow\n"
        "protect.protect(sys.argv[1], sys.argv[2], base='secret', measure=False)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script, str(sharded), str(tmp_path / "out")], stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline().strip() == "half way"
        child.send_signal(signal.SIGKILL)
    assert not (tmp_path / "out").exists()
    protect(sharded, tmp_path / "out", base="secret", measure=False)
    found = selfcheck.compare(sharded, tmp_path / "out" / "server", tmp_path / "out" / "client", inputs=20, greedy=8)
    assert found.top1 == 1.0
    assert {path.name for path in (tmp_path / "out" / "server").glob(".*")} == set()


def test_other_options_do_not_continue_an_interrupted_run(
    sharded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: object, **__: object) -> str:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("cloister.permute.client_files.write_shard", failing)
        with pytest.raises(DiskFull):
            protect(sharded, tmp_path / "out", base="secret", measure=False)
    key = next(storage.partial_path(tmp_path / "out").rglob("key")).read_bytes()
    protect(sharded, tmp_path / "out", base="secret", transform="orthogonal", measure=False)
    assert (tmp_path / "out" / "developer" / "key").read_bytes() != key


# ---- contexts, rotation, expiry --------------------------------------------------------------------------------


def test_contexts_users_and_rotation(plain: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    protect(plain, out, base="secret", contexts=3, expires_days=30, measure=False)
    assert len({manifests.read(path).protection.key_id for path in contexts.directories(out, "client").values()}) == 3
    for user in ("ada", "ben", "cho", "dan"):
        contexts.assign(out, user)
    users = contexts.assigned(out)
    assert sorted(list(users.values()).count(f"context-{i}") for i in range(3)) == [1, 1, 2]
    assert contexts.assign(out, "ada") == out / "client" / users["ada"]
    with pytest.raises(UsageError, match="no context"):
        contexts.assign(out, "eve", "context-9")

    old = {path.read_bytes() for path in (out / "developer").rglob("key")}
    protect(plain, out, base="secret", contexts=3, rotate=True, measure=False)
    assert not old & {path.read_bytes() for path in (out / "developer").rglob("key")}
    assert contexts.assigned(out) == users


def test_rotating_nothing_is_refused(plain: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="nothing to rotate"):
        protect(plain, tmp_path / "out", base="secret", rotate=True, measure=False)


def test_expired_key(plain: Path, tmp_path: Path) -> None:
    protect(plain, tmp_path / "out", base="secret", expires_days=1, measure=False)
    manifest = manifests.read(tmp_path / "out" / "client")
    manifest.check_expiry()
    with pytest.raises(ExpiredKey, match="expired on"):
        manifest.check_expiry(datetime.now(UTC) + timedelta(days=2))


def test_manifests_of_others_are_refused(plain: Path, tmp_path: Path) -> None:
    protect(plain, tmp_path / "out", base="secret", measure=False)
    with pytest.raises(BrokenManifest, match="server directory"):
        manifests.read(tmp_path / "out" / "server", role="client")
    path = tmp_path / "out" / "client" / manifests.FILE_NAME
    text = path.read_text()
    path.write_text(text.replace("format = 1", "format = 2"))
    with pytest.raises(FormatVersion, match="format version 2"):
        manifests.read(tmp_path / "out" / "client")
    path.write_text(text[: len(text) // 2])
    with pytest.raises((BrokenManifest, FormatVersion)):
        manifests.read(tmp_path / "out" / "client")
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(BrokenManifest):
        manifests.read(tmp_path / "out" / "client")


# ---- honesty ---------------------------------------------------------------------------------------------------


def test_the_manifest_says_what_the_attacks_recover(plain: Path, tmp_path: Path) -> None:
    """With a public base everything, for either transform; the label says so."""
    for transform in ("permutation", "orthogonal"):
        out = tmp_path / transform
        manifest = protect(plain, out, base="public:test", transform=transform)
        assert manifest.protection.label == manifests.OBFUSCATION
        assert manifest.measured["percent"] > 99
        for role in ("developer", "server", "client"):
            assert manifests.read(out / role).measured["percent"] == manifest.measured["percent"]
        assert manifest.measured["sentence"] in (out / "server" / "README.md").read_text()


def test_a_secret_base_is_still_measured(tmp_path: Path) -> None:
    from cloister import embedded

    manifest = protect(embedded.path(), tmp_path / "out", base="secret")
    assert manifest.protection.label == manifests.SUBSTITUTION
    assert manifest.measured["linked_percent"] == 100.0
    assert 0 < manifest.measured["percent"] < 60
