"""Measure which errors ``spile verify --recompute`` finds: ``python -m bench.proof [--model FOLDER] [--samples N]``.

Runs a model over texts once for each stored dtype, recomputes every sample, and prints three tables: false alarms on
correct rows, the smallest error that is found at each tap, and how many errors of each kind are found. ``--sinks``
repeats this for models in which one frequent token has an embedding that is 10 to 10,000 times as long.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

import spile
from spile.objects import open_folder
from spile.proof.comparison import Recompute, _Chosen, compare
from spile.proof.report import Problem, Recomputed
from spile.proof.rerun import recomputer
from spile.spec.identity import RunIdentity
from spile.spec.run import DataSpec, RunSpec
from spile.spec.taps import SCALED
from spile.store.shard import as_stored, decode, split
from spile.store.stored_stream import open_streams

DTYPES = ("bfloat16", "float16", "int8", "float8_e4m3")
ROW_ERRORS = ("zeroed row", "negated row", "noise", "neighbour's row", "other sample's row")
SAMPLE_ERRORS = ("scaled by 0.97", "layer below", "other weights")
Table = dict[bytes, list[np.ndarray]]


def write_texts(file: Path, count: int, characters: int, seed: int) -> None:
    """Write random paragraphs of this repository's documentation as a JSONL file."""
    texts: list[str] = []
    for page in sorted(Path(__file__).parents[1].glob("docs/**/*.md")):
        texts += [part for part in re.split(r"\n(?=## )|\n\n(?=\S)", page.read_text()) if len(part) > 80]
    texts = [texts[n] for n in np.random.default_rng(seed).permutation(len(texts))[:count]]
    lines = [json.dumps({"task_id": str(n), "text": text[:characters]}) for n, text in enumerate(texts)]
    file.write_text("\n".join(lines) + "\n")


def extract(model: str, texts: Path, output: str, dtype: str, store_dtype: str) -> str:
    """Store all taps of the residual stream, and return the dataset's root."""
    data = DataSpec(dataset=str(texts), max_seq_length=512)
    spec = RunSpec(model=model, data=data, output=output, dtype=dtype, store_dtype=store_dtype)  # type: ignore[arg-type]
    spile.extract(spec)
    return spec.output


@contextmanager
def with_errors(run: RunIdentity, plain: Table, others: Table, kinds: dict[bytes, str]) -> Iterator[None]:
    """Read stored rows with one error per sample inside the context, made before the rows are encoded.

    Rows that were decoded would not do: float8 rounds 0.97 times such a number back to the number itself.

    Args:
        run: The run of the dataset.
        plain: The rows of each sample before they are encoded, by the samples' tokens.
        others: The same, computed with other weights.
        kinds: The kind of error of each sample.
    """

    def read(chosen: _Chosen) -> list[np.ndarray]:
        wrong = wrong_rows(chosen.sample.tokens.tobytes(), plain, others, kinds)
        return [as_read(each, tap.dtype) for each, tap in zip(wrong, chosen.stream.kinds(run), strict=True)]

    with patch.object(_Chosen, "read", read):
        yield


def wrong_rows(key: bytes, plain: Table, others: Table, kinds: dict[bytes, str]) -> list[np.ndarray]:
    """Return the rows of a sample with its error."""
    rows = [np.array(each) for each in plain[key]]
    random = np.random.default_rng(np.frombuffer(key, np.uint32))
    other = next(theirs for theirs in others if theirs != key)
    return break_rows(rows, kinds[key], random, others[other], others[key])


def as_read(rows: np.ndarray, dtype: str) -> np.ndarray:
    """Return rows as they are read after they were stored."""
    stored = as_stored(np.asarray(rows, np.float32), dtype)
    return decode(*split(stored, dtype)) if dtype in SCALED else np.asarray(stored)


