"""Every parser of a file, a record or a reply from outside: valid documents, and the function that reads one."""

from __future__ import annotations

import asyncio
import gzip
import io
import json
import os
import pickle
import re
import shutil
import socket
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import requests

from spile.cli.plan import read_prices
from spile.cli.program import _read_config
from spile.data.arc.answers import by_task, parse_answer, read_references
from spile.data.arc.encoders import parse_encoder
from spile.data.arc.prompts import draw
from spile.data.chat import ChatTemplate
from spile.data.convert import convert
from spile.data.manifest import StreamsManifest
from spile.data.rows import parse_messages, parse_row, parse_task, parse_text
from spile.data.samples import open_stream
from spile.data.tokens import load_tokenizer
from spile.errors import SpileError
from spile.fleet.cloud_tpu import CloudSettings, CloudTpu, read_node, read_operation, read_queued, read_settings
from spile.fleet.home import FleetHome, Lease, _state_key, recorded_deployment
from spile.fleet.provider import NodeRequest
from spile.fleet.spec import Bill, FleetSpec, History, Pending, WorkerHistory, ZoneBlock, plan_workers
from spile.hosts import guard
from spile.hosts.files import _parse_probe
from spile.hosts.hosts import Access, Host
from spile.hosts.run import Session
from spile.models.adapters import find_adapter
from spile.models.model_files import find, read_index
from spile.models.safetensors_files import read_header
from spile.models.weights import locate_tensors
from spile.objects import open_folder
from spile.objects.clouds import parse_uploads
from spile.objects.crc import crc32c
from spile.objects.local import LocalFolder
from spile.objects.machine import machine_region
from spile.objects.retry import RequestFailure, from_obstore, from_status
from spile.proof.verification import verify
from spile.reading.dataset import open as open_dataset
from spile.reading.importing import read_pickle
from spile.reading.shuffle import _checksum
from spile.run.pod.identity import Identity
from spile.run.pod.rollcall import Callers, Peer
from spile.run.resolve import add_stop_tokens
from spile.spec.ranges import Ranges
from spile.spec.run import DataSpec, GenerationSpec, RunSpec
from spile.spec.safetensors import encode_header
from spile.spec.sample import Prediction
from spile.store.claims import ClaimReader
from spile.store.cleanup import is_alive
from spile.store.heartbeat import read_beat
from spile.store.ledger import FORMAT, Commit, PredictionsRecord, seal
from spile.store.predictions import read_predictions
from spile.store.quarantine import Supervision, Trials, read_trials, resume_trials, write_trials
from spile.store.run import claim_answers, join_run, read_run
from spile.store.shard import parse_shard_header
from spile.store.snapshot import SnapshotReader
from spile.store.statistics import TapStatistics
from spile.store.stored_stream import finished_quarantines
from spile.store.writer import read_stream
from world import produce, run_identity

OURS = (SpileError, RequestFailure)
ENCODERS = (
    "MinimalGridEncoder()",
    "GridCodeBlockEncoder(GridShapeEncoder(RowNumberEncoder(MinimalGridEncoder())))",
    "GridWithSeparationEncoder('|')",
    "RepeatNumberEncoder(3)",
    "ReplaceNumberEncoder('abcdefghij')",
)
Target = tuple[bytes | tuple[bytes, ...], Callable[[bytes], object]]


