"""Where the taps of a Hugging Face model are: modules found by the names that families give them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from spile.errors import SpecError
from spile.spec.sites import MODULE
from spile.spec.taps import Tap

__all__ = ["Place", "find_layers", "find_place"]

Side = Literal["input", "output"]
Part = Callable[[Any], Any]
"""From a module's value ``[rows, seq, …]`` to the site's."""

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
    """One hook: a module, which side of it, and what part of the value."""

    module: Any
    side: Side
    part: Part = lambda value: value


def find_layers(model: Any) -> Sequence[Any]:
    """The decoder's layers: the list of modules that is as long as the config says."""
    from torch import nn

    count = model.config.get_text_config().num_hidden_layers
    for _, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return list(module)
    raise SpecError("--backend torch", expected=f"a list of {count} layers in the model", found=type(model).__name__)


def find_place(model: Any, layers: Sequence[Any], tap: Tap) -> Place:
    """Where a tap is drawn, or an error that says how to name the module instead."""
    if tap.site.startswith(MODULE):
        return _named(model, tap.site.removeprefix(MODULE))
    finder = _FINDERS.get(tap.site)
    layer = None if tap.layer is None else layers[tap.layer]
    place = None if finder is None else finder(model, layer)
    if place is None:
        raise SpecError(
            f"--taps {tap.site}",
            expected=f"a place that {type(model).__name__} is known to have",
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
    """What a part adds: its output, or that of the norm that stands behind it."""
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
    """Queries, keys or values: of a matrix of their own, or of one that is all three."""

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
