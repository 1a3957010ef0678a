"""The features of a sparse autoencoder, from a checkpoint of SAELens or sparsify, computed on the rows of a dataset."""

from __future__ import annotations

import json
import threading
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from spile.errors import UserError, untrusted
from spile.reading.dataset import Dataset
from spile.reading.export import HOOKS
from spile.reading.inspection import evenly_spaced
from spile.spec.safetensors import header_length, parse_header

_TOP = 12  # the samples that are shown for a feature
_OPERATIONS = 1e12  # The multiplications of one scan, a minute on two cores. It limits the number of rows.
_ROWS = 65_536
_BATCH = 512
_CONTEXT = 16  # the tokens before and after the strongest one
_FILES = {"sae_weights.safetensors": "SAELens", "sae.safetensors": "sparsify"}
_SAELENS = {
    "standard": set[str](),
    "topk": set[str](),
    "jumprelu": {"threshold"},
    "transcoder": set[str](),
    "skip_transcoder": {"W_skip"},
    "jumprelu_transcoder": {"threshold"},
    "jumprelu_skip_transcoder": {"threshold", "W_skip"},
}
"""The architectures of SAELens whose features are shown, and their tensors beside those that all have."""
_OPTIONS = frozenset((
    "architecture", "d_in", "d_sae", "d_out", "dtype", "device", "metadata", "apply_b_dec_to_input",
    "normalize_activations", "reshape_activations", "k", "rescale_acts_by_decoder_norm", "decoder_init_norm",
    "l1_coefficient", "lp_norm", "l1_warm_up_steps", "use_sparse_activations", "aux_loss_coefficient",
    "jumprelu_init_threshold", "jumprelu_bandwidth", "jumprelu_sparsity_loss_mode", "l0_coefficient",
    "l0_warm_up_steps", "pre_act_loss_coefficient", "jumprelu_tanh_scale", "jumprelu_ste_to_input", "target_l0",
))  # fmt: skip
"""The options of a checkpoint of SAELens 6, with those of its training. Any other one may change the features."""
_KIND_OF_HOOK = {hook: kind for kind, hook in HOOKS.items()}

_Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Autoencoder:
    """The encoder of a sparse autoencoder."""

    name: str
    encoder: _Array
    """[d_in, features], float32."""
    bias: _Array
    shift: _Array
    """Subtracted from each row before it is encoded."""
    threshold: _Array | None = None
    """Activations that are not above it are 0 (JumpReLU)."""
    k: int | None = None
    """Only the k largest activations of a row are kept (TopK)."""
    norm: bool = False
    """Whether rows are scaled to the norm √d first."""
    tap: str | None = None
    """The tap that it was trained on, if the checkpoint states it."""

    @property
    def features(self) -> int:
        return int(self.encoder.shape[1])

    def encode(self, rows: _Array) -> _Array:
        """Return the activations ``[rows, features]``. The rows of all heads of a tap such as ``z`` are joined."""
        rows = rows.astype(np.float32).reshape(len(rows), -1)
        if self.norm:
            rows = rows * (np.sqrt(rows.shape[1]) / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-12))
        found = (rows - self.shift) @ self.encoder + self.bias
        if self.threshold is not None:
            return np.where(found > self.threshold, np.maximum(found, 0), 0).astype(np.float32)
        found = np.maximum(found, 0)
        if self.k is not None and self.k < found.shape[1]:
            left_out = np.argpartition(found, -self.k, axis=1)[:, : -self.k]
            np.put_along_axis(found, left_out, 0, axis=1)
        return np.asarray(found, np.float32)


def load_autoencoder(path: Path) -> Autoencoder:
    """Read a folder that SAELens or sparsify saved: ``cfg.json`` and the weights."""
    name = next((name for name in _FILES if (path / name).is_file()), None)
    if name is None or not (path / "cfg.json").is_file():
        raise UserError(f"--sae {path}", expected=f"a folder with cfg.json and {' or '.join(_FILES)}", found="none")
    with untrusted(UserError, f"--sae {path} is not a checkpoint of {_FILES[name]}"):
        config = json.loads((path / "cfg.json").read_bytes())
        tensors = _tensors(path / name)
        load = _from_saelens if _FILES[name] == "SAELens" else _from_sparsify
        found = load(path, config, tensors)
    if found.encoder.ndim != 2 or found.bias.shape != (found.features,) or found.shift.shape != found.encoder.shape[:1]:
        raise UserError(f"--sae {path}", expected="an encoder with a bias", found=f"shapes {found.encoder.shape}")
    return found


