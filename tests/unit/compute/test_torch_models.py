"""Models that the JAX decoder does not implement, from the command line: rows and answers equal transformers."""

from __future__ import annotations

import json
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import spile
from spile.cli.main import main
from spile.compute.batches import Batch
from spile.compute.progress import Progress
from spile.data.tokens import load_tokenizer
from spile.errors import UserError
from spile.models import model_files
from spile.spec.run import GenerationSpec, RunSpec
from spile.spec.sample import Sample
from spile.spec.taps import Tap
from torch_models import CAUSAL, ENCODERS, VOCABULARY, reference, save_model, save_texts

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

OPTIONS = ("--prompt", "text", "--max-seq-length", "64", "--store-dtype", "float32")


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_texts(tmp_path_factory.mktemp("texts") / "texts.jsonl"))


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """Ignore warnings of transformers and torch about tiny models."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def command(*words: object) -> int:
    with pytest.raises(SystemExit) as ended:
        main([str(word) for word in words])
    assert isinstance(ended.value.code, int)
    return ended.value.code


def refusal(capfd: pytest.CaptureFixture[str], *words: object) -> str:
    """Return the one line of a command that must fail."""
    capfd.readouterr()
    assert command(*words) == 2
    return capfd.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("name", [*CAUSAL, *ENCODERS])
def test_extract_stores_the_hidden_states_of_transformers(
    name: str, texts: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder, root = save_model(name, tmp_path / "model"), str(tmp_path / "out")
    assert command("extract", "--model", folder, "--dataset", texts, "--output", root, "--store-dtype", "float32") == 0
    shown = capfd.readouterr()
    assert "runs in PyTorch, not in spile's own decoder" in shown.out + shown.err
    model, dataset = reference(name, folder), spile.open(root)
    layers = model.config.get_text_config().num_hidden_layers
    assert dataset.taps == tuple(f"residual.{layer}" for layer in range(layers))
    for index in range(5):
        sample = dataset.sample(0, index)
        ids = torch.from_numpy(np.asarray(sample.tokens, np.int64))[None]
        with torch.no_grad():
            expected = model(input_ids=ids, output_hidden_states=True).hidden_states
        # The last one is behind the final norm; recurrent models leave out the embedding.
        expected = expected[0 if name in ("mamba", "mamba2", "rwkv") else 1 : -1]
        assert len(expected) >= layers - 1
        for layer, rows in enumerate(expected):
            np.testing.assert_allclose(sample.rows(f"residual.{layer}"), rows[0], atol=2e-5 * float(rows.abs().max()))
    assert command("verify", root, "--recompute", "5") == 0


@pytest.mark.parametrize("name", CAUSAL)
def test_infer_gives_the_answers_of_generate(name: str, texts: str, tmp_path: Path) -> None:
    folder, root = save_model(name, tmp_path / "model"), str(tmp_path / "out")
    words = ("--model", folder, "--dataset", texts, "--output", root, "--max-new-tokens", "7", "--batch-size", "3")
    assert command("infer", *words, *OPTIONS) == 0
    model, dataset = reference(name, folder), spile.open(root)
    predictions = [json.loads(line) for line in (tmp_path / "out" / "stream_0" / "predictions.jsonl").open()]
    assert len(predictions) == 5
    for prediction in predictions:
        sample, answer = dataset.sample(0, prediction["sample"]), prediction["tokens"]
        ids = torch.from_numpy(np.asarray(sample.tokens, np.int64))[None, : -len(answer)]
        settings = {"max_new_tokens": 7, "do_sample": False, "eos_token_id": answer[-1:], "pad_token_id": 0}
        if prediction["stop_reason"] == "length":
            settings["eos_token_id"] = None
        expected = model.generate(ids, attention_mask=torch.ones_like(ids), **settings)
        assert answer == expected[0, ids.shape[1] :].tolist()
    assert command("verify", root, "--recompute", "5") == 0  # rows of single steps equal those of one forward pass


def test_sampling_draws_the_tokens_of_the_jax_generator(texts: str, tmp_path: Path) -> None:
    found = []
    for backend in ("jax", "torch"):
        words = ("--model", "embedded", "--dataset", texts, "--output", tmp_path / backend, "--backend", backend)
        more = ("--max-new-tokens", "8", "--temperature", "0.9", "--top-p", "0.8", "--seed", "3", "--layers", "0")
        assert command("infer", *words, *more, *OPTIONS) == 0
        lines = (tmp_path / backend / "stream_0" / "predictions.jsonl").read_text().splitlines()
        found.append([(each["sample"], each["tokens"]) for each in map(json.loads, lines)])
    assert found[0] == found[1]


def test_what_a_model_cannot_do_is_one_line(
    texts: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    bert, t5 = save_model("bert", tmp_path / "bert"), save_model("t5", tmp_path / "t5")
    data = ("--dataset", texts, "--prompt", "text", "--output", tmp_path / "out")
    line = refusal(capfd, "infer", "--model", bert, *data)
    assert "spile infer: expected a model that generates text, found bert, loaded as BertModel" in line
    line = refusal(capfd, "extract", "--model", bert, *data, "--max-seq-length", "64", "--taps", "logits")
    assert "--taps: expected taps of a model without an LM head" in line
    line = refusal(capfd, "extract", "--model", t5, *data, "--taps", "attn")
    assert "--taps attn: expected a tap that T5EncoderModel has, found none for attn.0" in line
    line = refusal(capfd, "extract", "--model", bert, *data, "--max-seq-length", "129")
    assert "--max-seq-length: expected at most 128" in line
    monkeypatch.setattr("spile.run.resolve.find_spec", lambda _: None)
    line = refusal(capfd, "extract", "--model", bert, *data)
    assert "needs PyTorch, which is not installed: unknown architecture" in line
    assert line.endswith("found 'bert'. Run: pip install 'spile[torch]'")
    assert not (tmp_path / "out" / "run.json").exists()


def test_an_option_that_the_decoder_does_not_implement_runs_in_pytorch(
    texts: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    from transformers import AutoModelForCausalLM

    from numerics import cases

    folder = cases.write_model("llama-1", tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    config["rope_scaling"] = {"rope_type": "dynamic", "factor": 2.0}
    (folder / "config.json").write_text(json.dumps(config))
    ids = tmp_path / "ids.jsonl"
    ids.write_text(json.dumps({"task_id": "0", "input_ids": [5, 6, 7, 8]}) + "\n")
    root = str(tmp_path / "out")
    assert command("extract", "--model", folder, "--dataset", ids, "--output", root, "--store-dtype", "float32") == 0
    assert "llama runs in PyTorch" in "".join(capfd.readouterr())
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        expected = model(torch.tensor([[5, 6, 7, 8]]), output_hidden_states=True).hidden_states[1][0]
    np.testing.assert_allclose(spile.open(root).sample(0, 0).rows("residual.0"), expected, atol=1e-4)


def test_esm_has_a_vocabulary_instead_of_a_tokenizer_file(tmp_path: Path) -> None:
    from transformers import EsmTokenizer

    tokens = ["<cls>", "<pad>", "<eos>", "<unk>", *"LAGVSERTIDPKQNFYMHWCXBUZO", ".", "-", "<null_1>", "<mask>"]
    (tmp_path / "vocab.txt").write_text("\n".join(tokens))
    theirs = EsmTokenizer(str(tmp_path / "vocab.txt"))
    theirs.save_pretrained(tmp_path)
    assert not (tmp_path / "tokenizer.json").exists()
    ours = load_tokenizer(tmp_path)
    for text in ("MKTAYIAKQR", "MKT<mask>AYI", "M K T", "mkt", "MJK-.X", "", "ACD EFG\nHIK"):
        assert ours.encode([text], add_special=True)[0].tokens.tolist() == theirs(text)["input_ids"], text


# -- parts ------------------------------------------------------------------------------------------------------------


def load(name: str, folder: Path) -> Any:
    from spile.compute.torch_backend import load_model, read_torch_config

    return load_model(model_files.find(str(save_model(name, folder)), read=read_torch_config), "float32")


def samples() -> list[Sample]:
    draw = np.random.default_rng(0)
    return [
        Sample(
            number, str(number), draw.integers(3, VOCABULARY - 4, length).astype(np.int32), np.zeros(length, np.uint8)
        )
        for number, length in enumerate((9, 4, 17, 5, 4))
    ]


def test_layers_after_the_last_tap_and_the_head_are_not_computed(tmp_path: Path) -> None:
    from spile.compute.torch_backend import Hooks, find_layers

    model, calls = load("opt", tmp_path), []
    for layer, module in enumerate(find_layers(model)):
        module.register_forward_hook(lambda *_, layer=layer: calls.append(layer))
    model.lm_head.register_forward_hook(lambda *_: calls.append("head"))
    tokens = torch.ones((1, 4), dtype=torch.long)

    def computed(*taps: Tap) -> list[Any]:
        calls.clear()
        assert set(Hooks(model, taps).run(tokens, None)) == set(taps)
        return list(calls)

    assert computed(Tap("residual", 0)) == [0]
    assert computed(Tap("embed")) == []
    assert computed(Tap("module:model.decoder.layers.1.fc1")) == [0, 1]
    assert computed(Tap("residual", 2)) == [0, 1, 2]
    assert computed(Tap("final_norm")) == [0, 1, 2, "head"]


def test_the_parts_of_an_encoder_layer_add_up(tmp_path: Path) -> None:
    from spile.compute.torch_backend import Hooks

    tokens = torch.arange(3, 12)[None]
    kinds = ("resid_pre", "attn", "resid_mid", "mlp", "residual")
    for name in ("esm", "modernbert", "bert"):
        model = load(name, tmp_path / name)
        found = Hooks(model, [Tap(kind, 1) for kind in kinds]).run(tokens, torch.ones_like(tokens))
        before, attention, middle, mlp, after = (found[Tap(kind, 1)] for kind in kinds)
        added, again = before + attention, middle + mlp
        if name == "bert":  # its norms come after the sums
            layer = model.encoder.layer[1]
            added, again = layer.attention.output.LayerNorm(added), layer.output.LayerNorm(again)
        torch.testing.assert_close(middle, added.detach())
        torch.testing.assert_close(after, again.detach())


@pytest.mark.parametrize("name", ["opt", "mamba", "qwen3_5", "gemma4", "esm", "modernbert", "falcon", "granitemoe"])
def test_attn_and_mlp_are_what_is_added(name: str, tmp_path: Path) -> None:
    from spile.compute.torch_additions import refuse_other_values
    from spile.compute.torch_backend import Hooks

    model, tokens = load(name, tmp_path), torch.arange(3, 12)[None]
    kinds = ("attn", "mlp")[: 1 if name == "mamba" else 2]
    refuse_other_values(model, [Tap(kind, layer) for kind in kinds for layer in range(3)])
    refuse_other_values(model.to(torch.bfloat16), [Tap(kind, 1) for kind in kinds])
    found = Hooks(model.float(), [Tap("embed"), *(Tap(kind, 0) for kind in ("resid_pre", *kinds, "residual"))])
    values = found.run(tokens, torch.ones_like(tokens))
    if name == "granitemoe":
        torch.testing.assert_close(values[Tap("embed")], values[Tap("resid_pre", 0)])
    if name != "gemma4":  # its layers also add what the layer's own embedding gives
        total = sum((values[Tap(kind, 0)] for kind in kinds), values[Tap("resid_pre", 0)])
        torch.testing.assert_close(total, values[Tap("residual", 0)], atol=1e-4, rtol=1e-4)


SCALED = ("ctrl", "afmoe", "recurrent_gemma", "pegasus", "granitemoe")


@pytest.mark.parametrize("name", [*SCALED, "t5", "opt"])
def test_embed_is_what_the_residual_stream_begins_with(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two tokens at the same position differ by what the embedding adds, whatever the positions add."""
    from spile.compute import torch_backend
    from spile.compute.torch_additions import refuse_other_values

    model, taps = load(name, tmp_path), [Tap("embed"), Tap("resid_pre", 0)]
    found = [torch_backend.Hooks(model, taps).run(torch.full((1, 4), token), None) for token in (7, 9)]
    embed, begins = (found[0][tap] - found[1][tap] for tap in taps)
    torch.testing.assert_close(embed, begins, atol=1e-5, rtol=1e-5)
    refuse_other_values(model, taps)
    refuse_other_values(model.to(torch.bfloat16), taps)
    if name not in SCALED:
        return
    monkeypatch.setattr(torch_backend, "_TIMES_ROOT_OF_WIDTH", {})
    monkeypatch.setattr(torch_backend, "_EMBEDDING_SCALES", ())
    with pytest.raises(UserError, match=r"--taps embed: expected a model that adds 1 times .* --taps resid_pre\.0"):
        refuse_other_values(model, taps)


