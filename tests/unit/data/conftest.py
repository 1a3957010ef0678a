from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from backends import cloud_url, clouds, shared_clouds  # noqa: F401  fixtures
from spile.data.tokens import Tokenizer, load_tokenizer
from tiny_tokenizers import CHATML, save_tokenizer


@pytest.fixture(scope="session")
def chatml(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """No BOS, EOS and ChatML: like Qwen."""
    folder = tmp_path_factory.mktemp("chatml")
    return load_tokenizer(
        save_tokenizer(folder, {"bos_token": None, "eos_token": "<|im_end|>", "chat_template": CHATML})
    )


@pytest.fixture(scope="session")
def with_bos(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """BOS before every plain text, no chat template: like a Llama base model."""
    folder = tmp_path_factory.mktemp("bos")
    return load_tokenizer(save_tokenizer(folder, {"bos_token": "<s>", "eos_token": "</s>"}, bos_in_file=True))


@pytest.fixture
def jsonl(tmp_path: Path) -> Callable[..., str]:
    """Write rows (objects, or text as it is) to a file and say where."""

    def write(rows: Iterable[object], name: str = "rows.jsonl") -> str:
        lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
        (tmp_path / name).write_text("".join(line + "\n" for line in lines))
        return str(tmp_path / name)

    return write


def task(name: str | None = "a", **changes: object) -> dict[str, Any]:
    """A small task."""
    row: dict[str, Any] = {} if name is None else {"task_id": name}
    row |= {
        "train": [{"input": [[1, 2], [3, 4]], "output": [[2, 1], [4, 3]]}, {"input": [[5]], "output": [[5]]}],
        "test": [{"input": [[0, 9, 8]]}],
    }
    return row | changes


@pytest.fixture(name="task")
def task_fixture() -> Callable[..., dict[str, Any]]:
    return task


@pytest.fixture
def tasks(jsonl: Callable[..., str], task: Callable[..., dict[str, Any]]) -> str:
    return jsonl([task(f"t{n}", test=[{"input": [[n % 10, n // 10]]}]) for n in range(40)])
