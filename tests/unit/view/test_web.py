"""The endpoints of ``spile view``: their numbers are those of the Python API, and they refuse everything but reads."""

from __future__ import annotations

import http.client
import json
import re
import socket
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from tests.fakes.gcs import FakeGcs

from spile.cli.main import main
from spile.errors import UserError
from spile.fleet.home import FleetHome, WorkerReport
from spile.fleet.provider import NodeRequest, Operation
from spile.fleet.reconcile import Action
from spile.fleet.spec import FleetSpec, History, Policy, Worker, WorkerHistory
from spile.reading.dataset import open as open_dataset
from spile.reading.inspection import compare_datasets, inspect_dataset
from spile.spec.phase import Phase
from spile.store.snapshot import CommitPoint, SnapshotReader
from spile.view.web.export import exported_page, to_json
from spile.view.web.features import FeatureIndex, load_autoencoder
from spile.view.web.pages import ENDPOINTS, Viewer
from spile.view.web.roots import Root, throughput
from viewing import HOSTILE, make_root, serving


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_root(tmp_path_factory.mktemp("view") / "root")


def ask(viewer: Viewer, name: str, **values: object) -> Any:
    return json.loads(to_json(viewer.answer(name, {key: str(value) for key, value in values.items()})))


def test_the_numbers_of_a_sample_are_those_of_the_python_api(root: str) -> None:
    viewer, dataset = Viewer([Root(root)]), open_dataset(root)
    one = {"stream": 0, "index": 7}
    sample = dataset.sample(0, 7)
    first, second = (sample[tap].astype(np.float64) for tap in ("residual.0", "residual.1"))
    wanted = {
        "norm": np.linalg.norm(first, axis=1),
        "dimension": first[:, 3],
        "similarity": (first @ first[2]) / (np.linalg.norm(first, axis=1) * np.linalg.norm(first[2])),
        "distance": np.linalg.norm(first - second, axis=1) / np.linalg.norm(first, axis=1),
    }
    for measure, values in wanted.items():
        more = {"dimension": 3, "token": 2, "other": "residual.1"}
        found = ask(viewer, "heat", **one, measure=measure, tap="residual.0", **more)
        np.testing.assert_allclose(found["values"], values, rtol=1e-5, atol=1e-6)
    grid = ask(viewer, "grid", **one, first=2)
    assert (grid["taps"], grid["first"]) == (list(dataset.taps), 2)
    np.testing.assert_allclose(grid["values"][0], wanted["norm"][2:], rtol=1e-5)
    shown = ask(viewer, "sample", **one)
    assert shown["ids"] == sample.tokens.tolist()
    assert shown["kept"] == {"label": "odd"}


