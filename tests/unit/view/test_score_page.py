"""The page of grids, opened in a real browser."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from spile.data.arc.answers import Score, TaskAnswers, TaskScore
from spile.data.arc.grids import Pair, Task
from spile.view.report import score_page

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


def a_score() -> Score:
    task = Task("<b>&'\"</script>", (Pair([[1, 2]], [[2, 1]]), Pair([[3]], [[3]])), ([[4, 5]],))
    right = TaskScore(TaskAnswers("right", ([[5, 4]],), (3,), 3, 0), [[5, 4]], task)
    wrong = TaskScore(TaskAnswers("<b>wrong</script>", ([[5, 5]], [[1]]), (2, 1), 4, 1), [[5, 4]], task)
    none = TaskScore(TaskAnswers("none", (), (), 1, 1), None)
    return Score((right, wrong, none))


def test_it_holds_everything() -> None:
    page = score_page(a_score(), "runs/<x>")
    assert "__DATA__" not in page
    assert not re.search(r"""(?:src|href)\s*=|@import|url\(|https?://""", page)  # nothing is fetched
    assert page.count("</script>") == 2  # no text of a task ends the data early


def test_an_id_that_opens_a_script_comment_hides_nothing(tmp_path: Path) -> None:
    (right, *_) = a_score().tasks
    hostile = TaskScore(TaskAnswers("<!--<script>\u2028", ([[5, 4]],), (3,), 3, 0), [[5, 4]], right.task)
    page = score_page(Score((hostile, right)), "<!--<script>")
    assert page.count("<script>") == 1
    assert "<!--" not in page
    assert "\u2028" not in page
    assert drawn(page, tmp_path).count("<article") == 2


def test_the_content_security_policy_names_the_script_by_its_hash(tmp_path: Path) -> None:
    page = score_page(a_score(), "runs")
    assert "default-src 'none'" in page
    injected = page.replace("</body>", "<script>document.title = 'injected'</script></body>")
    assert "<title>injected</title>" not in drawn(injected, tmp_path)


def drawn(page: str, folder: Path) -> str:
    """The document once the page's own script has run: no frame is waited for, a busy machine may have none."""
    if BROWSER is None:
        pytest.skip("no Chromium here")
    file = folder / "page.html"
    file.write_text(page, encoding="utf-8")
    flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--window-size=1200,2000"]
    flags += [f"--user-data-dir={folder / 'profile'}", "--enable-logging=stderr"]
    done = subprocess.run(
        [BROWSER, *flags, "--dump-dom", file.as_uri()], capture_output=True, text=True, timeout=120, check=True
    )
    assert "Uncaught" not in done.stderr
    return done.stdout


def test_a_browser_draws_it(tmp_path: Path) -> None:
    dom = drawn(score_page(a_score(), "runs/<x>"), tmp_path)
    assert (
        "1 of 2 tasks right (50.0 %), 1 within two attempts; 8 answers, 2 unreadable; 1 tasks without a reference"
        in dom
    )
    assert dom.count("<article") == 3
    assert dom.count("<canvas") == 2 * 5 + 2 + 3
    assert "&lt;b&gt;wrong&lt;/script&gt;" in dom
    assert "3 tasks shown" in dom


@pytest.mark.slow
def test_grids_are_drawn_when_their_task_comes_near(tmp_path: Path) -> None:
    (right, *_) = a_score().tasks
    page = score_page(Score((right,) * 200), "runs")
    above = drawn(page, tmp_path).count("<canvas")
    assert 0 < above < 200
    without_policy = re.sub(r"<meta http-equiv[^>]*>", "", page)
    scrolled = without_policy.replace(
        "</body>", "<script>scrollTo(0, 1e6); dispatchEvent(new Event('scroll'));</script></body>"
    )
    assert above < drawn(scrolled, tmp_path).count("<canvas") < 200 * 7
