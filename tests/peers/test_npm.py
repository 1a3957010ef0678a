"""Hugging Face's own JavaScript reader on our shards, in Node. Runs where node and npm are, and npm's registry answers.

The package that is called ``safetensors`` there (0.0.1) opens no file with a ``__metadata__``, which is every file that
Hugging Face's own writer makes; ``@huggingface/hub`` has the parser that the hub's pages use.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from spile.objects import open_folder
from spile.reading.dataset import open as open_dataset
from world import TAPS, produce

NODE, NPM = shutil.which("node"), shutil.which("npm")
pytestmark = pytest.mark.skipif(NODE is None or NPM is None, reason="no node or npm here")

SCRIPT = """
import { open } from "node:fs/promises";
import { parseSafetensorsMetadata } from "@huggingface/hub";

const [path] = process.argv.slice(2);
const file = await open(path);
const { size } = await file.stat();
// The hub, for one file: ranges of it, and what it is.
const fetch = async (_url, init = {}) => {
  const range = /bytes=(\\d+)-(\\d+)/.exec(new Headers(init.headers).get("range") ?? "");
  const first = range ? Number(range[1]) : 0;
  const last = Math.min(range ? Number(range[2]) : size - 1, size - 1);
  const body = Buffer.alloc(last - first + 1);
  await file.read(body, 0, body.length, first);
  const headers = { etag: '"one"', "content-range": `bytes ${first}-${last}/${size}` };
  return new Response(init.method === "HEAD" ? null : body, { status: range ? 206 : 200, headers });
};
const { header } = await parseSafetensorsMetadata({ repo: "some/one", path: "shard.safetensors", fetch });
const { __metadata__: metadata, ...tensors } = header;
const length = Buffer.alloc(8);
await file.read(length, 0, 8, 0);
const found = { metadata, tensors: {} };
for (const [name, { dtype, shape, data_offsets: [begin, end] }] of Object.entries(tensors)) {
  const bytes = Buffer.alloc(end - begin);
  await file.read(bytes, 0, bytes.length, 8 + Number(length.readBigUInt64LE()) + begin);
  found.tensors[name] = { dtype, shape, bytes: bytes.toString("hex") };
}
await file.close();
console.log(JSON.stringify(found));
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the package in it."""
    place = tmp_path_factory.mktemp("npm")
    (place / "package.json").write_text('{"private": true, "type": "module"}')
    command = [str(NPM), "install", "--no-audit", "--no-fund", "--ignore-scripts", "@huggingface/hub@2"]
    done = subprocess.run(command, cwd=place, capture_output=True, text=True, timeout=120, check=False)
    if done.returncode:
        pytest.skip(f"npm has no @huggingface/hub: {done.stderr.strip().splitlines()[-1]}")
    (place / "read.js").write_text(SCRIPT)
    return place


def test_it_reads_every_tensor_of_a_shard(folder: Path, tmp_path: Path) -> None:
    produce(open_folder(str(tmp_path)), 12)
    dataset = open_dataset(str(tmp_path))
    (stream,) = dataset.streams
    record = stream.shards[0]
    command = [str(NODE), "read.js", str(tmp_path / "tpu_0" / record.name)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    shard = stream.open(record)
    assert found["metadata"]["stream"] == stream.record.id
    assert json.loads(found["metadata"]["samples"]) == shard.notes
    assert list(found["tensors"]) == list(shard.header.places)
    for name in (*map(str, TAPS), "tokens", "roles", "offsets", "sample_index"):
        tensor = found["tensors"][name]
        rows = shard.rows(name, 0, shard.place(name).shape[0])
        assert (tensor["dtype"], tuple(tensor["shape"])) == (shard.place(name).code, rows.shape)
        assert np.array_equal(np.frombuffer(bytes.fromhex(tensor["bytes"]), rows.dtype).reshape(rows.shape), rows)