def _resealed(data: bytes) -> bytes:
    """A record of this content whose checksum is right: what a checksum does not keep out."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return data
    return seal({"format": FORMAT, **value}) if isinstance(value, dict) and _plain(value) else data


def _plain(value: Any) -> bool:
    try:
        json.dumps(value, allow_nan=False)
    except (ValueError, RecursionError):
        return False
    return True


class Targets:
    """For each parser: a valid document and the function that reads it."""

    def __init__(self, scratch: Path) -> None:
        self._dataset, self._scratch = scratch / "dataset", scratch / "scratch"
        scratch = self._scratch
        scratch.mkdir()
        produce(open_folder(str(self._dataset)), 12)
        self._root = open_folder(str(scratch))
        scratch.joinpath("tpu_0").mkdir(exist_ok=True)
        self._shard = next(self._dataset.glob("tpu_0/*.safetensors")).read_bytes()
        self._embedded = Path(str(load_embedded()))

    def commit(self) -> Target:
        def read(data: bytes) -> None:
            for form in (data, _resealed(data)):
                with_ours(lambda form=form: Commit.from_bytes(form, "commit").pairs())  # type: ignore[misc]

        return (self._dataset / "tpu_0/commits/0001.json").read_bytes(), read

    def whole_dataset(self) -> Target:
        """A forged commit with a correct checksum, read by every reader of a dataset."""
        root = self._scratch / "whole"
        shutil.copytree(self._dataset, root)
        path, folder = root / "tpu_0/commits/0001.json", open_folder(str(root))

        def read_all() -> None:
            dataset = open_dataset(folder)
            for ref in dataset.samples:
                dataset.sample(ref.stream, ref.index).rows(dataset.taps[0])

        def read(data: bytes) -> None:
            path.write_bytes(_resealed(data))
            SnapshotReader(folder).take()
            with_ours(read_all)
            with_ours(lambda: verify(folder))

        valid = path.read_bytes()
        return valid[:-22] + b"}", read

    def reader_state(self) -> Target:
        """A state of the shuffled reader, also with a checksum that is right."""
        dataset = open_dataset(str(self._dataset))
        reader = dataset.shuffled("attn.1", 16, memory=2000, epochs=2)
        next(reader)
        state = reader.state()
        reader.close()

        def resume(state: Any) -> None:
            with dataset.shuffled("attn.1", 16, memory=2000, epochs=2, state=state) as again:
                next(again, None)

        def read(data: bytes) -> None:
            try:
                value = json.loads(data)
            except (ValueError, RecursionError):
                return
            forms = [value]
            if isinstance(value, dict):
                rest = {name: each for name, each in value.items() if name != "check"}
                forms.append({**rest, "check": _checksum(rest)})
            for form in forms:
                with_ours(lambda form=form: resume(form))  # type: ignore[misc]

        return json.dumps(state).encode(), read

    def pickle(self) -> Target:
        path, packed = self._scratch / "a.pkl", self._scratch / "b.pkl.gz"
        sample = {"sample_idx": 3, "activation": np.ones((2, 3), np.float32), "shape": (2, 3), "text_preview": "x"}

        def read(data: bytes) -> None:
            for place, content in ((path, data), (packed, gzip.compress(data, 1)), (packed, data)):
                place.write_bytes(content)
                with_ours(lambda place=place: read_pickle(place))  # type: ignore[misc]

        return pickle.dumps({0: [sample], 1: [sample]}, 2), read

    def run(self) -> Target:
        def read(data: bytes) -> None:
            for form in (data, _resealed(data)):
                (self._scratch / "run.json").write_bytes(form)
                with_ours(lambda: read_run(self._root))
                with_ours(lambda: join_run(self._root, run_identity()))

        return (self._dataset / "run.json").read_bytes(), read

    def stream(self) -> Target:
        def read(data: bytes) -> None:
            for form in (data, _resealed(data)):
                (self._scratch / "tpu_0/stream.json").write_bytes(form)
                with_ours(lambda: read_stream(self._root.child("tpu_0")))

        return (self._dataset / "tpu_0/stream.json").read_bytes(), read

    def progress(self) -> Target:
        (self._scratch / "tpu_0/stream.json").write_bytes((self._dataset / "tpu_0/stream.json").read_bytes())
        beat = {"attempt": "a", "host": "h", "phase": "running", "samples": 1, "samples_committed": 1, "tokens": 1}
        beat |= {"shards_written": 1, "shards_committed": 1, "tokens_per_second": 1.5, "retries": 0, "expected": 9}
        beat |= {"started": "2026-01-16T14:32:15Z", "updated": "2026-01-16T14:32:15Z", "version": "0", "log_tail": []}

        def read(data: bytes) -> None:
            (self._scratch / "tpu_0/progress.json").write_bytes(data)
            read_beat(self._root.child("tpu_0"))
            SnapshotReader(self._root).take()  # never an error: one stream's heartbeat stops no monitor

        return json.dumps(beat).encode(), read

    def header(self) -> Target:
        length = int.from_bytes(self._shard[:8], "little")

        def read(data: bytes) -> None:
            for form in (data, self._shard[:8] + data.ljust(length)[:length]):
                with_ours(lambda form=form: parse_shard_header(form, len(self._shard), "shard").notes())  # type: ignore[misc]

        return self._shard[8 : 8 + length], read

    def config(self) -> Target:
        def read(data: bytes) -> None:
            (self._scratch / "config.json").write_bytes(data)
            with_ours(lambda: find(str(self._scratch), weights=False).config)

        return (self._embedded / "config.json").read_bytes(), read

    def index(self) -> Target:
        return b'{"weight_map": {"a": "b.safetensors"}}', lambda data: with_ours(lambda: read_index(data, "index"))

    def tokenizer(self) -> Target:
        def read(data: bytes) -> None:
            (self._scratch / "tokenizer.json").write_bytes(data)
            with_ours(lambda: load_tokenizer(self._scratch))

        return b'{"version":"1.0","model":{"type":"WordLevel","vocab":{"a":0},"unk_token":"a"}}', read

    def tokenizer_config(self) -> Target:
        valid = b'{"version":"1.0","model":{"type":"WordLevel","vocab":{"a":0},"unk_token":"a"}}'
        (self._scratch / "tokenizer.json").write_bytes(valid)

        def read(data: bytes) -> None:
            (self._scratch / "tokenizer_config.json").write_bytes(data)
            with_ours(lambda: load_tokenizer(self._scratch))
            (self._scratch / "tokenizer_config.json").unlink()

        return b'{"bos_token": "a", "added_tokens_decoder": {"1": {"content": "b", "special": true}}}', read

    def template(self) -> Target:
        messages = [{"role": "user", "content": "hi"}]

        def read(data: bytes) -> None:
            with_ours(lambda: ChatTemplate(data.decode(errors="replace"), {}).render(messages))

        return b"{% for m in messages %}{{ m.content * 2 }}{{ 1 / 2 }}{% endfor %}", read

    def row(self) -> Target:
        def read(data: bytes) -> None:
            for part in (parse_task, parse_messages, lambda row, place: parse_text(row, "text", place)):
                with_ours(lambda part=part: part(parse_row(data, "row"), "row"))  # type: ignore[misc]

        return b'{"train": [{"input": [[1]], "output": [[2]]}], "test": [{"input": [[1]], "output": [[2]]}]}', read

    def manifest(self) -> Target:
        valid = {"version": 1, "source": "s", "seed": 0, "samples": 1, "streams": [], "rejected": {}, "origin": {}}
        return json.dumps(valid).encode(), lambda data: with_ours(lambda: StreamsManifest.from_json(data, "m"))

    def roll_call(self) -> Target:
        output = b'{"process": 1, "count": 2, "name": "h", "version": "0"}'
        identity = Identity(process=0, count=2, coordinator="127.0.0.1", port=1, source="test", name="n")

        def read(data: bytes) -> None:
            ours, theirs = socket.socketpair()
            with theirs:
                theirs.sendall(data[:50_000])  # what a socket holds without a reader
            peer = Peer(ours)
            Callers(identity).receive(peer)
            peer.close()

        return output, read

    def api_answers(self) -> Target:
        def read(data: bytes) -> None:
            try:
                value = json.loads(data)
            except (ValueError, RecursionError):
                return  # the client has refused it before
            for part in (read_node, read_queued, read_operation):
                with_ours(lambda part=part: part(value))  # type: ignore[misc]

        return (
            b'{"name": "projects/p/locations/z/nodes/n", "state": "READY", "createTime": "2026-01-01T00:00:00Z"}',
            read,
        )

    def fleet(self) -> Target:
        machine = NodeRequest("v3-8", "r")
        spec = FleetSpec("f", "p", ("a-b-c",), plan_workers(("a-b-c",), 2), machine, run={"model": "m"})
        return spec.to_json(), lambda data: with_ours(lambda: FleetSpec.from_json(data).to_json())

    def fleet_history(self) -> Target:
        past = {0: WorkerHistory("z", ("z",), Pending("create", "z", 1.0))}
        history = History(past, {"z": ZoneBlock(1.0, "no quota")}, {"u": Bill(0, "z", 1.0, 2.0, 3.0)})
        return history.to_json(), lambda data: with_ours(lambda: History.from_json(data).dollars)

    def fleet_folder(self) -> Target:
        """Leases, orders and reports: all are read by whoever monitors."""
        home = FleetHome(self._root.child("fleet/f"))
        machine = NodeRequest("v3-8", "r")
        spec = FleetSpec("f", "p", ("z",), plan_workers(("z",), 1), machine, deployment="d")
        for name in ("lease", "orders", "workers"):
            (self._scratch / "fleet/f" / name).mkdir(parents=True, exist_ok=True)
        lease = {"who": "w", "token": "t", "renewed": 1.0, "ttl": 9.0, "released": False}
        output = {
            "deployment": "d",
            "time": "now",
            "dollars": 3.0,
            "node": "n",
            "phase": "running",
            "verdict": "finished",
        }

        def read(data: bytes) -> None:
            for key in ("lease/000001.json", "orders/stop.json", "orders/budget.json", "workers/n.json"):
                (self._scratch / "fleet/f" / key).write_bytes(data)
            with_ours(lambda: Lease(home.folder, clock=lambda: 1.0, ttl=1.0).holder())
            with_ours(lambda: home.with_orders(spec).policy)
            home._seen.clear()
            home.read_reports()  # never an error: one machine's report stops no monitor

        return json.dumps(
            {**lease, **output, "updated": 1.0, "exit_code": 0, "launches": 1, "error": ""}
        ).encode(), read

    def listings(self) -> Target:
        def read(data: bytes) -> None:
            with_ours(lambda: parse_uploads(data))
            assert from_status(500, data).transient
            assert "\n" not in from_obstore(ValueError(data.decode("latin-1"))).cause

        row = "<Upload><Key>k</Key><UploadId>1</UploadId><Initiated>2026-01-01T00:00:00Z</Initiated></Upload>"
        return f"<ListMultipartUploadsResult>{row}</ListMultipartUploadsResult>".encode(), read

    # -- models ---------------------------------------------------------------------------------------------------

    def _model(self) -> Path:
        """Return a folder with the embedded model, whose files a target replaces."""
        folder = self._scratch / "model"
        shutil.copytree(self._embedded, folder)
        return folder

    def generation_config(self) -> Target:
        folder = self._model()
        tokenizer, files = load_tokenizer(folder), find(str(folder))

        def read(data: bytes) -> None:
            (folder / "generation_config.json").write_bytes(data)
            with_ours(lambda: add_stop_tokens(GenerationSpec(), files, tokenizer))

        return (b'{"eos_token_id": [1, 2]}', b'{"eos_token_id": 3, "temperature": 0.5}'), read

    def special_tokens_map(self) -> Target:
        folder = self._model()

        def read(data: bytes) -> None:
            for name in ("special_tokens_map.json", "chat_template.json", "chat_template.jinja"):
                (folder / name).write_bytes(data)
                with_ours(lambda: ChatTemplate.of(load_tokenizer(folder)))
                (folder / name).unlink()

        return (b'{"bos_token": {"content": "a"}, "eos_token": "b"}', b'{"chat_template": "{{ messages }}"}'), read

    def weights(self) -> Target:
        """The header of a weight file: JSON with a length in front, and as many bytes behind it as before, all zero."""
        folder = self._model()
        file = folder / "model.safetensors"
        valid = file.read_bytes()
        length = int.from_bytes(valid[:8], "little")

        def load() -> None:
            for piece in locate_tensors(find(str(folder))).values():
                piece.read(LocalFolder(folder))

        def read(data: bytes) -> None:
            behind = len(valid) - 8 - length
            for form, empty in ((len(data).to_bytes(8, "little") + data, behind), (data, 0)):
                replace_file(file, form, empty)
                with_ours(load)

        return (valid[8 : 8 + length], valid[: 8 + length]), read

    def adapter(self) -> Target:
        """The config of a LoRA."""
        folder = self._model()
        place = self._scratch / "adapter"
        save_lora(place)
        shapes = {entry.name: entry.shape for entry in read_header(LocalFolder(folder), "model.safetensors")}

        def read(data: bytes) -> None:
            (place / "adapter_config.json").write_bytes(data)
            with_ours(lambda: find_adapter(str(place)).changes(shapes))
            with_ours(lambda: find(str(folder)).with_adapter(find_adapter(str(place))))

        return ((place / "adapter_config.json").read_bytes(),), read

    def adapter_tensors(self) -> Target:
        """The header of a LoRA's file, with the same numbers behind it."""
        place = self._scratch / "adapter"
        save_lora(place)
        file = place / "adapter_model.safetensors"
        valid = file.read_bytes()
        length = int.from_bytes(valid[:8], "little")
        shapes = {entry.name: entry.shape for entry in read_header(LocalFolder(self._embedded), "model.safetensors")}

        def read(data: bytes) -> None:
            for form in (len(data).to_bytes(8, "little") + data + valid[8 + length :], data):
                replace_file(file, form)
                with_ours(lambda: find_adapter(str(place)).changes(shapes))
                with_ours(lambda: find(str(self._embedded)).with_adapter(find_adapter(str(place))))

        return (valid[8 : 8 + length], valid), read

    # -- datasets -------------------------------------------------------------------------------------------------

    def _data(self, suffix: str, *valid: bytes) -> Target:
        """A file of rows, read as a run and as ``spile data convert`` read it."""
        path, made = self._scratch / f"data{suffix}", self._scratch / "made.jsonl"
        tokenizer = load_tokenizer(self._embedded)

        def samples() -> None:
            spec = DataSpec(dataset=str(path), max_seq_length=64, bad_rows="skip")
            with closing(open_stream(spec, tokenizer, 100).read(Ranges())) as reader:
                for _ in reader:
                    pass

        def read(data: bytes) -> None:
            path.write_bytes(data)
            with_ours(samples)
            with_ours(lambda: convert(str(path), made))
            with_ours(lambda: read_references(str(path)))

        return valid, read

    def jsonl(self) -> Target:
        task = b'{"train": [{"input": [[1]], "output": [[2]]}], "test": [{"input": [[1]], "output": [[2]]}]}'
        chat = b'{"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": [{"text": "a"}]}]}'
        text, tokens = b'{"text": "hello", "id": 7}', b'{"input_ids": [1, 2, 3], "attention_mask": [1, 1, 0]}'
        return self._data(".jsonl", *(b"\n".join((each,) * 3) for each in (task, chat, text, tokens)))

    def json(self) -> Target:
        tasks = b'{"a": {"train": [{"input": [[1]], "output": [[2]]}], "test": [{"input": [[1]]}]}}'
        return self._data(".json", b'[{"text": "a"}, {"text": "b"}]', b'["a", "b"]', b"[[1, 2], [3]]", tasks)

    def csv(self) -> Target:
        return self._data(".csv", b'text,id\n"a, b",1\n"c\nd",2\n', "text\né\n".encode("utf-8-sig"))

    def tsv(self) -> Target:
        return self._data(".tsv", b"text\tid\na\t1\nb\t2\n")

    def text(self) -> Target:
        return self._data(".txt", b"one\ntwo\r\nthree\n")

    def parquet(self) -> Target:
        import pyarrow as pa
        import pyarrow.parquet as pq

        tables = (
            pa.table({"text": ["a", "b", "c"] * 20, "id": list(range(60))}),
            pa.table({"input_ids": [[1, 2], [3]], "when": pa.array([0, 10**9], pa.timestamp("ns"))}),
        )
        valid = []
        for table, compression in zip(tables, ("none", "snappy"), strict=True):
            sink = pa.BufferOutputStream()
            pq.write_table(table, sink, compression=compression)
            valid.append(sink.getvalue().to_pybytes())
        return self._data(".parquet", *valid)

    def references(self) -> Target:
        """The outputs that ``spile score`` compares with."""
        path = self._scratch / "references.json"

        def read(data: bytes) -> None:
            path.write_bytes(data)
            with_ours(lambda: read_references(str(path)))

        return (b'{"a": [[[1, 2], [3, 4]]], "b": [{"output": [[1]]}]}',), read

    def answer(self) -> Target:
        """What a model wrote, in each of the forms in which a grid can be asked for."""
        encoders = [parse_encoder(name) for name in ENCODERS]
        grid = ((1, 2), (3, 4))

        def read(data: bytes) -> None:
            for encoder in encoders:
                parse_answer(data.decode(errors="replace"), encoder)

        return tuple(encoder.to_text(grid).encode() for encoder in encoders), read

    # -- records of a run -------------------------------------------------------------------------------------------

    def spec(self) -> Target:
        spec = RunSpec(model="m", output="o")
        return (spec.to_json(), spec.to_toml().encode()), lambda data: with_ours(lambda: RunSpec.from_json(data))

    def config_file(self) -> Target:
        """The files of ``--config`` and ``--prices``."""
        path = self._scratch / "flags.toml"

        def read(data: bytes) -> None:
            path.write_bytes(data)
            with_ours(lambda: _read_config(str(path)))
            with_ours(lambda: read_prices(path))

        prices = b'as_of = "2026"\n[v5litepod]\nus-central1 = {on_demand = 1.2, preemptible = 0.5}\n'
        return (RunSpec(model="m", output="o").to_toml().encode(), prices), read

    def shard(self) -> Target:
        """The bytes of a shard, read by every reader of a dataset."""
        root = self._scratch / "whole"
        shutil.copytree(self._dataset, root)
        path, folder = next(root.glob("tpu_0/*.safetensors")), open_folder(str(root))

        def read_all() -> None:
            dataset = open_dataset(folder)
            for ref in dataset.samples:
                dataset.sample(ref.stream, ref.index).rows(dataset.taps[0])

        def read(data: bytes) -> None:
            replace_file(path, data)
            with_ours(read_all)
            with_ours(lambda: verify(folder))

        return (self._shard,), read

    def statistics(self) -> Target:
        """Statistics in a forged commit, as ``spile inspect`` and its page use them."""
        valid = {"count": 20, "norms": {"3": 10, "-2": 10}, "top": [[2.5, 1, 2, 3], [1.5, 4, 5, 6]]}

        def show(value: Any) -> None:
            found = TapStatistics.from_json(value)
            if found is not None:
                TapStatistics.merged([found, found]).summary()

        return (dumps(valid),), lambda data: [with_ours(partial(show, value)) for value in parsed(data)]

    def predictions(self) -> Target:
        """Answers whose checksum is right."""
        folder = self._root.child("tpu_0")
        shard = Commit.from_bytes((self._dataset / "tpu_0/commits/0001.json").read_bytes(), "c").shards[0]
        name = "predictions_0001-abcdef.jsonl"
        encoder = parse_encoder(ENCODERS[0])
        text, turned = encoder.to_text([[1, 2], [3, 4]]), draw(0, "t", 3, 2)
        valid = b"".join(
            Prediction(number, "t", text, (5, 6), (-0.5, -0.25), "stop", turned).line() for number in shard.samples
        )

        def read(data: bytes) -> None:
            (self._scratch / "tpu_0" / name).write_bytes(data)
            record = PredictionsRecord(name, len(data), crc32c(data), shard.count)
            with_ours(lambda: by_task(read_predictions(folder, replace(shard, predictions=record)), encoder))

        return (valid,), read

    def suspects(self) -> Target:
        folder = self._root.child("tpu_0")
        write_trials(folder, Trials("s").after_failure("signal 9"))
        valid = (self._scratch / "tpu_0/suspects.json").read_bytes()
        group = {"samples": [[0, 9]], "causes": ["signal 9"], "alone": 1}
        record = {**json.loads(valid), "trial": [[3, 5], [7, 8]], "groups": [group]}

        def read(data: bytes) -> None:
            (self._scratch / "tpu_0/suspects.json").write_bytes(data)
            found = read_trials(folder)  # never an error: the file only guides a search
            resume_trials(found, Supervision("l", 1, 0, "signal 9"), "s", Ranges([(0, 4)]))

        return (valid, dumps(record)), read

    def claim(self) -> Target:
        """Claims, the metadata of finished streams, and the owner of a folder for answers."""
        folder = self._scratch / "claims/0000"
        folder.mkdir(parents=True)
        shutil.copy(self._dataset / "tpu_0/stream.json", self._scratch / "tpu_0/stream.json")
        shutil.copy(self._dataset / "run.json", self._scratch / "run.json")

        def read(data: bytes) -> None:
            (folder / "000001.json").write_bytes(data)
            (self._scratch / "tpu_0/metadata.json").write_bytes(data)
            (self._scratch / "tpu_0/progress.json").write_bytes(data)
            (self._scratch / "answers.json").write_bytes(data)
            ClaimReader(self._root).owners()  # these three never fail: the files are for people
            finished_quarantines(self._root)
            is_alive(self._root.child("tpu_0"), 0.0)
            with_ours(lambda: claim_answers(self._root, self._root))

        return (b'{"worker": "w", "quarantined": ["a"], "run": "r", "output": "o", "phase": "done"}',), read

    # -- clouds and hosts -------------------------------------------------------------------------------------------

    def api_replies(self) -> Target:
        """Whole replies of the TPU API, through the client."""
        session = FakeSession()
        client = CloudTpu(
            CloudSettings("p", endpoint="http://127.0.0.1:9/"),
            session=session,
            sleep=lambda _: None,
            tries=2,
        )
        calls = (
            lambda: client.nodes("z"),
            lambda: client.queued("z"),
            client.zones,
            lambda: client.accelerator_types("z"),
            lambda: client.delete_node("z", "n"),
        )

        def read(data: bytes) -> None:
            for status in (200, 403, 429):
                session.status, session.body, session.sent = status, data, 0
                for call in calls:
                    with_ours(call)

        name = "projects/p/locations/z/nodes/n"
        node = {"name": name, "state": "READY", "networkEndpoints": [{"ipAddress": "1.2.3.4"}]}
        many = {"multisliceParams": {"nodeCount": 2, "nodeIdPrefix": "n"}, "node": {"labels": {"a": "b"}}}
        queued = {"name": name, "tpu": {"nodeSpec": [many]}, "state": {"state": "ACTIVE"}}
        listed = {"nodes": [node], "queuedResources": [queued]}
        places = {"locations": [{"locationId": "z"}], "acceleratorTypes": [{"type": "v3-8"}]}
        operation = {"name": name, "done": True, "error": {"code": 8, "message": "no more capacity"}}
        return (dumps({**listed, **places}), dumps(operation)), read

    def gcloud_settings(self) -> Target:
        """The settings of gcloud."""
        home = self._scratch / "gcloud"
        (home / "configurations").mkdir(parents=True)

        def read(data: bytes) -> None:
            (home / "configurations/config_default").write_bytes(data)
            (home / "active_config").write_bytes(data[:200])
            with_ours(lambda: read_settings(environment={"CLOUDSDK_CONFIG": str(home)}))
            (home / "active_config").unlink()
            with_ours(lambda: read_settings(environment={"CLOUDSDK_CONFIG": str(home)}))

        return (b"[core]\nproject = p\n[compute]\nzone = z\n",), read

    def metadata_server(self) -> Target:
        """The replies of a machine's metadata server."""
        reply = FakeReply()

        def read(data: bytes) -> None:
            reply.body = data
            with patch("urllib.request.OpenerDirector.open", lambda *_, **__: reply):
                with_ours(lambda: machine_region({}))

        return (b"projects/1/zones/us-central1-a", b"eu-west-1"), read

    def host_events(self) -> Target:
        """What a host writes to the standard error of ssh."""

        host = Host("n", "", 0, "1.2.3.4", 0)

        async def ended(data: bytes) -> None:
            session = Session(host, Access(), lambda *_: None)
            output, events = asyncio.StreamReader(), asyncio.StreamReader()
            output.feed_eof()
            events.feed_data(data)
            events.feed_eof()
            process = SimpleNamespace(stdout=output, stderr=events, returncode=255, wait=partial(asyncio.sleep, 0))
            session._process = process  # type: ignore[assignment]
            await session._read_to_end(process)  # type: ignore[arg-type]

        events = [{"event": "ready"}, {"event": "exit", "code": 1, "cause": "c", "left": ["a"]}]
        lines = [guard.MARK + json.dumps(each) for each in [*events, {"event": "refused", "reason": "r"}]]

        def read(data: bytes) -> None:
            for form in (data, *(guard.MARK.encode() + line for line in data.split(b"\n")[:8])):
                with_ours(lambda form=form: asyncio.run(ended(form)))  # type: ignore[misc]
            with_ours(lambda: _parse_probe(host, data))

        return (*(f"{line}\n".encode() for line in lines), b"rsync\n/home/u\na\0b"), read

    def deployed(self) -> Target:
        """What this computer knows about a deployment."""
        folder = self._scratch / "spile/deployed"
        folder.mkdir(parents=True)

        def read(data: bytes) -> None:
            with patch.dict(os.environ, {"XDG_STATE_HOME": str(self._scratch)}):
                (folder / _state_key("gs://b/fleet/f")).write_bytes(data)
                recorded_deployment("gs://b/fleet/f")

        return (b'{"home": "gs://b/fleet/f", "sha256": "00"}',), read


