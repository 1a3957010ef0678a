from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import get_args

import pytest

from spile.data.arc import prompts
from spile.data.arc.encoders import ENCODERS, parse_encoder
from spile.data.arc.grids import Pair, Task
from spile.data.arc.prompts import VERSIONS, arc_messages
from spile.data.lines import embedded_tasks
from spile.data.prompts import PromptBuilder
from spile.spec.run import PromptSpec, PromptVersion
from spile.spec.sample import Role

DOCS = (Path(__file__).parents[3] / "docs" / "prompts.md").read_text()
TASK = Task("t", (Pair([[1]], [[2]]), Pair([[3]], [[4]])), ([[5]], [[6]]), ([[7]], None))
PLAIN = parse_encoder("MinimalGridEncoder()")


def words(version: str) -> list[tuple[str, str]]:
    return [(message["role"], message["content"]) for message in arc_messages(TASK, PLAIN, version)]


@pytest.mark.parametrize(
    ("version", "sentence", "body", "system"),
    [
        ("output-from-examples-v0", prompts._OUTPUT_V0, "examples", False),
        ("output-from-examples-v1", prompts._OUTPUT_V1, "examples", True),
        ("input-from-inputs-v0", prompts._INPUTS, "Grid 1\n1\n\nGrid 2\n3", True),
        ("output-from-outputs-v0", prompts._OUTPUTS, "Grid 1\n2\n\nGrid 2\n4", True),
    ],
)
def test_the_words_of_each_version(version: str, sentence: str, body: str, system: bool) -> None:
    examples = "Example 1\nInput\n1\nOutput\n2\n\nExample 2\nInput\n3\nOutput\n4\n\nTest\nInput\n5\nOutput"
    user = ("user", f"{sentence}\n\n{examples if body == 'examples' else body}")
    assert words(version) == ([("system", prompts._SYSTEM)] if system else []) + [user]


def test_a_held_back_output_never_enters_a_prompt() -> None:
    assert not any("7" in content for version in VERSIONS for _, content in words(version))


def test_the_page_holds_every_version_encoder_sentence_and_role() -> None:
    for name in (*get_args(PromptVersion), *ENCODERS):
        assert f"`{name}" in DOCS
    for sentence in (prompts._SYSTEM, prompts._OUTPUT_V0, prompts._OUTPUT_V1, prompts._INPUTS, prompts._OUTPUTS):
        assert re.search(rf"^[SABCD]  {re.escape(sentence)}$", DOCS, re.MULTILINE)
    assert tuple(VERSIONS) == get_args(PromptVersion)
    for role in Role:
        label = role.name if role is Role.BOS else str(role.name).lower()
        assert f"| {role.value} | {label} |" in DOCS


def test_the_pages_examples_of_encoders_are_what_they_write() -> None:
    rows = re.findall(r"^\| `([A-Z]\w+\(.*?\))` \|.*\| `+ ?(.+?) ?`+ \|$", DOCS, re.MULTILINE)
    assert len(rows) == len(ENCODERS)
    for expression, text in rows:
        written = parse_encoder(expression.replace("\\|", "|")).to_text([[0, 1, 2], [3, 4, 5]])
        assert written.replace("\n", "⏎").strip("`") == text.replace("\\|", "|").strip("`")


@pytest.mark.parametrize("version", get_args(PromptVersion))
def test_prompts_are_the_same_bytes_on_every_machine(version: str) -> None:
    """Pinned: words, encoder and variants of the embedded tasks. A change here is a new version, never an edit."""
    builder = PromptBuilder(PromptSpec(kind="arc", version=version, predictions_per_task=4), seed=11, template=None)
    digest = hashlib.sha256()
    for number, line in enumerate(embedded_tasks().read_bytes().splitlines()):
        for prompt in builder.build(json.loads(line), range(4 * number, 4 * number + 4), f"line {number}", ""):
            digest.update(prompt.text.encode())
    assert digest.hexdigest()[:16] == PINNED[version]


PINNED = {
    "output-from-examples-v0": "70dc9e48baa34216",
    "output-from-examples-v1": "fb587469c048aace",
    "input-from-inputs-v0": "19c71bcc172d73a2",
    "output-from-outputs-v0": "1e98392cd2850f0e",
}
