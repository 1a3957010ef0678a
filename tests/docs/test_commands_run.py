"""The commands of the documentation run as they stand, page by page, against a fake hub and fake buckets."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from docs.guide_world import GuideWorld, barc_rows, guide_world, one_machine, stream_text
from docs.old_guides import BARC
from docs.pages import PAGES, ROOT, blocks, commands, name_of
from spile.objects import open_folder
from unit.models.toy_hub import COMMIT

NOT_RUN = {
    r"spile (docker|install|collect|logs|run) ": "other hosts or a container engine: tests/fleet, tests/pod",
    r"spile (pod check|extract --topology) ": "the hosts of a TPU slice: tests/pod",
    r"spile (deploy|fleet|monitor .*/fleet/) ?": "machines of a cloud: test_old_guides_to_the_end.py, tests/fleet",
    r"spile tpu ": "machines of a cloud: test_old_guides_to_the_end.py, tests/fleet",
    r"spile monitor ": "it watches until it is interrupted: tests/unit/view, tests/fleet",
    r"spile (view (?!.*--export)|extract --web)": "it serves a page: tests/unit/view/test_web.py, test_web_browser.py",
    r"spile (verify|inspect) \S+ --engine ": "many processes: tests/unit/store/test_parts.py",
    r"spile extract (--engine|--num-workers) ": "many processes: tests/crash/test_engine_local.py, test_ray_engine.py",
    r"spile .*(Qwen2.5-7B|mamba)": "a model that is not here: tests/numerics, tests/unit/compute/test_torch_models.py",
    r"spile (infer$|infer .*--predictions|score .*--reference)": "minutes of answers: tests/unit/cli/test_infer.py",
    r"spile import old/tpu_0 ": "pickles of the old scripts: tests/unit/reading",
    r"spile push ": "the Hugging Face hub: tests/unit/reading/test_push.py",
}
"""Commands that need what a test cannot have, or that take too long; the reason, and the tests that run them."""

ELSEWHERE = {
    "docs/cli.md": "test_cli_reference.py",
    "docs/guides/common-requests.md": "test_common_requests.py",
    "docs/guides/parallel-workers.md": "test_old_guides_to_the_end.py, in their old spelling",
}
"""Pages whose commands another test runs."""

SMALL = "spile extract --layers 0 --dataset prompts.txt"
BEFORE = {
    r"spile (inspect|export|verify|view) (\./activations|npy)": SMALL,
    r"spile extract --add-taps ": SMALL,
    r"spile data upload ": "spile data streams --num-streams 2 --output-dir data/streams",
    r"spile score ": "spile infer --max-samples 2 --max-new-tokens 16",
}
"""What a command needs and the page has not made: the reader's own data, or what other machines have stored."""
AGAIN = r"spile extract --add-taps"
"""Commands for which it is made again: the page assumes other taps."""


def runs(command: str) -> bool:
    return not any(re.match(pattern, command) for pattern in NOT_RUN)


def command_lines(page: Path) -> list[str]:
    return [shlex.join(words) for words in commands(page)]


def result_of(command: str) -> str | None:
    """Return the folder that a command writes."""
    words = shlex.split(command)
    if words[1] not in ("extract", "infer", "export", "data") or ("--to" in words[:-1] and "--add-taps" in words):
        return None
    for flag in ("--output", "--output-dir"):
        if flag in words:
            return words[words.index(flag) + 1]
    return {"extract": "./activations", "infer": "./inference"}.get(words[1])


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Iterator[GuideWorld]:
    """A folder with the files that the pages name, a model on the hub, and datasets on the hub."""
    import datasets

    def load(name: str, *_: object, **__: object) -> Any:
        rows = barc_rows() if name == BARC else [{"text": f"{n} foxes and {n} dogs"} for n in range(30)]
        return datasets.Dataset.from_list(rows).to_iterable_dataset()

    with guide_world(tmp_path, monkeypatch, capfd) as made:
        monkeypatch.setattr(datasets, "load_dataset", load)
        monkeypatch.setattr("spile.data.tables.resolve_commit", lambda *_: COMMIT)
        monkeypatch.setattr("spile.data.tables.Hub._parquet_files", [])
        one_machine(monkeypatch)
        here = Path.cwd()
        (here / "tasks.jsonl").write_bytes(stream_text(0, 4))
        (here / "reviews.csv").write_text("review,label\nThe cat sat,1\nDogs bark,0\n")
        rows = [{"text": "The cat sat", "label": 1, "source": "a"}, {"text": "Dogs bark", "label": 0, "source": "b"}]
        (here / "reviews.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        chats = [{"messages": [{"role": "user", "content": text}]} for text in ("The cat sat", "Dogs bark")]
        (here / "chats.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats))
        (here / "prompts.txt").write_text("The cat sat\nDogs bark\n")
        width = json.loads((tmp_path / "model" / "config.json").read_text())["hidden_size"]
        save_file({"vector": np.ones(width, np.float32)}, here / "vector.safetensors")
        (here / "arc-agi" / "training").mkdir(parents=True)
        (here / "arc-agi" / "training" / "t0.json").write_bytes(stream_text(0, 1))
        yield made


def prepare(world: GuideWorld, command: str, made: dict[str, str]) -> None:
    """Make what the command needs, and remove what another command has left where it writes."""
    for pattern, before in BEFORE.items():
        needed = str(result_of(before))
        if re.match(pattern, command) and (needed not in made or re.match(AGAIN, command)):
            remove(needed)
            code, shown = world.type(before.removeprefix("spile "))
            assert code == 0, shown
            made[needed] = before
    result = result_of(command)
    if result in made and not command.startswith(made[result]):
        remove(result)


def remove(result: str) -> None:
    if "://" in result:
        folder = open_folder(result)
        for info in list(folder.list()):
            folder.delete(info.key)
    else:
        shutil.rmtree(result, ignore_errors=True)


def follow(page: Path, world: GuideWorld) -> None:
    """Run the commands of a page in order."""
    for text in blocks(page, "toml"):
        Path("run.toml").write_text(text)
    made: dict[str, str] = {}
    for command in filter(runs, command_lines(page)):
        prepare(world, command, made)
        code, shown = world.type(command.removeprefix("spile ").replace("/shared/", f"{world.folder}/shared/"))
        assert code == 0, f"{command}\n{shown}"
        result = result_of(command)
        if result is not None:
            made[result] = command


def test_the_commands_of_the_readme_run(world: GuideWorld) -> None:
    follow(ROOT / "README.md", world)


_REST = [page for page in PAGES if page.name != "README.md" and name_of(page) not in ELSEWHERE]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("page", [page for page in _REST if any(map(runs, command_lines(page)))], ids=name_of)
def test_the_commands_of_a_page_run(page: Path, world: GuideWorld) -> None:
    follow(page, world)


def test_every_reason_not_to_run_a_command_is_needed() -> None:
    every = [command for page in PAGES for command in command_lines(page)]
    unused = [pattern for pattern in (*NOT_RUN, *BEFORE) if not any(re.match(pattern, each) for each in every)]
    assert unused == []
    assert sum(map(runs, every)) > 55
