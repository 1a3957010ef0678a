"""A Hugging Face model in PyTorch as a producer of rows: padded batches of like lengths, one forward each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import ml_dtypes  # noqa: F401 - NumPy's bfloat16
import numpy as np
import numpy.typing as npt

from spile.errors import Failure, ModelError, SpecError
from spile.planning.batches import Batch
from spile.runtime.producer import OutOfDeviceMemory, RowBlock, check_tokens
from spile.runtime.torch.drawing import Hooks
from spile.spec.sample import Sample
from spile.spec.taps import SCALED, Tap, TapRows
from spile.store.encoding import as_stored
from spile.weights.adapters import Adapter
from spile.weights.files import ModelFiles
from spile.weights.source import LocalSource

__all__ = ["TorchProducer", "installed", "load_model", "torch_device", "torch_rows"]

Rows = npt.NDArray[Any]


def installed() -> None:
    """Refuse to go on without torch and transformers."""
    try:
        import torch  # noqa: F401
        import transformers  # noqa: F401
    except ImportError as error:
        raise SpecError(
            "--backend torch", expected="torch", found=f"no {error.name}", fix="pip install 'spile[torch]'"
        ) from error


def torch_device() -> str:
    """Where models run."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def load_model(files: ModelFiles, dtype: str, *, weights: bool = True) -> Any:
    """The model in evaluation mode; without ``weights`` only its shapes, which take no memory."""
    installed()
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    if not isinstance(files.source, LocalSource):
        raise SpecError("--backend torch", expected="a model in a folder or on the hub", found=files.name)
    folder = files.source.folder
    try:
        if not weights:
            with torch.device("meta"):
                return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).eval()
        model, said = AutoModelForCausalLM.from_pretrained(
            folder, dtype=getattr(torch, dtype), output_loading_info=True, use_safetensors=True
        )
    except (ValueError, KeyError, OSError, RuntimeError, AttributeError, TypeError) as error:
        found = f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
        raise ModelError(f"transformers cannot load {files.name}", found=found) from error
    if wrong := sorted({*said["missing_keys"], *said["mismatched_keys"]}):
        raise SpecError(f"the weights of {files.name}", expected="every tensor of the model", found=f"no {wrong[0]}")
    if files.adapter is not None:
        _merge(model, files.adapter)
    return model.to(torch_device()).eval()


def _merge(model: Any, adapter: Adapter) -> None:
    import torch

    named = dict(model.named_parameters(remove_duplicate=False))
    for name, change in adapter.changes({name: tuple(value.shape) for name, value in named.items()}).items():
        merged = torch.from_numpy(change.apply(named[name].detach().float().numpy())).to(named[name].dtype)
        module, _, leaf = name.rpartition(".")
        # Another parameter, not another value: a head that is the embedding is changed alone.
        setattr(model.get_submodule(module), leaf, torch.nn.Parameter(merged, requires_grad=False))


def torch_rows(files: ModelFiles, taps: Sequence[Tap], store_dtype: str) -> tuple[TapRows, ...]:
    """What the taps' rows are, from a forward of shapes alone."""
    import torch

    def found(weights: bool) -> Mapping[Tap, Any]:
        model = load_model(files, "float32", weights=weights)
        tokens = torch.zeros((1, 2), dtype=torch.long, device=model.device)
        mask = torch.ones_like(tokens) if weights else None
        return Hooks(model, taps).run(tokens, mask, torch.ones_like(tokens, dtype=torch.bool))

    try:
        values = found(weights=False)
    except RuntimeError:  # it looks at values on the way, which shapes alone do not have
        values = found(weights=True)
    widths = {tap: values[tap].shape[-1] for tap in taps}
    return tuple(TapRows(str(tap), (width,), tap.stored_as(store_dtype, width)) for tap, width in widths.items())