def load_embedded() -> Path:
    from importlib import resources

    return Path(str(resources.files("spile.models") / "embedded"))


def replace_file(path: Path, content: bytes, zeros: int = 0) -> None:
    """Replace a file by a new one, with zeros at its end: a mapping of the old file stays valid, as after an upload."""
    new = path.with_suffix(".new")
    new.write_bytes(content)
    os.truncate(new, len(content) + zeros)
    new.replace(path)


def save_lora(folder: Path) -> None:
    """Save a LoRA of rank 2 for the first layer of the embedded model."""
    folder.mkdir()
    module = "model.layers.0.self_attn.q_proj"
    entries = {entry.name: entry for entry in read_header(LocalFolder(load_embedded()), "model.safetensors")}
    rows, columns = entries[f"{module}.weight"].shape
    tensors = {"A": np.ones((2, columns), np.float32), "B": np.ones((rows, 2), np.float32)}
    names = [(f"base_model.model.{module}.lora_{side}.weight", "F32", each.shape) for side, each in tensors.items()]
    header, _ = encode_header(names, {})
    data = b"".join(each.tobytes() for each in tensors.values())
    (folder / "adapter_model.safetensors").write_bytes(header + data)
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"], "bias": "none"}
    (folder / "adapter_config.json").write_bytes(dumps(config))


