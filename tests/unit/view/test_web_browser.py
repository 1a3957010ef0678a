"""``spile view`` in a real browser: hostile text, figures, keyboard, widths, updates, and a server that goes away."""

from __future__ import annotations

import re
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from spile.data.arc.answers import Score, TaskAnswers, TaskScore
from spile.data.arc.grids import Pair, Task
from spile.reading.dataset import open as open_dataset
from spile.store.snapshot import SnapshotReader
from spile.view.web.export import exported_page, score_page
from spile.view.web.features import FeatureIndex, load_autoencoder
from spile.view.web.pages import Viewer
from spile.view.web.roots import Root
from viewing import AXE, HOSTILE, chromium, make_root, opened, serving, until

PAGES = ("runs", "samples", "layers", "compare", "features")
pytestmark = pytest.mark.xdist_group("chromium")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as found:
        yield found


@pytest.fixture(scope="module")
def features(tmp_path_factory: pytest.TempPathFactory) -> FeatureIndex:
    folder = tmp_path_factory.mktemp("sae") / "layers.1"
    folder.mkdir()
    source = np.random.default_rng(0)
    shapes = {"encoder.weight": (24, 8), "encoder.bias": (24,), "W_dec": (24, 8), "b_dec": (8,)}
    weights = {name: source.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    safetensors.numpy.save_file(weights, folder / "sae.safetensors")
    (folder / "cfg.json").write_text('{"k": 4}')
    return FeatureIndex(load_autoencoder(folder), None)


def number(text: str) -> float:
    return float(text.replace(",", "").replace("−", "-").replace("%", ""))


def test_a_dataset_of_hostile_strings_is_shown_as_text(browser: Any, tmp_path: Path) -> None:
    root = make_root(tmp_path / "root", text=HOSTILE, answers=True)
    with serving(Viewer([Root(root)])) as server:
        for page in ("samples", "layers", "runs"):
            with opened(browser, f"{server.url}#/{page}/0") as tab:
                assert tab.evaluate("window.ran") is None
                assert tab.locator("main script, main img").count() == 0
                if page == "samples":
                    assert HOSTILE in tab.locator("main").inner_text()
                    shown = [number(each) for each in tab.locator(".card .tokens span").evaluate_all(VALUES)]
                    logprobs, norms = shown[:2], shown[2:]
                    dataset = open_dataset(root)
                    wanted = np.linalg.norm(dataset[0]["attn.1"].astype(np.float64), axis=1)
                    assert logprobs == [0.25, 1.5]
                    np.testing.assert_allclose(norms, wanted, rtol=1e-5)
                    assert number(tab.locator("[data-figure=logprob]").inner_text()) == -1.75


VALUES = "spans => spans.map(each => each.dataset.value)"


@pytest.mark.slow
def test_the_figures_of_every_page_are_those_of_the_python_api(
    browser: Any, tmp_path: Path, features: FeatureIndex
) -> None:
    one, two = make_root(tmp_path / "one"), make_root(tmp_path / "two", shift=0.5)
    dataset = open_dataset(one)
    with serving(Viewer([Root(one), Root(two)], features)) as server:
        with opened(browser, f"{server.url}#/runs/0") as tab:
            snapshot = SnapshotReader(dataset.root).take()
            tiles = tab.locator("dd[data-figure]").evaluate_all("all => all.map(e => [e.dataset.figure, e.innerText])")
            found = dict(tiles)
            assert number(found["Samples"]) == snapshot.total("samples") == 30
            assert number(found["Tokens"]) == snapshot.total("tokens")
            assert found["Done"] == "100 %"
        with opened(browser, f"{server.url}#/layers/0?tap=attn.1") as tab:
            rows = tab.locator("[aria-label=Taps] tbody tr").evaluate_all(CELLS)
            for tap, count, median, high, largest, sinks in rows:
                stats = dataset.stats(tap)
                assert (number(count), number(sinks)) == (stats.count, stats.sinks)
                figures = [stats.norm_quantile(0.5), stats.norm_quantile(0.99), stats.top[0].norm]
                assert [number(each) for each in (median, high, largest)] == pytest.approx(figures, rel=1e-3)
            assert tab.locator("figure").count() == 5
            for each in tab.locator("figure").all():  # Every plot has a title, a sentence and named axes.
                assert each.locator("h2").inner_text()
                assert each.locator("p.read").inner_text().endswith(".")
                assert each.locator("text.title").count() == 2
        with opened(browser, f"{server.url}#/compare/0") as tab:
            rows = tab.locator("[aria-label='Distance by tap'] tbody tr").evaluate_all(CELLS)
            from spile.reading.inspection import compare_datasets

            wanted = compare_datasets(dataset, open_dataset(two), samples=24).taps
            assert {row[0]: number(row[2]) for row in rows} == pytest.approx(
                {tap: each.median for tap, each in wanted.items()}, rel=1e-3
            )
        with opened(browser, f"{server.url}#/features/0/3") as tab:
            shown = [number(each) for each in tab.locator("[data-figure=activation]").all_inner_texts()]
            rows_of = [features.sae.encode(sample["residual.1"])[:, 3].max(initial=0) for sample in dataset]
            best = sorted((each for each in rows_of if each > 0), reverse=True)[:12]
            assert shown == pytest.approx(best, rel=1e-3)


CELLS = "rows => rows.map(row => [...row.children].map(cell => cell.innerText))"


@pytest.mark.slow
def test_every_page_works_at_every_width_in_light_and_dark_and_passes_axe(
    browser: Any, tmp_path: Path, features: FeatureIndex
) -> None:
    one, two = make_root(tmp_path / "one", answers=True), make_root(tmp_path / "two", shift=0.5, answers=True)
    with serving(Viewer([Root(one), Root(two)], features)) as server:
        for page in PAGES:
            for width, scheme in ((360, "light"), (1280, "dark"), (2560, "light")):
                with opened(browser, f"{server.url}#/{page}/0", width=width, scheme=scheme) as tab:
                    assert tab.evaluate("document.documentElement.scrollWidth <= innerWidth"), (page, width)
                    assert tab.locator(".error").count() == 0, tab.locator(".error").all_inner_texts()
                    if AXE.is_file():
                        tab.evaluate(AXE.read_text())  # Not as a script element, which the policy forbids.
                        found = tab.evaluate("axe.run(document, {resultTypes: ['violations']})")
                        wrong = [each for each in found["violations"] if each["impact"] in ("serious", "critical")]
                        assert not wrong, (page, width, [(each["id"], each["nodes"][0]["html"]) for each in wrong])
    if not AXE.is_file():
        pytest.skip("widths and colours are right; no axe-core here: npm install --prefix .axe axe-core")


@pytest.mark.slow
def test_the_keyboard_alone_opens_a_stream_and_a_sample(browser: Any, tmp_path: Path) -> None:
    root = make_root(tmp_path / "root")
    with serving(Viewer([Root(root)])) as server:
        with opened(browser, f"{server.url}#/runs/0") as tab:
            press_to(tab, "Streams")
            tab.keyboard.press("ArrowDown")
            tab.keyboard.press("Enter")
            tab.wait_for_selector("section pre")
            assert "tpu_0" in tab.locator("section:has(pre) h2").inner_text()
        with opened(browser, f"{server.url}#/samples/0") as tab:
            press_to(tab, "Samples")
            for _ in range(4):
                tab.keyboard.press("ArrowDown")
            tab.keyboard.press("Enter")
            until(tab, "location.hash === '#/samples/0/0/3'")
            until(tab, "document.querySelector('main h2 + p')?.innerText.includes('sample 3')")
            press_to(tab, "Tokens of the sample")
            tab.keyboard.press("ArrowRight")
            assert "position 0" in tab.locator(".readout").first.inner_text()


def press_to(tab: Any, label: str) -> None:
    for _ in range(60):
        tab.keyboard.press("Tab")
        if tab.evaluate("document.activeElement.getAttribute('aria-label')") == label:
            return
    raise AssertionError(f"Tab never reaches {label}")


@pytest.mark.slow
def test_a_server_that_goes_away_and_returns_is_noticed(browser: Any, tmp_path: Path) -> None:
    root = make_root(tmp_path / "root", done=False)
    with serving(Viewer([Root(root)])) as server:
        port = int(re.search(r":(\d+)/", server.url)[1])  # type: ignore[index]
        stack = opened(browser, f"{server.url}#/runs/0", quiet=False)
        tab = stack.__enter__()
    try:
        tab.wait_for_selector("#banner:not([hidden])")
        assert "does not answer" in tab.locator("#banner").inner_text()
        with serving(Viewer([Root(root)]), port=port):
            tab.wait_for_selector("#banner[hidden]", state="attached", timeout=60_000)
    finally:
        stack.__exit__(None, None, None)


@pytest.mark.slow
def test_a_bucket_that_goes_away_and_returns_and_a_run_that_grows(browser: Any, tmp_path: Path) -> None:
    root = make_root(tmp_path / "root", done=False)
    broken = threading.Event()

    class Flaky(Root):
        def describe_run(self, max_age: float = 2.0) -> dict[str, Any]:
            if broken.is_set():
                raise OSError("the bucket is away")
            return super().describe_run(0.0)

    with serving(Viewer([Flaky(root)])) as server, opened(browser, f"{server.url}#/runs/0") as tab:
        assert number(tab.locator("[data-figure=Samples]").inner_text()) == 30
        broken.set()
        tab.wait_for_selector("#banner:not([hidden])")
        assert "the bucket is away" in tab.locator("#banner").inner_text()
        shutil.rmtree(root)
        make_root(root, 60)
        broken.clear()
        tab.wait_for_selector("#banner[hidden]", state="attached")
        until(tab, "document.querySelector('[data-figure=Samples]').innerText === '60'")


@pytest.mark.slow
def test_another_host_shows_the_page_only_with_its_token(browser: Any, tmp_path: Path) -> None:
    root = make_root(tmp_path / "root")
    with serving(Viewer([Root(root)]), host="0.0.0.0") as server:
        local = re.sub(r"//[^:/]+", "//127.0.0.1", server.url)
        with opened(browser, local.partition("#")[0], quiet=False) as tab:
            assert "the token is missing or wrong" in tab.locator("main").inner_text()
        with opened(browser, local) as tab:
            tab.wait_for_selector("[data-figure=Samples]")
            assert "token" not in tab.url


@pytest.mark.slow
def test_an_exported_file_shows_every_page_without_a_server(
    browser: Any, tmp_path: Path, features: FeatureIndex
) -> None:
    one, two = make_root(tmp_path / "one", text=HOSTILE), make_root(tmp_path / "two", text=HOSTILE, shift=0.5)
    file = tmp_path / "page.html"
    file.write_text(exported_page(Viewer([Root(one), Root(two)], features)), encoding="utf-8")
    for page in PAGES:
        with opened(browser, f"{file.as_uri()}#/{page}/0") as tab:
            assert tab.evaluate("window.ran") is None
            assert tab.locator(".error").count() == 0, (page, tab.locator(".error").all_inner_texts())
            assert tab.locator("nav a").count() == len(PAGES)
            requests = tab.evaluate("performance.getEntriesByType('resource').filter(e => !e.name.startsWith('data:'))")
            assert requests == []


@pytest.mark.slow
def test_a_page_and_a_figure_can_be_saved_as_files(browser: Any, tmp_path: Path) -> None:
    root = make_root(tmp_path / "root")
    with serving(Viewer([Root(root)])) as server, opened(browser, f"{server.url}#/layers/0?tap=attn.1") as tab:
        for label, name in (("Save Norms by layer as SVG", "norms.svg"), ("Save Norms by layer as PNG", "norms.png")):
            with tab.expect_download() as waiting:
                tab.get_by_label(label).click()
            waiting.value.save_as(tmp_path / name)
        with tab.expect_download() as waiting:
            tab.get_by_text("Save page").click()
        waiting.value.save_as(tmp_path / "saved.html")
    assert (tmp_path / "norms.svg").read_text().startswith("<svg")
    assert "var(--" not in (tmp_path / "norms.svg").read_text()
    assert (tmp_path / "norms.png").read_bytes().startswith(b"\x89PNG")
    with opened(browser, (tmp_path / "saved.html").as_uri()) as tab:
        assert "Distribution of norms at attn.1" in tab.locator("main").inner_text()


def a_score(name: str = HOSTILE) -> Score:
    task = Task(name, (Pair([[1, 2]], [[2, 1]]), Pair([[3]], [[3]])), ([[4, 5]],))
    right = TaskScore(TaskAnswers("right", ([[5, 4]],), (3,), 3, 0), [[5, 4]], task)
    wrong = TaskScore(TaskAnswers(name, ([[5, 5]], [[1]]), (2, 1), 4, 1), [[5, 4]], task)
    none = TaskScore(TaskAnswers("none", (), (), 1, 1), None)
    return Score((right, wrong, none))


def test_the_page_of_scores_shows_wrong_cells_and_hostile_names(browser: Any, tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    file.write_text(score_page(str(tmp_path), a_score()), encoding="utf-8")
    with opened(browser, file.as_uri()) as tab:
        line = (
            "1 of 2 tasks right (50.0 %), 1 within two attempts; 8 answers, 2 unreadable; 1 tasks without a reference"
        )
        assert tab.locator("[data-figure=score]").inner_text() == line
        until(tab, "document.querySelectorAll('article canvas').length === 15")
        assert tab.locator("canvas[data-wrong='1']").count() == 1
        assert HOSTILE in tab.locator("main").inner_text()
        assert tab.evaluate("window.ran") is None
        tab.get_by_role("button", name="wrong").click()
        assert tab.locator("article:visible").count() == 1
        assert "1 tasks shown" in tab.locator("main").inner_text()


@pytest.mark.slow
def test_grids_are_drawn_when_their_task_comes_near(browser: Any, tmp_path: Path) -> None:
    (right, *_) = a_score().tasks
    file = tmp_path / "page.html"
    file.write_text(score_page(str(tmp_path), Score((right,) * 300)), encoding="utf-8")
    with opened(browser, file.as_uri()) as tab:
        tab.wait_for_selector("canvas")
        before = tab.locator("canvas").count()
        assert before < 300 * 7 / 3
        tab.evaluate("scrollTo(0, 1e7)")
        until(tab, f"document.querySelectorAll('canvas').length > {before}")
