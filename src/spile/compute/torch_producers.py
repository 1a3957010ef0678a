"""The PyTorch producer of ``extract`` and the PyTorch generator of ``infer``."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import islice
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes  # noqa: F401 - NumPy's bfloat16
import numpy as np
import numpy.typing as npt

from spile.compute.answers import Answer, AnswerProducer
from spile.compute.batches import Batch
from spile.compute.producer import OutOfDeviceMemory, Producer, RowBlock, check_tokens, not_finite
from spile.compute.progress import Progress
from spile.compute.threads import Channel, ThreadGroup, ThreadsEnded
from spile.compute.torch_additions import refuse_other_values
from spile.compute.torch_backend import Hooks, inference_on, input_device, load_replicas, nearly_equal, padding_is_safe
from spile.data.tokens import Tokenizer
from spile.errors import Failure, SpecError
from spile.models.generation import Sampling, choose_tokens
from spile.models.model_files import ModelFiles
from spile.spec.positions import ALL, MEAN
from spile.spec.run import GenerationSpec, RunSpec
from spile.spec.sample import Sample
from spile.spec.taps import SCALED, Tap
from spile.store.shard import as_stored

Rows = npt.NDArray[Any]


def load_torch_models(files: ModelFiles, spec: RunSpec, progress: Progress) -> list[Any]:
    """Load the model in PyTorch onto all devices, and log what this backend costs."""
    if spec.mesh_shape is not None:
        raise SpecError("--mesh-shape", expected="--backend jax, which has a mesh", found="--backend torch")
    progress.log(
        f"{files.config.architecture} runs in PyTorch, not in spile's own decoder (spile models): "
        "with padded batches and no overlap, about 1.5 to 4 times as slow"
    )
    return load_replicas(files, spec.dtype, spec.device)


def make_torch_producer(
    files: ModelFiles, taps: Sequence[Tap], spec: RunSpec, batch_tokens: int, progress: Progress
) -> TorchProducer:
    """Return the producer of ``extract`` in PyTorch."""
    models = load_torch_models(files, spec, progress)
    return TorchProducer(
        models, taps, store_dtype=spec.store_dtype, dtype=spec.dtype, most_tokens=batch_tokens, positions=spec.positions
    )


def describe_torch_devices(model: Any, replicas: int) -> str:
    """Return ``2 × NVIDIA H200`` or ``8 CPU threads``."""
    import torch

    if input_device(model).type != "cuda":
        return f"{torch.get_num_threads()} CPU threads"
    count = len(set(getattr(model, "hf_device_map", {}).values())) or replicas
    return f"{count} × {torch.cuda.get_device_name()}"


class TorchProducer(Producer):
    """A model on one or more devices, with a group of each batch on each replica.

    Samples of a group are computed sorted by length, which avoids padding.
    """

    def __init__(
        self,
        replicas: Sequence[Any],
        taps: Sequence[Tap],
        *,
        store_dtype: str,
        dtype: str,
        most_tokens: int,
        positions: str = ALL,
    ) -> None:
        self._hooks = [Hooks(model, taps) for model in replicas]
        self._model, self._taps, self._dtype = replicas[0], tuple(taps), dtype
        self._store_dtype, self._most_tokens, self._mean = store_dtype, most_tokens, positions == MEAN
        self._vocabulary = self._model.get_input_embeddings().num_embeddings
        refuse_other_values(self._model, taps)
        self._padded = padding_is_safe(self._model)
        self._pool = ThreadPoolExecutor(len(replicas), "spile-torch")
        self.groups, self.owned = len(replicas), tuple(range(len(replicas)))

    def describe(self) -> str:
        attention = getattr(self._model.config, "_attn_implementation", "its own")
        return f"PyTorch on {describe_torch_devices(self._model, self.groups)}, {self._dtype}, {attention} attention"

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def start(self, batch: Batch) -> list[list[Rows]]:
        """Compute a batch; return the rows of each group and tap."""
        check_tokens(batch.samples, self._vocabulary)
        return list(self._pool.map(self._compute, self.owned, [batch.samples_of(group) for group in self.owned]))

    def _compute(self, group: int, samples: Sequence[Sample]) -> list[Rows]:
        found: dict[int, Sequence[Rows]] = {}
        for similar in group_by_length(samples, self._most_tokens, padded=self._padded):
            found.update(self.rows(similar, group))
        parts = [found[sample.index] for sample in samples]
        return [np.concatenate([part[tap] for part in parts]) for tap in range(len(self._taps)) if parts]

    def rows(self, samples: Sequence[Sample], group: int = 0) -> dict[int, list[Rows]]:
        """Run one forward pass over padded rows; return the stored rows of each sample at each tap."""
        import torch

        hooks = self._hooks[group]
        tokens, mask = pad([sample.tokens for sample in samples], input_device(hooks.model))
        try:
            values = hooks.run(tokens, mask)
            if self._mean:
                values = {tap: _masked_mean(value, mask) for tap, value in values.items()}
            arrays = [copy_rows(tap, values[tap], self._store_dtype) for tap in self._taps]
        except torch.OutOfMemoryError as error:
            raise OutOfDeviceMemory("the device's memory ran out") from error
        return {
            sample.index: [array[row] if self._mean else sample.of_rows(array[row, : len(sample)]) for array in arrays]
            for row, sample in enumerate(samples)
        }

    def fetch(self, pending: object) -> Sequence[Sequence[RowBlock]]:
        """Return the rows of a batch, sample after sample; refuse NaN and infinity."""
        assert isinstance(pending, list)  # noqa: S101 - start returned it
        return [
            [
                RowBlock(group, encode_rows(tap, blocks[number], self._store_dtype))
                for group, blocks in enumerate(pending)
                if blocks
            ]
            for number, tap in enumerate(self._taps)
        ]


def pad(
    sequences: Sequence[npt.NDArray[np.int32]], device: Any, *, left: bool = False, length: int = 0
) -> tuple[Any, Any]:
    """Return token ids and their mask as tensors, all as long as the longest sequence or as ``length``."""
    import torch

    longest = max(length, *map(len, sequences))
    tokens = np.zeros((len(sequences), longest), np.int64)
    mask = np.zeros_like(tokens)
    for row, sequence in enumerate(sequences):
        here = slice(longest - len(sequence), longest) if left else slice(len(sequence))
        tokens[row, here], mask[row, here] = sequence, 1
    return torch.from_numpy(tokens).to(device), torch.from_numpy(mask).to(device)


def _masked_mean(value: Any, mask: Any) -> Any:
    """Return the mean over the tokens ``[rows, seq, width]`` that the mask marks, in float32: ``[rows, 1, width]``."""
    rows = value.float().masked_fill(mask[..., None].to(value.device) == 0, 0)
    return rows.sum(1, keepdim=True) / mask.sum(1).to(value.device)[:, None, None]


def copy_rows(tap: Tap, value: Any, store_dtype: str) -> Rows:
    """Copy the values of a tap to the host, in the stored dtype, or in float32 if the host encodes them."""
    import torch

    kind = tap.stored_as(store_dtype, value.shape[-1])
    if kind == "bfloat16":  # reinterpret the same bits for NumPy
        halves: Rows = value.to(torch.bfloat16).contiguous().view(torch.int16).cpu().numpy()
        return halves.view(np.dtype("bfloat16"))
    rows: Rows = value.to(getattr(torch, "float32" if kind in SCALED else kind)).cpu().numpy()
    return rows


def encode_rows(tap: Tap, rows: Rows, store_dtype: str) -> Rows:
    """Return rows as they are stored; refuse NaN and infinity."""
    if rows.dtype.kind not in "iu" and not np.isfinite(rows.astype(np.float32)).all():
        raise not_finite([tap], store_dtype)
    return as_stored(rows, tap.stored_as(store_dtype, rows.shape[1]))


def group_by_length(samples: Sequence[Sample], most_tokens: int, *, padded: bool = True) -> Iterator[list[Sample]]:
    """Yield samples of similar lengths, the longest first, as many as the token budget allows when padded.

    Without ``padded``, yield samples of the same length.
    """
    group: list[Sample] = []
    for sample in sorted(samples, key=len, reverse=True):
        full = group and (len(group) + 1) * len(group[0]) > most_tokens
        if full or (group and not padded and len(sample) != len(group[0])):
            yield group
            group = []
        group.append(sample)
    if group:
        yield group


# -- infer ------------------------------------------------------------------------------------------------------------

_ANSWERS_AT_ONCE = {"cpu": 16, "cuda": 64}
"""Answers at a time on each replica."""
_SORTED_BATCHES = 4
"""Batches of prompts that are sorted by length together."""


class TorchGenerator(AnswerProducer):
    """Answers samples with ``generate`` of transformers.

    Each replica answers a batch of prompts at a time, in a thread of its own. A batch takes as long as its longest
    answer. Tokens are selected here, with the random numbers of the JAX generator.
    """

    groups, owned = 1, (0,)

    def __init__(
        self,
        replicas: Sequence[Any],
        taps: Sequence[Tap],
        *,
        generation: GenerationSpec,
        spec: RunSpec,
        tokenizer: Tokenizer,
        progress: Progress,
    ) -> None:
        super().__init__(tokenizer, generation.capture, progress, positions=spec.positions, seed=spec.data.seed)
        self._hooks = [Hooks(model, taps) for model in replicas]
        self._model, self._dtype = replicas[0], spec.dtype
        for model in replicas:  # its own settings, such as a penalty for repetition, would change greedy answers
            model.generation_config = type(model.generation_config)(pad_token_id=0)
        self._size = spec.batch_size or _ANSWERS_AT_ONCE[input_device(self._model).type]
        refuse_other_values(self._model, taps)
        self._padded = _left_padding_is_safe(self._model)
        self._vocabulary = self._model.get_input_embeddings().num_embeddings
        self.taps, self.store_dtype = taps, spec.store_dtype
        chosen = generation.stop_tokens, generation.max_new_tokens, generation.temperature, generation.top_p
        self.sampling = Sampling(*chosen, spec.data.seed)
        self.threads = ThreadGroup()

    def describe(self) -> str:
        count = len(self._hooks)
        names = describe_torch_devices(self._model, count)
        return f"PyTorch on {names}, {self._dtype}, {count * self._size} answers at a time"

    def close(self) -> None:
        """End the threads at their next token."""
        self.threads.fail(ThreadsEnded())

    def answers(self, samples: Iterator[Sample]) -> Iterator[list[Answer]]:
        self.progress.start()
        self.threads = ThreadGroup()
        waiting, lock = self._batches(samples), threading.Lock()
        # Short, so that replicas wait for a slow disk instead of filling the memory with rows.
        ended: Channel[list[Answer]] = Channel(self.threads, len(self._hooks))

        def work(hooks: Hooks) -> None:
            while True:
                with lock:
                    batch = next(waiting, None)
                if batch is None:
                    break
                self._answer(hooks, batch, ended.put)
            ended.put(None)

        for hooks in self._hooks:
            self.threads.start("torch", partial(work, hooks))
        try:
            for _ in self._hooks:
                yield from ended
        except ThreadsEnded:
            pass
        finally:
            self.close()
            self.threads.join()

    def _batches(self, samples: Iterator[Sample]) -> Iterator[list[Sample]]:
        """Yield prompts of similar lengths, or of the same length if the model does not ignore padding."""
        while prompts := list(islice(samples, _SORTED_BATCHES * self._size)):
            check_tokens(prompts, self._vocabulary)
            no_limit = len(prompts) * max(map(len, prompts))
            for batch in group_by_length(prompts, no_limit, padded=self._padded):
                yield from (batch[start : start + self._size] for start in range(0, len(batch), self._size))

    def _answer(self, hooks: Hooks, samples: Sequence[Sample], report: Callable[[list[Answer]], None]) -> None:
        """Answer a batch, in two halves if it does not fit on the device."""
        import torch

        callbacks = _GenerateCallbacks(self, samples, report)
        tokens, mask = pad([sample.tokens for sample in samples], input_device(hooks.model), left=True)
        try:
            with (
                self.progress.busy("model", len(self._hooks)),
                inference_on(hooks.model),
                hooks.capture(callbacks.keep),
            ):
                hooks.model.generate(
                    input_ids=tokens,
                    attention_mask=mask,
                    max_new_tokens=self.sampling.max_new + 1,  # the last token of an answer is fed too
                    do_sample=False,
                    logits_processor=[callbacks.select],
                    stopping_criteria=[callbacks.ended],
                )
        except torch.OutOfMemoryError as error:
            if len(samples) == 1:
                raise Failure(
                    "the device's memory ran out with one answer at a time", fix="use a smaller --max-new-tokens"
                ) from error
            half = len(samples) // 2
            self.progress.log(f"device memory ran out with {len(samples)} answers at a time: going on with {half}")
            unanswered = [sample for sample in samples if sample.index not in callbacks.reported]
            for part in filter(None, (unanswered[:half], unanswered[half:])):
                self._answer(hooks, part, report)


class _GenerateCallbacks:
    """The answers of one batch, while ``generate`` calls back after each forward pass."""

    def __init__(
        self, generator: TorchGenerator, samples: Sequence[Sample], report: Callable[[list[Answer]], None]
    ) -> None:
        self._generator, self._report = generator, report
        self._answers = [Answer(sample, [[] for _ in generator.taps]) for sample in samples]
        self._length = max(map(len, samples))
        """Tokens per row of the next forward pass: the prompts, then one."""
        self._values: dict[Tap, Any] = {}
        self.reported: set[int] = set()

    def keep(self, tap: Tap, value: Any) -> None:
        """Receive the value of a tap."""
        self._values[tap] = value

    def select(self, _tokens: Any, scores: Any) -> Any:
        """Store the rows of a forward pass, report answers that ended, and select the next token of each other answer.

        This is a logits processor. The scores that it returns allow only the selected tokens.
        """
        import torch

        prompts = not self._answers[0].tokens
        unreported = [(row, each) for row, each in enumerate(self._answers) if each.sample.index not in self.reported]
        for _, answer in unreported:
            answer.fed += not prompts
        if self._generator.capture in ("both", "prompt" if prompts else "answer"):
            self._store(unreported, prompts)
        tokens, logprobs = self._choose_tokens(scores)
        unfinished = [(row, answer) for row, answer in unreported if answer.reason is None]
        for row, answer in unfinished:
            answer.append(tokens[row], logprobs[row], self._generator.sampling)
        ended = [answer for _, answer in unreported if answer.reason is not None and answer.fed == len(answer.tokens)]
        self.reported |= {answer.sample.index for answer in ended}
        self._generator.progress.add(
            tokens=len(unfinished) + (sum(len(answer.sample) for _, answer in unreported) if prompts else 0),
            generated_tokens=len(unfinished),
            computed_tokens=len(self._answers) * self._length,
        )
        self._length = 1
        self._report(ended)
        forced = torch.full_like(scores, -torch.inf)
        return forced.scatter_(1, torch.tensor(tokens, device=scores.device)[:, None], 0.0)

    def ended(self, tokens: Any, _scores: Any, **_more: Any) -> Any:
        """Return whether nothing is left to do: a stopping criterion."""
        import torch

        done = len(self.reported) == len(self._answers) or self._generator.threads.failed
        return torch.full((len(tokens),), done, device=tokens.device)

    def _store(self, unreported: Sequence[tuple[int, Answer]], prompts: bool) -> None:
        """Copy the captured rows of a forward pass to the answers."""
        sizes = [len(answer.sample) if prompts else 1 for _, answer in unreported]
        for number, tap in enumerate(self._generator.taps if unreported else ()):
            value = self._values.pop(tap).reshape(len(self._answers), self._length, -1)
            array = copy_rows(tap, value, self._generator.store_dtype)
            # A prompt is at the end of its row, behind the padding.
            own = [array[row, self._length - size :] for (row, _), size in zip(unreported, sizes, strict=True)]
            stored = encode_rows(tap, np.concatenate(own), self._generator.store_dtype)
            parts = np.split(stored, np.cumsum(sizes)[:-1])
            for (_, answer), rows in zip(unreported, parts, strict=True):
                answer.rows[number].append(rows.copy())  # a view would hold the rows of all answers

    def _choose_tokens(self, scores: Any) -> tuple[list[int], list[float]]:
        sampling = self._generator.sampling
        if sampling.temperature == 0:
            best = scores.float().log_softmax(-1).max(-1)
            return scores.argmax(-1).tolist(), best.values.tolist()
        samples = jnp.array([[answer.sample.number & 0x7FFFFFFF for answer in self._answers]], jnp.int32)
        generated = jnp.array([[len(answer.tokens) for answer in self._answers]], jnp.int32)
        chosen = _draw_tokens(scores.float().cpu().numpy(), samples, generated, sampling)
        return chosen.tokens[0].tolist(), chosen.logprobs[0].tolist()


_draw_tokens = jax.jit(choose_tokens, static_argnums=3)


def _left_padding_is_safe(model: Any) -> bool:
    """Return whether ``generate`` gives a padded prompt the same answer as without padding, beyond rounding.

    Models with a recurrent state may ignore the mask.
    """
    import torch

    def logits(length: int) -> Any:
        tokens, mask = pad([np.arange(1, 6, dtype=np.int32)], input_device(model), left=True, length=length)
        more = {"do_sample": False, "max_new_tokens": 3, "return_dict_in_generate": True, "output_logits": True}
        return torch.stack(model.generate(input_ids=tokens, attention_mask=mask, **more).logits)

    with torch.inference_mode():
        return nearly_equal(logits(5), logits(8), model.dtype)
