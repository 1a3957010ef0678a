"""Measure the data package against its limits: ``python -m bench.data [--tasks 200000]``.

1. Streams of generated tasks: tasks and bytes per second compared with an orjson parse of the same lines, and the peak
   memory for the whole dataset compared with a tenth of it.
2. ARC prompts to tokens: tokens per second with roles, compared with the tokenizer alone.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import orjson

import spile.models
from spile.data.lines import embedded_tasks
from spile.data.samples import open_stream
from spile.data.tokens import load_tokenizer
from spile.spec.ranges import Ranges
from spile.spec.run import DataSpec, PromptSpec
from spile.spec.sample import Sample

_CHILD = """
import json, resource, sys, time
from pathlib import Path
from spile.data.split import make_streams
began = time.perf_counter()
made = make_streams(sys.argv[1], Path(sys.argv[2]), 32)
seconds, cpu = time.perf_counter() - began, time.process_time()
print(json.dumps({"seconds": seconds, "cpu": cpu, "samples": made.manifest.samples,
                  "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}))
"""


def generate(file: Path, count: int) -> None:
    """Write the embedded tasks repeatedly, each with a unique name."""
    tasks = [json.loads(line) for line in embedded_tasks().read_text().splitlines()]
    bodies = [orjson.dumps({key: task[key] for key in ("train", "test")})[1:] for task in tasks]
    with file.open("wb", buffering=1 << 20) as out:
        for number in range(count):
            out.write(b'{"task_id":"task_%08d",' % number + bodies[number % len(bodies)] + b"\n")


def parse_seconds(file: Path) -> tuple[float, float]:
    """Return the wall and CPU seconds of the JSON parser alone."""
    began, cpu = time.perf_counter(), time.process_time()
    with file.open("rb", buffering=1 << 20) as lines:
        for line in lines:
            orjson.loads(line)
    return time.perf_counter() - began, time.process_time() - cpu


def streams(folder: Path, count: int) -> dict[str, Any]:
    """Split this many tasks in a separate process."""
    file = folder / f"tasks_{count}.jsonl"
    generate(file, count)
    parse, parse_cpu = parse_seconds(file)
    done = subprocess.run(
        [sys.executable, "-c", _CHILD, str(file), str(folder / f"streams_{count}")], capture_output=True, check=True
    )
    child = json.loads(done.stdout)
    size = file.stat().st_size
    return {
        "tasks": count,
        "megabytes": size / 1e6,
        "streams_tasks_per_s": count / child["seconds"],
        "streams_mb_per_s": size / 1e6 / child["seconds"],
        "orjson_tasks_per_s": count / parse,
        "share_of_parser": parse_cpu / child["cpu"],
        "peak_mb": child["peak_mb"],
    }


def tokens(seconds: float = 8.0) -> dict[str, Any]:
    """Measure reading variants of the embedded tasks, then the tokenizer alone on the same texts."""
    tokenizer = load_tokenizer(Path(spile.models.__file__).parent / "embedded")
    spec = DataSpec(prompt=PromptSpec(predictions_per_task=256), max_seq_length=1 << 16)
    stream = open_stream(spec, tokenizer)
    began, count, samples, texts = time.perf_counter(), 0, 0, list[str]()
    for item in stream.read(Ranges()):
        assert isinstance(item, Sample)
        count, samples = count + len(item), samples + 1
        if len(texts) < 256:
            texts.append(tokenizer.decode(item.tokens.tolist()))
        if time.perf_counter() - began > seconds:
            break
    rate = count / (time.perf_counter() - began)
    began = time.perf_counter()
    bare = sum(len(one) for one in tokenizer.backend.encode_batch_fast(texts, add_special_tokens=False))
    return {
        "samples": samples,
        "prompt_tokens_per_s": rate,
        "bare_tokenizer_tokens_per_s": bare / (time.perf_counter() - began),
    }


def main(argv: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tasks", type=int, default=200_000)
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="spile-bench-") as folder:
        tenth, whole = (streams(Path(folder), count) for count in (args.tasks // 10, args.tasks))
    found = {"streams": whole, "streams_tenth": tenth, "tokens": tokens()}
    print(
        f"data streams     {whole['tasks']:,} tasks, {whole['megabytes']:,.0f} MB: "
        f"{whole['streams_tasks_per_s']:,.0f} tasks/s, {whole['streams_mb_per_s']:,.0f} MB/s; "
        f"orjson alone {whole['orjson_tasks_per_s']:,.0f} tasks/s "
        f"({whole['share_of_parser']:.0%} of the parser's speed a processor second)"
    )
    print(f"  peak memory    {whole['peak_mb']:,.0f} MB; a tenth of the tasks: {tenth['peak_mb']:,.0f} MB")
    rates = found["tokens"]
    print(
        f"ARC prompts      {rates['prompt_tokens_per_s']:,.0f} tokens/s ready to batch, {rates['samples']:,} samples; "
        f"the bare tokenizer {rates['bare_tokenizer_tokens_per_s']:,.0f}"
    )
    return found


if __name__ == "__main__":
    main()
