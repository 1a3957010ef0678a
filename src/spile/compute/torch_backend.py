"""Models in PyTorch: any model of transformers, loaded onto all GPUs, with forward hooks at its taps.

Modules are found by the names that model families give them. A causal model is loaded with its LM head; an encoder, the
encoder of an encoder-decoder and any other model without an LM head are loaded through ``AutoModel``.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from spile.compute.mesh import gpu_error
from spile.errors import Failure, ModelError, SpecError, UnsupportedModel
from spile.models.adapters import Adapter
from spile.models.architecture import ModelConfig
from spile.models.families import read_config, refuse_quantized
from spile.models.model_files import ModelFiles
from spile.spec.taps import MODULE, Tap, TapRows

Side = Literal["input", "output"]

_ATTENTION_NAMES = ("self_attn", "attn", "attention", "self_attention", "linear_attn", "mixer", "mamba")
_MLP_NAMES = ("mlp", "block_sparse_moe", "feed_forward", "ffn", "moe", "shared_mlp")
_OUTPUT_NAMES = ("o_proj", "out_proj", "c_proj", "dense", "wo", "Wo")
_DOWN_NAMES = ("down_proj", "c_proj", "dense_4h_to_h", "fc2", "w2", "fc_out", "wo", "Wo")
_FUSED_NAMES = ("qkv_proj", "c_attn", "query_key_value", "Wqkv", "qkv")
_QKV_NAMES = {"q": ("q_proj", "wq", "query"), "k": ("k_proj", "wk", "key"), "v": ("v_proj", "wv", "value")}
_ROUTER_NAMES = ("gate", "router")
_NORMS_BEFORE_MLP = (
    "pre_feedforward_layernorm",
    "pre_mlp_layernorm",
    "pre_ff_layernorm",
    "post_attention_layernorm",
    "ln_2",
    "norm2",
    "ffn_norm",
    "mlp_norm",
)


@dataclass(frozen=True)
class HookPoint:
    """Where to put a hook: a module, its input or output, and the part of the value that is the tap's."""

    module: Any
    side: Side
    select: Callable[[Any], Any] = lambda value: value
    """Maps the input or output, ``[rows, seq, …]``, to the part that is the tap's."""
    scale: Any = None
    """The factor that the model applies before it adds this part to the residual stream."""

    def value(self, x: Any) -> Any:
        """Return the tap's value from the input or output of the module, which may be changed in place later."""
        part = self.select(x)
        return part.clone() if self.scale is None else part * self.scale


def find_layers(model: Any) -> Sequence[Any]:
    """Return the layers of the text model: the module list that is as long as the config says."""
    return _text_model(model)[1]


def _text_model(model: Any) -> tuple[Any, Sequence[Any]]:
    """Return the smallest module with the token embedding and the layers, and the layers.

    It is not the whole model if there is a vision tower, which may have as many layers.
    """
    from torch import nn

    count, table = text_config(model.config).num_hidden_layers, model.get_input_embeddings()
    containing = [module for module in model.modules() if any(each is table for each in module.modules())]
    for module in reversed(containing):
        for each in module.modules():
            if isinstance(each, nn.ModuleList) and len(each) == count:
                return module, list(each)
    raise SpecError("--backend torch", expected=f"a list of {count} layers in the model", found=type(model).__name__)


def find_hook_point(model: Any, layers: Sequence[Any], tap: Tap) -> HookPoint:
    """Return where a tap is hooked; the error says how to name the module instead."""
    if tap.kind.startswith(MODULE):
        return _find_named(model, tap.kind.removeprefix(MODULE))
    finder = _FINDERS.get(tap.kind)
    layer = None if tap.layer is None else layers[tap.layer]
    point = None if finder is None else finder(model, layer)
    if point is None:
        raise SpecError(
            f"--taps {tap.kind}",
            expected=f"a tap that {type(model).__name__} has",
            found=f"none for {tap}",
            fix=f"name the module, such as --taps {MODULE}{example_module(model, tap.layer)}",
        )
    if tap.heads is None:
        return point
    heads, head_dim, select = list(tap.heads), _head_dim(text_config(model.config)), point.select
    return replace(point, select=lambda value: select(value).unflatten(-1, (-1, head_dim))[..., heads, :])


