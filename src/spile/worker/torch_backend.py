"""The PyTorch producer of ``extract``: any Hugging Face model, with forward hooks at its taps.

Modules are found by the names that model families give them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import ml_dtypes  # noqa: F401 - NumPy's bfloat16
import numpy as np
import numpy.typing as npt

from spile.errors import Failure, ModelError, SpecError
from spile.models.adapters import Adapter
from spile.models.model_files import ModelFiles
from spile.models.safetensors_files import LocalSource
from spile.spec.sample import Sample
from spile.spec.taps import MODULE, SCALED, Tap, TapRows
from spile.store.shard_format import as_stored
from spile.worker.batches import Batch
from spile.worker.producer import BatchProducer, OutOfDeviceMemory, RowBlock, check_tokens

Side = Literal["input", "output"]
Part = Callable[[Any], Any]
"""Maps the value of a module, ``[rows, seq, …]``, to the value of the tap."""

_ATTENTION = ("self_attn", "attn", "attention", "self_attention", "mixer")
_MLP = ("mlp", "block_sparse_moe", "feed_forward", "ffn", "moe")
_O = ("o_proj", "out_proj", "c_proj", "dense", "wo")
_DOWN = ("down_proj", "c_proj", "dense_4h_to_h", "fc2", "w2", "fc_out", "wo")
_FUSED = ("qkv_proj", "c_attn", "query_key_value", "Wqkv", "qkv")
_SEPARATE = {"q": ("q_proj", "wq", "query"), "k": ("k_proj", "wk", "key"), "v": ("v_proj", "wv", "value")}
_ROUTER = ("gate", "router")
_MIDDLE = ("pre_feedforward_layernorm", "post_attention_layernorm", "ln_2", "norm2", "ffn_norm")


@dataclass(frozen=True)
class Place:
    """Where to put a hook: a module, its input or output, and the part of the value that is the tap's."""

    module: Any
    side: Side
    part: Part = lambda value: value


def find_layers(model: Any) -> Sequence[Any]:
    """Return the decoder layers: the module list that is as long as the config says."""
    from torch import nn

    count = model.config.get_text_config().num_hidden_layers
    for _, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return list(module)
    raise SpecError("--backend torch", expected=f"a list of {count} layers in the model", found=type(model).__name__)


def find_place(model: Any, layers: Sequence[Any], tap: Tap) -> Place:
    """Return where a tap is hooked; the error says how to name the module instead."""
    if tap.site.startswith(MODULE):
        return _named(model, tap.site.removeprefix(MODULE))
    finder = _FINDERS.get(tap.site)
    layer = None if tap.layer is None else layers[tap.layer]
    place = None if finder is None else finder(model, layer)
    if place is None:
        raise SpecError(
            f"--taps {tap.site}",
            expected=f"a tap that {type(model).__name__} has",
            found=f"none for {tap}",
            fix=f"name the module, such as --taps {MODULE}{_example(model, tap.layer)}",
        )
    return place


def _named(model: Any, path: str) -> Place:
    try:
        return Place(model.get_submodule(path), "output")
    except AttributeError:
        close = [name for name, _ in model.named_modules() if name.endswith(path.rpartition(".")[2])][:3]
        raise SpecError(
            f"--taps {MODULE}{path}",
            expected=f"a module of {type(model).__name__}" + (f", such as {', '.join(close)}" if close else ""),
            found="none of that name",
        ) from None


def _example(model: Any, layer: int | None) -> str:
    wanted = f".{layer or 0}."
    return next((name for name, _ in model.named_modules() if wanted in f"{name}."), "lm_head")


def _child(module: Any, names: Sequence[str]) -> Any:
    return next((getattr(module, name) for name in names if module is not None and hasattr(module, name)), None)


def _at(module: Any, side: Side, part: Part = lambda value: value) -> Place | None:
    return None if module is None else Place(module, side, part)


def _attention(_model: Any, layer: Any) -> Any:
    return _child(layer, _ATTENTION)


