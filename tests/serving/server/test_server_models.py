"""What can be served: protected directories, several contexts, encoders, classifiers and vision models."""

from __future__ import annotations

import base64
import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from tiny_models import tiny_causal_lm  # noqa: E402

from cloister.errors import BrokenCheckpoint, BrokenManifest, ExpiredKey, UnsupportedModel  # noqa: E402
from cloister.manifest import OBFUSCATION, Identity, Manifest, Model, Protection  # noqa: E402
from cloister.serving.server import ServerSettings, create_app  # noqa: E402
from cloister.serving.server.loading import load_all  # noqa: E402
from cloister.serving.wire import decode_tensor, encode_tensor  # noqa: E402

ROWS = np.random.default_rng(0).standard_normal((9, 32)).astype(np.float32)


def manifest(context: str = "default", **changes: Any) -> Manifest:
    return Manifest(
        mode="permute",
        role=changes.pop("role", "server"),
        model=Model("tiny", "llama", "LlamaForCausalLM", "generate", 32, 101, 128),
        protection=Protection(
            "permutation", "secret", OBFUSCATION, changes.pop("loop", "server"), context, "k" + context
        ),
        identity=Identity(weights_digest="d" * 64),
        created="2026-01-02T03:04:05+00:00",
        **changes,
    )


def client_of(path: Path, **options: Any) -> httpx.AsyncClient:
    """A client of an application in this process; only for models that need no engine."""
    app = create_app(ServerSettings(path, **options))
    return httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://server", timeout=60)


async def post(path: Path, route: str, body: dict[str, Any], **options: Any) -> httpx.Response:
    async with client_of(path, **options) as client:
        return await client.post(route, json=body)


def run(coroutine: Any) -> Any:
    import asyncio

    return asyncio.run(coroutine)


# Protected directories ------------------------------------------------------------------------------------------------


def test_contexts_are_several_models_in_one_process(start_server: Any, tmp_path: Path) -> None:
    for index, context in enumerate(("default", "second")):
        folder = tmp_path / f"context-{index}"
        tiny_causal_lm("Llama", seed=index).save_pretrained(folder)
        manifest(context).write(folder)
    server = start_server(tmp_path, max_slots=2, max_sessions=1)
    data = httpx.get(f"{server}/v1/models").json()["data"]
    assert [about["id"] for about in data] == ["tiny@default", "tiny@second"]
    assert data[1]["cloister"] == {
        "key_id": "ksecond",
        "format": 1,
        "loop": "server",
        "label": OBFUSCATION,
        "context": "second",
        "weights_digest": "d" * 64,
    }
    assert data[0]["created"] == 1767323045
    answers = []
    for index, about in enumerate(data):
        body = {"model": about["id"], "prompt": [1, 2], "max_tokens": 8, "temperature": 0}
        answers.append(httpx.post(f"{server}/v1/completions", json=body, timeout=60).json()["choices"][0]["token_ids"])
        prompt = torch.tensor([[1, 2]])
        made = tiny_causal_lm("Llama", seed=index).generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=8, do_sample=False, pad_token_id=0
        )
        assert answers[-1] == made[0, 2:].tolist()
    unnamed = httpx.post(f"{server}/v1/completions", json={"prompt": [1]})
    assert unnamed.status_code == 400 and unnamed.json()["error"]["param"] == "model"


def test_loop_token_gives_one_token_per_message(start_server: Any, tmp_path: Path) -> None:
    model = tiny_causal_lm("Llama")
    table = model.get_input_embeddings().weight.clone().numpy()
    model.get_input_embeddings().weight.zero_()
    model.save_pretrained(tmp_path)
    manifest(loop="token").write(tmp_path)
    server = start_server(tmp_path, max_slots=2, max_sessions=2)
    body = {"prompt_embeds": encode_tensor(table[[1, 2]]), "temperature": 0}
    refused = httpx.post(f"{server}/v1/completions", json={**body, "max_tokens": 2}, timeout=60)
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "max_tokens"
    prompt = torch.tensor([[1, 2]])
    made = tiny_causal_lm("Llama").generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=1, do_sample=False, pad_token_id=0
    )
    answer = httpx.post(f"{server}/v1/completions", json={**body, "max_tokens": 1}, timeout=60).json()
    assert answer["choices"][0]["token_ids"] == made[0, 2:].tolist()


def test_wrong_role_other_format_and_expired_keys_are_refused(tmp_path: Path) -> None:
    tiny_causal_lm("Llama").save_pretrained(tmp_path)
    manifest(role="client").write(tmp_path)
    with pytest.raises(BrokenManifest, match="client directory"):
        load_all(ServerSettings(tmp_path))
    manifest(not_after=(datetime.now(UTC) - timedelta(days=1)).isoformat()).write(tmp_path)
    with pytest.raises(ExpiredKey):
        load_all(ServerSettings(tmp_path))


