"""Stream a large dataset of the hub: time to the first batch, memory for data, and a resume after SIGKILL.

``python -m bench.streaming --rows 10000000`` writes Parquet files, serves them on a loopback port as a hub does, and
runs the embedded model on them.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.fakes.hub import DatasetHub

from spile.spec.amounts import size

_FILE_ROWS, _GROUP_ROWS = 500_000, 10_000
_RUN = """
import json, sys
from spile.spec.run import make_spec
from spile.run.worker import run_stream
from spile.compute.progress import Progress

progress = Progress.of_process()
done = run_stream(make_spec(json.loads(sys.argv[1])), progress=progress)
wall = done.progress.wall
print(json.dumps({"data": wall.start, "first": wall.start + wall.compile, "memory": done.peak_memory,
                  "samples": done.progress.samples, "held": done.samples}))
"""
_READ = """
import json, sys, time
from spile.data.samples import open_stream
from spile.data.tokens import load_tokenizer
from spile.models import model_files
from spile.spec.ranges import Ranges
from spile.spec.run import DataSpec
from spile.compute.progress import peak_memory

tokenizer = load_tokenizer(model_files.find("embedded").tokenizer_folder)
began = time.perf_counter()
stream = open_stream(DataSpec(dataset=sys.argv[1]), tokenizer)
before = peak_memory()
reader = stream.read(Ranges())
rows = sum(1 for _ in reader)
seconds = time.perf_counter() - began
began = time.perf_counter()
again = stream.read(Ranges([(0, rows - 1000)]), reader.parts, rows)
first = next(again)
resumed = time.perf_counter() - began
print(json.dumps({"rows": rows, "seconds": seconds, "memory": peak_memory() - before, "parts": len(reader.parts),
                  "resumed": resumed, "first": first.index}))
"""
_ROWS = """
import json, sys, time
from spile.data.lines import PartReader
from spile.data.sources import open_input
from spile.spec.run import DataSpec

def memory():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096

reader = PartReader(open_input(DataSpec(dataset=sys.argv[1])))
began, used, marks, rows = time.perf_counter(), time.process_time(), [], 0
for rows, _ in enumerate(reader.lines(), 1):
    if rows % 500_000 == 0:
        marks.append(memory())
print(json.dumps({"rows": rows, "seconds": time.perf_counter() - began, "cpu": time.process_time() - used,
                  "first": marks[0], "most": max(marks), "last": marks[-1], "parts": len(reader.parts)}))