def _added(layer: Any, after: str, inner: Any) -> Place | None:
    """Hook what a part adds to the residual stream: its output, or the output of the norm after it."""
    own = _child(layer, (after.replace("attention", "self_attn").replace("feedforward", "mlp"),))
    if own is not None:  # GLM-4
        return _at(own, "output")
    behind = hasattr(layer, "pre_feedforward_layernorm") or not (
        hasattr(layer, "input_layernorm") or not hasattr(layer, "post_feedforward_layernorm")
    )
    return _at(getattr(layer, after) if behind else inner, "output")


def _mlp(layer: Any) -> Any:
    return _child(layer, _MLP)


def _down(layer: Any) -> Any:
    return _child(_mlp(layer) or layer, _DOWN)


def _resid_mid(model: Any, layer: Any) -> Place | None:
    config = model.config
    if getattr(config, "use_parallel_residual", False) or getattr(config, "parallel_attn", False):
        return None
    if hasattr(layer, "post_feedforward_layernorm") and not hasattr(layer, "pre_feedforward_layernorm"):
        return _at(_mlp(layer), "input")
    return _at(_child(layer, _MIDDLE), "input")


def _heads(site: str) -> Callable[[Any, Any], Place | None]:
    """Return a finder for queries, keys or values, whether their matrices are separate or fused."""

    def find(model: Any, layer: Any) -> Place | None:
        attention = _attention(model, layer)
        own = _child(attention, _SEPARATE[site])
        if own is not None:
            return Place(own, "output")
        fused = _child(attention, _FUSED)
        return (
            None
            if fused is None
            else Place(fused, "output", _third(model, site, hasattr(attention, "query_key_value")))
        )

    return find


def _third(model: Any, site: str, interleaved: bool) -> Part:
    config = model.config.get_text_config()
    heads = config.num_attention_heads
    keys = getattr(config, "num_key_value_heads", None) or heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    sizes = [heads * head_dim, keys * head_dim, keys * head_dim]
    place = "qkv".index(site)

    def part(value: Any) -> Any:
        if interleaved:
            return value.unflatten(-1, (heads, 3, head_dim))[..., place, :].flatten(-2)
        return value.split(sizes, dim=-1)[place]

    return part


_FINDERS: dict[str, Callable[[Any, Any], Place | None]] = {
    "residual": lambda _, layer: _at(layer, "output"),
    "resid_pre": lambda _, layer: _at(layer, "input"),
    "attn": lambda model, layer: _added(layer, "post_attention_layernorm", _attention(model, layer)),
    "mlp": lambda _, layer: _added(layer, "post_feedforward_layernorm", _mlp(layer) or _child(layer, _DOWN)),
    "attn_in": lambda model, layer: _at(_attention(model, layer), "input"),
    "mlp_in": lambda _, layer: _at(_mlp(layer) or _child(layer, ("fc1",)), "input"),
    "mlp_hidden": lambda _, layer: _at(_down(layer), "input"),
    "resid_mid": _resid_mid,
    "q": _heads("q"),
    "k": _heads("k"),
    "v": _heads("v"),
    "z": lambda model, layer: _at(_child(_attention(model, layer), _O), "input"),
    "router": lambda _, layer: _at(_child(_mlp(layer), _ROUTER), "output"),
    "embed": lambda model, _: _at(model.get_input_embeddings(), "output"),
    "final_norm": lambda model, _: _at(model.get_output_embeddings(), "input"),
}


_OF_LOGITS = frozenset({"logits", "logits_ids", "loss"})