def test_what_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BrokenCheckpoint, match="neither"):
        load_all(ServerSettings(tmp_path))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(BrokenCheckpoint, match="cannot be read"):
        load_all(ServerSettings(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["os"], "auto_map": {"AutoModel": "x.Y"}}))
    with pytest.raises(UnsupportedModel):
        load_all(ServerSettings(tmp_path))


def test_pickled_weights_are_not_loaded(tmp_path: Path) -> None:
    model = tiny_causal_lm("Llama")
    model.config.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(
        json.dumps({**json.loads((tmp_path / "config.json").read_text()), "architectures": ["LlamaForCausalLM"]})
    )
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(BrokenCheckpoint):
        load_all(ServerSettings(tmp_path))


# Encoders -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bert_config() -> Any:
    return transformers.BertConfig(
        vocab_size=101, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48,
        max_position_embeddings=64, num_labels=3,
    )  # fmt: skip


def save(model: Any, path: Path) -> Any:
    model.eval().requires_grad_(False).save_pretrained(path)
    return model


def test_embeddings_are_the_mean_of_the_last_layer(tmp_path: Path, bert_config: Any) -> None:
    model = save(transformers.BertModel(bert_config), tmp_path)
    texts = [[5, 6, 7], [8, 9], [1, 2, 3], [4]]
    expected = [model(torch.tensor([ids])).last_hidden_state[0].mean(0).numpy() for ids in texts]
    answer = run(post(tmp_path, "/v1/embeddings", {"input": texts})).json()
    assert answer["object"] == "list" and answer["usage"] == {"prompt_tokens": 9, "total_tokens": 9}
    assert [item["index"] for item in answer["data"]] == [0, 1, 2, 3]
    for item, vector in zip(answer["data"], expected, strict=True):
        np.testing.assert_allclose(item["embedding"], vector, atol=1e-5)
    answer = run(post(tmp_path, "/v1/embeddings", {"input": [5, 6, 7], "encoding_format": "base64"})).json()
    vector = np.frombuffer(base64.b64decode(answer["data"][0]["embedding"]), "<f4")
    np.testing.assert_allclose(vector, expected[0], atol=1e-5)


def test_embeddings_from_vectors_with_the_pooling_of_sentence_transformers(tmp_path: Path, bert_config: Any) -> None:
    model = save(transformers.BertModel(bert_config), tmp_path)
    (tmp_path / "modules.json").write_text(json.dumps([{"type": "sentence_transformers.models.Normalize"}]))
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text(
        json.dumps({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False})
    )
    hidden = model(inputs_embeds=torch.tensor(ROWS)[None]).last_hidden_state[0, 0]
    expected = torch.nn.functional.normalize(hidden, dim=-1).numpy()
    answer = run(post(tmp_path, "/v1/embeddings", {"prompt_embeds": [encode_tensor(ROWS)]})).json()
    np.testing.assert_allclose(answer["data"][0]["embedding"], expected, atol=1e-5)


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({"input": "text"}, 400, "input"),
        ({"input": ["text"]}, 400, "input"),
        ({"input": []}, 400, "input"),
        ({"input": [[]]}, 400, "input"),
        ({"input": [[101]]}, 400, "input"),
        ({"input": [[1] * 65]}, 413, "input"),
        ({"input": [[1]] * 3000}, 413, "input"),
        ({"input": [[1]], "encoding_format": "int8"}, 400, "encoding_format"),
        ({"input": [[1]], "dimensions": 8}, 400, "dimensions"),
        ({"prompt_embeds": ["AAAA"]}, 400, "prompt_embeds"),
    ],
)
def test_bad_embedding_bodies(tmp_path: Path, bert_config: Any, body: dict[str, Any], status: int, param: str) -> None:
    save(transformers.BertModel(bert_config), tmp_path)
    response = run(post(tmp_path, "/v1/embeddings", body))
    assert (response.status_code, response.json()["error"]["param"]) == (status, param)


def test_class_scores_with_token_types(tmp_path: Path, bert_config: Any) -> None:
    model = save(transformers.BertForSequenceClassification(bert_config), tmp_path)
    types = [0, 0, 1]
    expected = model(torch.tensor([[5, 6, 7]]), token_type_ids=torch.tensor([types])).logits.numpy()
    answer = run(post(tmp_path, "/cloister/v1/forward", {"prompt": [5, 6, 7], "token_type_ids": types})).json()
    assert answer["kind"] == "classes"
    np.testing.assert_allclose(decode_tensor(answer["output"], expected_columns=3, max_rows=1), expected, atol=1e-5)