def dumps(value: Any) -> bytes:
    return json.dumps(value).encode()


def parsed(data: bytes) -> list[Any]:
    """Return the value of JSON in a list, or an empty list."""
    try:
        return [json.loads(data)]
    except (ValueError, RecursionError):
        OUTCOME.refused = True
        return []


class FakeReply(io.BytesIO):
    """A reply of a server, opened as often as it is asked for."""

    status, body = 200, b""

    def __enter__(self) -> FakeReply:
        return FakeReply(self.body)


class FakeSession(requests.Session):
    """Answers every request with the same body; the page token in it is valid for a few pages."""

    status, body, sent = 200, b"", 0

    def request(self, *_: Any, **__: Any) -> requests.Response:  # type: ignore[override]
        reply = requests.Response()
        reply.status_code, reply._content = self.status, self.body
        reply.encoding = "utf-8"
        return reply


class Outcome:
    """What became of an input, which a target may read in several forms."""

    accepted = refused = False


OUTCOME = Outcome()


def with_ours(call: Callable[[], object]) -> None:
    """Call a parser that returns a value or raises one of our errors, in one line."""
    try:
        call()
        OUTCOME.accepted = True
    except OURS as error:
        OUTCOME.refused = True
        line = str(error)
        assert line.isprintable() or not re.search(r"[\x00-\x1f\x7f-\x9f]", line), repr(line)


NAMES = [name for name in vars(Targets) if not name.startswith("_")]


def open_target(name: str, scratch: Path) -> tuple[tuple[bytes, ...], Callable[[bytes], object]]:
    """Return the valid documents of a target and its parser."""
    valid, read = getattr(Targets(scratch), name)()
    return (valid if isinstance(valid, tuple) else (valid,)), read
