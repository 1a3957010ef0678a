"""``spile view``: the web application for runs and activations."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from spile.cli.flags import log
from spile.errors import UserError
from spile.spec.amounts import size
from spile.spec.options import check_number


def view(
    roots: list[str] | None = None,
    *,
    host: str = "127.0.0.1",
    port: int | None = None,
    interval: float = 5.0,
    sae: Path | None = None,
    sae_tap: str | None = None,
    model: str | None = None,
    export: Path | None = None,
    samples: int = 12,
) -> int:
    """Show runs, samples, layers and features in the browser. Nothing is changed; only the parts shown are read.

    Runs are updated while they grow. Two datasets are also compared, sample by sample. On an address that other
    machines can reach, the page needs the token in the printed address, or in the variable SPILE_VIEW_TOKEN.

    Args:
        roots: Datasets: folders, gs://…, s3://…, az://…; or a fleet's gs://bucket/fleet/NAME. [default: ./activations]
        host: The address to listen on. One that other machines can reach needs a token.
        port: The port. [default: 8765, or a free one if that is taken]
        interval: Seconds between two updates of a run.
        sae: The checkpoint of a sparse autoencoder: a folder of SAELens or sparsify.
        sae_tap: The tap of the autoencoder. [default: the one that the checkpoint states]
        model: Where the model is now, if it moved: its tokenizer gives the texts of tokens.
        export: Write the pages to this HTML file, which contains everything, and exit.
        samples: With --export: the number of samples in the file.
    """
    check_number("--interval", interval, 0.5, 3600)
    from spile.fleet.home import find_home
    from spile.store.run import read_run
    from spile.view.web.export import exported_page, write_page
    from spile.view.web.features import open_features
    from spile.view.web.pages import Viewer
    from spile.view.web.roots import Root
    from spile.view.web.server import WebServer

    opened = [Root(root, find_home(root), model) for root in roots or ["./activations"]]
    for root in opened:
        if root.home is None and read_run(root.folder) is None:
            raise UserError(f"no dataset at {root.url}", expected="a folder with run.json", found="none")
    viewer = Viewer(opened, open_features(sae, sae_tap))
    if export is not None:
        page = exported_page(viewer, samples=max(0, samples))
        write_page(page, export, "--export")
        log(f"wrote {export} ({size(len(page.encode()))}): one file, nothing is fetched")
        return 0
    server = WebServer(viewer, host=host, port=port, interval=interval)
    log(f"{server.url}  (Ctrl+C stops it)")
    server.run()
    return 0


def serve_page(root: str, wanted: bool, *, fleet: str | None = None) -> AbstractContextManager[object]:
    """Serve the page of a run while a block runs, and print its address, if that is wanted."""
    if not wanted:
        return nullcontext()
    from spile.fleet.home import find_home
    from spile.view.web.pages import Viewer
    from spile.view.web.roots import Root
    from spile.view.web.server import WebServer

    server = WebServer(Viewer([Root(root, find_home(root, fleet))]))
    log(f"web: {server.url}")
    return server.in_background()
