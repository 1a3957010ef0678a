"""Write the golden references of tests/numerics from transformers and torch.

    python scripts/make_goldens.py [CASE...]

Each has a case's tokens, every tap that transformers computes for it in float64 (rounded to float32), and how far
transformers in float32 is from that. The weights are seeded and therefore not stored.
"""

from __future__ import annotations

import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from numerics.cases import CASES, GOLDENS, distance, golden_path, taps, tokens, write_model
from numerics.reference import transformers_taps


def main() -> None:
    """Write one file per case."""
    GOLDENS.mkdir(exist_ok=True)
    made_by = {name: version(name) for name in ("torch", "transformers")}
    for case in sys.argv[1:] or CASES:
        with tempfile.TemporaryDirectory() as folder:
            write_model(case, Path(folder))
            narrow, wide = (transformers_taps(Path(folder), tokens(case), taps(case), wide=w) for w in (False, True))
        measured = [str(tap) for tap in taps(case) if tap.kind != "logits_ids"]
        own = np.asarray([distance(narrow[tap], wide[tap]) for tap in measured])
        rounded = {
            tap: values if values.dtype == np.int32 else values.astype(np.float32) for tap, values in wide.items()
        }
        save_file({"tokens": tokens(case), "own_distance": own, **rounded}, golden_path(case), metadata=made_by)
        print(f"{golden_path(case).name}: {golden_path(case).stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
