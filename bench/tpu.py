"""Compile a run's program with the real TPU compiler, without a TPU: ``python -m bench.tpu v5e:2x2 qwen2.5-0.5b 8``.

The arguments are the topology, the shape of the model, and the batch rows of 2048 tokens per chip; every layer's
residual goes to the host. It needs ``libtpu`` (``pip install 'spile[tpu]'``). A run over ARC prompts has only this
program. Before sequences were packed, it had one for each padded length, 16 to 24 in total.
"""

from __future__ import annotations

import argparse
import os

os.environ |= {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "TF_CPP_MIN_LOG_LEVEL": "3"}

from bench.shapes import _COMMON, SHAPES
from spile.models.families import read_config
from spile.planning.tpu_compiler import Program, compile_rows
from spile.spec.taps import select_taps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("machine")
    parser.add_argument("shape", choices=sorted(SHAPES))
    parser.add_argument("rows", type=int)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--layers", type=int, nargs="*")
    args = parser.parse_args()
    config = read_config({**_COMMON, **SHAPES[args.shape]})
    taps = select_taps(("residual",), tuple(args.layers) if args.layers else None, config.n_layers)
    fit = compile_rows(Program(config, taps, args.machine, args.length), args.rows)
    print(
        f"{args.machine} {args.shape}, {args.rows} × {args.length} tokens per chip, mesh {fit.mesh[0]}×{fit.mesh[1]}: "
        f"{fit.seconds:.0f} s to compile, temporaries {fit.temporary / 1e9:.2f} GB, peak {fit.peak / 1e9:.2f} of "
        f"{fit.memory / 1e9:.1f} GB, host output {fit.host / 1e9:.2f} GB{'' if fit.fits else ', does not fit'}"
    )


if __name__ == "__main__":
    main()
