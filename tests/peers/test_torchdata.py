"""torchdata's StatefulDataLoader saves and restores our workers' states. Runs where torchdata is installed."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torchdata", reason="no torchdata here: .ci/run makes an environment for it")
pytestmark = pytest.mark.filterwarnings("default")  # its own imports warn

from spile.objects import open_folder  # noqa: E402
from spile.reading.dataset import open as open_dataset  # noqa: E402
from world import produce  # noqa: E402


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stateful_loader_continues_where_it_stopped(tmp_path: Path, workers: int) -> None:
    from torchdata.stateful_dataloader import StatefulDataLoader

    produce(open_folder(str(tmp_path)), 60)
    dataset = open_dataset(str(tmp_path))

    def loader() -> StatefulDataLoader:
        return StatefulDataLoader(dataset.torch("attn.1", batch_rows=64), batch_size=None, num_workers=workers)

    first = loader()
    iterator = iter(first)
    next(iterator), next(iterator), next(iterator)
    state = first.state_dict()
    rest = [batch.float().sum().item() for batch in iterator]
    again = loader()
    again.load_state_dict(state)
    assert [batch.float().sum().item() for batch in again] == rest != []
