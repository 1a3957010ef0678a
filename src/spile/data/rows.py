"""Parse the rows of a stream: ARC tasks, chats, texts or token ids, and detect which of them a dataset has."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from hashlib import blake2b
from itertools import chain
from math import isfinite
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

from spile.data.arc.encoders import parse_encoder
from spile.data.arc.grids import Pair, Task, task_problem
from spile.errors import DataError, SpecError
from spile.spec.run import EVERY_FIELD, PromptKind, PromptSpec

TOKENS, MASK, ROLES_FIELD = "input_ids", "attention_mask", "token_roles"
"""The fields with token ids and the attention mask, named as in transformers, and with the roles of the tokens; -1
stands for the role that follows from the token alone."""
PAIRS = "examples"
"""The default field of the data commands, with a list of ``[input, output]`` pairs of an ARC task."""
_MAX_KEPT_BYTES = 1024
"""Maximum size of the JSON of kept fields, so that the header of a shard stays small."""
MAX_SAMPLE_LENGTH = 1 << 24
"""Maximum number of characters or token ids of a sample. A tokenizer needs several hundred bytes for each token."""
_SHORT = 200
"""Maximum length of a text that ``--keep '*'`` stores."""
_TABLE_ROWS = 1024
"""Rows of a table that are converted at a time."""
SAMPLE_FIELDS = frozenset({"train", "test", "messages", "task_id", "id", TOKENS, MASK, ROLES_FIELD})
"""The fields that make a sample, which ``--keep '*'`` does not store again."""

_REJECTED = "rejected row: "
_EXACT = 2.0**53
"""From here on, a floating-point number stands for several integers."""
_FIELDS = 8
"""Number of fields of an unrecognised row that an error lists."""


def parse_row(raw: bytes, place: str) -> dict[str, Any]:
    """Parse a line as a JSON object."""
    try:
        row = orjson.loads(raw)
    except ValueError as error:
        raise DataError(f"{place} is not JSON", found=f"{error}: {_excerpt(raw)}") from error
    if isinstance(row, str) and row.startswith(_REJECTED):
        raise DataError(f"{place}, from {row.removeprefix(_REJECTED)}")
    if not isinstance(row, dict):
        raise DataError(place, expected="a JSON object", found=_excerpt(raw))
    return row


def rejected_line(reason: str) -> bytes:
    """Return the line that replaces a row that could not be read, so that readers count and report it."""
    return orjson.dumps(_REJECTED + reason)


def row_id(row: Mapping[str, Any], place: str = "") -> str | None:
    """Return the row's ``task_id`` or ``id``, or None. A number is written as in JSON.

    Raises:
        DataError: The id is a list or an object, or a number with too many digits, which reading JSON rounds.

    """
    for name in ("task_id", "id"):
        value = row.get(name)
        if value is None or value == "" or (isinstance(value, float) and not isfinite(value)):
            continue
        if isinstance(value, list | dict) or (isinstance(value, float) and abs(value) >= _EXACT):
            expected = "a text, or a number that JSON keeps exactly"
            where = f"{place}, its {name}" if place else name
            raise DataError(where, expected=expected, found=_excerpt(value), fix="write the ids as texts")
        return orjson.dumps(value).decode() if isinstance(value, bool | float) else str(value)
    return None


def arc_task_id(row: Mapping[str, Any], place: str = "") -> str:
    """Return the id of an ARC row: its own, else a hash of its content.

    A task's augmentations are derived from its id, so the id affects the tokens. The content, unlike the row number, is
    the same in the source and in every split of it.
    """
    name = row_id(row, place)
    if name is None:
        content = _to_json({key: row.get(key) for key in ("train", "test")})
        name = f"task-{blake2b(content, digest_size=6).hexdigest()}"
    return name


def resolve(prompt: PromptSpec, row: Mapping[str, Any], place: str) -> PromptSpec:
    """Decide the kind of prompt from a row, and reset options that do not affect this kind to their defaults.

    Two runs that differ only in unused options are therefore the same run.
    """
    kind = prompt.kind
    if kind == "auto":
        named: PromptKind = "tokens" if isinstance(row.get(prompt.column), list) else "text"
        shapes: dict[str, PromptKind] = {"train": "arc", "messages": "chat", prompt.column: named, TOKENS: "tokens"}
        kind = next((shape for name, shape in shapes.items() if name in row), kind)
    if kind == "auto":
        raise _unknown(prompt, row, place)
    if kind != "text" and prompt.pack:
        raise SpecError("--pack", expected="plain text", found=f"{kind} at {place}")
    if kind != "arc" and prompt.predictions_per_task > 1:
        raise SpecError("--predictions-per-task above 1", expected="ARC tasks", found=f"{kind} at {place}")
    default = PromptSpec()
    if kind == "arc":
        return replace(prompt, kind=kind, encoder=str(parse_encoder(prompt.encoder)), column=default.column)
    plain = replace(prompt, kind=kind, encoder=default.encoder, version=default.version)
    if kind != "chat" and prompt.template_from is not None:
        raise SpecError("--template-from", expected="chats", found=f"{kind} at {place}")
    if kind == "tokens" and not isinstance(row.get(prompt.column), list):
        return replace(plain, column=TOKENS)
    return replace(plain, column=default.column) if kind == "chat" else plain


def _unknown(prompt: PromptSpec, row: Mapping[str, Any], place: str) -> DataError:
    """Return the error for an unrecognised row, with advice for the challenge's file of all tasks in one object."""
    if row and all(isinstance(value, dict) and "train" in value for value in row.values()):
        return DataError(
            f"{place} is all tasks in one object, by their ids",
            expected="one task per line",
            fix="make lines of them: spile data convert --dataset FILE --output tasks.jsonl",
        )
    names = [*map(str, row)]
    shown = ", ".join(names[:_FIELDS]) + (f" and {len(names) - _FIELDS} more" if len(names) > _FIELDS else "")
    return DataError(
        place,
        expected=f"an ARC task (train, test), a chat (messages), a text ({prompt.column}) or tokens ({TOKENS})",
        found=f"the fields {shown or 'of an empty object'}",
        fix="name the text's field with --column",
    )


