"""The pictures of the documentation: pages of ``spile view`` on what the embedded model stores.

``SPILE_WRITE_SCREENS=1`` writes them to ``docs/images``.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from spile.cli.main import main
from spile.view.web.pages import Viewer
from spile.view.web.roots import Root
from viewing import chromium, opened, serving

IMAGES = Path(__file__).parents[3] / "docs/images"
PICTURES = {
    "view-run": ("#/runs/0", "light", 860),
    "view-samples": ("#/samples/0", "light", 1000),
    "view-layers": ("#/layers/0?tap=residual.3", "dark", 1000),
    "view-compare": ("#/compare/0", "light", 900),
}


@pytest.mark.slow
def test_the_pictures_of_the_documentation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for output, dtype in (("activations", "bfloat16"), ("int8", "int8")):
        words = [
            "extract",
            "--output",
            output,
            "--store-dtype",
            dtype,
            "--max-samples",
            "12",
            "--shard-size-gb",
            "0.004",
        ]
        with pytest.raises(SystemExit) as ended:
            main(words)
        assert ended.value.code == 0
    write = os.environ.get("SPILE_WRITE_SCREENS") == "1"
    with serving(Viewer([Root("activations"), Root("int8")])) as server, chromium() as browser:
        for name, (address, scheme, height) in PICTURES.items():
            with opened(browser, server.url + address, scheme=scheme) as page:
                assert page.locator(".error").count() == 0
                page.set_viewport_size({"width": 1280, "height": height})
                page.wait_for_timeout(200)
                file = (IMAGES if write else tmp_path) / f"{name}.png"
                page.screenshot(path=file)
                assert file.stat().st_size > 20_000  # A blank page has a few thousand bytes.