def _from_saelens(path: Path, config: dict[str, Any], tensors: dict[str, _Array]) -> Autoencoder:
    """Return an autoencoder that gives the values of ``SAE.encode`` in float32, or refuse the checkpoint."""
    metadata = config.get("metadata") or {}
    config, unknown = _current_config(config, metadata)
    kind, scaling = str(config.get("architecture", "standard")), str(config.get("normalize_activations") or "none")
    if np.all(tensors.get("scaling_factor", 0) == 1):
        del tensors["scaling_factor"]  # Some versions before 6 stored ones.
    wanted = {"W_enc", "b_enc", "W_dec", "b_dec"} | _SAELENS.get(kind, set())
    head = config.get("hook_head_index", metadata.get("hook_head_index"))
    fix = "save a trained autoencoder with sae.save_inference_model(DIR)" if "batchtopk" in kind else None
    for name, allowed, expected, found in (
        ("architecture", kind in _SAELENS, f"one of {', '.join(_SAELENS)}", kind),
        (
            "normalize_activations",
            scaling in ("none", "constant_norm_rescale"),
            "none or constant_norm_rescale",
            scaling,
        ),
        ("hook_head_index", head is None, "all heads", head),
        ("options", not unknown, "those of SAELens 6.54", ", ".join(sorted(unknown))),
        ("tensors", tensors.keys() == wanted, ", ".join(sorted(wanted)), ", ".join(sorted(tensors))),
    ):
        if not allowed:
            raise UserError(f"--sae {path} cannot be shown: {name}", expected=expected, found=found, fix=fix)
    norms: _Array = np.ones(1, np.float32)
    if kind == "topk" and config.get("rescale_acts_by_decoder_norm"):
        norms = np.linalg.norm(tensors["W_dec"], axis=1)
    # A transcoder reads another space than its b_dec is in, even if both have the same width.
    centred = "transcoder" not in kind and bool(config.get("apply_b_dec_to_input", True))
    hook = str(config.get("hook_name") or metadata.get("hook_name") or "")
    return Autoencoder(
        name=path.name,
        encoder=tensors["W_enc"] * norms,
        bias=tensors["b_enc"] * norms,
        shift=tensors["b_dec"] if centred else np.zeros(len(tensors["W_enc"]), np.float32),
        threshold=tensors.get("threshold"),
        k=int(config["k"]) if kind == "topk" else None,
        norm=scaling != "none",
        tap=_tap_of_hook(hook),
    )


def _current_config(config: dict[str, Any], metadata: dict[str, Any]) -> tuple[dict[str, Any], set[str]]:
    """Return the config in the form of SAELens 6, and its options that may change the features and are not known.

    Before version 6, the activation function was an option of its own, and everything else is known.
    """
    version = str(config.get("sae_lens_version") or metadata.get("sae_lens_version") or "0")
    if int(version.partition(".")[0]) >= 6:
        return config, config.keys() - _OPTIONS
    activation = str(config.get("activation_fn_str") or config.get("activation_fn") or "relu")
    if activation == "topk":
        return {**config, "architecture": "topk", "k": config["activation_fn_kwargs"]["k"]}, set()
    return config, set() if activation == "relu" else {f"activation_fn {activation}"}


def _from_sparsify(path: Path, config: dict[str, Any], tensors: dict[str, _Array]) -> Autoencoder:
    activation = "signed topk" if config.get("signed") else str(config.get("activation", "topk"))
    if activation != "topk":
        raise UserError(f"--sae {path} cannot be shown: activation", expected="topk", found=activation)
    encoder = np.ascontiguousarray(tensors["encoder.weight"].T)
    centred = not config.get("transcode") and tensors["b_dec"].shape == encoder.shape[:1]
    layer = path.name.removeprefix("layers.")
    return Autoencoder(
        name=path.name,
        encoder=encoder,
        bias=tensors["encoder.bias"],
        shift=tensors["b_dec"] if centred else np.zeros(len(encoder), np.float32),
        k=int(config["k"]),
        tap=f"residual.{layer}" if layer != path.name and layer.isdigit() else None,
    )


def _tap_of_hook(hook: str) -> str | None:
    """Return ``residual.5`` for ``blocks.5.hook_resid_post`` and for ``blocks.6.hook_resid_pre``."""
    parts = hook.split(".")
    if len(parts) != 3 or not parts[1].isdigit():
        return None
    if parts[2] == "hook_resid_pre":
        return f"residual.{int(parts[1]) - 1}" if int(parts[1]) else None
    return f"{_KIND_OF_HOOK[parts[2]]}.{parts[1]}" if parts[2] in _KIND_OF_HOOK else None


def _tensors(path: Path) -> dict[str, _Array]:
    with path.open("rb") as file:
        size = path.stat().st_size
        start = file.read(8)
        header = parse_header(start + file.read(header_length(start, size)), size)
    return {
        name: np.fromfile(path, place.dtype, prod(place.shape), offset=place.start)
        .reshape(place.shape)
        .astype(np.float32)
        for name, place in header.places.items()
    }


