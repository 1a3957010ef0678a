"""The documentation is correct: links resolve, commands parse and examples run."""

from __future__ import annotations

import json
import pkgutil
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from cyclopts import CoercionError, CycloptsError, MissingArgumentError

from docs.pages import PAGES, ROOT, anchors, blocks, commands, links, mentions, name_of, prose
from spile.cli.aliases import translate
from spile.cli.main import main
from spile.cli.program import COMMANDS, GROUPS, build_app
from spile.objects import open_folder
from world import produce

pages = pytest.mark.parametrize("page", PAGES, ids=name_of)


def test_there_are_pages() -> None:
    names = {name_of(page) for page in PAGES}
    assert {"README.md", "CHANGELOG.md", "CONTRIBUTING.md", "docs/architecture.md", "docs/format.md"} <= names
    assert {"docs/guides/README.md", "docs/guides/extract.md", "docs/guides/parallel-workers.md"} <= names


@pages
def test_every_link_leads_somewhere(page: Path) -> None:
    for target in links(page):
        path, _, anchor = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        assert there.exists(), f"{name_of(page)}: no {target}"
        assert there.is_relative_to(ROOT), f"{name_of(page)}: {target} leads outside"
        if anchor and there.suffix == ".md":
            assert anchor in anchors(there), f"{name_of(page)}: no heading for {target}"


def test_every_page_can_be_reached_from_the_readme() -> None:
    seen, waiting = set(), [ROOT / "README.md"]
    while waiting:
        page = waiting.pop()
        seen.add(page)
        there = [(page.parent / link.partition("#")[0]).resolve() for link in links(page) if not link.startswith("#")]
        waiting += [each for each in there if each.suffix == ".md" and each not in seen]
    assert sorted(map(name_of, set(PAGES) - seen)) == []


def understood(words: list[str], *, whole: bool) -> None:
    """Check that all flags exist and, if the command is ``whole``, that no required flag is missing."""
    name = " ".join(words[1:3])
    if " ".join(words[1:]) in GROUPS:
        return
    words = [words[0], *translate(words[1:], {})]  # a script of the guides is a command
    assert words[1].startswith("-") or words[1] in GROUPS or any(each.name == words[1] for each in COMMANDS), words
    try:
        build_app().parse_args(words[1:], exit_on_error=False, print_error=False)
    except (MissingArgumentError, CoercionError):  # a mention may leave something out, or write N for a number
        assert not whole, words
    except CycloptsError as error:
        pytest.fail(f"{name}: {' '.join(words)}: {error}")


@pages
def test_every_command_is_understood(page: Path) -> None:
    for words in commands(page):
        words = _without_config(words)
        understood(words, whole=True)


@pages
def test_every_mention_of_a_command_is_understood(page: Path) -> None:
    for words in mentions(page):
        if len(words) > 1:
            understood(_without_config(words), whole=False)


def _without_config(words: list[str]) -> list[str]:
    """``--config FILE`` is the program's own, before any command."""
    if "--config" not in words:
        return words
    place = words.index("--config")
    return words[:place] + words[place + 2 :]


def test_commands_are_found_at_all() -> None:
    found = [words for page in PAGES for words in commands(page)]
    assert len(found) > 40
    assert {"extract", "verify", "monitor", "deploy", "run", "data", "tpu", "plan"} <= {words[1] for words in found}


@pytest.mark.parametrize("page", ["README.md", "docs/guides/extract.md", "docs/guides/python.md"])
def test_the_python_examples_run(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    produce(open_folder(str(tmp_path / "activations")), 30)
    monkeypatch.chdir(tmp_path)
    examples = blocks(ROOT / page, "python")
    assert examples
    names: dict[str, object] = {}
    for block in examples:
        if re.search(r"^(import|from) torch", block, re.MULTILINE):
            pytest.importorskip("torch")
        exec(compile(block, page, "exec"), names)


@pytest.mark.slow
def test_the_training_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = ROOT / "docs/guides/training.md"
    monkeypatch.chdir(tmp_path)
    for words in commands(page):
        with pytest.raises(SystemExit) as ended:
            main([*words[1:], "--max-samples", "3"])
        assert ended.value.code == 0
    names: dict[str, object] = {}
    for block in blocks(page, "python"):
        exec(compile(block, page.name, "exec"), names)


def named_things(page: Path) -> Iterator[str]:
    """``spile.…`` as examples import it and texts mention it."""
    for block in blocks(page, "python"):
        for module, names in re.findall(r"^ *from (spile[\w.]*) import ([\w, ]+)", block, re.MULTILINE):
            yield from (f"{module}.{name.split(' as ')[0].strip()}" for name in names.split(","))
        yield from re.findall(r"^ *import (spile[\w.]*)", block, re.MULTILINE)
    yield from re.findall(r"`(spile(?:\.[A-Za-z_]\w*)+)", prose(page))


@pages
def test_every_name_of_the_package_that_a_page_uses_is_there(page: Path) -> None:
    for name in named_things(page):
        try:
            pkgutil.resolve_name(name)
        except (ImportError, AttributeError) as error:
            pytest.fail(f"{name_of(page)}: no {name}: {error}")


@pages
def test_every_file_of_the_project_that_a_page_names_is_there(page: Path) -> None:
    """By its path from the root, or within the package or the tests."""
    rooms = {path.name for path in [*(ROOT / "src" / "spile").iterdir(), *ROOT.iterdir()] if path.is_dir()}
    for name in re.findall(r"`([\w-]+/[\w./-]*\.(?:py|sh|html))`", prose(page)):
        if name.split("/")[0] in rooms:
            places = (ROOT / name, ROOT / "src" / "spile" / name, ROOT / "tests" / name)
            assert any(place.exists() for place in places), f"{name_of(page)}: no {name}"


def test_the_batch_job_starts_a_worker_for_each_task() -> None:
    (block,) = blocks(ROOT / "docs" / "guides" / "parallel-workers.md", "json")
    (group,) = json.loads(block)["taskGroups"]
    (runnable,) = group["taskSpec"]["runnables"]
    words = shlex.split(runnable["container"]["commands"][1].replace("$BATCH_TASK_INDEX", "7"))
    _, bound, _ = build_app().parse_args(words[1:], exit_on_error=False, print_error=False)
    assert bound.arguments["flags"].worker_id == 7


@pytest.mark.parametrize("name", ["pods.md", "parallel-workers.md", "quick-experiments.md", "verify-a-pod.md"])
def test_a_guide_for_bare_hosts_begins_with_installing_spile(name: str) -> None:
    """The guides once assumed that spile was installed on the hosts."""
    text = (ROOT / "docs" / "guides" / name).read_text(encoding="utf-8")
    first = next(line for block in re.findall(r"```bash\n(.*?)```", text, re.DOTALL) for line in block.splitlines())
    assert first.startswith(("spile install ", "spile run ")), first
    assert "install" in first
