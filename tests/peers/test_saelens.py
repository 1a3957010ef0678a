"""SAELens' own loader and trainer on what we write. Runs where sae-lens is installed: an environment of its own."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("sae_lens", reason="no sae-lens here: .ci/run makes an environment for it")
pytestmark = pytest.mark.filterwarnings("default")  # its own imports warn

from spile.objects import open_folder  # noqa: E402
from spile.reading.dataset import Dataset  # noqa: E402
from spile.reading.dataset import open as open_dataset  # noqa: E402
from spile.reading.export import export_dataset  # noqa: E402
from world import produce  # noqa: E402

EXAMPLE = Path(__file__).parents[2] / "examples" / "saelens.py"


@pytest.fixture
def dataset(tmp_path: Path) -> Dataset:
    produce(open_folder(str(tmp_path / "root")), 120)
    return open_dataset(str(tmp_path / "root"))


def test_its_store_reads_our_cache(dataset: Dataset, tmp_path: Path) -> None:
    import torch
    from sae_lens.training.activations_store import ActivationsStore

    done = export_dataset(dataset, str(tmp_path / "cache"), to="saelens", taps=["residual.1"], context_size=16)
    store = ActivationsStore(
        model=SimpleNamespace(tokenizer=None, cfg=SimpleNamespace(device="cpu")),
        dataset=None,
        streaming=False,
        hook_name="blocks.1.hook_resid_post",
        hook_head_index=None,
        context_size=16,
        d_in=8,
        n_batches_in_buffer=4,
        total_training_tokens=1000,
        store_batch_size_prompts=2,
        train_batch_size_tokens=32,
        prepend_bos=False,
        normalize_activations="none",
        device=torch.device("cpu"),
        dtype="float32",
        cached_activations_path=str(tmp_path / "cache"),
    )
    loaded = store.load_cached_activation_dataset()
    assert len(loaded) == done.rows
    wanted = np.concatenate(list(dataset.rows("residual.1"))).astype(np.float32)
    found = torch.cat(list(loaded["blocks.1.hook_resid_post"])).numpy()
    assert np.array_equal(found, wanted[: len(found)])
    batch = store.get_filtered_llm_batch(raise_on_epoch_end=False)
    assert batch.shape[-1] == 8


def test_its_trainer_trains_on_our_reader(dataset: Dataset) -> None:
    example = runpy.run_path(str(EXAMPLE))
    rows = iter(dataset.torch("residual.1", batch_rows=64, epochs=None, dtype="float32"))
    trainer = example["trainer"](rows, steps=20, batch_rows=64, features=32, k=4)
    before = {name: value.clone() for name, value in trainer.sae.state_dict().items()}
    trained = trainer.fit()
    assert any(not value.equal(before[name]) for name, value in trained.state_dict().items())


def test_the_example_trains_on_the_demo_and_saves_what_saelens_loads(tmp_path: Path) -> None:
    from sae_lens import SAE

    demo = ["-m", "spile.cli.main", "extract", "--output", "activations", "--max-samples", "4", "--layers", "1"]
    command = [str(EXAMPLE), "activations", "--steps", "5", "--batch-rows", "256", "--output", "sae"]
    for words in (demo, command):
        done = subprocess.run([sys.executable, *words], cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "saved sae"
    sae = SAE.load_from_disk(tmp_path / "sae")
    assert (sae.cfg.d_in, sae.cfg.d_sae) == (open_dataset(str(tmp_path / "activations")).run.d_model, 512)
