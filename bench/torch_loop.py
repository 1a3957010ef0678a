"""An optimized extraction loop in torch, for comparison: ``python -m bench.torch_loop MODEL TASKS.jsonl OUT``.

Batches are sorted by length under a token budget and run through the base model without its head. The real tokens of
every layer are gathered on the device, copied on a separate stream into a ring of pinned buffers, and written by
threads, one file per batch. On a CPU the loop has no ring. ``--naive`` is the simple loop: padded batches in the order
of the data, ``.cpu()`` of each layer, ``torch.save``.

The loop has no resume, no commits, no checksums and no index of its rows. It is one process whose whole wall time is
measured; its last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import queue
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from spile.data.samples import open_stream
from spile.data.tokens import load_tokenizer
from spile.spec.ranges import Ranges
from spile.spec.run import DataSpec, PromptSpec
from spile.spec.sample import Sample

Tokens = npt.NDArray[np.int32]


def prompts(model: Path, tasks: str, variants: int, most: int | None) -> list[Tokens]:
    """Return the same tokens that spile computes."""
    data = DataSpec(dataset=tasks, prompt=PromptSpec(predictions_per_task=variants), max_samples=most)
    stream = open_stream(data, load_tokenizer(model))
    return [item.tokens for item in stream.read(Ranges()) if isinstance(item, Sample)]


def by_budget(samples: Sequence[Tokens], budget: int) -> Iterator[list[Tokens]]:
    """Yield batches, longest samples first, that fit in ``budget`` tokens with padding."""
    ordered = sorted(samples, key=len, reverse=True)
    start = 0
    while start < len(ordered):
        rows = max(1, budget // len(ordered[start]))
        yield ordered[start : start + rows]
        start += rows


def padded(batch: Sequence[Tokens]) -> tuple[Any, Any]:
    """Return token ids and attention mask."""
    import torch

    ids = torch.zeros((len(batch), max(map(len, batch))), dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, tokens in enumerate(batch):
        ids[row, : len(tokens)] = torch.from_numpy(tokens.astype(np.int64))
        mask[row, : len(tokens)] = 1
    return ids, mask


class Writers:
    """Threads that write the layers of each batch to one file and return its buffer."""

    def __init__(self, folder: Path, count: int, buffers: Sequence[Any]) -> None:
        self.free: queue.Queue[Any] = queue.Queue()
        for buffer in buffers:
            self.free.put(buffer)
        self._folder = folder
        self._work: queue.Queue[Any] = queue.Queue(2 * count)
        self._threads = [threading.Thread(target=self._run) for _ in range(count)]
        for thread in self._threads:
            thread.start()

    def put(self, number: int, layers: Any, ready: Any, buffer: Any) -> None:
        """Write these layers when they are ready."""
        self._work.put((number, layers, ready, buffer))

    def _run(self) -> None:
        import torch

        while (work := self._work.get()) is not None:
            number, layers, ready, buffer = work
            if ready is not None:
                ready.synchronize()
            with (self._folder / f"batch_{number:05d}.bin").open("wb", buffering=0) as file:
                for layer in layers:
                    view = layer.view(torch.int16) if layer.dtype == torch.bfloat16 else layer
                    file.write(view.numpy().data)
            if buffer is not None:
                self.free.put(buffer)

    def close(self) -> None:
        """Wait until everything is written."""
        for _ in self._threads:
            self._work.put(None)
        for thread in self._threads:
            thread.join()


def tuned(model: Any, batches: Sequence[Sequence[Tokens]], args: argparse.Namespace, config: Any) -> None:
    """Run the optimized loop."""
    import torch

    cuda = args.device == "cuda"
    layers = range(config.num_hidden_layers) if args.layer is None else [args.layer]
    most = max(sum(map(len, batch)) for batch in batches)
    ring = [
        torch.empty((len(layers), most, config.hidden_size), dtype=model.dtype, pin_memory=True)
        for _ in range(args.ring if cuda else 0)
    ]
    writers = Writers(args.output, args.writers, ring)
    copies = torch.cuda.Stream() if cuda else None
    try:
        for number, batch in enumerate(batches):
            ids, mask = padded(batch)
            real = mask.flatten().nonzero().squeeze(1).to(args.device, non_blocking=True)
            states = model(
                input_ids=ids.to(args.device), attention_mask=mask.to(args.device), output_hidden_states=True,
                use_cache=False,
            ).hidden_states  # fmt: skip
            kept = [states[layer + 1].flatten(0, 1).index_select(0, real) for layer in layers]
            if copies is None:
                writers.put(number, kept, None, None)
                continue
            buffer = writers.free.get()
            copies.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(copies):
                rows = [buffer[place, : len(real)] for place in range(len(kept))]
                for target, source in zip(rows, kept, strict=True):
                    target.copy_(source, non_blocking=True)
                    source.record_stream(copies)
                ready = torch.cuda.Event()
                ready.record(copies)
            writers.put(number, rows, ready, buffer)
    finally:
        writers.close()


def naive(model: Any, batches: Sequence[Sequence[Tokens]], args: argparse.Namespace) -> None:
    """Run the simple loop."""
    import torch

    for number, batch in enumerate(batches):
        ids, mask = padded(batch)
        result = model(
            input_ids=ids.to(args.device), attention_mask=mask.to(args.device), output_hidden_states=True
        )  # fmt: skip
        torch.save([state.cpu() for state in result.hidden_states[1:]], args.output / f"batch_{number:05d}.pt")


def main() -> None:
    began = time.perf_counter()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("tasks")
    parser.add_argument("output", type=Path)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--budget", type=int, default=4096)
    parser.add_argument("--ring", type=int, default=4)
    parser.add_argument("--writers", type=int, default=8)
    parser.add_argument("--variants", type=int, default=1)
    parser.add_argument("--samples", type=int)
    parser.add_argument("--layer", type=int)
    parser.add_argument("--naive", action="store_true")
    args = parser.parse_args()

    import torch
    from transformers import AutoModel, AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    args.output.mkdir(parents=True, exist_ok=True)
    kind = AutoModelForCausalLM if args.naive else AutoModel
    model = kind.from_pretrained(args.model, dtype=getattr(torch, args.dtype)).to(args.device).eval()
    samples = prompts(args.model, args.tasks, args.variants, args.samples)
    naive_batches = [samples[start : start + 16] for start in range(0, len(samples), 16)]
    batches = naive_batches if args.naive else list(by_budget(samples, args.budget))
    first = time.perf_counter()
    with torch.inference_mode():
        if args.naive:
            naive(model, batches, args)
        else:
            tuned(model, batches, args, model.config)
    done = time.perf_counter()
    tokens = sum(map(len, samples))
    computed = sum(len(batch) * max(map(len, batch)) for batch in batches)
    result = {
        "tokens": tokens, "padding": 1 - tokens / computed, "start": first - began, "loop": done - first,
        "tokens_per_second": tokens / (done - first),
    }  # fmt: skip
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