class Hooks:
    """Hooks at the taps of a model. Values are ``[rows, seq, …]``."""

    def __init__(self, model: Any, taps: Sequence[Tap]) -> None:
        self.model, self.taps = model, tuple(taps)
        layers = find_layers(model)
        self._places = {tap: find_place(model, layers, tap) for tap in taps if tap.site not in _OF_LOGITS}

    @contextmanager
    def drawing(self, keep: Callable[[Tap, Any], None]) -> Iterator[None]:
        """Pass the value of each tap to ``keep`` as it is computed, while the context is open."""
        handles = [_hook(place, functools.partial(keep, tap)) for tap, place in self._places.items()]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def run(self, tokens: Any, mask: Any, follows: Any) -> Mapping[Tap, Any]:
        """Run padded rows; return the values of every tap. ``follows``: whether a token of the same row comes next."""
        import torch

        kept: dict[Tap, Any] = {}

        def keep(tap: Tap, value: Any) -> None:
            kept[tap] = _heads_of(tap, value, self.model)

        needs_logits = any(tap.site in _OF_LOGITS for tap in self.taps)
        with torch.inference_mode(), self.drawing(keep):
            body = self.model if needs_logits or any(tap.site == "final_norm" for tap in self.taps) else self._body()
            out = body(input_ids=tokens, attention_mask=mask, use_cache=False)
        if needs_logits:
            kept.update(_of_logits(out.logits, tokens, follows, self.taps))
        rows, length = tokens.shape
        return {tap: value.reshape(rows, length, -1) for tap, value in kept.items()}

    def _body(self) -> Any:
        """Return the model without its LM head."""
        return getattr(self.model, self.model.base_model_prefix, self.model)


def _hook(place: Place, keep: Callable[[Any], None]) -> Any:
    if place.side == "output":
        return place.module.register_forward_hook(lambda _module, _inputs, output: keep(place.part(_first(output))))

    def before(_module: Any, args: Any, kwargs: Any) -> None:
        keep(place.part(args[0] if args else kwargs["hidden_states"]))

    return place.module.register_forward_pre_hook(before, with_kwargs=True)


def _first(output: Any) -> Any:
    return output[0] if isinstance(output, tuple | list) else output


def _heads_of(tap: Tap, value: Any, model: Any) -> Any:
    if tap.heads is None:
        return value
    heads = getattr(model.config.get_text_config(), "head_dim", None)
    config = model.config.get_text_config()
    head_dim = heads or config.hidden_size // config.num_attention_heads
    return value.unflatten(-1, (-1, head_dim))[..., list(tap.heads), :]


def _of_logits(logits: Any, tokens: Any, follows: Any, taps: Sequence[Tap]) -> dict[Tap, Any]:
    import torch

    found: dict[Tap, Any] = {}
    for tap in taps:
        if tap.site == "loss":
            loss = torch.nn.functional.cross_entropy(
                logits[:, :-1].float().flatten(0, 1), tokens[:, 1:].flatten(), reduction="none"
            ).reshape(tokens.shape[0], -1)
            loss = torch.nn.functional.pad(loss, (0, 1))
            found[tap] = torch.where(follows, loss, torch.zeros_like(loss))
        elif tap.site in _OF_LOGITS:
            top = logits.topk(tap.top, dim=-1)
            found[tap] = top.values if tap.site == "logits" else top.indices
    return found


Rows = npt.NDArray[Any]


def installed() -> None:
    """Refuse if torch or transformers is not installed."""
    try:
        import torch  # noqa: F401
        import transformers  # noqa: F401
    except ImportError as error:
        raise SpecError(
            "--backend torch", expected="torch", found=f"no {error.name}", fix="run: pip install 'spile[torch]'"
        ) from error


