"""SAELens' own loader and trainer on what we write. Runs where sae-lens is installed: an environment of its own."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("sae_lens", reason="no sae-lens here: .ci/run makes an environment for it")
pytestmark = pytest.mark.filterwarnings("default")  # its own imports warn

from spile.objects import open_folder  # noqa: E402
from spile.reading.dataset import Dataset  # noqa: E402
from spile.reading.dataset import open as open_dataset  # noqa: E402
from spile.reading.export.tables import write_saelens  # noqa: E402
from world import produce  # noqa: E402


@pytest.fixture
def dataset(tmp_path: Path) -> Dataset:
    produce(open_folder(str(tmp_path / "root")), 120)
    return open_dataset(str(tmp_path / "root"))


def test_its_store_reads_our_cache(dataset: Dataset, tmp_path: Path) -> None:
    import torch
    from sae_lens.training.activations_store import ActivationsStore

    done = write_saelens(dataset, str(tmp_path / "cache"), "residual.1", context_size=16)
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
    from sae_lens import LoggingConfig, TopKTrainingSAE, TopKTrainingSAEConfig
    from sae_lens.config import SAETrainerConfig
    from sae_lens.training.sae_trainer import SAETrainer

    sae = TopKTrainingSAE(TopKTrainingSAEConfig(d_in=8, d_sae=32, k=4, device="cpu", dtype="float32"))
    before = {name: value.clone() for name, value in sae.state_dict().items()}
    configuration: Any = SAETrainerConfig(
        n_checkpoints=0,
        checkpoint_path=None,
        save_final_checkpoint=False,
        total_training_samples=64 * 20,
        device="cpu",
        autocast=False,
        lr=1e-3,
        lr_end=1e-4,
        lr_scheduler_name="constant",
        lr_warm_up_steps=0,
        adam_beta1=0.9,
        adam_beta2=0.999,
        lr_decay_steps=0,
        n_restart_cycles=1,
        train_batch_size_samples=64,
        dead_feature_window=1000,
        feature_sampling_window=2000,
        logger=LoggingConfig(log_to_wandb=False),
    )
    rows = iter(dataset.torch("residual.1", batch_rows=64, epochs=None, dtype="float32"))
    trainer = SAETrainer(cfg=configuration, sae=sae, data_provider=rows)
    trained = trainer.fit()
    assert any(not value.equal(before[name]) for name, value in trained.state_dict().items())