def parse_task(row: Mapping[str, Any], place: str) -> Task:
    """Return the row's ARC task."""
    name, problem = arc_task_id(row, place), task_problem(row)
    if problem is not None:
        raise DataError(f"{place}, task {name}", expected="an ARC task", found=problem)
    return Task(
        name,
        tuple(Pair(pair["input"], pair["output"]) for pair in row["train"]),
        tuple(pair["input"] for pair in row["test"]),
        tuple(pair.get("output") for pair in row["test"]),
    )


def parse_messages(row: Mapping[str, Any], place: str) -> list[dict[str, Any]]:
    """Return the row's messages."""
    messages = row.get("messages")
    if not isinstance(messages, list) or not messages:
        raise DataError(place, expected="a list of messages", found=_kind(messages))
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise DataError(place, expected='messages like {"role": …, "content": …}', found=_excerpt(message))
        if not isinstance(message.get("content"), str | list | None):
            raise DataError(place, expected="a message's content as text", found=_kind(message["content"]))
    return messages


def parse_text(row: Mapping[str, Any], column: str, place: str) -> str:
    """Return the row's text."""
    text = row.get(column)
    if not isinstance(text, str):
        expected = f"a text in {column!r}"
        if column not in row:
            found = f"the fields {', '.join(row)}"
            raise DataError(place, expected=expected, found=found, fix="name its field with --column")
        fix = "correct or leave out the row, or extract with --bad-rows skip"
        raise DataError(place, expected=expected, found=f"{_kind(text)} there", fix=fix)
    check_length(len(text), "characters", place)
    return text


def check_length(length: int, unit: str, place: str) -> None:
    """Raise :class:`DataError` for a sample that would need too much memory."""
    if length > MAX_SAMPLE_LENGTH:
        raise DataError(
            place,
            expected=f"at most {MAX_SAMPLE_LENGTH:,} {unit} in a sample",
            found=f"{length:,}",
            fix="split it into several rows, or skip such rows with --bad-rows skip",
        )


def parse_token_ids(row: Mapping[str, Any], column: str, vocabulary: int | None, place: str) -> npt.NDArray[np.int32]:
    """Return the row's token ids without those that its attention mask excludes (padding)."""
    found = row.get(column)
    if isinstance(found, list):
        check_length(len(found), "token ids", place)
    tokens = _integers(found)
    if tokens is None:
        fields = f"{_kind(found)} there" if column in row else f"the fields {', '.join(row)}"
        raise DataError(place, expected=f"a list of token ids in {column!r}", found=fields, fix="name it with --column")
    if vocabulary is not None and len(tokens) and not 0 <= tokens.min() <= tokens.max() < vocabulary:
        wrong = tokens[(tokens < 0) | (tokens >= vocabulary)][0]
        raise DataError(
            place,
            expected=f"token ids from 0 to {vocabulary - 1:,}, the model's vocabulary",
            found=str(wrong),
            fix="tokenize with this model's own tokenizer",
        )
    if MASK not in row:
        return tokens.astype(np.int32)
    mask = _integers(row[MASK])
    if mask is None or len(mask) != len(tokens):
        raise DataError(place, expected=f"{len(tokens)} numbers in {MASK!r}, one per token", found=_kind(row[MASK]))
    return np.asarray(tokens[mask != 0], np.int32)


