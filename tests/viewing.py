"""Datasets, servers and a real browser for the tests of the web application."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spile.models.model_files import find
from spile.objects import open_folder
from spile.spec.run import GenerationSpec
from spile.spec.sample import Prediction, Role
from spile.store.predictions import put_predictions
from spile.store.run import join_run
from spile.store.writer import join_stream
from world import TAPS, D, rows_of, run_identity, sample_of, stream_identity

HOSTILE = (
    '<script>window.ran=1</script><img src=x onerror="window.ran=1">"\'></svg></p>&amp;<!--\u2028javascript:alert(1)'
)
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
AXE = Path(__file__).parents[1] / ".axe/node_modules/axe-core/axe.min.js"
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage",
)  # fmt: skip


def make_root(
    path: Path | str,
    samples: int = 30,
    *,
    text: str = "",
    shift: float = 0.0,
    width: int = D,
    answers: bool = False,
    done: bool = True,
) -> str:
    """Write a dataset of three shards. ``text`` is every string in it; ``shift`` is added to all rows."""
    folder = open_folder(str(path))
    generation = GenerationSpec(max_new_tokens=64) if answers else None
    run = run_identity(
        model=text or "embedded", tokenizer=_tokenizer_hash(), keep=("label",), generation=generation, d_model=width
    )
    join_run(folder, run)
    store = join_stream(folder, 0, stream_identity(samples if done else samples * 2), run)
    store.statistics = True
    for first in range(0, samples, samples // 3):
        part = [_sample(number, text, answers) for number in range(first, min(samples, first + samples // 3))]
        builder = store.begin(part)
        for tap in range(len(TAPS)):
            rows = np.concatenate([rows_of(each, tap, width, "float32") for each in part]) + np.float32(shift)
            builder.write(tap, 0, rows.astype("bfloat16"))
        record = builder.finish()
        if answers:
            record = put_predictions(store.folder, record, [_prediction(each, text) for each in part])
        store.commit([record])
    if done:
        store.finish()
    return str(path)


@cache
def _tokenizer_hash() -> str:
    return find("embedded", weights=False).tokenizer_hash()


def _sample(number: int, text: str, answers: bool) -> Any:
    made = sample_of(number, length=5 + number % 20)
    roles = made.roles.copy()
    if answers:
        roles[-2:] |= np.uint8(Role.ANSWER)
    kept = {"label": text or ("even", "odd")[number % 2]}
    return replace(made, roles=roles, kept=kept, task_id=text or made.task_id, preview=text or made.preview)


def _prediction(sample: Any, text: str) -> Prediction:
    tokens = tuple(int(token) for token in sample.tokens[-2:])
    return Prediction(
        sample.index, sample.task_id, text or "an answer", tokens, (-0.25, -1.5), "length", sample.augmentation
    )


@contextmanager
def serving(viewer: Any, **options: Any) -> Iterator[Any]:
    """Serve a viewer on a free loopback port."""
    pytest.importorskip("starlette", reason="no starlette here")
    pytest.importorskip("uvicorn", reason="no uvicorn here")
    from spile.view.web.server import WebServer

    with WebServer(viewer, **{"port": 0, "interval": 0.5, **options}).in_background() as server:
        yield server


@contextmanager
def chromium() -> Iterator[Any]:
    """Start Chromium under Playwright."""
    if CHROMIUM is None:
        pytest.skip("no Chromium here")
    driver = pytest.importorskip("playwright.sync_api", reason="no playwright here")
    with driver.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=[*FLAGS])
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def opened(browser: Any, url: str, *, width: int = 1280, scheme: str = "light", quiet: bool = True) -> Iterator[Any]:
    """Open a page and wait until it is drawn. Unless ``quiet`` is False, its console must have no error at the end."""
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    wrong: list[str] = []
    page.on("console", lambda message: wrong.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("dialog", lambda dialog: (wrong.append("a dialog"), dialog.dismiss()))
    try:
        page.goto(url)
        page.wait_for_selector("main[data-ready=true]", timeout=60_000)
        yield page
        assert not (quiet and wrong), wrong
    finally:
        page.close()


def until(page: Any, expression: str) -> None:
    """Wait until an expression is true. Playwright's own function uses eval, which the page's policy forbids."""
    end = time.monotonic() + 60
    while not page.evaluate(expression):
        assert time.monotonic() < end, expression
        page.wait_for_timeout(50)