def test_the_factor_before_a_norm(tmp_path: Path) -> None:
    from spile.compute.torch_additions import refuse_other_values
    from spile.compute.torch_backend import Hooks

    model, tokens = load("big_bird", tmp_path), torch.arange(3, 12)[None]
    refuse_other_values(model, [Tap("embed")])
    table = model.get_input_embeddings().weight
    embed = Hooks(model, [Tap("embed")]).run(tokens, None)[Tap("embed")]
    torch.testing.assert_close(embed, (table[tokens] * 32**0.5).detach())


@pytest.mark.parametrize("name", [*CAUSAL, *ENCODERS])
def test_the_embedding_of_every_family_passes_the_check(name: str, tmp_path: Path) -> None:
    from spile.compute.torch_additions import refuse_other_values

    refuse_other_values(load(name, tmp_path), [Tap("embed")])


def test_modules_with_other_values_are_refused(texts: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The outputs of Bloom's attention and MLP contain the residual stream."""
    bloom, out = save_model("bloom", tmp_path / "bloom"), tmp_path / "out"
    data = ("--model", bloom, "--dataset", texts, "--prompt", "text", "--output", out)
    for kind in ("attn", "mlp", "resid_mid"):
        line = refusal(capfd, "extract", *data, "--taps", kind)
        assert f"--taps {kind}.0: expected a model that adds the outputs of attention and MLP" in line
        assert "ame the module, such as --taps module:transformer.h.0" in line
    assert not (out / "stream_0" / "commits").exists()


def generator_of(models: list[Any], how: GenerationSpec, taps: tuple[Tap, ...] = (), **more: Any) -> Any:
    from spile.compute.torch_producers import TorchGenerator

    spec = RunSpec(dtype="float32", store_dtype="float32", **more)
    tokenizer = load_tokenizer(model_files.find("embedded").tokenizer_folder)
    return TorchGenerator(models, taps, generation=how, spec=spec, tokenizer=tokenizer, progress=Progress())


def test_two_replicas_share_a_batch(tmp_path: Path) -> None:
    from spile.compute.torch_backend import place_replicas
    from spile.compute.torch_producers import TorchProducer

    taps, every = (Tap("residual", 0), Tap("residual", 2)), samples()
    model = load("opt", tmp_path)
    options: dict[str, Any] = {"store_dtype": "float32", "dtype": "float32"}
    one = TorchProducer([model], taps, **options, most_tokens=64)
    alone = one.rows(every)
    both = place_replicas(model, ("cpu", "cpu"))
    assert both[0] is not both[1]
    two = TorchProducer(both, taps, **options, most_tokens=64)
    groups = ((tuple(every[:3]),), (tuple(every[3:]),))
    blocks = two.fetch(two.start(Batch(groups, 1, 64)))
    for tap, of_tap in enumerate(blocks):
        assert [block.group for block in of_tap] == [0, 1]
        for block, part in zip(of_tap, (every[:3], every[3:]), strict=True):
            expected = np.concatenate([alone[sample.index][tap] for sample in part])
            np.testing.assert_allclose(block.rows, expected, atol=1e-5)
    (empty,) = {len(of_tap) for of_tap in two.fetch(two.start(Batch((groups[0], ()), 1, 64)))}
    assert empty == 1
    how = GenerationSpec(max_new_tokens=6)
    found = []
    for replicas in ([model], both):
        generator = generator_of(replicas, how, taps, batch_size=2)
        answers = [answer for turn in generator.answers(iter(samples())) for answer in turn]
        found.append({answer.sample.index: answer.tokens for answer in answers})
    assert found[0] == found[1]
    assert sorted(found[0]) == [0, 1, 2, 3, 4]


def test_memory_that_runs_out_halves_the_batch(tmp_path: Path) -> None:
    model, sizes = load("opt", tmp_path), []

    def run_out(_module: Any, args: Any, kwargs: Any) -> None:
        tokens = kwargs["input_ids"] if "input_ids" in kwargs else args[0]
        sizes.append(len(tokens))
        if len(tokens) > 2:
            raise torch.OutOfMemoryError("not enough")

    generator = generator_of([model], GenerationSpec(max_new_tokens=3))
    model.register_forward_pre_hook(run_out, with_kwargs=True)
    answers = [answer for turn in generator.answers(iter(samples())) for answer in turn]
    assert sorted(answer.sample.index for answer in answers) == [0, 1, 2, 3, 4]
    assert sizes[0] == 5
    assert {len(answer.tokens) for answer in answers} == {3}


def test_an_error_of_one_replica_ends_the_run(tmp_path: Path) -> None:
    from spile.compute.torch_backend import place_replicas

    models = place_replicas(load("opt", tmp_path), ("cpu", "cpu"))
    generator = generator_of(models, GenerationSpec(max_new_tokens=3))
    strange = samples()
    strange[0].tokens[0] = VOCABULARY
    with pytest.raises(UserError, match="the tokenizer is not this model's"):
        list(generator.answers(iter(strange)))


def test_closing_the_answers_ends_the_threads(tmp_path: Path) -> None:
    how = GenerationSpec(max_new_tokens=100_000)
    generator = generator_of([load("rwkv", tmp_path)], how)
    answers = generator.answers(iter(samples()))
    next(answers)
    assert any(thread.name == "spile-torch" for thread in threading.enumerate())
    answers.close()
    assert not any(thread.name == "spile-torch" for thread in threading.enumerate())


def test_a_model_that_accelerate_places_gives_the_same_rows(tmp_path: Path) -> None:
    """Without GPUs accelerate places all layers on the CPU; this shows only that its calls work."""
    pytest.importorskip("accelerate")
    from spile.compute.torch_backend import _split_over_gpus
    from spile.compute.torch_producers import TorchProducer

    taps, every, model = (Tap("residual", 1),), samples(), load("opt", tmp_path)
    options: dict[str, Any] = {"store_dtype": "float32", "dtype": "float32", "most_tokens": 64}
    alone = TorchProducer([model], taps, **options).rows(every)
    spread = TorchProducer([_split_over_gpus(model)], taps, **options).rows(every)
    for index, (rows,) in alone.items():
        np.testing.assert_array_equal(rows, spread[index][0])
