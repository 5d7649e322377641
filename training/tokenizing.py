"""The tokenizer of the embedded model and the chat form it is trained on.

A byte-level BPE of 4,096 entries trained on the training text: all 256 bytes are in the vocabulary, so
every text can be encoded and decoded without loss. Digits are single tokens, which helps arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

VOCABULARY = 4096
CONTEXT = 512
EOS, PAD, USER, ASSISTANT, SYSTEM = SPECIALS = (
    "<|endoftext|>",
    "<|pad|>",
    "<|user|>",
    "<|assistant|>",
    "<|system|>",
)
EOS_ID, PAD_ID, USER_ID, ASSISTANT_ID, SYSTEM_ID = range(5)

CHAT_TEMPLATE = """\
{%- for message in messages -%}
{%- if message['role'] == 'system' -%}
{{- '<|system|>' + message['content'] | trim -}}
{%- elif message['role'] == 'user' -%}
{{- '<|user|>' + message['content'] | trim -}}
{%- elif message['role'] == 'assistant' -%}
{{- '<|assistant|>' + message['content'] | trim + '<|endoftext|>' -}}
{%- else -%}
{{- raise_exception('Roles are system, user and assistant, not ' + message['role']) -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|assistant|>' -}}
{%- endif -%}
"""


def train(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """Train the tokenizer; the same texts in the same order give the same tokenizer."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(SPECIALS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    raw.train_from_iterator(texts, trainer)
    for position, token in enumerate(SPECIALS):
        assert raw.token_to_id(token) == position, "the special tokens must take the first ids"
    return PreTrainedTokenizerFast(
        tokenizer_object=raw,
        eos_token=EOS,
        pad_token=PAD,
        additional_special_tokens=[USER, ASSISTANT, SYSTEM],
        chat_template=CHAT_TEMPLATE,
        model_max_length=CONTEXT,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )
