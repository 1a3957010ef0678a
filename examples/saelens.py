"""SAELens' own trainer on a spile dataset, without an export: it takes any iterator over batches.

pip install sae-lens
python examples/saelens.py ./activations --tap residual.1 --steps 200 --output sae
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

from sae_lens import LoggingConfig, TopKTrainingSAE, TopKTrainingSAEConfig
from sae_lens.config import SAETrainerConfig
from sae_lens.training.sae_trainer import SAETrainer

import spile


def trainer(rows: Iterator[Any], *, steps: int, batch_rows: int, features: int, k: int) -> SAETrainer[Any, Any]:
    """Return a top-k autoencoder and its trainer; the first batch determines the width of rows."""
    width = next(rows).shape[1]
    sae = TopKTrainingSAE(TopKTrainingSAEConfig(d_in=width, d_sae=features, k=k, device="cpu", dtype="float32"))
    config = SAETrainerConfig(
        n_checkpoints=0,
        checkpoint_path=None,
        save_final_checkpoint=False,
        total_training_samples=batch_rows * steps,
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
        train_batch_size_samples=batch_rows,
        dead_feature_window=1000,
        feature_sampling_window=2000,
        logger=LoggingConfig(log_to_wandb=False),
    )
    return SAETrainer(cfg=config, sae=sae, data_provider=rows)


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root")
    parser.add_argument("--tap", default="residual.1")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch-rows", type=int, default=1024)
    parser.add_argument("--output", default="sae")
    args = parser.parse_args()

    dataset = spile.open(args.root)
    rows = iter(
        dataset.torch(args.tap, batch_rows=args.batch_rows, epochs=None, exclude=spile.Role.FIRST, dtype="float32")
    )
    trained = trainer(rows, steps=args.steps, batch_rows=args.batch_rows, features=512, k=16).fit()
    trained.save_model(args.output)
    print(f"saved {args.output}")


if __name__ == "__main__":
    main()