def parse_roles(row: Mapping[str, Any], count: int, place: str) -> npt.NDArray[np.int64] | None:
    """Return the roles of the row's ``count`` token ids, or None if it has none."""
    if ROLES_FIELD not in row:
        return None
    roles = _integers(row[ROLES_FIELD])
    if roles is None or len(roles) != count or not ((roles >= -1) & (roles < 256)).all():
        raise DataError(
            place, expected=f"{count} roles in {ROLES_FIELD!r}, one per token", found=_kind(row[ROLES_FIELD])
        )
    return roles


def _integers(value: object) -> npt.NDArray[np.int64] | None:
    """Return a list of integers as an array, or None for any other value."""
    if not isinstance(value, list):
        return None
    try:
        found = np.array(value) if value else np.empty(0, np.int64)
    except ValueError:  # nested lists of different lengths
        return None
    return found if found.dtype == np.int64 and found.ndim == 1 else None


def elements(data: Any) -> Iterator[Any]:
    """Yield the elements of a sequence, or the rows of a table as dicts."""
    if hasattr(data, "iter_rows"):  # polars
        return iter(data.iter_rows(named=True))
    if hasattr(data, "to_batches"):  # pyarrow
        return chain.from_iterable(batch.to_pylist() for batch in data.to_batches(max_chunksize=_TABLE_ROWS))
    if hasattr(data, "iloc") and hasattr(data, "columns"):  # pandas
        starts = range(0, len(data), _TABLE_ROWS)
        return chain.from_iterable(data.iloc[start : start + _TABLE_ROWS].to_dict("records") for start in starts)
    return iter(data)


def plain_value(value: Any) -> Any:
    """Return a scalar or an array of NumPy, or a time, as JSON holds it."""
    value = value.tolist() if hasattr(value, "tolist") else value
    return value.isoformat() if hasattr(value, "isoformat") else value


def scalar_fields(row: Mapping[str, Any], column: str) -> dict[str, object]:
    """Return the numbers, booleans and short texts of a row besides its sample, up to the maximum size."""
    kept: dict[str, object] = {}
    size = 0
    for name, value in row.items():
        if name == column or name in SAMPLE_FIELDS or not isinstance(value, bool | int | float | str | None):
            continue
        if isinstance(value, str) and len(value) > _SHORT:
            continue
        size += len(_to_json({name: value}))
        if size > _MAX_KEPT_BYTES:
            break
        kept[name] = value
    return kept


def select_kept_fields(
    row: Mapping[str, Any], names: Sequence[str], column: str, place: str
) -> dict[str, object] | None:
    """Return the fields of a row that the run keeps, or None if it keeps none."""
    if tuple(names) == (EVERY_FIELD,):
        return scalar_fields(row, column) or None
    if not names:
        return None
    missing = [name for name in names if name not in row]
    if missing:
        raise DataError(
            place,
            expected=f"the fields of --keep: {', '.join(names)}",
            found=f"no {', '.join(missing)}, but {', '.join(row)}",
            fix="leave it out of --keep, or give every row one (null if there is none)",
        )
    kept = {name: row[name] for name in names}
    size = len(_to_json(kept))
    if size > _MAX_KEPT_BYTES:
        found = f"{size:,} in {', '.join(names)}"
        raise DataError(place, expected=f"at most {_MAX_KEPT_BYTES:,} bytes to --keep of a row", found=found)
    return kept


def _kind(value: object) -> str:
    if value is None or value == [] or value != value:
        return "an empty list" if value == [] else "nothing"
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean"}
    return next((name for kind, name in names.items() if isinstance(value, kind)), "a number")


def _excerpt(value: object) -> str:
    raw = value if isinstance(value, bytes) else _to_json(value)
    return repr(raw[:60].decode(errors="replace"))


def _to_json(value: object) -> bytes:
    try:
        return orjson.dumps(value, option=orjson.OPT_SORT_KEYS)
    except TypeError as error:  # orjson reads deeper nesting than it writes
        raise DataError("a row cannot be written as JSON", found=str(error)) from error
