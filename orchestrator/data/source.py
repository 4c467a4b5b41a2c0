"""Where prompts come from: rows of stored data or of a generator, in an order that can be continued exactly."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from orchestrator.config import DataConfig
from orchestrator.data.context import USUAL_PROMPT
from orchestrator.data.generators import Row
from orchestrator.data.rows import DataError, open_rows
from orchestrator.data.tokenizer import TokenizerError, encode_prompt, tokenizer_fingerprint
from state.errors import ResumeError
from state.stored import shown
from workers.batch import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_ENDLESS_PATIENCE = 1000


@dataclass(frozen=True, slots=True)
class Cursor:
    """How far a data source has been read.

    `position` counts rows of the current epoch, those left out included; `left_out` counts over-long prompts so far.
    """

    position: int = 0
    epoch: int = 0
    next_group_id: int = 0
    left_out: int = 0


class DataSource:
    """Prompts in a fixed order, from the start again as often as a batch needs.

    A file is shuffled anew each epoch by (seed, epoch), so the order needs no state. Prompts of more than
    `max_prompt_len` tokens, or of none, are left out and counted without disturbing the order of the others.
    """

    def __init__(self, config: DataConfig, tokenizer: PreTrainedTokenizerBase, seed: int) -> None:
        self._config, self._tokenizer, self._seed = config, tokenizer, seed
        self._limit = config.max_prompt_len or USUAL_PROMPT
        self._rows = open_rows(config, seed)
        self._cursor = Cursor()
        settings = f"{self._rows.fingerprint} {config.apply_chat_template} {self._limit}"
        order = f"{seed} {config.shuffle}" if self._rows.size is not None else ""
        self.fingerprint = hashlib.sha256(
            f"{settings} {order} {tokenizer_fingerprint(tokenizer)}".encode()
        ).hexdigest()[:16]

    @property
    def cursor(self) -> Cursor:
        return self._cursor

    def next(self, n: int) -> list[Prompt]:
        """The next `n` prompts, with group ids of their own."""
        return self._collect(n, until_epoch=None)

    def first(self, n: int) -> list[Prompt]:
        """The next `n` prompts, or as many as this epoch still has: no row twice."""
        prompts = self._collect(n, until_epoch=self._cursor.epoch + 1)
        if not prompts:
            raise self._nothing_left(self._cursor.left_out)
        return prompts

    def usable_per_epoch(self) -> int:
        """Prompts of one epoch that are not left out: reads and tokenises all of them. Raises `DataError` when there
        is none, and `ValueError` for rows that never end."""
        if self._rows.size is None:
            raise ValueError("these rows never end")
        usable = sum(self._encoded(index) is not None for index in range(self._rows.size))
        if not usable:
            raise self._nothing_left(self._rows.size)
        return usable

    def state(self) -> dict[str, Any]:
        """JSON: the cursor, and the fingerprint of what it counts."""
        return {"fingerprint": self.fingerprint, **asdict(self._cursor)}

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raise `ResumeError` when `state` counts rows of other data than this, or rows that it does not have."""
        if state["fingerprint"] != self.fingerprint:
            raise ResumeError(
                f"the checkpoint was made with other data: its fingerprint is {state['fingerprint']}, that of this run "
                f"{self.fingerprint} (rows, order, seed, chat template, tokenizer). Continue with the same data, or "
                "start from its weights alone with checkpoint.weights_only"
            )
        if self._rows.size is not None and state["position"] >= max(1, self._rows.size):
            raise ResumeError(
                f"the checkpoint's cursor is at row {state['position']} of data that has {self._rows.size}: its "
                "data.json is damaged. Name another iteration with checkpoint.ckpt_step, or start from its weights "
                "alone with checkpoint.weights_only"
            )

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state` returned."""
        self.check_state(state)
        self._cursor = Cursor(**{one.name: state[one.name] for one in fields(Cursor)})

    def again(self, state: Mapping[str, Any]) -> Prompt:
        """The prompt that was next when `state` was returned. How far the data was read stays as it is."""
        here = self._cursor
        try:
            self.restore(state)
            (prompt,) = self.next(1)
            return prompt
        finally:
            self._cursor = here

    def _collect(self, n: int, until_epoch: int | None) -> list[Prompt]:
        # Twice the size: with a new order each epoch, all usable rows may come first in one and last in the next.
        patience = _ENDLESS_PATIENCE if self._rows.size is None else 2 * self._rows.size
        prompts: list[Prompt] = []
        in_vain = 0
        while len(prompts) < n and self._cursor.epoch != until_epoch:
            prompt = self._advance()
            if prompt is not None:
                in_vain = 0
                prompts.append(prompt)
                continue
            in_vain += 1
            if in_vain >= patience:
                raise self._nothing_left(self._cursor.left_out)
        return prompts

    def _advance(self) -> Prompt | None:
        """One row further; None when its prompt is left out."""
        at = self._cursor
        encoded = self._encoded(self._index(at))
        usable = encoded is not None
        ended = self._rows.size is not None and at.position + 1 >= self._rows.size
        self._cursor = Cursor(
            position=0 if ended else at.position + 1,
            epoch=at.epoch + 1 if ended else at.epoch,
            next_group_id=at.next_group_id + usable,
            left_out=at.left_out + (not usable),
        )
        if encoded is None:
            return None
        row, text, ids = encoded
        return Prompt(at.next_group_id, ids, text, row.label, row.metadata)

    def _encoded(self, index: int) -> tuple[Row, str, tuple[int, ...]] | None:
        """Row `index` with its text and token ids; None when it is left out."""
        row = self._rows.row(index)
        try:
            text, ids = encode_prompt(self._tokenizer, row.prompt, apply_chat_template=self._config.apply_chat_template)
        except TokenizerError:
            raise
        except Exception as error:  # a tokenizer or a chat template raises what it likes
            what = f"the tokenizer cannot encode {shown(row.prompt)}: {error or type(error).__name__}"
            raise DataError(f"{self._rows.where(index)}: {what}") from error
        return (row, text, ids) if 0 < len(ids) <= self._limit else None

    def _index(self, at: Cursor) -> int:
        if self._rows.size is None or not self._config.shuffle:
            return at.position
        return _permutation(self._rows.size, self._seed, at.epoch)[at.position]

    def _nothing_left(self, left_out: int) -> DataError:
        return DataError(
            f"no prompt of this data has between 1 and data.max_prompt_len={self._limit} tokens; "
            f"{left_out} were left out"
        )


@lru_cache(maxsize=2)
def _permutation(size: int, seed: int, epoch: int) -> tuple[int, ...]:
    order = list(range(size))
    random.Random(f"order/{seed}/{epoch}").shuffle(order)
    return tuple(order)