"""


def write_rows(folder: Path, rows: int) -> int:
    """Write Parquet files of short texts; return their size."""
    import pyarrow as arrow
    from pyarrow import parquet

    files = -(-rows // _FILE_ROWS)
    for number in range(files):
        numbers = range(number * _FILE_ROWS, min(rows, (number + 1) * _FILE_ROWS))
        texts = [f"{n} the quick brown fox number {n * 7919 % 10007} jumps over {n % 97} lazy dogs" for n in numbers]
        table = arrow.table({"id": [f"row-{n}" for n in numbers], "text": texts})
        parquet.write_table(table, folder / f"train-{number:05d}-of-{files:05d}.parquet", row_group_size=_GROUP_ROWS)
    return sum(path.stat().st_size for path in folder.iterdir())


def child(hub: DatasetHub, cache: Path, program: str, argument: str) -> dict[str, float]:
    """Run a program in a new process and return what it prints."""
    environment = {**os.environ, **hub.environment(cache)}
    done = subprocess.run(
        [sys.executable, "-c", program, argument], env=environment, check=True, stdout=subprocess.PIPE, text=True
    )
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def spec(dataset: str, output: Path, **more: object) -> dict[str, object]:
    """Return the fields of a run spec: one layer of the embedded model, commits every two seconds."""
    return {"dataset": dataset, "output": str(output), "layers": "0", "commit_every": 2.0, **more}


def killed_run(hub: DatasetHub, cache: Path, fields: dict[str, object], commits: int) -> None:
    """Start a run and end it with SIGKILL after some commits."""
    environment = {**os.environ, **hub.environment(cache)}
    process = subprocess.Popen(
        [sys.executable, "-c", _RUN, json.dumps(fields)], env=environment, stdout=subprocess.DEVNULL
    )
    ledger = Path(str(fields["output"])) / "stream_0" / "commits"
    while process.poll() is None and (not ledger.is_dir() or len(list(ledger.iterdir())) < commits):
        time.sleep(0.2)
    process.send_signal(signal.SIGKILL)
    process.wait()


def workers_run(hub: DatasetHub, cache: Path, output: Path, workers: int, tokens: int) -> tuple[float, float]:
    """Run several workers on this machine; return the seconds to the first commit of any and of all streams."""
    words = ["extract", "--dataset", hub.name, "--output", str(output), "--layers", "0", "--commit-every", "0.1"]
    words += ["--model", "embedded", "--num-workers", str(workers), "--max-tokens", str(tokens)]
    environment, began = {**os.environ, **hub.environment(cache)}, time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-m", "spile.cli.main", *words], env=environment, stdout=subprocess.DEVNULL
    )
    seen: list[float] = []
    while process.poll() is None:
        begun = len(list(output.glob("*/commits/0001.json")))
        seen += [time.perf_counter() - began] * (begun - len(seen))
        time.sleep(0.05)
    if process.returncode or len(seen) < workers:
        raise SystemExit(f"{workers} workers: {len(seen)} of them began, exit code {process.returncode}")
    return seen[0], seen[-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--tokens", type=int, default=200_000, help="tokens that the model computes in each run")
    parser.add_argument("--read-all", action="store_true", help="also read and tokenize all rows without a model")
    parser.add_argument("--only-rows", action="store_true", help="only read and hash all rows: how the memory grows")
    parser.add_argument(
        "--workers", type=int, default=0, help="also run this number of workers on this machine at once"
    )
    words = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        folder, cache, output = (Path(place) / name for name in ("data", "cache", "out"))
        folder.mkdir()
        total = write_rows(folder, words.rows)
        with DatasetHub(folder) as hub:
            print(f"{words.rows:,} rows in {len(hub.paths())} Parquet files, {size(total)}")
            if words.only_rows:
                read = child(hub, cache, _ROWS, hub.name)
                print(
                    f"all rows         {read['rows']:,.0f} read and hashed in {read['seconds']:.0f} s "
                    f"({read['cpu']:.0f} CPU seconds), {read['parts']:,.0f} hashes\n"
                    f"memory           {size(read['first'])} of the process after 500,000 rows, {size(read['most'])} "
                    f"at most, {size(read['last'])} at the end"
                )
                return
            small = Path(place) / "small.jsonl"
            small.write_text("".join(json.dumps({"text": f"{n} foxes and dogs"}) + "\n" for n in range(2000)))
            base = child(hub, cache, _RUN, json.dumps(spec(str(small), Path(place) / "base")))
            found = child(hub, cache, _RUN, json.dumps(spec(hub.name, output, max_tokens=words.tokens)))
            print(f"data ready       {found['data']:.1f} s after the start of the process")
            print(f"first batch      {found['first']:.1f} s, with the compilation of its program")
            held = found["memory"] - base["memory"]
            print(f"memory           {size(found['memory'])} at most; {size(max(0, held))} more than for 2,000 rows")
            print(f"sent by the hub  {size(hub.bytes_sent)} of {size(total)} for {found['samples']:,.0f} samples")
            killed_run(hub, cache, spec(hub.name, Path(place) / "killed"), commits=3)
            sent, began = hub.bytes_sent, time.perf_counter()
            fields = spec(hub.name, Path(place) / "killed", max_tokens=4 * words.tokens)
            again = child(hub, cache, _RUN, json.dumps(fields))
            print(
                f"after SIGKILL    first batch {again['first']:.1f} s after the start, {again['samples']:,.0f} samples "
                f"to {again['held']:,.0f} in {time.perf_counter() - began:.0f} s; {size(hub.bytes_sent - sent)} sent"
            )
            if words.workers:
                first, last = workers_run(hub, cache, Path(place) / "workers", words.workers, words.tokens)
                print(f"{words.workers} workers        first commit {first:.1f} s after the start, of all {last:.1f} s")
            if words.read_all:
                sent = hub.bytes_sent
                read = child(hub, cache, _READ, hub.name)
                print(
                    f"all rows         {read['rows']:,.0f} read and tokenized in {read['seconds']:.0f} s, "
                    f"{size(read['memory'])} of memory, {read['parts']:,.0f} hashes"
                )
                print(f"resume at row    {read['first']:,.0f}: {read['resumed']:.1f} s to the first sample")


if __name__ == "__main__":
    main()
