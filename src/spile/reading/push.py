"""``spile push``: upload a dataset to the Hugging Face hub.

Shards are committed first, in groups, and the ledger with the dataset card last. So a repository has a
complete dataset or no ledger, and an interrupted push continues: the hub already has the files of the finished groups.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from spile.errors import SpecError, StoreError, UserError
from spile.objects.folder import Folder, ObjectInfo, read_chunks
from spile.objects.hub import HubFolder, hub_errors
from spile.reading.dataset import Dataset
from spile.store.layout import PROGRESS, SUSPECTS, predictions_name, stream_number
from spile.store.run import read_run

_GROUP = 4 << 30  # Bytes of the files of one commit. A push that is interrupted repeats at most this much.
_FILES = 100
_DATA = (".safetensors", ".jsonl")
_NOT_PUSHED = (PROGRESS, SUSPECTS)


@dataclass(frozen=True)
class Pushed:
    """What the repository holds after a push."""

    url: str
    commit: str
    files: int
    size: int


def push_dataset(
    dataset: Dataset,
    target: str,
    extra: Mapping[str, bytes],
    *,
    private: bool = False,
    progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> Pushed:
    """Upload a dataset and the files ``extra``, such as its card, and compare what the hub then lists with them.

    Raises:
        UserError: The dataset is empty, or the repository holds another run or may not be written.
        StoreError: The hub failed, or lists something else than was uploaded.
    """
    from huggingface_hub import CommitOperationAdd, HfApi
    from huggingface_hub.utils.tqdm import disable_progress_bars

    disable_progress_bars()
    repository = HubFolder.parse(target)
    if repository.revision or repository.prefix:
        raise SpecError("the repository", expected="hf://datasets/OWNER/NAME", found=target)
    files = _files(dataset)
    if not any(each.key.endswith(_DATA[0]) for each in files):
        raise UserError(f"{dataset.root.url} has no samples yet", fix="push it after the first commit")
    total, done, api, commit = sum(each.size for each in files), 0, HfApi(), ""
    with hub_errors(target):
        api.create_repo(repository.repository, repo_type="dataset", private=private, exist_ok=True)
    _check_run(dataset, repository)
    for group in _groups(files):
        last = group[-1] is files[-1]
        with hub_errors(target), _on_disk(dataset.root, group) as folder:
            adds = [CommitOperationAdd(each.key, folder / each.key) for each in group]
            adds += [CommitOperationAdd(key, data) for key, data in (extra.items() if last else ())]
            message = "Add the ledger and the card" if last else f"Add {len(group)} shards"
            created = api.create_commit(repository.repository, adds, commit_message=message, repo_type="dataset")
            checksums = {each.path_in_repo: each._local_oid for each in adds}
        commit, done = created.oid, done + sum(each.size for each in group)
        _check_uploaded(HubFolder(repository.repository, commit), checksums)
        progress(done, total)
    return Pushed(repository.url, commit, len(files) + len(extra), total)


def _files(dataset: Dataset) -> list[ObjectInfo]:
    """Return the files of the dataset as it is now: data of the ledger first, then the ledger and ``run.json``."""
    found = []
    names = {stream.number: {each.name for each in stream.files} for stream in dataset.streams}
    kept = {number: known | {predictions_name(name) for name in known} for number, known in names.items()}
    for each in dataset.root.list():
        top, _, _ = each.key.partition("/")
        name = each.key.rpartition("/")[2]
        number = stream_number(top)
        if name in _NOT_PUSHED or (top != each.key and number not in kept):
            continue
        if name.startswith(("shard_", "predictions_")) and name not in kept.get(-1 if number is None else number, ()):
            continue  # It was not finished, or was removed from the ledger.
        found.append(each)
    return sorted(found, key=lambda each: (not each.key.endswith(_DATA), "/" not in each.key, each.key))


def _groups(files: Iterable[ObjectInfo]) -> Iterator[list[ObjectInfo]]:
    group: list[ObjectInfo] = []
    for each in files:
        data = each.key.endswith(_DATA)
        full = len(group) >= _FILES or sum(file.size for file in group) + each.size > _GROUP
        if group and (data != group[0].key.endswith(_DATA) or (data and full)):
            yield group
            group = []
        group.append(each)
    if group:
        yield group


@contextmanager
def _on_disk(root: Folder, files: Iterable[ObjectInfo]) -> Iterator[Path]:
    """Give a local folder with these files: the dataset's own, or a temporary copy of a bucket's."""
    if root.local_path is not None:
        yield root.local_path
        return
    with tempfile.TemporaryDirectory(prefix="spile-push-") as folder:
        for each in files:
            path = Path(folder) / each.key
            path.parent.mkdir(parents=True, exist_ok=True)
            if shutil.disk_usage(folder).free < each.size:
                raise UserError(f"no room in {folder} for {each.key}", fix="set TMPDIR to a larger disk")
            with path.open("wb") as file:
                file.writelines(read_chunks(root, each.key))
        yield Path(folder)


def _check_run(dataset: Dataset, repository: HubFolder) -> None:
    found = read_run(repository)
    if found is not None and found.fingerprint() != dataset.run.fingerprint():
        raise UserError(f"{repository.url} holds another run ({found.model})", fix="push to another repository")


def _check_uploaded(repository: HubFolder, checksums: Mapping[str, str | None]) -> None:
    listed = {each.key: each.etag for each in repository.list()}
    wrong = [key for key, checksum in checksums.items() if listed.get(key) != checksum]
    if wrong:
        raise StoreError(
            f"{repository.url} lists other content for {wrong[0]} than was uploaded",
            expected=str(checksums[wrong[0]]),
            found=str(listed.get(wrong[0])),
            fix="push again",
        )