def break_rows(
    rows: list[np.ndarray], kind: str, random: Any, other: Sequence[np.ndarray], weights: list[np.ndarray]
) -> list[np.ndarray]:
    """Put one error of this kind into the rows of each tap."""
    if kind == "scaled by 0.97":
        return [each * np.float32(0.97) for each in rows]
    if kind == "layer below":
        return [rows[1], *rows[:-1]]
    if kind == "other weights":
        return weights
    for each, theirs in zip(rows, other, strict=True):
        row = int(random.integers(len(each) // 2, len(each)))
        noise = random.standard_normal(each.shape[1])
        each[row] = {
            "zeroed row": np.zeros_like(each[row]),
            "negated row": -each[row],
            "noise": noise * np.linalg.norm(each[row]) / np.linalg.norm(noise),
            "neighbour's row": each[row - 1],
            "other sample's row": np.asarray(theirs[min(row, len(theirs) - 1)], np.float32),
        }[kind]
    return rows


def judge(root: str, recompute: Recompute, samples: int) -> tuple[Recomputed, list[Problem], float]:
    """Recompute samples of a dataset; return the measured noise, the problems and the seconds."""
    run = spile.open(root).run
    began = time.perf_counter()
    found, problems = compare(run, open_streams(open_folder(root), run), recompute, samples, 0)
    return found, problems, time.perf_counter() - began


def changed_model(model: str, folder: Path, change: Callable[[dict[str, np.ndarray]], None]) -> str:
    """Copy a model in one safetensors file and change its weights."""
    from safetensors.numpy import load_file, save_file

    shutil.copytree(model, folder)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    (folder / "model.safetensors").unlink()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return str(folder)


def scale_down_projection(tensors: dict[str, np.ndarray]) -> None:
    """Change the weights of one layer by 30 %."""
    name = "model.layers.0.mlp.down_proj.weight"
    tensors[name] = tensors[name] * tensors[name].dtype.type(1.3)


def lengthen_embedding(token: int, ratio: float) -> Callable[[dict[str, np.ndarray]], None]:
    """Return a change that makes the embedding of one token longer."""

    def change(tensors: dict[str, np.ndarray]) -> None:
        table = np.array(tensors["model.embed_tokens.weight"])
        table[token] = table[token] * table.dtype.type(ratio)
        tensors["model.embed_tokens.weight"] = table

    return change


def measure(model: str, texts: Path, root: str, dtype: str, store_dtype: str, samples: int) -> Recompute:
    """Store the rows of a model in one dtype, and print the false alarms and the smallest errors that are found."""
    extract(model, texts, root, dtype, store_dtype)
    recompute = recomputer(root)
    found, problems, seconds = judge(root, recompute, samples)
    pairs = found.samples * len(found.taps)
    print(f"\n{dtype} stored as {store_dtype}: {len(problems)} false alarms in {pairs:,} pairs ({seconds:.0f} s)")
    for problem in problems:
        print("  FALSE ALARM", problem.line())
    print(f"  {'tap':14}{'noise':>9}{'stored':>9}{'row':>9}{'sample':>9}{'factor':>9}{'worst':>8}")
    chosen = list(found.taps)[:: max(1, len(found.taps) // 6)]
    for tap in dict.fromkeys([*chosen, list(found.taps)[-1]]):
        noise = found.taps[tap]
        figures = (noise.fresh, noise.stored, noise.row_limit, noise.sample_limit, noise.gain_limit)
        print(f"  {tap:14}" + "".join(f"{100 * x:8.3g}%" for x in figures) + f"{noise.worst:8.2f}")
    return recompute


def measure_errors(root: str, recompute: Recompute, other: str, texts: Path, scratch: Path, samples: int) -> None:
    """Print how many errors of each kind are found in the dataset at ``root``."""
    run = spile.open(root).run
    tables: list[Table] = []
    for name in (run.model, other):
        found = spile.open(extract(name, texts, str(scratch / "plain"), run.dtype, "float32"))
        read = [found.sample(0, ref.index) for ref in found.samples]
        keys = [np.asarray(sample.tokens, np.int32).tobytes() for sample in read]
        rows = [[np.asarray(sample.rows(tap), np.float32) for tap in found.taps] for sample in read]
        tables.append(dict(zip(keys, rows, strict=True)))
        shutil.rmtree(scratch / "plain")
    chosen = [[*ROW_ERRORS, *SAMPLE_ERRORS][number % 8] for number in range(len(keys))]
    kinds = dict(zip(keys, chosen, strict=True))
    with with_errors(run, tables[0], tables[1], kinds):
        judged, problems, _ = judge(root, recompute, samples)
    sizes: dict[tuple[int, str], tuple[float, float]] = {}
    for ref, key in zip(found.samples, keys, strict=True):
        wrong = wrong_rows(key, tables[0], tables[1], kinds)
        for tap, true, broken in zip(found.taps, tables[0][key], wrong, strict=True):
            sizes[ref.index, tap] = error_size(true, broken)
    show_found(problems, dict(zip([ref.index for ref in found.samples], chosen, strict=True)), sizes, judged)


def error_size(rows: np.ndarray, wrong: np.ndarray) -> tuple[float, float]:
    """Return the largest and the median error of the rows, relative to their norms."""
    relative = np.linalg.norm(wrong - rows, axis=1) / np.linalg.norm(rows, axis=1)
    return float(relative.max()), float(np.median(relative))


def show_found(
    problems: Sequence[Problem],
    kinds: dict[int, str],
    sizes: dict[tuple[int, str], tuple[float, float]],
    judged: Recomputed,
) -> None:
    """Print how many of the errors of each kind were found, and how large those are that were not."""
    pattern = re.compile(r"sample (\d+) at ([^:]+):")
    matches = [pattern.search(problem.text) for problem in problems]
    found = {(int(match[1]), match[2]) for match in matches if match}
    hits, totals = Counter[str](), Counter[str]()
    missed: list[tuple[float, str]] = []
    for (sample, tap), (row, whole) in sizes.items():
        kind, limits = kinds[sample], judged.taps[tap]
        totals[kind] += 1
        hits[kind] += (sample, tap) in found
        if (sample, tap) not in found:
            share = max(row / limits.row_limit, whole / limits.sample_limit)
            missed.append((share, f"{kind} in sample {sample} at {tap}, {share:.2f} of the smallest error"))
    print("  found: " + ", ".join(f"{kind} {hits[kind]} of {totals[kind]}" for kind in totals))
    for _, line in sorted(missed, reverse=True)[:8]:
        print(f"  missed: {line}")
    if missed:
        larger = sum(share > 1 for share, _ in missed)
        print(f"  missed: {len(missed)}, of which {larger} are larger than the smallest error that is found")


def main() -> None:
    """Measure each stored dtype, and each ratio of artificial sinks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="build/real/smollm2", help="a folder with one model.safetensors")
    parser.add_argument("--samples", type=int, default=48)
    parser.add_argument("--characters", type=int, default=1200, help="characters of each text")
    parser.add_argument("--seed", type=int, default=0, help="for the choice of texts")
    parser.add_argument("--no-errors", action="store_true", help="only count false alarms, which is nine times faster")
    parser.add_argument("--compute", nargs="*", default=["bfloat16"])
    parser.add_argument("--dtypes", nargs="*", default=list(DTYPES))
    parser.add_argument("--sinks", nargs="*", type=float, default=[])
    parser.add_argument("--sink-token", type=int, default=198, help="the id of a frequent token")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        texts = scratch / "texts.jsonl"
        write_texts(texts, args.samples, args.characters, args.seed)
        for ratio in (1.0, *args.sinks):
            model, other = args.model, scratch / f"other-{ratio:g}"
            if ratio != 1.0:
                model = changed_model(
                    args.model, scratch / f"sink-{ratio:g}", lengthen_embedding(args.sink_token, ratio)
                )
                print(f"\n== the embedding of token {args.sink_token} is {ratio:g} times as long")
            changed_model(model, other, scale_down_projection)
            for dtype in args.compute:
                for store_dtype in args.dtypes:
                    root = str(scratch / "run")
                    recompute = measure(model, texts, root, dtype, store_dtype, args.samples)
                    if not args.no_errors:
                        measure_errors(root, recompute, str(other), texts, scratch, args.samples)
                    shutil.rmtree(root)


if __name__ == "__main__":
    main()
