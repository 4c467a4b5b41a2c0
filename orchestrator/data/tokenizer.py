"""The tokenizer of a run, and how a row becomes the token ids of a prompt. transformers is imported on use."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

from state.errors import SlotwiseError
from workers.config import ModelConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class TokenizerError(SlotwiseError):
    """The tokenizer is missing, or cannot do what the configuration asks of it."""


def load_tokenizer(model: ModelConfig) -> PreTrainedTokenizerBase:
    """`model.tokenizer`, else the one of `model.hf_checkpoint`."""
    from transformers import AutoTokenizer

    path = model.tokenizer or model.hf_checkpoint
    if path is None:
        raise TokenizerError("no tokenizer: set model.tokenizer (a directory) or model.hf_checkpoint")
    try:
        return AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise TokenizerError(f"cannot load a tokenizer from {path!r}: {error}") from error


def encode_prompt(
    tokenizer: PreTrainedTokenizerBase, prompt: str | list[dict[str, Any]], *, apply_chat_template: bool
) -> tuple[str, tuple[int, ...]]:
    """The text that the model sees and its token ids.

    With a chat template a bare string becomes one user message, and the header of the answer is added; special tokens
    are the template's own then. Without, the tokenizer adds those it normally adds.
    """
    if apply_chat_template:
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        if tokenizer.chat_template is None:
            raise TokenizerError("data.apply_chat_template is on but the tokenizer has no chat template")
        text = str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
        return text, tuple(tokenizer.encode(text, add_special_tokens=False))
    if not isinstance(prompt, str):
        raise TokenizerError("a prompt is a list of messages: set data.apply_chat_template")
    return prompt, tuple(tokenizer.encode(prompt))


def decode_response(tokenizer: PreTrainedTokenizerBase, ids: tuple[int, ...]) -> str:
    """For people and reward functions only: text is never turned back into ids.

    One special token at the end (what ended the response) is not shown; any other is, since the model did say it.
    """
    shown = ids[:-1] if ids and ids[-1] in tokenizer.all_special_ids else ids
    return str(tokenizer.decode(list(shown), skip_special_tokens=False))


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """16 hex digits: the vocabulary and the chat template."""
    entries = "\n".join(f"{index} {token}" for token, index in sorted(tokenizer.get_vocab().items()))
    return hashlib.sha256(f"{entries}\n{tokenizer.chat_template}".encode()).hexdigest()[:16]
