"""``spile import``: pickles of earlier extraction scripts become a dataset.

A file is ``shard_0001.pkl.gz`` with ``{layer: [{"sample_idx", "activation", "shape", "text_preview"}, …]}``. A pickle
is a program, and these files may come from anyone. So :func:`read_pickle` knows only a few names and builds every array
itself. Size, number of instructions and sample indices are bounded.
"""

from __future__ import annotations

import gzip
import hashlib
import pickle
import pickletools
import re
from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import replace
from io import BytesIO
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import numpy.typing as npt

from spile.errors import DataError
from spile.objects import Folder
from spile.objects.local import refuse_links
from spile.spec.identity import RunIdentity, StreamIdentity
from spile.spec.ranges import Ranges
from spile.spec.run import PromptSpec, StoreDtype
from spile.spec.sample import Role, Sample, Skip
from spile.spec.taps import SCALED, Tap
from spile.store.run import join_run, read_run
from spile.store.shard import LIMIT, as_stored
from spile.store.writer import StreamWriter, join_stream

UNKNOWN_TOKEN = -1
"""Stored in place of token ids, which the pickles do not contain."""
_MAX_EXPANSION = 10  # Bytes that a compressed byte may become. Activations compress by a factor of 1.1 to 3.
_ALWAYS_ALLOWED = 256 << 20  # unpacked bytes that are accepted for any size of the compressed file
_MAX_INSTRUCTIONS = 4_000_000  # Instructions of one pickle. A sample takes about fifty.
_MAX_DEPTH = 100  # Tuples in tuples.
_MAX_LAYERS = 100_000
_MAX_MISSING = 100_000  # sample indices without a sample that are accepted, in addition to twenty for each sample

_EXPECTED = "{layer: [{sample_idx, activation, shape, text_preview}, …]}"

_Array = npt.NDArray[Any]


class PickledSample(NamedTuple):
    """A sample at one layer."""

    number: int
    rows: _Array
    preview: str

    @property
    def kind(self) -> tuple[int, tuple[int, ...]]:
        """What is the same at every layer."""
        return self.number, self.rows.shape


_Content = dict[int, list[PickledSample]]  # the samples of each layer


class _Refused(Exception):
    """Why a pickle is not read."""


class _Dtype:
    """A dtype that a pickle describes."""

    def __init__(self, kind: Any, *_: Any) -> None:
        if not isinstance(kind, str) or not re.fullmatch(r"[<>|=]?(f[248]|[iu][1248]|b1)|bfloat16", kind):
            raise _Refused("it has a dtype that is no number")
        self.value: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16 if kind == "bfloat16" else kind)

    def __setstate__(self, state: Any) -> None:
        """Apply the byte order. Anything else that a state can set, such as fields or flags, is refused."""
        plain = isinstance(state, tuple) and len(state) >= 5 and state[2:5] == (None, None, None)
        if not plain or state[1] not in ("<", ">", "|", "="):
            raise _Refused("it has a dtype with fields or objects")
        self.value = self.value.newbyteorder(state[1]) if state[1] in ("<", ">") else self.value


