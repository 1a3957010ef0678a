"""Write the golden references of tests/numerics from transformers and torch.

    python scripts/make_goldens.py [CASE...]

Each holds a case's tokens and every tap that transformers computes for it in float32. The weights are seeded, so
they are not stored.
"""

from __future__ import annotations

import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

from safetensors.numpy import save_file

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from numerics.cases import CASES, GOLDENS, golden_path, taps, tokens, write_model
from numerics.reference import transformers_taps


def main() -> None:
    """One file a case."""
    GOLDENS.mkdir(exist_ok=True)
    made_by = {name: version(name) for name in ("torch", "transformers")}
    for case in sys.argv[1:] or CASES:
        with tempfile.TemporaryDirectory() as folder:
            expected = transformers_taps(write_model(case, Path(folder)), tokens(case), taps(case))
        save_file({"tokens": tokens(case), **expected}, golden_path(case), metadata=made_by)
        print(f"{golden_path(case).name}: {golden_path(case).stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