def torch_device() -> str:
    """Return ``cuda`` or ``cpu``: where models run."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def load_model(files: ModelFiles, dtype: str, *, weights: bool = True) -> Any:
    """Load a model in evaluation mode; without ``weights`` only its shapes, which take no memory."""
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
        model, info = AutoModelForCausalLM.from_pretrained(
            folder, dtype=getattr(torch, dtype), output_loading_info=True, use_safetensors=True
        )
    except (ValueError, KeyError, OSError, RuntimeError, AttributeError, TypeError) as error:
        found = f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
        raise ModelError(f"transformers cannot load {files.name}", found=found) from error
    if wrong := sorted({*info["missing_keys"], *info["mismatched_keys"]}):
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
        # Replace the parameter, not its value: a head that is tied to the embedding must change alone.
        setattr(model.get_submodule(module), leaf, torch.nn.Parameter(merged, requires_grad=False))


def torch_rows(files: ModelFiles, taps: Sequence[Tap], store_dtype: str) -> tuple[TapRows, ...]:
    """Return name, shape and dtype of the stored rows of each tap, from a forward pass of shapes."""
    import torch

    def found(weights: bool) -> Mapping[Tap, Any]:
        model = load_model(files, "float32", weights=weights)
        tokens = torch.zeros((1, 2), dtype=torch.long, device=model.device)
        mask = torch.ones_like(tokens) if weights else None
        return Hooks(model, taps).run(tokens, mask, torch.ones_like(tokens, dtype=torch.bool))

    try:
        values = found(weights=False)
    except RuntimeError:  # the model depends on values, which shapes do not have
        values = found(weights=True)
    widths = {tap: values[tap].shape[-1] for tap in taps}
    return tuple(TapRows(str(tap), (width,), tap.stored_as(store_dtype, width)) for tap, width in widths.items())


class TorchProducer(BatchProducer):
    """A model on one device. Samples of a batch are computed sorted by length, which avoids padding."""

    groups = 1
    owned = (0,)

    def __init__(self, model: Any, taps: Sequence[Tap], *, store_dtype: str, dtype: str, most_tokens: int) -> None:
        self._hooks = Hooks(model, taps)
        self._model, self._taps, self._dtype = model, tuple(taps), dtype
        self._store_dtype, self._most = store_dtype, most_tokens
        self._vocabulary = model.get_input_embeddings().num_embeddings

    def describe(self) -> str:
        """Return ``PyTorch on NVIDIA H200, bfloat16, sdpa attention``."""
        import torch

        where = torch.cuda.get_device_name() if torch_device() == "cuda" else f"{torch.get_num_threads()} CPU threads"
        attention = getattr(self._model.config, "_attn_implementation", "its own")
        return f"PyTorch on {where}, {self._dtype}, {attention} attention"

    def start(self, batch: Batch) -> Mapping[int, Sequence[Rows]]:
        """Compute a batch; return the rows of each tap by sample index."""
        check_tokens(batch.samples, self._vocabulary)
        found: dict[int, Sequence[Rows]] = {}
        for some in group_by_length(batch.samples, self._most):
            found.update(self.rows(some))
        return {sample.index: found[sample.index] for sample in batch.samples}

    def rows(self, samples: Sequence[Sample]) -> Iterator[tuple[int, Sequence[Rows]]]:
        """Run one forward pass over padded rows; yield the stored rows of each sample."""
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
        if kind == "bfloat16":  # reinterpret the same bits for NumPy
            halves: Rows = value.to(torch.bfloat16).contiguous().view(torch.int16).cpu().numpy()
            return halves.view(np.dtype("bfloat16"))
        rows: Rows = value.to(getattr(torch, "float32" if kind in SCALED else kind)).cpu().numpy()
        return rows

    def fetch(self, pending: object) -> Sequence[Sequence[RowBlock]]:
        """Return the rows of a batch, sample after sample; refuse NaN and infinity."""
        assert isinstance(pending, dict)  # noqa: S101 - start returned it
        blocks = [np.concatenate([rows[tap] for rows in pending.values()]) for tap in range(len(self._taps))]
        bad = [str(tap) for tap, block in zip(self._taps, blocks, strict=True) if not _finite(block)]
        if bad:
            fix = "use --store-dtype bfloat16, which holds larger values" if self._store_dtype == "float16" else None
            raise Failure(f"NaN or infinity at {', '.join(bad)}", expected="finite activations", fix=fix)
        both = zip(self._taps, blocks, strict=True)
        return [[RowBlock(0, as_stored(b, tap.stored_as(self._store_dtype, b.shape[1])))] for tap, b in both]


def _finite(block: Rows) -> bool:
    return block.dtype.kind in "iu" or bool(np.isfinite(block.astype(np.float32)).all())


def group_by_length(samples: Sequence[Sample], most_tokens: int) -> Iterator[list[Sample]]:
    """Yield samples of similar lengths, the longest first, as many as the token budget allows when padded."""
    some: list[Sample] = []
    for sample in sorted(samples, key=len, reverse=True):
        if some and (len(some) + 1) * len(some[0]) > most_tokens:
            yield some
            some = []
        some.append(sample)
    if some:
        yield some
