"""Each of the ten common requests is short, is two clicks from the README, and does what its heading says."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from tests.fakes.gcs import FakeGcs

import spile
from docs.pages import BLOCK, ROOT, links
from spile.cli.main import main
from unit.models.toy_models import small_model

PAGE = ROOT / "docs" / "guides" / "common-requests.md"
SECTIONS = re.findall(r"^## (\d+\. .*?)\n(.*?)(?=^## |\Z)", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
PROMPTS = ["The cat sat on the mat", "Dogs bark", "Seven green papers"]
LABELS = ["1", "0", "1"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with the files that the page names: a model of 13 layers, an adapter and three datasets."""
    folder = tmp_path_factory.mktemp("requests")
    small_model(folder / "model", 13)
    (folder / "my-lora").mkdir()
    name = "base_model.model.model.layers.0.self_attn.q_proj"
    factors = {
        f"{name}.lora_A.weight": np.ones((2, 16), np.float32),
        f"{name}.lora_B.weight": np.ones((16, 2), np.float32),
    }
    save_file(factors, folder / "my-lora" / "adapter_model.safetensors")
    about = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "bias": "none", "target_modules": ["q_proj"]}
    (folder / "my-lora" / "adapter_config.json").write_text(json.dumps(about))
    (folder / "prompts.txt").write_text("\n".join(PROMPTS))
    rows = [f"{prompt},{label}" for prompt, label in zip(PROMPTS, LABELS, strict=True)]
    (folder / "reviews.csv").write_text("\n".join(["review,label", *rows]))
    chat = [{"role": "user", "content": "Which colour?"}, {"role": "assistant", "content": "green"}]
    (folder / "chats.jsonl").write_text(json.dumps({"messages": chat}) + "\n")
    before = Path.cwd()
    with FakeGcs() as bucket, pytest.MonkeyPatch.context() as patch:
        bucket.add_bucket("my-bucket")
        patch.setenv("STORAGE_EMULATOR_HOST", bucket.url)
        os.chdir(folder)
        yield folder
        os.chdir(before)


def stored(root: str, samples: int = 3) -> spile.Dataset:
    assert spile.verify(root).ok
    dataset = spile.open(root)
    assert len(dataset) == samples
    return dataset


def check_last(_: str) -> None:
    assert stored("./last").numpy("residual.12", positions="all").shape == (3, 16)


def check_npy(_: str) -> None:
    assert sorted(file.name for file in Path("npy").glob("residual*")) == ["residual.12.npy", "residual.5.npy"]
    assert np.load("npy/residual.5.npy").dtype == np.float16


def check_column(_: str) -> None:
    dataset = stored("./reviews")
    assert [sample.text for sample in dataset] == PROMPTS
    assert dataset.labels("label").tolist() == LABELS


def check_list(shown: str) -> None:
    assert "16)" in shown


def check_resume(shown: str) -> None:
    stored("gs://my-bucket/activations")
    again = run(SECTIONS[4][1])
    assert "3 stored" in shown
    assert "nothing" in again or "0 of them now" in again


def check_size(shown: str) -> None:
    assert re.search(r"\d ?(bytes|[kMG]B)", shown)


def check_limit(_: str) -> None:
    stored("./small")
    run(SECTIONS[6][1].replace("1GB", "5kB").replace("./small", "./smaller"))  # all three: 12 kB
    stored("./smaller", 2)


def check_adapter(_: str) -> None:
    run(SECTIONS[6][1])
    plain, adapted = stored("./small"), stored("./lora")
    assert not np.array_equal(plain.numpy("residual.12"), adapted.numpy("residual.12"))


def check_answer(_: str) -> None:
    dataset = stored("./answers", 1)
    assert dataset.decode(dataset[0].tokens) == "green<|im_end|>"
    assert len(dataset[0]["residual.12"]) == len(dataset[0].tokens)


def check_text(_: str) -> None:
    assert [sample.text for sample in stored("./prompts")] == PROMPTS


CHECKS: list[Callable[[str], None]] = [
    check_last, check_npy, check_column, check_list, check_resume,
    check_size, check_limit, check_adapter, check_answer, check_text,
]  # fmt: skip


def run(body: str) -> str:
    """Run the only block of a section as it stands and return what it prints."""
    ((_, language, block),) = BLOCK.findall(body)
    assert language in ("bash", "python")
    lines = [line for line in block.splitlines() if line]
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown), contextlib.redirect_stderr(shown):
        if language == "python":
            assert len(lines) <= 5
            exec(compile(block, PAGE.name, "exec"), {})
        else:
            (command,) = lines
            with pytest.raises(SystemExit) as ended:
                main(shlex.split(command)[1:])
            assert ended.value.code == 0, shown.getvalue()
    return shown.getvalue()


def test_there_are_ten_and_the_readme_links_to_them() -> None:
    assert [title.split(".")[0] for title, _ in SECTIONS] == [str(number) for number in range(1, 11)]
    assert "docs/guides/common-requests.md" in links(ROOT / "README.md")


@pytest.mark.parametrize("number", range(10), ids=[title for title, _ in SECTIONS])
def test_a_request_does_what_its_heading_says(number: int, folder: Path) -> None:
    CHECKS[number](run(SECTIONS[number][1]))