class TorchProducer:
    """One device; the samples of a batch sorted by length, so that little is padded, and put back in their order."""

    groups = 1
    owned = (0,)

    def __init__(self, model: Any, taps: Sequence[Tap], *, store_dtype: str, dtype: str, most_tokens: int) -> None:
        self._hooks = Hooks(model, taps)
        self._model, self._taps, self._dtype = model, tuple(taps), dtype
        self._store_dtype, self._most = store_dtype, most_tokens
        self._vocabulary = model.get_input_embeddings().num_embeddings

    def prepare(self, *_: object) -> None:
        """Nothing is compiled."""

    def await_program(self, _batch: Batch, _given_up: Callable[[], bool]) -> None:
        """Nothing to wait for."""

    def close(self) -> None:
        """Nothing to end."""

    def describe(self) -> str:
        """For people."""
        import torch

        where = torch.cuda.get_device_name() if torch_device() == "cuda" else f"{torch.get_num_threads()} CPU threads"
        attention = getattr(self._model.config, "_attn_implementation", "its own")
        return f"PyTorch on {where}, {self._dtype}, {attention} attention"

    def start(self, batch: Batch) -> Mapping[int, Sequence[Rows]]:
        """Compute a batch: by sample's index, each tap's rows."""
        check_tokens(batch.samples, self._vocabulary)
        found: dict[int, Sequence[Rows]] = {}
        for some in _alike(batch.samples, self._most):
            found.update(self.rows(some))
        return {sample.index: found[sample.index] for sample in batch.samples}

    def rows(self, samples: Sequence[Sample]) -> Iterator[tuple[int, Sequence[Rows]]]:
        """One forward over padded rows."""
        import torch

        longest = max(map(len, samples))
        tokens = np.zeros((len(samples), longest), np.int64)
        mask = np.zeros_like(tokens)
        for row, sample in enumerate(samples):
            tokens[row, : len(sample)], mask[row, : len(sample)] = sample.tokens, 1
        given = [torch.from_numpy(array).to(torch_device()) for array in (tokens, mask)]
        follows = torch.nn.functional.pad(given[1][:, 1:], (0, 1)).bool()
        try:
            drawn = self._hooks.run(given[0], given[1], follows)
        except torch.OutOfMemoryError as error:
            raise OutOfDeviceMemory("the device's memory ran out") from error
        arrays = [self._stored(tap, drawn[tap]) for tap in self._taps]
        for row, sample in enumerate(samples):
            yield sample.index, [sample.of_rows(array[row, : len(sample)]) for array in arrays]

    def _stored(self, tap: Tap, value: Any) -> Rows:
        import torch

        kind = tap.stored_as(self._store_dtype, value.shape[-1])
        if kind == "bfloat16":  # NumPy's view of the same bits
            halves: Rows = value.to(torch.bfloat16).contiguous().view(torch.int16).cpu().numpy()
            return halves.view(np.dtype("bfloat16"))
        rows: Rows = value.to(getattr(torch, "float32" if kind in SCALED else kind)).cpu().numpy()
        return rows

    def fetch(self, pending: object) -> Sequence[Sequence[RowBlock]]:
        """The batch's rows, sample after sample, looked at for what is no number."""
        assert isinstance(pending, dict)  # noqa: S101 - the pipeline hands back what start gave it
        blocks = [np.concatenate([rows[tap] for rows in pending.values()]) for tap in range(len(self._taps))]
        bad = [str(tap) for tap, block in zip(self._taps, blocks, strict=True) if not _finite(block)]
        if bad:
            fix = "--store-dtype bfloat16 holds larger values" if self._store_dtype == "float16" else None
            raise Failure(f"NaN or infinity at {', '.join(bad)}", expected="finite activations", fix=fix)
        both = zip(self._taps, blocks, strict=True)
        return [[RowBlock(0, as_stored(b, tap.stored_as(self._store_dtype, b.shape[1])))] for tap, b in both]


def _finite(block: Rows) -> bool:
    return block.dtype.kind in "iu" or bool(np.isfinite(block.astype(np.float32)).all())


def _alike(samples: Sequence[Sample], most_tokens: int) -> Iterator[list[Sample]]:
    """Samples of like lengths, the longest first, as many as the token budget allows when padded."""
    some: list[Sample] = []
    for sample in sorted(samples, key=len, reverse=True):
        if some and (len(some) + 1) * len(some[0]) > most_tokens:
            yield some
            some = []
        some.append(sample)
    if some:
        yield some
