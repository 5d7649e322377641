"""The client of mode permute: plain ids in, plain ids out; on the wire only what the key makes of them.

    session = connect_permute("out/client", "https://host:8443", token="...")
    await session.open()                         # key, format, expiry, certificate, attestation: before anything else
    async for token in session.generate(ids, Sampling(max_tokens=32)):
        ...

Speaks to `cloister serve` and to a vLLM server (docs/serving-vllm.md); which one it is shows in the handshake. With
loop "server" an answer is one message; with loop "token" each token is one message, whose embedding row never leaves
this machine untransformed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cloister import manifest as manifests
from cloister.errors import (
    CloisterError,
    FormatVersion,
    InvalidParameter,
    NotAvailable,
    PeerDied,
    PeerError,
    TooLarge,
    TrustError,
    UnsupportedParameter,
    WrongKey,
)
from cloister.ledger import Ledger
from cloister.manifest import OBFUSCATION
from cloister.modes import Sampling, Token
from cloister.serving.client_tensors import ClientTensors
from cloister.serving.permute_answers import Vocabulary, finish_reason, key_of, one_choice, session_of, vectors_of
from cloister.serving.transport import Handler, Transport
from cloister.serving.wire import decode_tensor, encode_tensor

GetEvidence = Callable[[str], Awaitable[dict[str, Any]]]
Attestor = Callable[[str, GetEvidence, bytes | None], Awaitable[Any]]
"""`await check(url, get_evidence, peer_certificate)` raises `AttestationFailed`, or is content; see
`cloister.attest.verifying.make_verifier`. It runs before the handshake."""

_HANDSHAKE = "that somebody with an address here asks; nothing of any prompt"
_GOODBYE_SECONDS = 2.0
_FORBIDDEN = -100.0  # the lowest logit bias that servers take


def connect_permute(client: str | Path, server: str, **options: Any) -> PermuteSession:
    """A session between the client directory `client` and the server at URL `server`. Options: see `PermuteSession`."""
    return PermuteSession(client, server, **options)


class PermuteSession:
    """Implements `cloister.modes.Session`. Safe for many requests at once on one event loop."""

    def __init__(
        self,
        client: str | Path,
        server: str,
        *,
        token: str | None = None,
        ledger: Ledger | None = None,
        insecure_plain_http: bool = False,
        verify_attestation: Attestor | None = None,
        idle_timeout: float = 300.0,
        handler: Handler | None = None,
    ) -> None:
        directory = Path(client)
        self.manifest = manifests.read(directory, role="client")
        self.ledger = ledger if ledger is not None else Ledger()
        self.max_model_len = self.manifest.model.max_positions
        self._tensors = ClientTensors(directory / "client.safetensors")
        self._vocabulary = Vocabulary(self._tensors, self.manifest.model.vocab_size)
        self._eos = _eos_ids(directory)
        self._attest = verify_attestation
        self._name = ""
        self._ours = True  # False: a vLLM server, without our extensions
        self._opened = False
        self._opening = asyncio.Lock()
        self._transport = Transport(
            server,
            self.ledger,
            fingerprint=self.manifest.identity.tls_fingerprint,
            token=token,
            insecure_plain_http=insecure_plain_http,
            idle_timeout=idle_timeout,
            handler=handler,
        )
        if self.manifest.identity.measurement and verify_attestation is None:
            raise NotAvailable(
                "This client demands an attested server, and nothing was given that can check one.",
                advice="Connect with verify_attestation=...; see docs/attestation.md.",
            )

    # Opening ----------------------------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Check attestation, key, format, weights and expiry. Nothing of a prompt has left before this has passed."""
        self.manifest.check_expiry()
        async with self._opening:
            if self._opened:
                return
            if self._attest is not None:
                await self._attested(self._attest)
            answer = await self._transport.json("GET", "/v1/models", step="handshake", reveals=_HANDSHAKE)
            self._adopt(answer.get("data"))
            self._opened = True

    async def _attested(self, check: Attestor) -> None:
        """Ask the server for a proof that is bound to the very key of this TLS connection."""

        async def get_evidence(nonce: str) -> dict[str, Any]:
            path = f"/cloister/v1/attestation?nonce={nonce}"
            return await self._transport.json("GET", path, step="attestation", reveals=_HANDSHAKE)

        # The certificate is known only after a first exchange; every later connection must show the same one.
        await self._transport.json("GET", "/version", step="attestation", reveals=_HANDSHAKE)
        self._transport.pin_peer()
        await check(self._transport.url, get_evidence, self._transport.peer_certificate)

    def _adopt(self, listed: Any) -> None:
        """Choose the model with our key from the server's list."""
        models = [item for item in listed if isinstance(item, dict)] if isinstance(listed, list) else []
        wanted = self.manifest.protection.key_id
        about = next((item["cloister"] for item in models if key_of(item) == wanted), None)
        if about is not None:
            model = next(item for item in models if key_of(item) == wanted)
            self._check_identity(about)
            self._ours = True
        else:
            # vLLM lists nothing of ours; there the operator puts the key id at the end of the served name
            model = next((m for m in models if "cloister" not in m and str(m.get("id", "")).endswith(wanted)), {})
            self._ours = False
        if not model or not wanted:
            held = ", ".join(str(key_of(item) or item.get("id"))[:80] for item in models) or "none"
            raise WrongKey(
                f"{self._transport.party} does not serve the key of this client directory "
                f"(this client: {wanted}; the server: {held}).",
                advice="Nothing was sent. Use the OUT/client that belongs to this server's OUT/server; on vLLM the "
                "served model name must end in the key id.",
            )
        self._name = str(model.get("id"))
        length = model.get("max_model_len")
        if isinstance(length, int) and length > 0:
            self.max_model_len = min(length, self.manifest.model.max_positions)

    def _check_identity(self, about: Mapping[str, Any]) -> None:
        if about.get("format") != manifests.FORMAT:
            raise FormatVersion(
                f"{self._transport.party} serves format version {about.get('format')!r}; "
                f"this client reads version {manifests.FORMAT}.",
                advice="Nothing was sent. Install the same Cloister version on both sides.",
            )
        expected, found = self.manifest.identity.weights_digest, about.get("weights_digest")
        if expected and found and expected != found:
            raise TrustError(
                f"{self._transport.party} serves other weights than this client was made for "
                f"(expected {expected[:16]}..., got {str(found)[:16]}...).",
                advice="Nothing was sent. Ask the model developer which of the two directories is current.",
            )

    async def _ready(self) -> None:
        if not self._opened:
            await self.open()
        self.manifest.check_expiry()

    @contextlib.asynccontextmanager
    async def _guarded(self) -> AsyncIterator[None]:
        """After a failure of the server it may come back as another one: the handshake is then done again."""
        try:
            yield
        except PeerError:
            self._opened = False
            raise

    # Generating -------------------------------------------------------------------------------------------------------

    async def generate(
        self, prompt: Sequence[int], sampling: Sampling, *, request: str = ""
    ) -> AsyncGenerator[Token, None]:
        """Generate after `prompt`. Closing the iterator cancels the work on both sides."""
        ids = self._checked(prompt)
        await self._ready()
        if len(ids) + sampling.max_tokens > self.max_model_len:
            sampling = replace(sampling, max_tokens=max(self.max_model_len - len(ids), 0))
        if sampling.max_tokens < 1:
            raise TooLarge(
                f"The prompt has {len(ids)} tokens and the model holds {self.max_model_len}: nothing can follow.",
                advice="Send a shorter prompt.",
            )
        loop = self._one_message if self.manifest.protection.loop == "server" else self._message_per_token
        async with self._guarded(), contextlib.aclosing(loop(ids, sampling, request)) as tokens:
            async for token in tokens:
                yield token

    async def _one_message(
        self, ids: NDArray[np.int64], sampling: Sampling, request: str
    ) -> AsyncGenerator[Token, None]:
        body = self._body(sampling) | {
            "prompt": self._vocabulary.to_server[ids].tolist(),
            "max_tokens": sampling.max_tokens,
            "min_tokens": sampling.min_tokens,
            "presence_penalty": sampling.presence_penalty,
            "frequency_penalty": sampling.frequency_penalty,
            "repetition_penalty": sampling.repetition_penalty,
            "logit_bias": self._bias(sampling.logit_bias),
            "stop_token_ids": self._vocabulary.sent(self._stops(sampling)),
            "ignore_eos": sampling.ignore_eos,
            "stream": True,
        }
        if sampling.seed is not None:
            body["seed"] = sampling.seed
        events = self._transport.events(
            "/v1/completions", body, step="completion", reveals=self._reveals(), request=request
        )
        finish: str | None = None
        count = 0
        async with contextlib.aclosing(events):
            async for event in events:
                choice = one_choice(event)
                if choice is None:  # a usage chunk
                    continue
                finish = finish_reason(choice)
                tokens = self._tokens(choice)
                count += len(tokens)
                if count > sampling.max_tokens:  # a stream without end must not fill this machine's memory
                    raise PeerError(f"{self._transport.party} answered more than the {sampling.max_tokens} tokens.")
                for index, token in enumerate(tokens):
                    last = index == len(tokens) - 1
                    yield replace(token, finish=finish) if last and finish else token
                if finish == "stop" and not tokens and self._stops(sampling):
                    yield Token(self._stops(sampling)[0], finish="stop")
                if finish:
                    # The answer is whole. Read the formal end, so that the connection can be used again, but do not
                    # let a server that withholds it hold up anybody.
                    with contextlib.suppress(CloisterError, TimeoutError):
                        async with asyncio.timeout(_GOODBYE_SECONDS):
                            async for _ in events:
                                pass
                    break
        if finish is None:
            raise PeerDied(f"{self._transport.party} ended the answer without saying why.", advice="Ask again.")

    async def _message_per_token(
        self, ids: NDArray[np.int64], sampling: Sampling, request: str
    ) -> AsyncGenerator[Token, None]:
        if sampling.repetition_penalty != 1.0:
            raise UnsupportedParameter(
                "repetition_penalty is not possible when the server sees one token at a time.",
                advice="Use presence_penalty and frequency_penalty.",
                param="repetition_penalty",
            )
        stops = self._stops(sampling)
        counts: Counter[int] = Counter()
        entry = self._transport.open_entry("completion", self._reveals(), request)
        rows = self._rows(ids)
        session: str | None = None
        try:
            for step in range(sampling.max_tokens):
                body = self._body(sampling) | {
                    "prompt_embeds": rows,
                    "max_tokens": 1,
                    "ignore_eos": True,  # this side decides when the answer is over
                    "logit_bias": self._bias(
                        _history_bias(sampling, counts, stops if step < sampling.min_tokens else ())
                    ),
                }
                if sampling.seed is not None:
                    body["seed"] = (sampling.seed + step) % 2**63
                if self._ours:
                    body["cloister"] = {"session": session or "new"}
                answer = await self._transport.json(
                    "POST", "/v1/completions", body, step="completion", reveals="", request=request, entry=entry
                )
                choice = one_choice(answer)
                tokens = self._tokens(choice) if choice else []
                if len(tokens) != 1:
                    raise PeerError(f"{self._transport.party} answered {len(tokens)} tokens where one was asked for.")
                token = tokens[0]
                counts[token.id] += 1
                if token.id in stops:
                    yield replace(token, finish="stop")
                    return
                if step == sampling.max_tokens - 1:
                    yield replace(token, finish="length")
                    return
                yield token
                if self._ours:
                    session = session_of(answer, self._transport.party)
                    rows = self._rows(np.array([token.id]))
                else:  # vLLM keeps no session: the whole prefix is sent again
                    ids = np.append(ids, token.id)
                    rows = self._rows(ids)
        except (asyncio.CancelledError, GeneratorExit):
            entry.note = "cancelled"
            raise
        finally:
            if session is not None:
                await self._end_session(session, entry, request)

    async def _end_session(self, session: str, entry: Any, request: str) -> None:
        """Give the cache back. The server forgets idle sessions by itself, so a failure here is nobody's problem."""
        body = {"model": self._name, "cloister": {"session": session, "close": True}}
        note = entry.note
        with contextlib.suppress(CloisterError, TimeoutError):
            async with asyncio.timeout(5):
                await self._transport.json(
                    "POST", "/v1/completions", body, step="completion", reveals="", request=request, entry=entry
                )
        entry.note = note

    def _body(self, sampling: Sampling) -> dict[str, Any]:
        """The fields that both loops send. Defaults are sent too: a server's own defaults may be others."""
        body: dict[str, Any] = {
            "model": self._name,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
            "detokenize": False,
        }
        if sampling.logprobs is not None:
            body["logprobs"] = sampling.logprobs
        return body

    def _stops(self, sampling: Sampling) -> tuple[int, ...]:
        return (() if sampling.ignore_eos else self._eos) + tuple(sampling.stop_token_ids)

    def _bias(self, plain: Mapping[int, float]) -> dict[str, float]:
        return {str(self._vocabulary.sent([token])[0]): amount for token, amount in plain.items()}

    def _tokens(self, choice: Mapping[str, Any]) -> list[Token]:
        """The tokens of one chunk, translated; anything that is not a token id of this vocabulary is refused."""
        ids = choice.get("token_ids")
        if ids is None and choice.get("text"):
            raise PeerError(
                f"{self._transport.party} answered with text, not with token ids.",
                advice="On vLLM 0.10.2 or later, start it as docs/serving-vllm.md says.",
            )
        if ids is not None and not isinstance(ids, list):
            raise PeerError(f"{self._transport.party} answered with something that is not a list of token ids.")
        plain = [self._vocabulary.plain(token, self._transport.party) for token in ids or []]
        logs = choice.get("logprobs")
        if not isinstance(logs, dict):
            return [Token(token) for token in plain]
        try:
            return self._with_logprobs(plain, logs)
        except (TypeError, ValueError, OverflowError):
            raise PeerError(f"{self._transport.party} answered with log probabilities that are not numbers.") from None

    def _with_logprobs(self, plain: Sequence[int], logs: Mapping[str, Any]) -> list[Token]:
        chosen = logs.get("token_logprobs") or []
        tops = logs.get("top_logprobs") or []
        tokens = []
        for index, token in enumerate(plain):
            top = tops[index] if index < len(tops) and isinstance(tops[index], dict) else {}
            named = [(self._vocabulary.named(name, self._transport.party), float(p)) for name, p in top.items()]
            named.sort(key=lambda pair: -pair[1])
            logprob = float(chosen[index]) if index < len(chosen) and chosen[index] is not None else None
            tokens.append(Token(token, logprob, tuple(named)))
        return tokens

    # One forward pass -------------------------------------------------------------------------------------------------

    async def logits(self, prompt: Sequence[int], *, request: str = "") -> NDArray[np.float32]:
        """Plain logits [positions, vocabulary] (or [classes]) of one forward pass."""
        ids = self._checked(prompt)
        await self._ready()
        kind, output = await self._forward(self._prompt(ids), "logits", request)
        return output[:, self._vocabulary.to_server] if kind == "logits" else self._plain_classes(output)[0]

    async def embed(self, batch: Sequence[Sequence[int]], *, request: str = "") -> NDArray[np.float32]:
        """Pooled vectors [batch, hidden] of an embedding model."""
        prompts = [self._checked(ids) for ids in batch]
        await self._ready()
        if "embedding" in self._tensors:
            inputs: dict[str, Any] = {"prompt_embeds": [self._rows(ids) for ids in prompts]}
        else:
            inputs = {"input": [self._vocabulary.to_server[ids].tolist() for ids in prompts]}
        body = {"model": self._name, "encoding_format": "base64", **inputs}
        async with self._guarded():
            answer = await self._transport.json(
                "POST", "/v1/embeddings", body, step="embedding", reveals=self._reveals(), request=request,
                expected=8 * len(prompts) * self.manifest.model.hidden_size,
            )  # fmt: skip
        vectors = np.stack(vectors_of(answer, len(prompts), self.manifest.model.hidden_size, self._transport.party))
        if "output_order" in self._tensors:
            vectors = vectors[:, self._tensors.order("output_order", self.manifest.model.hidden_size)]
        return vectors

    async def classify(self, inputs: Any, *, request: str = "") -> NDArray[np.float32]:
        """Class scores [batch, classes] for lists of token ids, or for images [batch, channels, height, width]."""
        await self._ready()
        if "patch_weight" in self._tensors:
            images = np.asarray(inputs, dtype=np.float32)
            bodies = [
                {"pixel_embeds": self._patches(image)} for image in (images[None] if images.ndim == 3 else images)
            ]
        else:
            bodies = [self._prompt(self._checked(ids)) for ids in inputs]
        scores = []
        for body in bodies:
            _, output = await self._forward(body, "classification", request)
            scores.append(self._plain_classes(output)[0])
        return np.stack(scores)

    async def _forward(self, inputs: Mapping[str, Any], step: str, request: str) -> tuple[str, NDArray[np.float32]]:
        if not self._ours:
            raise NotAvailable(
                f"{self._transport.party} is a vLLM server, which gives no logits or class scores.",
                advice="Use `cloister serve` for this.",
            )
        body = {"model": self._name, **inputs}
        async with self._guarded():
            answer = await self._transport.json(
                "POST", "/cloister/v1/forward", body, step=step, reveals=self._reveals(), request=request,
                expected=8 * max(self.max_model_len, 1) * self.manifest.model.vocab_size,
            )  # fmt: skip
        kind = answer.get("kind")
        columns = {
            "logits": self.manifest.model.vocab_size,
            "classes": self._tensors.shape("class_order")[0] if "class_order" in self._tensors else 0,
            "vectors": self.manifest.model.hidden_size,
        }.get(str(kind), 0)
        output = decode_tensor(str(answer.get("output")), expected_columns=columns, max_rows=max(self.max_model_len, 1))
        return str(kind), output

    def _plain_classes(self, scores: NDArray[np.float32]) -> NDArray[np.float32]:
        return scores[:, self._tensors.order("class_order", scores.shape[1])]

    def _patches(self, image: NDArray[np.float32]) -> str:
        """The transformed patch projection, computed here: pixels never leave."""
        weight = self._tensors.floats("patch_weight")  # [channels * patch * patch, hidden]
        if image.ndim != 3:
            raise InvalidParameter("An image must have the shape [channels, height, width].", param="inputs")
        channels, height, width = image.shape
        side = round((weight.shape[0] / channels) ** 0.5)
        if side * side * channels != weight.shape[0] or height % side or width % side:
            raise InvalidParameter(
                f"An image of shape {list(image.shape)} does not fit this model's patches.", param="inputs"
            )
        cut = image.reshape(channels, height // side, side, width // side, side).transpose(1, 3, 0, 2, 4)
        rows = cut.reshape(-1, weight.shape[0]) @ weight
        if "patch_bias" in self._tensors:
            rows = rows + self._tensors.floats("patch_bias")
        return encode_tensor(rows)

    # What is sent -----------------------------------------------------------------------------------------------------

    def _prompt(self, ids: NDArray[np.int64]) -> dict[str, Any]:
        if "embedding" in self._tensors:
            return {"prompt_embeds": self._rows(ids)}
        return {"prompt": self._vocabulary.to_server[ids].tolist()}

    def _rows(self, ids: NDArray[np.int64]) -> str:
        """The transformed embedding rows of `ids`; only these rows are read from the disk."""
        rows = self._tensors.mapped("embedding")[ids]
        return encode_tensor(rows, "bfloat16" if rows.dtype == np.uint16 else None)

    def _checked(self, prompt: Sequence[int]) -> NDArray[np.int64]:
        if not len(prompt):
            raise InvalidParameter("The prompt is empty.", param="prompt")
        ids = np.asarray(prompt)
        if ids.ndim != 1 or ids.dtype.kind not in "iu" or ids.min() < 0 or ids.max() >= self._vocabulary.size:
            raise InvalidParameter(f"Token ids must be whole numbers below {self._vocabulary.size}.", param="prompt")
        if len(ids) > self.max_model_len:
            raise TooLarge(
                f"The prompt has {len(ids)} tokens; the model holds {self.max_model_len}.",
                advice="Send a shorter prompt.",
            )
        return ids.astype(np.int64)

    def _reveals(self) -> str:
        what = "token ids under the key" if "embedding" not in self._tensors else "transformed embedding rows"
        seen = f"{what}: how many, when, and which are equal"
        if self.manifest.protection.label == OBFUSCATION:
            return f"{seen}; who knows the public base can work out the words"
        return seen

    async def close(self) -> None:
        """Release the connection."""
        await self._transport.close()


def _history_bias(sampling: Sampling, counts: Counter[int], forbidden: Sequence[int]) -> dict[int, float]:
    """Penalties and `min_tokens` as a logit bias: the server sees one token at a time and has no history to punish."""
    bias = dict(sampling.logit_bias)
    if sampling.presence_penalty or sampling.frequency_penalty:
        for token, count in counts.items():
            penalty = sampling.presence_penalty + sampling.frequency_penalty * count
            bias[token] = bias.get(token, 0.0) - penalty
    bias.update(dict.fromkeys(forbidden, _FORBIDDEN))
    return bias


def _eos_ids(directory: Path) -> tuple[int, ...]:
    """The ids that end an answer, in the plain vocabulary."""
    try:
        raw = json.loads((directory / "generation_config.json").read_text()).get("eos_token_id")
    except (OSError, ValueError, AttributeError):
        return ()
    return tuple(item for item in (raw if isinstance(raw, list) else [raw]) if type(item) is int)