class FeatureIndex:
    """The activations of all features on some rows of a dataset, computed once at the first request."""

    def __init__(self, sae: Autoencoder, tap: str | None) -> None:
        self.sae = sae
        self.tap = tap or sae.tap
        self._lock = threading.Lock()
        self._scans: dict[str, _Scan] = {}

    def overview(self, dataset: Dataset) -> dict[str, Any]:
        """Return how often and how strongly each feature is active."""
        scan = self._scan(dataset)
        return {
            "name": self.sae.name,
            "tap": scan.tap,
            "rows": scan.rows,
            "samples": scan.samples,
            "density": (scan.active / max(1, scan.rows)).astype(np.float32),
            "largest": scan.top[:, 0],
        }

    def feature(self, dataset: Dataset, number: int) -> dict[str, Any]:
        """Return the samples in which a feature is most active, each with the tokens around the strongest one."""
        scan, shown = self._scan(dataset), []
        for value, place in zip(scan.top[number], scan.where[number], strict=True):
            if value <= 0:
                continue
            stream, index, row = (int(each) for each in scan.address[place])
            sample = dataset.sample(stream, index)
            first, last = max(0, row - _CONTEXT), min(len(sample), row + _CONTEXT + 1)
            values = self.sae.encode(np.asarray(sample[scan.tap][first:last]))[:, number]
            texts = sample.shown_texts()[first:last]
            shown.append(
                {"stream": stream, "index": index, "task_id": sample.task_id, "row": row, "first": first,
                 "tokens": texts, "values": values, "value": float(value)}
            )  # fmt: skip
        return {"feature": number, "density": float(scan.active[number] / max(1, scan.rows)), "samples": shown}

    def _scan(self, dataset: Dataset) -> _Scan:
        with self._lock:
            if dataset.root.url not in self._scans:
                self._scans[dataset.root.url] = _Scan.of(dataset, self.sae, self._tap_in(dataset))
            return self._scans[dataset.root.url]

    def _tap_in(self, dataset: Dataset) -> str:
        fix = f"name it with --sae-tap: one of {', '.join(dataset.taps)}"
        if self.tap is None:
            raise UserError("the checkpoint does not state the tap of the autoencoder", fix=fix)
        if self.tap not in dataset.taps:
            raise UserError(f"no tap {self.tap} in {dataset.root.url}", fix=fix)
        return self.tap


@dataclass(frozen=True)
class _Scan:
    tap: str
    rows: int
    samples: int
    active: _Array  # for each feature: the number of rows where it is active
    top: _Array  # for each feature: its largest activations, at most one of each sample; descending, ``[features, 12]``
    where: _Array  # for each of these, the number of its address
    address: _Array  # stream, sample and row of each address

    @classmethod
    def of(cls, dataset: Dataset, sae: Autoencoder, tap: str) -> _Scan:
        limit = int(min(_ROWS, max(_BATCH, _OPERATIONS / sae.encoder.size)))
        active = np.zeros(sae.features, np.int64)
        top, where = np.zeros((sae.features, _TOP), np.float32), np.zeros((sae.features, _TOP), np.int64)
        address: list[tuple[int, int, int]] = []
        samples = 0
        mean_length = max(1, sum(each.tokens for each in dataset.streams) // max(1, len(dataset.samples)))
        for place in evenly_spaced(len(dataset.samples), max(1, limit // mean_length)):
            sample = dataset.sample(*dataset.samples.address(place))
            values = _encode_all(sae, sample[tap])
            active += (values > 0).sum(0)
            if len(values):
                best = values.argmax(0)
                _insert(top, where, values[best, np.arange(sae.features)], len(address) + best)
            address += [(sample.ref.stream, sample.ref.index, row) for row in range(len(sample))]
            samples += 1
            if len(address) >= limit:
                break
        if not address:
            raise UserError(f"no rows at {tap} in {dataset.root.url}", fix="look again after the first commit")
        return cls(tap, len(address), samples, active, top, where, np.array(address, np.int64))


def _encode_all(sae: Autoencoder, rows: _Array) -> _Array:
    width = prod(rows.shape[1:])
    if width != len(sae.encoder):
        raise UserError("the autoencoder and the tap have different widths", expected=len(sae.encoder), found=width)
    parts = [sae.encode(rows[at : at + _BATCH]) for at in range(0, len(rows), _BATCH)]
    return np.concatenate(parts) if parts else np.zeros((0, sae.features), np.float32)


def _insert(top: _Array, where: _Array, values: _Array, places: _Array) -> None:
    """Insert one value for each feature into the sorted lists of its largest values."""
    for column in range(top.shape[1]):
        larger = values > top[:, column]
        top[larger, column], values = values[larger], np.where(larger, top[:, column], values)
        where[larger, column], places = places[larger], np.where(larger, where[:, column], places)


def open_features(path: Path | None, tap: str | None) -> FeatureIndex | None:
    """Return the index of the checkpoint that ``--sae`` names, or None."""
    if path is None:
        return None
    try:
        return FeatureIndex(load_autoencoder(path.expanduser()), tap)
    except OSError as error:
        raise UserError(f"--sae {path}", expected="a readable folder", found=error.strerror) from error