def _find_named(model: Any, path: str) -> HookPoint:
    try:
        return HookPoint(model.get_submodule(path), "output")
    except AttributeError:
        close = [name for name, _ in model.named_modules() if name.endswith(path.rpartition(".")[2])][:3]
        raise SpecError(
            f"--taps {MODULE}{path}",
            expected=f"a module of {type(model).__name__}" + (f", such as {', '.join(close)}" if close else ""),
            found="none of that name",
        ) from None


def example_module(model: Any, layer: int | None) -> str:
    """Return the path of a module of this layer."""
    wanted = f".{layer or 0}."
    return next((name for name, _ in model.named_modules() if wanted in f"{name}."), "lm_head")


def _child(module: Any, names: Sequence[str]) -> Any:
    return next((child for name in names if (child := getattr(module, name, None)) is not None), None)


def _hook_point(module: Any, side: Side) -> HookPoint | None:
    return None if module is None else HookPoint(module, side)


def is_bert_like(layer: Any) -> bool:
    """Return whether attention and MLP end with a ``dense`` layer to whose output the residual stream is added."""
    return hasattr(getattr(layer, "output", None), "dense") and hasattr(getattr(layer, "attention", None), "self")


def _attention(layer: Any) -> Any:
    """Return the attention module. In layers like BERT's it is inside of one that adds the residual stream."""
    return layer.attention.self if is_bert_like(layer) else _child(layer, _ATTENTION_NAMES)


def _mlp(layer: Any) -> Any:
    return _child(layer, _MLP_NAMES)


def _attention_out(layer: Any) -> Any:
    return layer.attention.output.dense if is_bert_like(layer) else _child(_attention(layer), _OUTPUT_NAMES)


def _mlp_out(layer: Any) -> Any:
    return layer.output.dense if is_bert_like(layer) else _child(_mlp(layer) or layer, _DOWN_NAMES)


def _with_scale(point: HookPoint | None, module: Any, names: Sequence[str]) -> HookPoint | None:
    """Apply the factor that the module has under one of these names, if it has one."""
    from torch import Tensor

    scale = _child(module, names)
    return replace(point, scale=scale) if point is not None and isinstance(scale, float | int | Tensor) else point


def _find_addition(layer: Any, part: Any, out: Any, norms: tuple[str, str]) -> HookPoint | None:
    """Hook what attention or MLP adds to the residual stream: its output, or the output of the norm after it, scaled.

    The norm has the first of the names in GLM-4, and the second in Gemma and OLMo. In other models,
    ``post_attention_layernorm`` is the norm before the MLP. ``out`` is the last matrix of the part.
    """
    if is_bert_like(layer):
        return _hook_point(out, "output")
    gemma = _child(layer, ("pre_feedforward_layernorm", "pre_mlp_layernorm")) is not None
    olmo = hasattr(layer, "post_feedforward_layernorm") and not hasattr(layer, "input_layernorm")
    normed = hasattr(layer, norms[0]) or gemma or olmo
    point = _hook_point((_child(layer, norms) if normed else None) or part or out, "output")
    return _with_scale(point, layer, ("residual_multiplier", "residual_scale"))


def _find_resid_mid(model: Any, layer: Any) -> HookPoint | None:
    config = model.config
    if getattr(config, "use_parallel_residual", False) or getattr(config, "parallel_attn", False):
        return None
    if hasattr(layer, "post_feedforward_layernorm") and not hasattr(layer, "pre_feedforward_layernorm"):
        return _hook_point(_mlp(layer), "input")
    if is_bert_like(layer):
        return _hook_point(layer.attention, "output")
    return _hook_point(_child(layer, _NORMS_BEFORE_MLP), "input")


