"""Forward hooks that keep the taps' values of one forward."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from spile.runtime.torch.places import Place, find_layers, find_place
from spile.spec.taps import Tap

__all__ = ["Hooks"]

_OF_LOGITS = frozenset({"logits", "logits_ids", "loss"})


class Hooks:
    """The taps of a model, and what is kept of them. Values are ``[rows, seq, …]``."""

    def __init__(self, model: Any, taps: Sequence[Tap]) -> None:
        self.model, self.taps = model, tuple(taps)
        layers = find_layers(model)
        self._places = {tap: find_place(model, layers, tap) for tap in taps if tap.site not in _OF_LOGITS}

    @contextmanager
    def drawing(self, keep: Callable[[Tap, Any], None]) -> Iterator[None]:
        """While it is open, each tap's value goes to ``keep`` as it comes to be."""
        handles = [_hook(place, functools.partial(keep, tap)) for tap, place in self._places.items()]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def run(self, tokens: Any, mask: Any, follows: Any) -> Mapping[Tap, Any]:
        """One forward over padded rows: every tap's values. ``follows``: whether a token of the same row comes next."""
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
        """The model without its LM head, which nobody asked for."""
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
            said = torch.nn.functional.cross_entropy(
                logits[:, :-1].float().flatten(0, 1), tokens[:, 1:].flatten(), reduction="none"
            ).reshape(tokens.shape[0], -1)
            said = torch.nn.functional.pad(said, (0, 1))
            found[tap] = torch.where(follows, said, torch.zeros_like(said))
        elif tap.site in _OF_LOGITS:
            top = logits.topk(tap.top, dim=-1)
            found[tap] = top.values if tap.site == "logits" else top.indices
    return found
