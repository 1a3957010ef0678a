"""``spile view``: the web application for runs and activations."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from spile.errors import SpecError, UserError
from spile.spec.amounts import size
from spile.view.table import output

if TYPE_CHECKING:
    from spile.view.web.pages import Viewer


def view(
    roots: Annotated[
        list[str] | None,
        Parameter(
            help="Datasets: folders, gs://…, s3://…, az://…; or a fleet's gs://bucket/fleet/NAME. [default: "
            "./activations]",
            negative="",
        ),
    ] = None,
    *,
    host: Annotated[
        str, Parameter(help="The address to listen on. One that other machines can reach needs a token.")
    ] = "127.0.0.1",
    port: Annotated[int | None, Parameter(help="The port. [default: 8765, or a free one if that is taken]")] = None,
    interval: Annotated[float, Parameter(help="Seconds between two updates of a run.")] = 5.0,
    sae: Annotated[
        Path | None, Parameter(help="The checkpoint of a sparse autoencoder: a folder of SAELens or sparsify.")
    ] = None,
    sae_tap: Annotated[
        str | None, Parameter(help="The tap of the autoencoder. [default: the one that the checkpoint states]")
    ] = None,
    model: Annotated[
        str | None, Parameter(help="Where the model is now, if it moved: its tokenizer gives the texts of tokens.")
    ] = None,
    export: Annotated[
        Path | None, Parameter(help="Write the pages to this HTML file, which contains everything, and exit.")
    ] = None,
    samples: Annotated[int, Parameter(help="With --export: the number of samples in the file.")] = 12,
) -> int:
    """Show runs, samples, layers and features in the browser. Nothing is changed; only the parts shown are read.

    Runs are updated while they grow. Two datasets are also compared, sample by sample. On an address that other
    machines can reach, the page needs the token in the printed address, or in the variable SPILE_VIEW_TOKEN.
    """
    if not 0.5 <= interval <= 3600:
        raise SpecError("--interval", expected="from 0.5 to 3600 seconds", found=f"{interval:g}")
    viewer = make_viewer(roots or ["./activations"], model=model, sae=sae, sae_tap=sae_tap, live=export is None)
    console = output()
    if export is not None:
        from spile.view.web.export import exported_page, write_page

        page = exported_page(viewer, samples=max(0, samples))
        write_page(page, export, "--export")
        console.print(f"wrote {export} ({size(len(page.encode()))}): one file, nothing is fetched", markup=False)
        return 0
    from spile.view.web.server import WebServer

    server = WebServer(viewer, host=host, port=port, interval=interval)
    console.print(f"{server.url}  (Ctrl+C stops it)", markup=False, soft_wrap=True, highlight=False)
    server.run()
    return 0


def make_viewer(
    roots: Sequence[str],
    *,
    model: str | None = None,
    sae: Path | None = None,
    sae_tap: str | None = None,
    live: bool = True,
) -> Viewer:
    """Open the roots of the command line; a dataset that does not exist is an error unless it is being made."""
    from spile.cli.fleet import fleet_home
    from spile.store.stream import read_run
    from spile.view.web.features import open_features
    from spile.view.web.pages import Viewer
    from spile.view.web.roots import Root

    opened = [Root(root, fleet_home(root, None), model) for root in roots]
    for root in opened:
        if root.home is None and read_run(root.folder) is None:
            raise UserError(f"no dataset at {root.url}", expected="a folder with run.json", found="none")
    return Viewer(opened, open_features(sae, sae_tap), live=live)


def web_of(root: str, wanted: bool, *, fleet: str | None = None) -> AbstractContextManager[object]:
    """Serve the page of a run while a block runs, and print its address, if that is wanted."""
    if not wanted:
        return nullcontext()
    from spile.cli.fleet import fleet_home
    from spile.view.web.pages import Viewer
    from spile.view.web.roots import Root
    from spile.view.web.server import WebServer

    server = WebServer(Viewer([Root(root, fleet_home(root, fleet))]))
    output().print(f"web: {server.url}", markup=False, soft_wrap=True, highlight=False)
    return server.in_background()
