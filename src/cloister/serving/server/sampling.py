"""From logits to one token: penalties, bias, temperature and truncation, one request at a time.

A draw walks the tokens in the order of their probability, not of their ids. So a protected model, whose vocabulary is
in another order, gives for one seed the same answer as the plain model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from cloister.modes import Sampling


@dataclass
class Choice:
    """One chosen token."""

    id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


@dataclass
class Sampler:
    """The sampling state of one request; its random numbers do not depend on who else is in the batch."""

    sampling: Sampling
    end_ids: frozenset[int]  # tokens that end this answer, masked until min_tokens
    prompt_ids: frozenset[int] = frozenset()  # only known when ids were sent; used by the repetition penalty
    counts: Counter[int] = field(default_factory=Counter)
    generator: torch.Generator | None = None

    def __post_init__(self) -> None:
        if self.generator is None and self.sampling.temperature > 0:
            self.generator = torch.Generator()
            if self.sampling.seed is None:
                self.generator.seed()
            else:
                self.generator.manual_seed(self.sampling.seed)

    @property
    def plain_greedy(self) -> bool:
        """Whether the batch's argmax is this request's answer."""
        s = self.sampling
        return s.temperature == 0 and s.logprobs is None and not self._changes_logits(0)

    def _changes_logits(self, produced: int) -> bool:
        s = self.sampling
        penalties = s.presence_penalty or s.frequency_penalty or s.repetition_penalty != 1.0
        return bool(penalties or s.logit_bias or produced < s.min_tokens)

    def choose(self, raw: torch.Tensor, produced: int) -> Choice:
        """Choose from `raw`, the float32 logits of one position on the CPU; `produced` tokens came before."""
        logits = self._adjusted(raw, produced) if self._changes_logits(produced) else raw
        token = int(logits.argmax()) if self.sampling.temperature == 0 else self._draw(logits)
        self.counts[token] += 1
        if self.sampling.logprobs is None:
            return Choice(token)
        logprobs = torch.log_softmax(raw, dim=-1)  # of the model itself, as vLLM reports them
        values, ids = logprobs.topk(min(self.sampling.logprobs, logprobs.numel()))
        return Choice(token, float(logprobs[token]), tuple(zip(ids.tolist(), values.tolist(), strict=True)))

    def _adjusted(self, raw: torch.Tensor, produced: int) -> torch.Tensor:
        s, logits = self.sampling, raw.clone()
        if s.repetition_penalty != 1.0:
            seen = _index(self.prompt_ids | self.counts.keys())
            logits[seen] = torch.where(
                logits[seen] > 0, logits[seen] / s.repetition_penalty, logits[seen] * s.repetition_penalty
            )
        if self.counts and (s.frequency_penalty or s.presence_penalty):
            counts = torch.tensor(list(self.counts.values()), dtype=torch.float32)
            logits[_index(self.counts)] -= s.frequency_penalty * counts + s.presence_penalty
        if s.logit_bias:
            logits[_index(s.logit_bias)] += torch.tensor(list(s.logit_bias.values()), dtype=torch.float32)
        if produced < s.min_tokens and self.end_ids:
            logits[_index(self.end_ids)] = -torch.inf
        return logits

    def _draw(self, logits: torch.Tensor) -> int:
        s = self.sampling
        scaled, order = (logits / s.temperature).sort(descending=True, stable=True)
        if s.top_k:
            scaled = scaled[: s.top_k]
        probabilities = scaled.double().softmax(dim=-1)
        if s.min_p:
            probabilities = probabilities[: max(int((probabilities >= s.min_p * probabilities[0]).sum()), 1)]
        cumulative = probabilities.cumsum(dim=-1)
        if s.top_p < 1.0:
            # the smallest set whose mass reaches top_p of what is left
            kept = int((cumulative < s.top_p * float(cumulative[-1])).sum()) + 1
            cumulative = cumulative[:kept]
        point = torch.rand((), generator=self.generator, dtype=torch.float64) * cumulative[-1]
        chosen = min(int(torch.searchsorted(cumulative, point, right=True)), cumulative.numel() - 1)
        return int(order[chosen])


def _index(ids: Iterable[int]) -> torch.Tensor:
    return torch.tensor(list(ids), dtype=torch.long)