def test_masked_language_model_gives_logits(tmp_path: Path, bert_config: Any) -> None:
    model = save(transformers.BertForMaskedLM(bert_config), tmp_path)
    expected = model(inputs_embeds=torch.tensor(ROWS)[None]).logits[0].numpy()
    answer = run(post(tmp_path, "/cloister/v1/forward", {"prompt_embeds": encode_tensor(ROWS)})).json()
    assert answer["kind"] == "logits"
    np.testing.assert_allclose(decode_tensor(answer["output"], expected_columns=101, max_rows=9), expected, atol=1e-5)


# Vision ---------------------------------------------------------------------------------------------------------------


def vision_config(kind: str, patch: int) -> Any:
    return getattr(transformers, kind)(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, num_labels=5,
        image_size=3 if patch == 1 else 3 * patch, patch_size=patch, num_channels=32 if patch == 1 else 3,
    )  # fmt: skip


@pytest.mark.parametrize("kind", ["ViT", "CLIP"])
def test_embedded_patches_give_what_the_image_gives(tmp_path: Path, kind: str) -> None:
    classes = {
        "ViT": (transformers.ViTForImageClassification, "ViTConfig"),
        "CLIP": (transformers.CLIPVisionModelWithProjection, "CLIPVisionConfig"),
    }
    model_class, config = classes[kind]
    plain = model_class(vision_config(config, 4)).eval().requires_grad_(False)
    served = model_class(vision_config(config, 1)).eval().requires_grad_(False)
    # the client embeds the patches with the plain weights; the server's patch projection is the identity
    name = next(name for name, value in plain.named_parameters() if value.dim() == 4)
    projection = plain.get_parameter(name)
    state = {
        key: value for key, value in plain.state_dict().items() if "patch_embedding" not in key or "position" in key
    }
    state[name] = torch.eye(32)[:, :, None, None]
    if name.replace("weight", "bias") in plain.state_dict():
        state[name.replace("weight", "bias")] = torch.zeros(32)
    served.load_state_dict(state, strict=False)
    save(served, tmp_path)
    image = torch.randn(1, 3, 12, 12, generator=torch.Generator().manual_seed(0))
    bias = plain.state_dict().get(name.replace("weight", "bias"))
    patches = torch.nn.functional.conv2d(image, projection, bias, stride=4)[0].flatten(1).T.contiguous().numpy()
    output = plain(pixel_values=image)
    expected, shown = (output.logits, "classes") if kind == "ViT" else (output.image_embeds, "vectors")
    answer = run(post(tmp_path, "/cloister/v1/forward", {"pixel_embeds": encode_tensor(patches)})).json()
    assert answer["kind"] == shown
    got = decode_tensor(answer["output"], expected_columns=expected.shape[1], max_rows=1)
    np.testing.assert_allclose(got, expected.numpy(), atol=1e-4)
    short = run(post(tmp_path, "/cloister/v1/forward", {"pixel_embeds": encode_tensor(patches[:8])}))
    assert short.status_code == 400 and "9" in short.json()["error"]["message"]


def test_a_vision_model_that_takes_images_is_not_asked_for_patches(tmp_path: Path) -> None:
    save(transformers.ViTForImageClassification(vision_config("ViTConfig", 4)), tmp_path)
    response = run(post(tmp_path, "/cloister/v1/forward", {"pixel_embeds": encode_tensor(ROWS)}))
    assert response.status_code == 400 and response.json()["error"]["param"] == "pixel_embeds"


# Attestation ----------------------------------------------------------------------------------------------------------


def test_attestation_is_delegated(tmp_path: Path, bert_config: Any) -> None:
    save(transformers.BertModel(bert_config), tmp_path)

    async def ask() -> httpx.Response:
        async with client_of(tmp_path, attest=lambda nonce: {"nonce": nonce.hex(), "quote": "q"}) as client:
            return await client.get("/cloister/v1/attestation", params={"nonce": "ab" * 32})

    assert run(ask()).json() == {"nonce": "ab" * 32, "quote": "q"}


# A real model ---------------------------------------------------------------------------------------------------------


def test_minilm_vectors_are_those_of_transformers(minilm_dir: Path) -> None:
    model = transformers.AutoModel.from_pretrained(minilm_dir).eval()
    ids = [101, 7592, 2088, 102]
    with torch.no_grad():
        expected = model(torch.tensor([ids])).last_hidden_state[0].mean(0)
    answer = run(post(minilm_dir, "/v1/embeddings", {"input": [ids]})).json()
    got = torch.tensor(answer["data"][0]["embedding"])
    assert float(torch.nn.functional.cosine_similarity(got, expected, dim=0)) > 0.99999