class _PickledArray:
    """An array of a pickle, whose content follows."""

    value: _Array | None = None

    def __init__(self, *_: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        """Make the array from (version, shape, dtype, Fortran order, bytes)."""
        _, shape, dtype, fortran, data = state
        self.value = _array(data, dtype, shape, "F" if fortran is True else "C")

    @classmethod
    def from_buffer(cls, *parts: Any) -> _PickledArray:
        found = cls()
        found.value = _array(*parts)
        return found

    @classmethod
    def scalar(cls, dtype: Any, data: Any) -> int | float:
        value = _array(data, dtype, (1,), "C")[0]
        return int(value) if dtype.value.kind in "iub" else float(value)


def _array(data: Any, dtype: Any, shape: Any, order: Any) -> _Array:
    if not isinstance(data, bytes | bytearray) or not isinstance(dtype, _Dtype) or order not in ("C", "F"):
        raise _Refused("it has an array that does not consist of bytes and a dtype")
    if not isinstance(shape, tuple) or not all(type(size) is int and 0 <= size < 1 << 48 for size in shape):
        raise _Refused("it has an array with an impossible shape")
    if len(shape) > 8 or prod(shape) * dtype.value.itemsize != len(data):
        raise _Refused("it has an array whose shape does not match its bytes")
    return np.frombuffer(data, dtype.value).reshape(shape, order=order)


_NAMES: dict[tuple[str, str], Any] = {
    ("numpy", "dtype"): _Dtype,
    ("numpy", "ndarray"): "ndarray",
    ("ml_dtypes", "bfloat16"): "bfloat16",
    **{(f"numpy.{core}.multiarray", "_reconstruct"): _PickledArray for core in ("core", "_core")},
    **{(f"numpy.{core}.multiarray", "scalar"): _PickledArray.scalar for core in ("core", "_core")},
    **{(f"numpy.{core}.numeric", "_frombuffer"): _PickledArray.from_buffer for core in ("core", "_core")},
}
"""What the names in a pickle are replaced by, never the named objects: with NumPy's own, a pickle can set pointers.

A pickle can set attributes of what it names, unless that has ``__setstate__`` or, as a bound method, no attributes.
"""


class _Unpickler(pickle.Unpickler):
    """An unpickler that knows the names of ``_NAMES`` only."""

    def __init__(self, file: BytesIO, size: int) -> None:
        super().__init__(file, encoding="latin1")
        self._left = size

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("_codecs", "encode"):
            return self._encode
        if (module, name) not in _NAMES:
            raise _Refused(f"it names {module[:40]}.{name[:40]}")
        return _NAMES[module, name]

    def _encode(self, text: str, encoding: str) -> bytes:
        """Old protocols write bytes as text."""
        self._left -= len(text)
        if encoding not in ("latin1", "latin-1") or self._left < 0:  # one text can be encoded many times
            raise _Refused("it encodes text, or more text than the file has")
        return text.encode("latin1")


def _check_instructions(file: BytesIO) -> None:
    """Refuse a pickle that would take much more memory than its bytes, or overflow the C stack, while it is loaded.

    The stack and the memo are followed, with the number of tuples nested in each object: C code hashes nested tuples
    without a limit. An unpickler skips bytes if an instruction crosses the end of its frame.
    """
    file.seek(0)
    stack: list[int] = []
    marks = [0]
    memo: dict[int, int] = {}
    frame = 0
    steps: Iterable[tuple[pickletools.OpcodeInfo, Any, Any]] = pickletools.genops(file)
    for count, (step, value, start) in enumerate(steps):
        before, first = step.stack_before, len(stack) - len(step.stack_before)
        if pickletools.markobject in before:
            first = marks.pop() - before.index(pickletools.markobject)
        if count >= _MAX_INSTRUCTIONS:
            raise _Refused(f"it has more than {_MAX_INSTRUCTIONS:,} instructions")
        if not marks or first < marks[-1]:
            raise _Refused(f"it has the instruction {step.name} where none is expected")
        if start < frame and (frame < file.tell() or step.name == "FRAME"):
            raise _Refused("it has an instruction that crosses the end of its frame")
        depth = max(stack[first:], default=0) + step.name.startswith("TUPLE")
        del stack[first:]
        if step.name == "MARK":
            marks.append(len(stack))
        elif step.name.endswith("GET"):
            stack.append(memo[value])
        else:
            stack += [depth] * len(step.stack_after)
        if step.name == "FRAME":
            frame = file.tell() + value
        elif step.name.endswith("PUT") or step.name == "MEMOIZE":
            place = len(memo) if value is None else value
            memo[place] = stack[-1]
            if place > count:  # the unpickler allocates all places before this one
                raise _Refused("it has a memo with gaps")
        if depth > _MAX_DEPTH:
            raise _Refused("it has tuples that are nested deeply")
    file.seek(0)


def _unpacked(path: Path) -> BytesIO:
    """Return the content of a file, which may be compressed."""
    content = BytesIO()
    with path.open("rb") as file:
        size = path.stat().st_size
        packed = file.read(2) == b"\x1f\x8b"
        file.seek(0)
        limit = max(_ALWAYS_ALLOWED, _MAX_EXPANSION * size) if packed else size
        with closing(gzip.GzipFile(fileobj=file) if packed else file) as source:
            while piece := source.read(1 << 20):
                content.write(piece)
                if content.tell() > limit:
                    raise _Refused("it unpacks to much more than activations do")
    return content


def read_pickle(path: Path) -> _Content:
    """Return the content of one file: the samples of each layer, which are the same at every layer.

    Raises:
        DataError: The file is anything else. Nothing in it was executed.
    """
    where = str(path)
    try:
        unpacked = _unpacked(path)
        size = unpacked.tell()
        _check_instructions(unpacked)
        content = _Unpickler(unpacked, size).load()
    except _Refused as error:
        expected = "a pickle of dicts, lists, tuples, strings, numbers and arrays"
        raise DataError(f"{where} is refused", expected=expected, found=str(error)) from error
    except (OSError, EOFError) as error:
        raise DataError(f"{where} cannot be read", found=str(error)) from error
    except Exception as error:  # pickle and zlib raise many types for damaged files
        raise DataError(f"{where} is not a pickle", found=f"{type(error).__name__}: {str(error)[:80]}") from error
    return _checked(content, where, max(_ALWAYS_ALLOWED, size))


def _checked(content: Any, where: str, left: int) -> _Content:
    """Return the samples of each layer; every layer must have the same ones, and their rows at most ``left`` bytes."""
    if not isinstance(content, dict) or not content:
        raise DataError(where, expected=_EXPECTED, found=f"{type(content).__name__}, or nothing")
    found: _Content = {}
    for layer, samples in content.items():
        if type(layer) is not int or not 0 <= layer < _MAX_LAYERS or not isinstance(samples, list):
            raise DataError(where, expected=_EXPECTED, found=f"a {type(layer).__name__} for a {type(samples).__name__}")
        at = f"{where}, layer {layer}"
        found[layer] = [_checked_sample(each, f"{at}, sample number {place}") for place, each in enumerate(samples)]
        left -= sum(each.rows.nbytes for each in found[layer])
        if left < 0:  # the activations would take much more memory than the file
            raise DataError(at, expected="an activation for each sample", found="one that several samples share")
        first = next(iter(found))
        if [each.kind for each in found[layer]] != [each.kind for each in found[first]]:
            raise DataError(at, expected=f"the samples of layer {first}")
    return found


def _checked_sample(sample: Any, at: str) -> PickledSample:
    fields = sample if isinstance(sample, dict) else {}
    array, index, preview = (fields.get(name) for name in ("activation", "sample_idx", "text_preview"))
    rows = array.value if isinstance(array, _PickledArray) else None
    if rows is None or type(index) is not int or not 0 <= index < 1 << 48:
        raise DataError(at, expected=_EXPECTED, found="a sample without sample_idx or activation")
    flat = rows[0] if rows.ndim == 3 and len(rows) == 1 else rows
    if flat.ndim != 2 or not flat.size or not (flat.dtype.kind == "f" or flat.dtype == ml_dtypes.bfloat16):
        raise DataError(at, expected="an activation [tokens, d] of floats", found=f"{rows.dtype} {rows.shape}")
    return PickledSample(index, flat, preview if isinstance(preview, str) else "")


def _pickle_files(source: str) -> list[Path]:
    """Return the pickles that a user means: a file, or all files of a folder in their order."""
    path = Path(source).expanduser()
    found = [path] if path.is_file() else sorted(path.glob("**/*.pkl.gz")) + sorted(path.glob("**/*.pkl"))
    if not found:
        raise DataError(f"no pickle at {source}", expected="shard_0001.pkl.gz or a folder of such files")
    if path.is_dir():
        refuse_links(path, found)
    return found


class _Survey(NamedTuple):
    """What a first pass over all files finds."""

    sha256: str
    layers: tuple[int, ...]
    width: int
    samples: int  # one more than the largest sample index


def import_pickles(
    source: str,
    root: Folder,
    *,
    worker_id: int = 0,
    site: str = "residual",
    model: str = "unknown",
    store_dtype: StoreDtype = "bfloat16",
    progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> StreamWriter:
    """Store pickles as one stream of a dataset. Files that an earlier import committed are not stored again.

    The first of two passes checks every file, so that nothing is stored of a source with a bad file; the second stores
    one shard per file.
    """
    files = _pickle_files(source)
    survey = _survey(files, store_dtype)
    run = _identity(model, survey, store_dtype)
    taps = tuple(Tap(site, layer) for layer in survey.layers)
    known = read_run(root)
    run = replace(run, folders="stream" if known is None else known.folders)
    join_run(root, run)
    total = survey.samples
    store = join_stream(root, worker_id, StreamIdentity(source, survey.sha256, total, total, taps), run)
    for done, path in enumerate(files, 1):
        _store(store, read_pickle(path), survey.layers)
        progress(done, len(files))
    left = Ranges([(0, total)]) - store.ledger.done
    if left:
        store.commit([], [Skip(index, str(index), "not in the pickles") for index in left])
    store.finish()
    return store


def _survey(files: list[Path], store_dtype: StoreDtype) -> _Survey:
    digest, width = hashlib.sha256(), 0
    layers: tuple[int, ...] = ()
    indices: dict[int, Path] = {}
    for path in files:
        content = read_pickle(path)
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
        layers = layers or tuple(sorted(content))
        if tuple(sorted(content)) != layers:
            expected = f"the {len(layers)} layers of {files[0]}"
            raise DataError(str(path), expected=expected, found=f"{len(content)} layers")
        for index, rows, _ in content[layers[0]]:
            if index in indices:
                raise DataError(f"sample {index} occurs twice", found=f"{indices[index]} and {path}")
            indices[index] = path
            width = width or rows.shape[1]
            if rows.shape[1] != width:
                raise DataError(f"{path}, sample {index}", expected=f"rows of {width}", found=rows.shape[1])
        for layer, samples in content.items():
            for index, rows, _ in samples:
                _check_numbers(rows, store_dtype, f"{path}, layer {layer}, sample {index}")
    if not indices:
        raise DataError(f"{files[0]} and {len(files) - 1} other files have no sample")
    total = max(indices) + 1
    if total - len(indices) > _MAX_MISSING + 20 * len(indices):
        raise DataError(
            f"sample_idx {total - 1} in {indices[total - 1]}",
            expected=f"indices near the number of samples, {len(indices)}",
            found=f"{total - len(indices)} indices without a sample",
        )
    return _Survey(digest.hexdigest(), layers, width, total)


def _check_numbers(rows: _Array, store_dtype: StoreDtype, at: str) -> None:
    """Refuse values that are NaN or infinite, or that ``store_dtype`` cannot represent."""
    if not np.isfinite(rows).all():
        raise DataError(f"{at} has values that are NaN or infinite", fix="remove the sample from the pickle")
    with np.errstate(over="ignore"):
        stored = rows.astype(np.float32 if store_dtype in SCALED else store_dtype)
    if not np.isfinite(stored).all() or (store_dtype in SCALED and np.abs(stored).max() >= LIMIT):
        largest, fix = f"{np.abs(rows).max():.3g}", "choose another --store-dtype"
        raise DataError(f"{at} has values too large for {store_dtype}", found=largest, fix=fix)


def _store(store: StreamWriter, content: _Content, layers: tuple[int, ...]) -> None:
    """Store the samples of one file that are not committed yet as one shard."""
    first = content[layers[0]]
    chosen = [place for place, sample in enumerate(first) if sample.number not in store.ledger.done]
    if not chosen:
        return
    builder = store.begin([_sample(first[place]) for place in chosen])
    kinds = store.record.identity.rows(store.run)
    for tap, layer in enumerate(layers):
        rows = np.concatenate([content[layer][place].rows for place in chosen])
        builder.write(tap, 0, as_stored(rows, kinds[tap].dtype))
    store.commit([builder.finish()])


def _sample(source: PickledSample) -> Sample:
    length = len(source.rows)
    roles = np.zeros(length, np.uint8)
    roles[:1] = Role.FIRST
    tokens = np.full(length, UNKNOWN_TOKEN, np.int32)
    return Sample(source.number, str(source.number), tokens, roles, source.preview)


def _identity(model: str, survey: _Survey, store_dtype: str) -> RunIdentity:
    return RunIdentity(
        model=model,
        revision=None,
        architecture="unknown",
        d_model=survey.width,
        n_layers=max(survey.layers) + 1,
        weights=f"imported: {model}",  # names are not compared, hashes of weights are
        tokenizer="unknown",
        prompt=PromptSpec(kind="text"),
        seed=0,
        max_seq_length=1 << 20,
        long="truncate",
        dtype="float32",
        store_dtype=store_dtype,
    )
