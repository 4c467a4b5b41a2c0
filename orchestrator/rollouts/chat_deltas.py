"""Tokens that a chat template puts after an answer: its end, further messages, the header of the next answer.

A template may render earlier turns differently once others follow (it drops their reasoning, or joins them). A
conversation that was rendered anew at each turn would not continue what the engine wrote. So nothing is ever rendered
again: only the *difference* that new messages make is tokenised, and appended to the ids that are there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from state.errors import SlotwiseError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_ANSWER = "\u2063slotwise\u2063answer\u2063"


class UnusableTemplate(SlotwiseError):
    """The chat template does not show where an answer ends."""


def after_answer(
    tokenizer: PreTrainedTokenizerBase, answer_ids: Sequence[int], messages: Sequence[Mapping[str, Any]]
) -> tuple[int, ...]:
    """Ids that follow an answer when `messages` come next, up to where the next answer begins.

    `answer_ids` are the engine's; the end-of-turn token is not doubled when they end with it.
    """
    conversation = [{"role": "user", "content": ""}, {"role": "assistant", "content": _ANSWER}, *messages]
    text = str(tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True))
    _, found, rest = text.partition(_ANSWER)
    if not found or _ANSWER in rest:
        raise UnusableTemplate(
            f"the chat template of {tokenizer.name_or_path or 'this tokenizer'} does not render an answer exactly once"
        )
    ids = tuple(tokenizer.encode(rest, add_special_tokens=False))
    return ids[1:] if ids and answer_ids and ids[0] == answer_ids[-1] else ids
