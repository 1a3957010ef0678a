"""Train a top-k sparse autoencoder on a tap in torch, through a DataLoader with workers.

    spile extract
    python examples/train_sae_torch.py ./activations --tap residual.1 --steps 300 --workers 2

Under ``torchrun`` each rank reads different rows: ``dataset.torch`` gets the rank from torch.distributed.
"""

from __future__ import annotations

import argparse

import torch
from torch.utils.data import DataLoader

import spile


class TopK(torch.nn.Module):
    """A top-k autoencoder with k features per row."""

    def __init__(self, d: int, features: int, k: int) -> None:
        super().__init__()
        directions = torch.nn.functional.normalize(torch.randn(features, d), dim=1)
        self.k = k
        self.encoder = torch.nn.Parameter(directions.T.clone())
        self.threshold = torch.nn.Parameter(torch.zeros(features))
        self.decoder = torch.nn.Parameter(directions)
        self.bias = torch.nn.Parameter(torch.zeros(d))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Reconstruct the rows from k features each."""
        values = (rows - self.bias) @ self.encoder + self.threshold
        best, places = values.topk(self.k, dim=1)
        return torch.zeros_like(values).scatter(1, places, best.relu()) @ self.decoder + self.bias


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root")
    parser.add_argument("--tap", default="residual.1")
    parser.add_argument("--features", type=int, default=512)
    parser.add_argument("--k", type=int, default=16)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--workers", type=int, default=2)
    args = parser.parse_args()

    torch.manual_seed(0)
    dataset = spile.open(args.root)
    rows = dataset.torch(args.tap, batch_rows=1024, epochs=None, exclude=spile.Role.FIRST)
    loader = iter(DataLoader(rows, batch_size=None, num_workers=args.workers))
    first = next(loader).float()
    scale = first.shape[1] ** 0.5 / first.norm(dim=1).mean()
    sae = TopK(first.shape[1], args.features, args.k)
    sae.bias.data = (first * scale).mean(0)
    optimiser = torch.optim.Adam(sae.parameters(), 1e-3)
    for step in range(1, args.steps + 1):
        batch = next(loader).float() * scale
        error = (sae(batch) - batch).square().sum()
        optimiser.zero_grad()
        (error / len(batch)).backward()
        optimiser.step()
        with torch.no_grad():
            sae.decoder.data = torch.nn.functional.normalize(sae.decoder, dim=1)
            if step % 100 == 0 or step == args.steps:
                total = (batch - batch.mean(0)).square().sum()
                print(f"step {step}: {float(error / total):.4f} of the variance unexplained", flush=True)


if __name__ == "__main__":
    main()