def _head_dim(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _find_qkv(kind: str, model: Any, layer: Any) -> HookPoint | None:
    """Find queries, keys or values, whether their matrices are separate or fused."""
    attention = _attention(layer)
    own = _child(attention, _QKV_NAMES[kind])
    if own is not None:
        return HookPoint(own, "output")
    fused = _child(attention, _FUSED_NAMES)
    if fused is None:
        return None
    config, which = text_config(model.config), "qkv".index(kind)
    heads, head_dim = config.num_attention_heads, _head_dim(config)
    keys = getattr(config, "num_key_value_heads", None) or heads
    sizes = [heads * head_dim, keys * head_dim, keys * head_dim]
    if hasattr(attention, "query_key_value"):  # interleaved: the query, key and value of each head
        return HookPoint(fused, "output", lambda x: x.unflatten(-1, (heads, 3, head_dim))[..., which, :].flatten(-2))
    return HookPoint(fused, "output", lambda x: x.split(sizes, dim=-1)[which])


_ATTENTION_NORMS = ("post_self_attn_layernorm", "post_attention_layernorm")
_MLP_NORMS = ("post_mlp_layernorm", "post_feedforward_layernorm")
_EMBEDDING_SCALES = ("embedding_multiplier", "embedding_scale", "embed_scale", "normalizer")
_TIMES_ROOT_OF_WIDTH = {"afmoe": "mup_enabled", "big_bird": "rescale_embeddings", "ctrl": ""}
"""Types of models that compute the factor of the embedding in their forward pass, and the config's field for it."""


def _find_embed(model: Any, _: Any) -> HookPoint | None:
    """Hook the embedding that is called: an encoder like T5's has one of its own, with the weight of the shared one."""
    config, text, table = text_config(model.config), _text_model(model)[0], model.get_input_embeddings()
    tables = [each for each in text.modules() if type(each) is type(table) and each.weight is table.weight]
    point = HookPoint(tables[-1], "output")
    switch = _TIMES_ROOT_OF_WIDTH.get(config.model_type)
    if switch is None or not getattr(config, switch, not switch):
        return _with_scale(point, text, _EMBEDDING_SCALES)
    return replace(point, scale=config.hidden_size**0.5)


_FINDERS: dict[str, Callable[[Any, Any], HookPoint | None]] = {
    "residual": lambda _, layer: _hook_point(layer, "output"),
    "resid_pre": lambda _, layer: _hook_point(layer, "input"),
    "attn": lambda _, layer: _find_addition(layer, _attention(layer), _attention_out(layer), _ATTENTION_NORMS),
    "mlp": lambda _, layer: _find_addition(layer, _mlp(layer), _mlp_out(layer), _MLP_NORMS),
    "attn_in": lambda _, layer: _hook_point(_attention(layer), "input"),
    "mlp_in": lambda _, layer: _hook_point(_mlp(layer) or _child(layer, ("fc1", "intermediate")), "input"),
    "mlp_hidden": lambda _, layer: _hook_point(_mlp_out(layer), "input"),
    "resid_mid": _find_resid_mid,
    "q": functools.partial(_find_qkv, "q"),
    "k": functools.partial(_find_qkv, "k"),
    "v": functools.partial(_find_qkv, "v"),
    "z": lambda _, layer: _hook_point(_attention_out(layer), "input"),
    "router": lambda _, layer: _hook_point(_child(_mlp(layer), _ROUTER_NAMES), "output"),
    "embed": _find_embed,
    "final_norm": lambda model, _: _hook_point(model.get_output_embeddings(), "input"),
}


_LOGIT_TAPS = frozenset({"logits", "logits_ids", "loss"})


class _AllTapsComputed(Exception):
    """Raised before the first layer that no tap needs."""


class Hooks:
    """Hooks at the taps of a model. Values are ``[rows, seq, …]``."""

    def __init__(self, model: Any, taps: Sequence[Tap]) -> None:
        self.model, self.taps = model, tuple(taps)
        layers = find_layers(model)
        headless = [str(tap) for tap in taps if tap.kind in _LOGIT_TAPS and model.get_output_embeddings() is None]
        if headless:
            raise SpecError(
                "--taps", expected="taps of a model without an LM head", found=", ".join(headless), fix="leave them out"
            )
        self._points = {tap: find_hook_point(model, layers, tap) for tap in taps if tap.kind not in _LOGIT_TAPS}
        number = {id(module): index for index, layer in enumerate(layers) for module in layer.modules()}
        number |= {id(point.module): -1 for tap, point in self._points.items() if tap.kind == "embed"}
        last = max((number.get(id(point.module), len(layers)) for point in self._points.values()), default=-1)
        stops_early = len(self._points) == len(self.taps) and last + 1 < len(layers)
        self._first_unneeded = layers[last + 1] if stops_early else None
        """The first layer that no tap needs."""

    @contextmanager
    def capture(self, keep: Callable[[Tap, Any], None], *, stop_early: bool = False) -> Iterator[None]:
        """Pass the value of each tap to ``keep`` as it is computed, while the context is open.

        ``stop_early``: raise an exception, which the context suppresses, before the first layer that no tap needs.
        """

        def stop(_module: Any, _args: Any) -> None:
            raise _AllTapsComputed

        handles = [hook_at(point, functools.partial(keep, tap)) for tap, point in self._points.items()]
        if stop_early and self._first_unneeded is not None:
            handles.append(self._first_unneeded.register_forward_pre_hook(stop))
        try:
            with suppress(_AllTapsComputed):
                yield
        finally:
            for handle in handles:
                handle.remove()

    def run(self, tokens: Any, mask: Any) -> Mapping[Tap, Any]:
        """Run padded rows up to the last layer that a tap needs; return the values of every tap."""
        kept: dict[Tap, Any] = {}
        needs_logits = any(tap.kind in _LOGIT_TAPS for tap in self.taps)
        needs_head = needs_logits or any(tap.kind == "final_norm" for tap in self.taps)
        with inference_on(self.model), self.capture(kept.__setitem__, stop_early=True):
            out = forward(self.model if needs_head else body_of(self.model), tokens, mask)
        if needs_logits:
            kept.update(_compute_logit_taps(out.logits, tokens, mask, self.taps))
        rows, length = tokens.shape
        return {tap: value.reshape(rows, length, -1) for tap, value in kept.items()}


def body_of(model: Any) -> Any:
    """Return the model without its LM head."""
    return getattr(model, model.base_model_prefix, model)


def forward(module: Any, tokens: Any, mask: Any) -> Any:
    """Run a model without a cache. Some models accept no cache or no mask."""
    accepted = inspect.signature(module.forward).parameters
    options = {"attention_mask": mask, "use_cache": False}
    return module(input_ids=tokens, **{name: value for name, value in options.items() if name in accepted})


def padding_is_safe(model: Any) -> bool:
    """Return whether the model gives a padded sample the same activations, beyond rounding.

    Most models do; some that mix positions in other ways than by attention ignore the mask.
    """
    import torch

    tokens = torch.arange(1, 6, device=input_device(model))[None]
    padded = torch.nn.functional.pad(tokens, (0, 3))
    with torch.inference_mode():
        plain = forward(body_of(model), tokens, torch.ones_like(tokens))[0]
        other = forward(body_of(model), padded, (padded > 0).long())[0][:, :5]
    return nearly_equal(plain, other, model.dtype)


def nearly_equal(left: Any, right: Any, dtype: Any) -> bool:
    """Return whether two tensors differ by less than the root of the dtype's precision, relative to their norm."""
    import torch

    limit = torch.finfo(dtype).eps ** 0.5
    return bool((left.float() - right.float()).norm() <= limit * left.float().norm())


def hook_at(point: HookPoint, keep: Callable[[Any], None]) -> Any:
    """Pass the value of a hook point to ``keep`` whenever it is computed; return the handle that removes the hook."""

    def after(_module: Any, _args: Any, output: Any) -> None:
        keep(point.value(output[0] if isinstance(output, tuple | list) else output))

    def before(_module: Any, args: Any, kwargs: Any) -> None:
        keep(point.value(args[0] if args else kwargs["hidden_states"]))

    if point.side == "output":
        return point.module.register_forward_hook(after)
    return point.module.register_forward_pre_hook(before, with_kwargs=True)


def _compute_logit_taps(logits: Any, tokens: Any, mask: Any, taps: Sequence[Tap]) -> dict[Tap, Any]:
    """Return the values of the taps that are derived from the logits. The loss is 0 if no token follows in the row."""
    from torch.nn.functional import cross_entropy, pad

    found: dict[Tap, Any] = {}
    for tap in taps:
        if tap.kind == "loss":
            given, following = logits[:, :-1].float().flatten(0, 1), tokens[:, 1:].to(logits.device)
            loss = cross_entropy(given, following.flatten(), reduction="none").reshape(following.shape)
            if mask is not None:
                loss = loss.masked_fill(mask[:, 1:].to(logits.device) == 0, 0)
            found[tap] = pad(loss, (0, 1))
        elif tap.kind in _LOGIT_TAPS:
            top = logits.topk(tap.top, dim=-1)
            found[tap] = top.values if tap.kind == "logits" else top.indices
    return found


def require_torch() -> None:
    """Refuse if torch or transformers is not installed."""
    try:
        import torch  # noqa: F401
        import transformers  # noqa: F401
    except ImportError as error:
        raise SpecError(
            "--backend torch", expected="torch", found=f"no {error.name}", fix="run: pip install 'spile[torch]'"
        ) from error


def torch_devices(device: str = "auto") -> tuple[str, ...]:
    """Return the devices that models run on: all GPUs, or the CPU. ``device`` is the value of ``--device``."""
    import torch

    if device == "tpu":
        raise SpecError("--device tpu", expected="--backend jax", found="--backend torch, which runs on CPUs and GPUs")
    found = () if device == "cpu" else tuple(f"cuda:{number}" for number in range(torch.cuda.device_count()))
    if device == "cuda" and not found:
        built = "" if torch.version.cuda else "PyTorch was installed without CUDA"
        raise gpu_error(built, "install a build of torch with CUDA (pytorch.org)", "PyTorch sees no GPU")
    return found or ("cpu",)


def input_device(model: Any) -> Any:
    """Return the device of the token embedding, to which token ids are sent."""
    return model.get_input_embeddings().weight.device


@contextmanager
def inference_on(model: Any) -> Iterator[None]:
    """Compute without gradients, with the GPU of the model as this thread's GPU, which some kernels require."""
    import torch

    device = input_device(model)
    with torch.inference_mode(), torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        yield


def text_config(config: Any) -> Any:
    """Return the part of a config of transformers that describes the text model; of an encoder-decoder, the encoder."""
    encoder = getattr(config, "encoder", None) if config.is_encoder_decoder else None
    return encoder if hasattr(encoder, "num_hidden_layers") else config.get_text_config()


def read_torch_config(raw: Mapping[str, Any]) -> ModelConfig:
    """Read the sizes of a model of any family, with the defaults of its config class in transformers."""
    require_torch()
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    with suppress(UnsupportedModel):  # The same config, and therefore the same hash, as for the JAX backend.
        return read_config(raw)
    refuse_quantized(raw)
    name = str(raw["model_type"])
    if name not in CONFIG_MAPPING:
        raise ModelError(
            f"transformers {transformers.__version__} does not know the model type {name!r}",
            fix="run: pip install -U transformers",
        )
    text = text_config(CONFIG_MAPPING[name].from_dict(_decode_floats(raw)))
    heads = getattr(text, "num_attention_heads", None)
    heads = heads if isinstance(heads, int) and heads > 0 else 1
    head_dim = max(2, 2 * (text.hidden_size // heads // 2))
    layers, width = text.num_hidden_layers, text.hidden_size
    longest = getattr(text, "max_position_embeddings", None)
    longest = longest if isinstance(longest, int) and longest > 0 else None
    return ModelConfig(name, width, layers, heads, heads, head_dim, 4 * width, text.vocab_size, positions=longest)


def _decode_floats(value: Any) -> Any:
    """Decode infinity and NaN, which transformers writes as ``{"__float__": "Infinity"}``."""
    if isinstance(value, Mapping):
        if set(value) == {"__float__"}:
            return float(value["__float__"])
        return {key: _decode_floats(each) for key, each in value.items()}
    return [_decode_floats(each) for each in value] if isinstance(value, list) else value


def _choose_class(config: Any) -> Any:
    """Return the class that loads a model: with an LM head if the model was saved with one, else without."""
    from transformers import AutoModel, AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForTextEncoding
    from transformers.models.auto import modeling_auto as auto

    kind, saved = config.model_type, tuple(config.architectures or ())
    if not config.is_encoder_decoder:
        causal = auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(kind)
        vision = auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.get(kind)
        if causal in saved or (causal and any(name.endswith(("ForCausalLM", "LMHeadModel")) for name in saved)):
            return AutoModelForCausalLM
        if vision is not None and (vision in saved or not saved):
            return AutoModelForImageTextToText
        if causal is not None and not saved and kind not in auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES:
            return AutoModelForCausalLM
    return AutoModelForTextEncoding if kind in auto.MODEL_FOR_TEXT_ENCODING_MAPPING_NAMES else AutoModel


def _local_folder(files: ModelFiles) -> Path:
    require_torch()
    if files.folder.local_path is None:
        raise SpecError("--backend torch", expected="a model in a folder or on the hub", found=files.name)
    return files.folder.local_path


@contextmanager
def _transformers_errors(name: str) -> Iterator[None]:
    """Convert the errors of transformers to one line."""
    from transformers.utils.logging import disable_progress_bar, set_verbosity_error

    disable_progress_bar()
    set_verbosity_error()
    try:
        yield
    except (ValueError, KeyError, OSError, RuntimeError, AttributeError, TypeError, ImportError) as error:
        found = f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
        raise ModelError(f"transformers cannot load {name}", found=found) from error


def _load_shapes(files: ModelFiles) -> Any:
    """Return the model without values, which takes no memory."""
    folder = _local_folder(files)
    return _shapes_of(files.name, folder, (folder / "config.json").read_bytes())


@functools.lru_cache(maxsize=1)
def _shapes_of(name: str, folder: Path, _config: bytes) -> Any:
    import torch
    from transformers import AutoConfig

    with _transformers_errors(name), torch.device("meta"):
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        return _without_decoder(_choose_class(config).from_config(config, trust_remote_code=False)).eval()


def load_model(files: ModelFiles, dtype: str) -> Any:
    """Load a model on the CPU, in evaluation mode."""
    import torch
    from transformers import AutoConfig

    folder = _local_folder(files)
    with _transformers_errors(files.name):
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        model, info = _choose_class(config).from_pretrained(
            folder,
            dtype=getattr(torch, dtype),
            output_loading_info=True,
            use_safetensors=True,
            trust_remote_code=False,
        )
    missing = {*info["missing_keys"], *(key for key, *_ in info["mismatched_keys"])}
    pooler = {key for key in missing if key.startswith("pooler.")}
    if pooler:  # no activation depends on it, and masked language models are saved without it
        model.pooler = None
    if wrong := sorted(missing - pooler):
        raise SpecError(f"the weights of {files.name}", expected="every tensor of the model", found=f"no {wrong[0]}")
    if files.adapter is not None:
        _merge_adapter(model, files.adapter)
    return _without_decoder(model).eval()


def _without_decoder(model: Any) -> Any:
    """Return the encoder of an encoder-decoder, and any other model unchanged."""
    return model.get_encoder() if model.config.is_encoder_decoder and hasattr(model, "decoder") else model


_WEIGHTS_FRACTION = 0.9
"""The part of a GPU's memory that the weights of a replica may take."""


def load_replicas(files: ModelFiles, dtype: str, device: str = "auto") -> list[Any]:
    """Load a model onto all GPUs: a replica on each, or one that is spread over them if it does not fit on one."""
    import torch

    devices = torch_devices(device)
    model = load_model(files, dtype)
    size = sum(each.numel() * each.element_size() for each in model.parameters())
    try:
        if len(devices) > 1 and size > _WEIGHTS_FRACTION * torch.cuda.get_device_properties(0).total_memory:
            return [_split_over_gpus(model)]
        return place_replicas(model, devices)
    except torch.OutOfMemoryError as error:
        raise Failure(
            f"{files.name} does not fit on {devices[0]}", fix="use --dtype bfloat16, or a machine with more GPUs"
        ) from error


def place_replicas(model: Any, devices: Sequence[str]) -> list[Any]:
    """Return the model on the first device, and a copy of it on each other device."""
    copies = [copy.deepcopy(model).to(device) for device in devices[1:]]
    return [model.to(devices[0]), *copies]


def _split_over_gpus(model: Any) -> Any:
    """Return a model whose layers are on several GPUs."""
    try:
        from accelerate import dispatch_model, infer_auto_device_map
    except ImportError as error:
        raise SpecError(
            "a model that does not fit on one GPU",
            expected="accelerate",
            found="none",
            fix="run: pip install accelerate",
        ) from error
    undivided = list(model._no_split_modules or ())
    return dispatch_model(model, infer_auto_device_map(model, no_split_module_classes=undivided))


def refuse_no_generation(files: ModelFiles) -> None:
    """Refuse a model that generates no text, such as an encoder."""
    model = _load_shapes(files)
    if not model.can_generate() or model.get_output_embeddings() is None:
        raise SpecError(
            "spile infer",
            expected="a model that generates text",
            found=f"{files.config.architecture}, loaded as {type(model).__name__}",
            fix="use spile extract",
        )


def learned_positions(files: ModelFiles) -> int | None:
    """Return the number of positions with a learned embedding, if the model has these."""
    from torch import nn

    found = [
        module.num_embeddings - (module.padding_idx or -1) - 1 - getattr(module, "offset", 0)
        for name, module in _text_model(_load_shapes(files))[0].named_modules()
        if isinstance(module, nn.Embedding) and ("position" in name or name.endswith("wpe"))
    ]
    return min(found, default=None)


def _merge_adapter(model: Any, adapter: Adapter) -> None:
    import torch

    named = dict(model.named_parameters(remove_duplicate=False))
    for name, change in adapter.changes({name: tuple(value.shape) for name, value in named.items()}).items():
        merged = torch.from_numpy(change(named[name].detach().float().numpy())).to(named[name].dtype)
        module, _, leaf = name.rpartition(".")
        # Replace the parameter, not its value: a head that is tied to the embedding must change alone.
        setattr(model.get_submodule(module), leaf, torch.nn.Parameter(merged, requires_grad=False))


def torch_rows(files: ModelFiles, taps: Sequence[Tap], store_dtype: str) -> tuple[TapRows, ...]:
    """Return name, shape and dtype of the stored rows of each tap, from a forward pass of shapes."""
    import torch

    tokens = torch.ones((1, 2), dtype=torch.long)
    try:
        values = Hooks(_load_shapes(files), taps).run(tokens.to("meta"), None)
    except RuntimeError:  # the model depends on values, which shapes do not have
        values = Hooks(load_model(files, "float32"), taps).run(tokens, torch.ones_like(tokens))
    widths = {tap: values[tap].shape[-1] for tap in taps}
    return tuple(TapRows(str(tap), (width,), tap.stored_as(store_dtype, width)) for tap, width in widths.items())
