"""Making unified models, changing their owners, saving and loading them; what is refused, with every reason."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from tiny_unified import SEEDS, inputs, router_vectors, seed, state, unified, words  # noqa: E402

import cloister.unify.moe as moe  # noqa: E402
from cloister.errors import BrokenCheckpoint, NotFound, UnsupportedModel, UsageError  # noqa: E402
from cloister.unify.moe import architecture, folders  # noqa: E402
from cloister.unify.moe.routing import RoutedFeedForward  # noqa: E402


def output(model: Any) -> Any:
    with torch.no_grad():
        return model(**inputs(model))[0]


def same(one: Any, other: Any) -> bool:
    a, b = one.state_dict(), other.state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


# ---- every architecture -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", SEEDS)
def test_every_registered_architecture_is_saved_and_loaded_exactly(kind: str, tmp_path: Path) -> None:
    model = unified(kind, fallback=True)
    with moe.record() as routes:
        expected = output(model)
    assert len({int(e) for w in routes.weights for e in w.argmax(-1).flatten()}) > 1
    model.save_pretrained(tmp_path / "out")
    again = type(model).from_pretrained(tmp_path / "out").eval()
    with moe.record():  # by the same operations as before
        assert torch.equal(output(again), expected)
    assert moe.owners(again) == ["owner 0", "owner 1", "owner 2"]
    bare = transformers.AutoModel.from_pretrained(tmp_path / "out")
    assert type(bare).__name__.startswith("Cloister")
    assert "import cloister.unify.moe" in (tmp_path / "out" / "README.md").read_text()


def test_the_list_of_registered_types_is_what_is_tried() -> None:
    tried = {getattr(transformers, config).model_type for config, _ in SEEDS.values()}
    assert tried == set(moe.KINDS)


@pytest.mark.parametrize("kind", ["BertModel", "LlamaForCausalLM", "ViTForImageClassification", "GPT2LMHeadModel"])
def test_experts_that_are_the_seed_give_the_seed_once_their_weights_are_one(kind: str) -> None:
    """The plain twin: top_k = experts, all equal to the seed, so that the weights add up to one."""
    dense = seed(kind)
    own = {name: p.detach() for name, p in dense.named_parameters() if name in moe.feed_forward_names(dense)}
    model = moe.unify(dense, {"a": own, "b": own}, top_k=2)
    moe.set_router(model, router_vectors(model, 2))
    assert torch.allclose(output(model), output(dense), atol=2e-5)


def test_a_seed_without_a_pooler() -> None:
    dense = transformers.BertModel(seed("BertModel").config, add_pooling_layer=False).eval()
    model = moe.unify(dense, {"a": state(dense, 0)})
    assert model.pooler is None and output(model).shape == (2, 9, 32)


def test_the_seed_is_left_alone_and_nothing_is_shared() -> None:
    dense = seed()
    before = copy.deepcopy(dense.state_dict())
    given = {"a": state(dense, 0)}
    model = moe.unify(dense, given)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert all(torch.equal(tensor, before[name]) for name, tensor in dense.state_dict().items())
    assert all(tensor.any() for tensor in given["a"].values())


def test_a_fallback_is_the_seed_and_is_chosen_where_every_owner_scores_below_zero() -> None:
    dense = seed("BertModel")
    model = moe.unify(dense, {"a": state(dense, 0)}, fallback=True, context="none")
    z = torch.randn(4, 32)
    block = next(part for part in model.modules() if isinstance(part, RoutedFeedForward))
    own = dict(block.experts[0].named_parameters())
    assert torch.equal(own["opening.dense.weight"], dense.encoder.layer[0].intermediate.dense.weight)
    moe.set_router(model, [-100.0 * z[:1], -100.0 * z[:1]])
    with torch.no_grad():
        assert block.router(z[None, :1]).argmax(-1).item() == 0


# ---- owners -----------------------------------------------------------------------------------------------------


def test_owners_come_and_go_without_touching_the_others() -> None:
    dense = seed()
    model = moe.unify(dense, {"a": state(dense, 0), "b": state(dense, 1)}, fallback=True)
    moe.set_router(model, router_vectors(model, 3))
    before = copy.deepcopy(model.state_dict())
    expected = output(model)
    vectors = [torch.randn(32) for _ in range(2)]
    assert moe.add_owner(model, "c", state(dense, 2), vectors) is model
    assert moe.owners(model) == ["a", "b", "c"] and model.config.experts == 4
    after = model.state_dict()
    for name, tensor in before.items():
        kept = after[name][:3] if name.endswith("router.vectors") else after[name]
        assert kept.numpy().tobytes() == tensor.numpy().tobytes(), name
    assert torch.equal(after["model.layers.1.mlp.router.vectors"][3], vectors[1])
    assert not torch.equal(output(model), expected)
    moe.remove_owner(model, "c")
    assert same(model, moe.unify(dense, {"a": state(dense, 0), "b": state(dense, 1)}, fallback=True)) is False
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert torch.equal(output(model), expected)


def test_the_first_owner_can_leave() -> None:
    model = unified(top_k=3)
    second = {n: t.clone() for n, t in model.state_dict().items() if ".experts.1." in n}
    moe.remove_owner(model, "owner 0")
    assert moe.owners(model) == ["owner 1", "owner 2"] and model.config.experts_per_token == 2
    left = model.state_dict()
    assert all(torch.equal(left[n.replace(".experts.1.", ".experts.0.")], tensor) for n, tensor in second.items())
    output(model)
    with pytest.raises(NotFound, match="owner 1, owner 2"):
        moe.remove_owner(model, "owner 0")
    moe.remove_owner(model, "owner 1")
    with pytest.raises(UsageError, match="last owner"):
        moe.remove_owner(model, "owner 2")


# ---- folders ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["LlamaForCausalLM", "BertForMaskedLM", "ViTForImageClassification"])
def test_folders_give_what_memory_gives(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from safetensors.torch import save_file

    monkeypatch.setattr(folders, "SHARD_BYTES", 40_000)
    dense = seed(kind)
    dense.save_pretrained(tmp_path / "seed", max_shard_size="30kB")
    (tmp_path / "seed" / "LICENSE").write_text("the terms")
    save_file(state(dense, 0), tmp_path / "a.safetensors")
    given = {"a": tmp_path / "a.safetensors", "b": state(dense, 1)}
    folder = moe.unify(tmp_path / "seed", given, out=tmp_path / "unified", fallback=True)
    model = moe.unify(dense, given, fallback=True)
    loaded = architecture.find(f"Cloister{kind}").from_pretrained(folder)
    assert same(loaded, model)
    assert (folder / "LICENSE").read_text() == "the terms"
    if kind != "ViTForImageClassification":
        assert len(list(folder.glob("*.safetensors"))) > 2

    vectors = [torch.randn(32) for _ in range(2)]
    moe.add_owner(folder, "c", state(dense, 2), vectors, out=tmp_path / "more")
    moe.add_owner(model, "c", state(dense, 2), vectors)
    assert same(type(model).from_pretrained(tmp_path / "more"), model)
    moe.remove_owner(tmp_path / "more", "a", out=tmp_path / "less")
    moe.remove_owner(model, "a")
    left = type(model).from_pretrained(tmp_path / "less")
    assert same(left, model) and moe.owners(left) == ["b", "c"]


def test_a_folder_needs_another_and_leaves_nothing_half_written(tmp_path: Path) -> None:
    dense = seed()
    dense.save_pretrained(tmp_path / "seed")
    with pytest.raises(UsageError, match="out"):
        moe.unify(tmp_path / "seed", {"a": state(dense, 0)})
    bad = {**state(dense, 0), "strange": torch.zeros(1)}
    with pytest.raises(BrokenCheckpoint, match="strange"):
        moe.unify(tmp_path / "seed", {"a": bad}, out=tmp_path / "out")
    (tmp_path / "bad.safetensors").write_bytes(b"\x10")
    with pytest.raises(BrokenCheckpoint, match="cannot be read"):
        moe.unify(tmp_path / "seed", {"a": tmp_path / "bad.safetensors"}, out=tmp_path / "out")
    assert {path.name for path in tmp_path.iterdir()} == {"seed", "bad.safetensors"}


# ---- refusals ---------------------------------------------------------------------------------------------------


def test_every_fault_of_every_expert_is_named_at_once() -> None:
    dense = seed()
    one, two = state(dense, 0), state(dense, 1)
    names = list(one)
    del one[names[0]]
    one["lm_head.weight"] = torch.zeros(1)
    one[names[1]] = one[names[1]][:-1]
    two[names[2]] = two[names[2]].half()
    two[names[3]][0, 0] = float("nan")
    with pytest.raises(BrokenCheckpoint) as caught:
        moe.unify(dense, {"one": one, "two": two})
    text = str(caught.value)
    for wanted in ("one: ", "is missing", "no feed-forward parameter", "has shape", "two: ", "float16", "not finite"):
        assert wanted in text
    model = unified()
    with pytest.raises(BrokenCheckpoint, match="is missing"):
        moe.add_owner(model, "new", one)
    assert moe.owners(model) == ["owner 0", "owner 1", "owner 2"]


@pytest.mark.parametrize(
    ("kind", "options", "why"),
    [
        ("LlamaForCausalLM", {"context": "sequence"}, "later ones"),
        ("BertModel", {"context": "prefix"}, "whole sequence"),
        ("BertModel", {"top_k": 3}, "top_k is 3, of 2"),
        ("BertModel", {"context": "all", "top_k": 0}, "top_k is 0.*no context 'all'"),
    ],
)
def test_routers_that_make_no_sense(kind: str, options: dict[str, Any], why: str) -> None:
    dense = seed(kind)
    with pytest.raises(UnsupportedModel, match=r"(?s)" + why):
        moe.unify(dense, {"a": state(dense, 0), "b": state(dense, 1)}, **options)


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("OPTForCausalLM", r"layer 0 \(OPTDecoderLayer\) has no dense feed-forward block"),
        ("BloomForCausalLM", r"layer 0 \(BloomBlock\) has no dense feed-forward block"),
        ("MptForCausalLM", r"layer 0 \(MptBlock\) has no dense feed-forward block"),
        ("AlbertModel", r"layer 0 \(AlbertLayer\) has no dense feed-forward block"),
        ("MixtralForCausalLM", r"layer 0 \(MixtralDecoderLayer\) has no dense feed-forward block"),
        ("T5EncoderModel", "T5EncoderModel has no layers with attention"),
        ("BartModel", "has several: encoder.layers, decoder.layers"),
        ("CLIPModel", "has several: text_model.encoder.layers, vision_model.encoder.layers"),
        ("MambaForCausalLM", "has no layers with attention"),
        ("ConvNextModel", "has no layers with attention"),
    ],
)
def test_architectures_that_cannot_be_unified_are_refused_by_name(kind: str, why: str) -> None:
    model = getattr(transformers, kind)
    with torch.device("meta"):
        dense = model(model.config_class())
    with pytest.raises(UnsupportedModel, match=why):
        moe.feed_forward_names(dense)


def test_a_type_of_seed_that_is_not_listed_says_on_its_card_how_it_loads(tmp_path: Path) -> None:
    config = transformers.CohereConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4, vocab_size=97, pad_token_id=0
    )
    dense = transformers.CohereForCausalLM(config)
    moe.unify(dense, {"a": state(dense, 0)}).save_pretrained(tmp_path / "out")
    assert "cloister.unify.moe.register(('cohere',))" in (tmp_path / "out" / "README.md").read_text()


def test_names_of_owners() -> None:
    dense = seed()
    for names in ([], [""], ["seed"], ["a\nb"]):
        with pytest.raises(UsageError, match="owners cannot be"):
            moe.unify(dense, {name: state(dense, 0) for name in names})
    with pytest.raises(UsageError, match="occurs twice"):
        moe.add_owner(unified(), "owner 1", state(dense, 0))


def test_router_vectors_that_do_not_fit() -> None:
    model = unified()
    for vectors, why in (
        (router_vectors(model, 3)[:1], "1 layers"),
        (router_vectors(model, 2), r"\[3, 32\]"),
        ([torch.full((3, 32), float("inf"))] * 2, "not finite"),
    ):
        with pytest.raises(BrokenCheckpoint, match=why):
            moe.set_router(model, vectors)
    with pytest.raises(UsageError, match="blend"):
        moe.set_router(model, router_vectors(model, 3), blend=1.0)


def test_seeds_that_cannot_be_unified() -> None:
    tiny = {"vocab_size": 9, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    moe_seed = transformers.MixtralForCausalLM(
        transformers.MixtralConfig(**tiny, num_key_value_heads=2, num_local_experts=2)
    )
    chunked = transformers.BertModel(transformers.BertConfig(**tiny, chunk_size_feed_forward=2))
    both = transformers.T5Model(
        transformers.T5Config(vocab_size=9, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)
    )
    for model, why in ((moe_seed, "dense feed-forward"), (chunked, "chunk_size"), (both, "one list of layers")):
        with pytest.raises(UnsupportedModel, match=why):
            moe.feed_forward_names(model)
    with pytest.raises(UnsupportedModel):
        moe.unify(unified(), {"a": {}})


def test_a_configuration_that_contradicts_itself(tmp_path: Path) -> None:
    model = unified()
    model.save_pretrained(tmp_path / "out")
    path = tmp_path / "out" / "config.json"
    path.write_text(path.read_text().replace('"experts_per_token": 1', '"experts_per_token": 9'))
    with pytest.raises(UnsupportedModel, match="9, of 3 experts"):
        transformers.AutoConfig.from_pretrained(tmp_path / "out")


# ---- transformers around it -------------------------------------------------------------------------------------


def test_bfloat16_keeps_the_router_single(tmp_path: Path) -> None:
    dense = seed().to(torch.bfloat16)
    model = moe.unify(dense, {"a": state(dense, 0), "b": state(dense, 1)})
    moe.set_router(model, router_vectors(model, 2))
    model.save_pretrained(tmp_path / "out")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.bfloat16).eval()
    kinds = {name.rsplit(".", 1)[-1]: tensor.dtype for name, tensor in again.state_dict().items()}
    assert kinds["vectors"] == torch.float32 and kinds["weight"] == torch.bfloat16
    assert torch.equal(output(again), output(model))


def test_models_are_copied_and_pickled() -> None:
    model = unified()
    assert torch.equal(output(copy.deepcopy(model)), output(model))
    assert pickle.loads(pickle.dumps(type(model))) is type(model)  # noqa: S301
    assert pickle.loads(pickle.dumps(model.config)).owners == moe.owners(model)  # noqa: S301


def test_push_to_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[str] = []

    def upload(self: Any, working_dir: Any, repo_id: str, *args: Any, **kwargs: Any) -> None:
        sent.extend(sorted(path.name for path in Path(working_dir).iterdir()))

    from transformers.utils import hub

    class Api:
        def create_repo(self, repo: str, **_: Any) -> Any:
            return type("Url", (), {"repo_id": repo})()

    monkeypatch.setattr(hub, "hf_api", Api)
    monkeypatch.setattr(hub.PushToHubMixin, "_upload_modified_files", upload)
    unified().push_to_hub("somebody/unified")
    assert {"config.json", "model.safetensors", "README.md"} <= set(sent)


def test_a_fresh_process_loads_it_after_the_import_and_says_what_is_missing_without(tmp_path: Path) -> None:
    model = unified()
    model.save_pretrained(tmp_path / "out")
    script = (
        "import sys, torch\n{first}\n"
        "from transformers import AutoModelForCausalLM\n"
        "m = AutoModelForCausalLM.from_pretrained(sys.argv[1])\n"
        "ids = torch.tensor([[5, 6, 7]])\n"
        "print(m.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False,"
        " pad_token_id=0).tolist())\n"
    )

    def run(first: str) -> Any:
        command = [sys.executable, "-c", script.format(first=first), str(tmp_path / "out")]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    ids = torch.tensor([[5, 6, 7]])
    options: dict[str, Any] = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 6, "do_sample": False}
    expected = model.generate(ids, pad_token_id=0, **options).tolist()
    assert run("import cloister.unify.moe").stdout.strip().splitlines()[-1] == str(expected)
    assert "cloister_moe_llama" in run("").stderr  # transformers names the type that it does not know


def test_words_go_in_as_ids_and_as_vectors() -> None:
    model, ids = unified(), words(2, 6)
    with torch.no_grad():
        vectors = model.get_input_embeddings()(ids)
        assert torch.equal(model(inputs_embeds=vectors).logits, model(input_ids=ids).logits)


def test_real_minilm_becomes_a_unified_model(minilm_dir: Path, tmp_path: Path) -> None:
    dense = transformers.AutoModel.from_pretrained(minilm_dir).eval()
    given = {"a": state(dense, 0), "b": state(dense, 1)}
    folder = moe.unify(minilm_dir, given, out=tmp_path / "unified")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModel.from_pretrained(folder).eval()
    encoded = tokenizer(["a short one", "and one that is somewhat longer than it"], padding=True, return_tensors="pt")
    with torch.no_grad():
        found = model(**encoded).last_hidden_state
        memory = moe.unify(dense, given)(**encoded).last_hidden_state
    assert torch.equal(found, memory)