def test_the_numbers_of_layers_are_those_of_the_python_api(root: str) -> None:
    viewer, dataset = Viewer([Root(root)]), open_dataset(root)
    inspected = inspect_dataset(dataset, tap="attn.1")
    for found in ask(viewer, "layers")["taps"]:
        stats = dataset.stats(found["tap"])
        assert (found["rows"], found["sinks"], found["complete"]) == (stats.count, stats.sinks, True)
        assert found["quantiles"][2] == stats.norm_quantile(0.5)
    tap, stats = ask(viewer, "tap", tap="attn.1"), dataset.stats("attn.1")
    np.testing.assert_allclose(tap["mean"], stats.mean, rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(np.square(tap["size"]), stats.mean**2 + stats.variance, rtol=1e-5)
    assert sum(rows for _, _, rows in tap["bins"]) == stats.count
    assert [row[0] for row in tap["top"]] == pytest.approx([row.norm for row in stats.top], rel=1e-5)
    np.testing.assert_allclose(ask(viewer, "cosine")["values"], inspected.cosine, rtol=1e-5, atol=1e-6)
    space = ask(viewer, "space", tap="attn.1")
    np.testing.assert_allclose(space["points"], inspected.plane, rtol=1e-4, atol=1e-5)
    assert set(space["kept"]["label"]) == {"even", "odd"}


def test_a_search_finds_samples_by_text_label_and_length(root: str) -> None:
    viewer = Viewer([Root(root)])
    listed = ask(viewer, "samples", start=4, count=3)
    assert [row[1] for row in listed["rows"]] == [4, 5, 6]
    assert listed["total"] == 30
    odd = ask(viewer, "samples", label="label=odd", min=10, max=12)
    assert [row[1] for row in odd["rows"]] == [5, 7, 25, 27]
    assert (odd["next"], odd["scanned"]) == (None, 30)
    assert [row[1] for row in ask(viewer, "samples", find="TASK-3")["rows"]] == [6, 7]
    assert ask(viewer, "samples", role="assistant")["rows"] == []
    with pytest.raises(UserError, match="role: expected one of"):
        viewer.answer("samples", {"role": "unknown"})


def test_two_datasets_are_compared_and_the_most_different_sample_comes_first(root: str, tmp_path: Path) -> None:
    other = make_root(tmp_path / "other", shift=0.5)
    viewer = Viewer([Root(root), Root(other)])
    wanted = compare_datasets(open_dataset(root), open_dataset(other), samples=24)
    found = ask(viewer, "compare", root=0, other=1)
    assert found["samples"] == wanted.samples == 24
    assert [row[0] for row in found["by_sample"]] == sorted((row[0] for row in found["by_sample"]), reverse=True)
    assert found["taps"][0][2] == pytest.approx(wanted.taps["residual.0"].median)
    far, stream, index, _, tap = found["by_sample"][0]
    cells = ask(viewer, "difference", root=0, other=1, stream=stream, index=index)
    assert max(cells["values"][cells["taps"].index(tap)]) == pytest.approx(far, rel=1e-5)


def test_the_throughput_of_all_bins_adds_up_to_the_tokens() -> None:
    points = {
        0: [CommitPoint(1000.0 + 60 * n, "a", 1, 600, 1) for n in range(5)],
        1: [CommitPoint(1100.0, "b", 1, 90, 1)],
    }
    found = throughput(points, {"a": 940.0, "b": 1070.0})
    width = found["times"][1] - found["times"][0]
    assert sum(found["rates"]) * width == pytest.approx(5 * 600 + 90)
    assert found["rates"][0] == pytest.approx(10.0)
    assert throughput({}, {}) == {"times": [], "rates": []}


def test_a_run_shows_what_the_snapshot_shows(tmp_path: Path) -> None:
    root = make_root(tmp_path / "root", done=False)
    snapshot, found = SnapshotReader(open_dataset(root).root).take(), ask(Viewer([Root(root)]), "run")
    (row,) = found["rows"]
    state = dict(zip(found["columns"], row, strict=True))
    assert (state["samples"], state["expected"], state["committed"]) == (30, 60, 3)
    assert (found["percent"], found["totals"]["tokens"]) == (snapshot.percent, snapshot.total("tokens"))
    assert ask(Viewer([Root(root)]), "stream", stream=0)["commits"][0][2] == 10


def test_a_fleet_shows_zones_restarts_reasons_events_and_logs(tmp_path: Path) -> None:
    root = make_root(tmp_path / "root", done=False)
    home = FleetHome.open(str(tmp_path / "fleet/f"))
    workers = (Worker(0, "tpu-0", "zone-a"), Worker(1, "tpu-1", "zone-b"))
    policy = Policy(budget=20.0)
    fleet = FleetSpec(
        "f", "p", ("zone-a", "zone-b"), workers, NodeRequest("v3-8", "r"), run={"output": root}, policy=policy
    )
    home.folder.put("fleet.json", fleet.to_json())
    past = WorkerHistory("zone-b", preemptions=2, creates=3, lost="preempted in zone-a")
    home.write_history(History({0: past}, settled=12.5), 1)
    home.write_report(WorkerReport("tpu-0", launches=2, phase=Phase.UNKNOWN, error="one\nout of memory"))
    home.log([(Action("create", 0, "zone-b", "tpu-0", "its machine is gone"), Operation())], 1, 0.0)
    home.folder.put("logs/tpu-0/000001.log", b"first\nsecond\n")
    viewer = Viewer([Root("", home)])
    found = ask(viewer, "run")
    state = dict(zip(found["columns"], found["rows"][0], strict=True))
    assert (state["zone"], state["restarts"]) == ("zone-b", 2)
    assert state["reason"] == "preempted 2×; preempted in zone-a; out of memory"
    assert (found["fleet"]["dollars"], found["fleet"]["budget"]) == (12.5, 20.0)
    (event,) = ask(viewer, "events")["events"]
    assert (event["verb"], event["name"], event["reason"]) == ("create", "tpu-0", "its machine is gone")
    assert ask(viewer, "stream", stream=0)["log"] == ["first", "second"]


OUTSIDE = (
    "/static/../secret.txt", "/static/..%2f..%2fsecret.txt", "/static/%2e%2e/pages.py", "/../secret.txt",
    "/static//etc/passwd", "/api/../../secret.txt", "/static/nothing.js",
)  # fmt: skip
WRONG = (
    "heat?stream=0&index=-1", "heat?stream=x", "heat?stream=0&index=0&tap=../x", "heat?root=7&stream=0",
    "sample?stream=0&index=999", "tap?tap=%00", "grid?stream=0&index=99999999999", "none",
)  # fmt: skip


FORGED_HOSTS = (
    "x/y?",
    "x/y#",
    "x?",
    "x/",
    "me@localhost",
    "localhost:80/y?",
    "localhost:x",
    "[::1]/?",
    "a b",
    "localhost:",
)


def get(port: int, path: str, *, method: str = "GET", headers: dict[str, str] | None = None) -> tuple[int, str, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    try:
        connection.putrequest(method, path, skip_host="Host" in (headers or {}))
        for name, value in (headers or {}).items():
            connection.putheader(name, value)
        connection.endheaders()
        reply = connection.getresponse()
        return reply.status, reply.read().decode(), reply.headers
    finally:
        connection.close()


def port_of(server: Any) -> int:
    return int(re.search(r":(\d+)/", server.url)[1])  # type: ignore[index]


def test_only_reads_by_this_machine_are_answered_and_nothing_is_written(tmp_path: Path) -> None:
    root = make_root(tmp_path / "root", text=HOSTILE)
    (tmp_path / "secret.txt").write_text("a secret")
    before = {path: path.stat().st_mtime_ns for path in Path(root).rglob("*")}
    with serving(Viewer([Root(root)])) as server:
        port = port_of(server)
        status, page, headers = get(port, "/")
        assert (status, headers["X-Content-Type-Options"]) == (200, "nosniff")
        policy = headers["Content-Security-Policy"]
        assert "default-src 'none'; script-src 'self';" in policy
        assert "unsafe" not in policy
        assert "<script>" not in page
        for host in ("evil.example", f"evil.example:{port}", "127.0.0.1.evil.example"):
            assert get(port, "/api/about", headers={"Host": host})[0] == 421
        for host in ("", *FORGED_HOSTS):
            assert get(port, "/api/about", headers={"Host": host})[0] == 400, host
        for host in (f"localhost:{port}", "127.0.0.1:9", "[::1]:80"):
            assert get(port, "/api/about", headers={"Host": host})[0] == 200
        assert get(port, "/api/about", headers={"Sec-Fetch-Site": "cross-site"})[0] == 403
        for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS"):
            assert get(port, "/api/about", method=method)[0] == 405
        for path in OUTSIDE:
            status, text, _ = get(port, path)
            assert status == 404, path
            assert "a secret" not in text
        for path in WRONG:
            status, text, headers = get(port, f"/api/{path}")
            assert (status, headers["Content-Type"]) == (404, "application/json"), (path, text)
            assert set(json.loads(text)) == {"error"}
        for name in ENDPOINTS:
            get(port, f"/api/{name}?stream=0&index=0&tap=attn.1")
    assert {path: path.stat().st_mtime_ns for path in Path(root).rglob("*")} == before


def test_another_host_needs_the_token_which_is_not_in_the_query(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPILE_VIEW_TOKEN", "correct-horse")
    with serving(Viewer([Root(root)]), host="0.0.0.0") as server:
        port = port_of(server)
        assert server.url.endswith(f":{port}/#token=correct-horse")  # After the #: it is never sent.
        assert get(port, "/")[0] == 200
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "correct-hors"}):
            assert get(port, "/api/about?token=correct-horse", headers=headers)[0] == 401
            assert get(port, "/api/live?root=0", headers=headers)[0] == 401
        assert get(port, "/api/about", headers={"Authorization": "Bearer correct-horse"})[0] == 200


def test_a_host_header_cannot_change_the_path_that_is_checked(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before Starlette 1.0.1, ``request.url.path`` was / for a request of /api/about with the Host header ``x/?``."""
    monkeypatch.setenv("SPILE_VIEW_TOKEN", "correct-horse")
    with serving(Viewer([Root(root)]), host="0.0.0.0") as server:
        from starlette.datastructures import URL
        from starlette.requests import HTTPConnection

        monkeypatch.setattr(HTTPConnection, "url", URL("http://x/?/api/about"))  # as Starlette 1.0.0 made it
        port = port_of(server)
        for path in (
            "/api/about",
            "/api/live?root=0",
            "/api/samples",
            "/openapi.json",
            "//api/about",
            "/static/../api/about",
        ):
            assert get(port, path, headers={"Host": f"machine:{port}"})[0] == 401, path
            for host in FORGED_HOSTS:
                with socket.create_connection(("127.0.0.1", port), 20) as raw:
                    raw.sendall(f"GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
                    assert raw.recv(65536).startswith(b"HTTP/1.1 400 "), host
        headers = {"Host": f"machine:{port}", "Authorization": "Bearer correct-horse"}
        assert get(port, "/api/about", headers=headers)[0] == 200


def test_a_sample_of_a_bucket_is_read_by_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    with FakeGcs() as fake:
        fake.add_bucket("b")
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", fake.url)
        make_root("gs://b/root", 90, width=1024)
        viewer = Viewer([Root("gs://b/root")])
        ask(viewer, "sample", stream=0, index=50)
        ask(viewer, "heat", stream=0, index=50, tap="residual.1")
        dataset = viewer.roots[0].dataset()
        stored = sum(file.size for stream in dataset.streams for file in stream.files)
        assert dataset.root.stats.bytes_read < stored / 10


def test_a_missing_package_is_one_line(
    root: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    with pytest.raises(SystemExit) as ended:
        main(["view", root])
    assert ended.value.code == 2
    assert "pip install 'spile[view]'" in capsys.readouterr().err


def test_a_dataset_that_does_not_exist_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["view", str(tmp_path / "none")])
    assert ended.value.code == 2
    assert "no dataset at" in capsys.readouterr().err


def test_an_exported_file_fetches_nothing_and_no_text_ends_its_data(tmp_path: Path) -> None:
    root = make_root(tmp_path / "root", text=HOSTILE)
    page = exported_page(Viewer([Root(root)]))
    assert 'id="data">{"answers":' in page
    assert not re.search(r"""(?:src|href)\s*=\s*["'](?!data:|#main)|@import|url\(|https?://(?!www\.w3\.org)""", page)
    assert page.count("</script>") == 2
    assert "<!--" not in page
    assert "unsafe" not in page
    assert "window.ran=1" in page


# -- features ----------------------------------------------------------------------------------------------------------


def save_saelens(path: Path, **config: object) -> dict[str, np.ndarray]:
    source = np.random.default_rng(0)
    tensors = {
        "W_enc": source.standard_normal((8, 24)).astype(np.float32),
        "b_enc": source.standard_normal(24).astype(np.float32) * 0.1,
        "W_dec": source.standard_normal((24, 8)).astype(np.float32),
        "b_dec": source.standard_normal(8).astype(np.float32) * 0.1,
    }
    if config.get("architecture") == "jumprelu":
        tensors["threshold"] = np.full(24, 0.5, np.float32)
    path.mkdir()
    safetensors.numpy.save_file(tensors, path / "sae_weights.safetensors")
    (path / "cfg.json").write_text(json.dumps({"d_in": 8, "d_sae": 24, **config}))
    return tensors


@pytest.mark.parametrize("kind", ["standard", "topk", "rescaled topk", "jumprelu"])
def test_features_of_a_saelens_checkpoint(root: str, tmp_path: Path, kind: str) -> None:
    """tests/peers compares with SAELens itself."""
    options: dict[str, object] = {"metadata": {"hook_name": "blocks.1.hook_resid_post", "sae_lens_version": "6.54.12"}}
    options |= {"architecture": kind.split()[-1], "k": 4, "rescale_acts_by_decoder_norm": kind == "rescaled topk"}
    t = save_saelens(tmp_path / "sae", **options, apply_b_dec_to_input=kind != "jumprelu")
    index = FeatureIndex(load_autoencoder(tmp_path / "sae"), None)
    viewer, dataset = Viewer([Root(root)], index), open_dataset(root)
    rows = [sample["residual.1"].astype(np.float32) for sample in dataset]
    x = np.concatenate(rows) - (0 if kind == "jumprelu" else t["b_dec"])
    acts = np.maximum(x @ t["W_enc"] + t["b_enc"], 0)
    if kind == "rescaled topk":
        acts *= np.linalg.norm(t["W_dec"], axis=1)
    if "topk" in kind:
        acts[acts < np.sort(acts, axis=1)[:, -4, None]] = 0
    if kind == "jumprelu":
        acts[acts <= 0.5] = 0
    found = ask(viewer, "features")
    assert (found["tap"], found["rows"], found["samples"]) == ("residual.1", len(x), 30)
    np.testing.assert_allclose(found["density"], (acts > 0).mean(0), rtol=1e-5)
    np.testing.assert_allclose(found["largest"], acts.max(0), rtol=1e-4)
    best = int(acts.max(0).argmax())
    feature = ask(viewer, "feature", feature=best)
    owner = np.repeat(np.arange(30), [len(each) for each in rows])
    tops = sorted((float(acts[owner == n, best].max()) for n in range(30)), reverse=True)[:12]
    assert [each["value"] for each in feature["samples"]] == pytest.approx([top for top in tops if top > 0], rel=1e-4)
    one = feature["samples"][0]
    assert one["values"][one["row"] - one["first"]] == pytest.approx(one["value"], rel=1e-4)


@pytest.mark.parametrize(
    ("config", "why"),
    [
        (
            {"architecture": "batchtopk", "k": 4},
            r"architecture: expected one of .*found batchtopk\. Save .*inference_model",
        ),
        ({"architecture": "matryoshka_batchtopk", "k": 4}, r"found matryoshka_batchtopk\. Save a trained"),
        ({"architecture": "gated"}, "found gated"),
        ({"normalize_activations": "layer_norm"}, "normalize_activations: expected none or .*found layer_norm"),
        (
            {"metadata": {"sae_lens_version": "6.60.0"}, "gain": 2},
            "options: expected those of SAELens 6.54, found gain",
        ),
        ({"architecture": "standard", "threshold": [1]}, None),
        ({"architecture": "jumprelu_transcoder"}, "tensors: expected .*threshold, found W_dec, W_enc, b_dec, b_enc"),
        ({"activation_fn": "tanh-relu"}, "options: .*found activation_fn tanh-relu"),
    ],
)
def test_a_saelens_checkpoint_that_would_be_shown_wrongly_is_refused(
    tmp_path: Path, config: dict[str, object], why: str | None
) -> None:
    save_saelens(tmp_path / "sae", **config)
    if why is None:  # Options of versions before 6 are all known.
        assert load_autoencoder(tmp_path / "sae").k is None
        return
    with pytest.raises(UserError, match=why):
        load_autoencoder(tmp_path / "sae")


def test_features_of_a_sparsify_checkpoint_and_of_no_checkpoint(root: str, tmp_path: Path) -> None:
    folder = tmp_path / "layers.1"
    folder.mkdir()
    source = np.random.default_rng(0)
    tensors = {
        "encoder.weight": source.standard_normal((24, 8)).astype(np.float32),
        "encoder.bias": np.zeros(24, np.float32),
        "W_dec": source.standard_normal((24, 8)).astype(np.float32),
        "b_dec": np.full(8, 0.25, np.float32),
    }
    safetensors.numpy.save_file(tensors, folder / "sae.safetensors")
    (folder / "cfg.json").write_text(json.dumps({"k": 3, "d_in": 8, "num_latents": 24}))
    sae = load_autoencoder(folder)
    assert sae.tap == "residual.1"
    rows = open_dataset(root)[0]["residual.1"]
    found = sae.encode(rows)
    plain = np.maximum((rows - 0.25) @ tensors["encoder.weight"].T, 0)
    assert ((found > 0).sum(1) <= 3).all()
    np.testing.assert_allclose(found.max(1), plain.max(1), rtol=1e-5)
    with pytest.raises(UserError, match="--sae-tap"):
        FeatureIndex(sae, "residual.9").overview(open_dataset(root))
    for more, found in (({"activation": "groupmax"}, "groupmax"), ({"signed": True}, "signed topk")):
        (folder / "cfg.json").write_text(json.dumps({"k": 3, "d_in": 8, "num_latents": 24, **more}))
        with pytest.raises(UserError, match=f"activation: expected topk, found {found}"):
            load_autoencoder(folder)
    with pytest.raises(UserError, match=r"expected a folder with cfg\.json"):
        load_autoencoder(tmp_path)
    (folder / "sae.safetensors").write_bytes(b"x" * 40)
    with pytest.raises(UserError, match="not a checkpoint of sparsify"):
        load_autoencoder(folder)
