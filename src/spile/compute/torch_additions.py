"""Check that ``embed``, ``attn`` and ``mlp`` of a PyTorch model are what it adds to its residual stream.

Modules are found by their names. A model of an unknown family may scale the output of such a module, norm it, or add
something to it. The check is by value and needs no knowledge of the family.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from spile.compute.torch_backend import (
    body_of,
    example_module,
    find_hook_point,
    find_layers,
    forward,
    hook_at,
    inference_on,
    input_device,
    is_bert_like,
    text_config,
)
from spile.errors import SpecError
from spile.spec.taps import MODULE, Tap

_KINDS = ("attn", "mlp", "resid_mid")


def refuse_other_values(model: Any, taps: Sequence[Tap]) -> None:
    """Refuse taps whose value is not what the embedding or the layer adds to the residual stream.

    What a layer adds is the difference between two values in the layer, of which the first is the input of a module. A
    parallel block adds attention and MLP together.
    """
    import torch

    layers, eps = find_layers(model), torch.finfo(model.dtype).eps
    if any(tap.kind == "embed" for tap in taps):
        _refuse_other_embedding(model, layers)
    for index in sorted({tap.layer for tap in taps if tap.kind in _KINDS and tap.layer is not None}):
        if is_bert_like(layers[index]):  # ``resid_mid`` is after a norm there
            continue
        found = _Layer(model, layers, index)
        attn, mlp = found.values.get("attn"), found.values.get("mlp")
        both = None if attn is None or mlp is None else attn + mlp
        together = _is_added(both, found.inputs, found.outputs, eps)
        right = {
            "attn": together or _is_added(attn, found.inputs, found.outputs, eps),
            "mlp": together or _is_added(mlp, found.inputs, found.outputs, eps),
            "resid_mid": _is_added(attn, found.inputs, [found.values.get("resid_mid")], eps),
        }
        for tap in taps:
            if tap.layer == index and not right.get(tap.kind, True):
                raise SpecError(
                    f"--taps {tap}",
                    expected="a model that adds the outputs of attention and MLP to the residual stream",
                    found=f"{type(model).__name__}, which adds other values",
                    fix=f"name the module, such as --taps {MODULE}{example_module(model, index)}",
                )


def _refuse_other_embedding(model: Any, layers: Sequence[Any]) -> None:
    """Refuse ``embed`` if the model multiplies the embedding by another factor than the tap.

    The factor is known if the input of the first layer is the embedding times a factor, and positions: it is compared
    for multiples of random numbers in place of the embedding. A norm after the embedding hides the factor.
    """
    import torch

    point, inputs = find_hook_point(model, layers, Tap("embed")), []

    def see(_module: Any, args: Any, kwargs: Any) -> None:
        inputs.append(_copy(args[0] if args else kwargs["hidden_states"]))

    noise = torch.randn(1, 5, text_config(model.config).hidden_size, generator=torch.Generator().manual_seed(0))
    tokens = torch.arange(1, 6, device=input_device(model))[None]
    for times in (0, 1, 2):
        handles = [
            point.module.register_forward_hook(lambda _m, _i, output, times=times: (times * noise).to(output)),
            layers[0].register_forward_pre_hook(see, with_kwargs=True),
        ]
        try:
            with inference_on(model):
                forward(body_of(model), tokens, torch.ones_like(tokens))
        finally:
            for handle in handles:
                handle.remove()
    if any(each.shape != noise.shape for each in inputs):
        return
    none, once, twice = inputs
    added = once - none
    if (twice - once - added).norm() > 0.02 * added.norm():
        return
    factor, scale = float((added * noise).sum() / noise.norm() ** 2), 1.0 if point.scale is None else float(point.scale)
    if abs(factor - scale) > 0.02 * abs(scale):
        raise SpecError(
            "--taps embed",
            expected=f"a model that adds {scale:g} times its token embedding to the residual stream",
            found=f"{type(model).__name__}, which adds {factor:.4g} times",
            fix=f"store what the first layer reads instead: --taps {Tap('resid_pre', 0)}",
        )


class _Layer:
    """One layer after a forward pass in which it got random numbers instead of the residual stream.

    The rounding of a large residual stream would be larger than what is added to it.
    """

    def __init__(self, model: Any, layers: Sequence[Any], index: int) -> None:
        import torch

        self.values: dict[str, Any] = {}
        self.inputs: list[Any] = []
        """The inputs of its modules."""
        self.outputs: list[Any] = []
        """Their inputs and outputs."""
        width = text_config(model.config).hidden_size
        self._noise = torch.randn(1, 5, width, generator=torch.Generator().manual_seed(0))
        modules = list(layers[index].modules())
        handles = [layers[index].register_forward_pre_hook(self._replace, with_kwargs=True)]
        handles += [module.register_forward_hook(self._see, with_kwargs=True) for module in modules]
        for kind in _KINDS:
            with suppress(SpecError):
                handles.append(
                    hook_at(find_hook_point(model, layers, Tap(kind, index)), functools.partial(self._keep, kind))
                )
        tokens = torch.arange(1, 6, device=input_device(model))[None]
        try:
            with inference_on(model):
                forward(body_of(model), tokens, torch.ones_like(tokens))
        finally:
            for handle in handles:
                handle.remove()

    def _replace(self, _module: Any, args: Any, kwargs: Any) -> Any:
        if args:
            return (self._noise.to(args[0]), *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": self._noise.to(kwargs["hidden_states"])}

    def _see(self, _module: Any, args: Any, kwargs: Any, output: Any) -> None:
        outputs = output if isinstance(output, tuple | list) else (output,)
        inputs, outputs = (
            [_copy(each) for each in some if getattr(each, "shape", None) == self._noise.shape]
            for some in ((*args, *kwargs.values()), outputs[:1])
        )
        self.inputs += inputs
        self.outputs += inputs + outputs

    def _keep(self, kind: str, value: Any) -> None:
        self.values[kind] = _copy(value).reshape(self._noise.shape)


def _copy(value: Any) -> Any:
    import torch

    return value.detach().to("cpu", torch.float32, copy=True)


def _is_added(value: Any, before: Sequence[Any], after: Sequence[Any], eps: float) -> bool:
    """Return whether adding the value to one of ``before`` gives one of ``after``, but for rounding."""
    import torch

    for end in after:
        if value is None or end is None or not before:
            continue
        added, size = end - torch.stack(list(before)), value.norm()
        part = (added * value).sum((1, 2, 3)) / size**2
        rest = (added - value).flatten(1).norm(dim=1)
        if bool(((part - 1).abs() < 0.05).logical_and(rest < 0.02 * size + 4 * eps * end.norm()).any()):
            return True
    return False
