"""``spile push``: upload a dataset to the Hugging Face hub.

Shards are committed first, in groups. The last commit adds the ledger and the dataset card and removes the files of
the dataset that the repository held before. So a repository holds the earlier dataset, the new one or none at any
time, and an interrupted push continues: the hub already has the files of the finished groups.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from spile.errors import Damaged, SpecError, StoreError, UserError
from spile.objects.folder import Folder, ObjectInfo, read_chunks
from spile.objects.hub import HubFolder, hub_errors
from spile.reading.dataset import Dataset
from spile.store.layout import COMMITS, DatasetFile, FileKind, commit_number, find_streams, parse_key, predictions_name
from spile.store.run import differences, mismatch, read_run
from spile.store.stored_stream import Stream
from spile.store.writer import read_stream

_GROUP = 4 << 30  # Bytes of the files of one commit. A push that is interrupted repeats at most this much.
_FILES = 100
_OTHER_REPOSITORY = "push to another repository, or delete this one first"


@dataclass(frozen=True)
class Pushed:
    """What the repository holds after a push."""

    url: str
    commit: str
    files: int
    size: int
    left_out: tuple[str, ...] = ()
    """The files below the root that are not part of the dataset and were not uploaded."""


def push_dataset(
    dataset: Dataset,
    target: str,
    extra: Mapping[str, bytes],
    *,
    private: bool = False,
    progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> Pushed:
    """Upload a dataset and the files ``extra``, such as its card, and compare what the hub then lists with them.

    Only files that the format defines and the ledger names are uploaded, and none that a symbolic link leads to.

    Raises:
        UserError: The dataset is empty, or the repository holds another dataset or may not be written.
        StoreError: The hub failed, or lists something else than was uploaded.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.utils.tqdm import disable_progress_bars

    disable_progress_bars()
    repository = HubFolder.parse(target)
    if repository.revision or repository.prefix:
        raise SpecError("the repository", expected="hf://datasets/OWNER/NAME", found=target)
    data, records, left_out = _choose_files(dataset)
    if not data:
        raise UserError(f"{dataset.root.url} has no samples yet", fix="push it after the first commit")
    name, total, done = repository.repository, sum(each.size for each in (*data, *records)), 0
    with hub_errors(target):
        HfApi().create_repo(name, repo_type="dataset", private=private, exist_ok=True)
    _refuse_other_dataset(dataset, HubFolder(name))
    for group in _groups(data):
        _commit(dataset.root, name, group, f"Add {len(group)} shards")
        done += sum(each.size for each in group)
        progress(done, total)
    before = HubFolder(name)
    _refuse_other_dataset(dataset, before)
    removed = {info.key for info in before.list() if parse_key(info.key)} - {each.key for each in (*data, *records)}
    commit = _commit(
        dataset.root, name, records, "Add the ledger and the card", extra=extra, removed=removed, parent=before.commit
    )
    progress(total, total)
    return Pushed(repository.url, commit, len(data) + len(records) + len(extra), total, tuple(left_out))


def _commit(
    root: Folder,
    name: str,
    files: Iterable[ObjectInfo],
    message: str,
    *,
    extra: Mapping[str, bytes] | None = None,
    removed: Collection[str] = (),
    parent: str | None = None,
) -> str:
    """Commit files to the repository and compare what the hub then lists with them; return the id of the commit.

    With ``parent``, the hub refuses the commit if it has another commit since that one.
    """
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi

    with hub_errors(f"hf://datasets/{name}"), _on_disk(root, files) as folder:
        adds = [CommitOperationAdd(each.key, folder / each.key) for each in files]
        adds += [CommitOperationAdd(key, content) for key, content in (extra or {}).items()]
        created = HfApi().create_commit(
            name,
            [*adds, *(CommitOperationDelete(key, is_folder=False) for key in sorted(removed))],
            commit_message=message,
            repo_type="dataset",
            parent_commit=parent,
        )
        checksums = {each.path_in_repo: each._local_oid for each in adds}
    _check_uploaded(HubFolder(name, created.oid), {**checksums, **dict.fromkeys(removed)})
    return created.oid


def _choose_files(dataset: Dataset) -> tuple[list[ObjectInfo], list[ObjectInfo], list[str]]:
    """Return the dataset's data files, its other files, and the names of files that are not part of the dataset.

    Raises:
        UserError: A symbolic link leads to a file of the dataset.
        Damaged: A committed file is gone.

    """
    url = dataset.root.url.rstrip("/")
    ledgers = {
        ledger.folder.url.removeprefix(f"{url}/"): ledger
        for stream in dataset.streams
        for ledger in (stream, *stream.additions)
    }
    missing = {f"{folder}/{name}" for folder, ledger in ledgers.items() for name in _committed_files(ledger)}
    data: list[ObjectInfo] = []
    records: list[ObjectInfo] = []
    left_out: list[str] = []
    for info in dataset.root.list():
        file = parse_key(info.key)
        if file is not None and file.kind is FileKind.LOCAL:
            continue
        required = info.key in missing or (file is not None and _is_record(file, ledgers))
        if required and info.linked:
            problem = f"{url}/{info.key} cannot be uploaded: a symbolic link leads to it"
            raise UserError(problem, fix=f"copy the dataset with cp -rL {url} COPY, then push the copy")
        if file is None or info.linked or not (required or file.kind is FileKind.DERIVED):
            left_out.append(info.key)
            continue
        missing.discard(info.key)
        (data if file.kind is FileKind.DATA else records).append(info)
    if missing:
        raise Damaged(f"{url}/{min(missing)} is gone", fix=f"see what is left with: spile verify {url}")
    return data, records, left_out


def _committed_files(ledger: Stream) -> Iterator[str]:
    for commit in ledger.commits:
        for shard in commit.shards:
            yield shard.name
            if shard.predictions is not None:
                yield predictions_name(shard.name)


def _is_record(file: DatasetFile, ledgers: Mapping[str, Stream]) -> bool:
    """Return whether a file is a record of the dataset as it was opened. A worker may have committed since then."""
    if file.kind is not FileKind.RECORD or not file.ledger:
        return file.kind is FileKind.RECORD
    if file.ledger not in ledgers:
        return False
    last = max((commit.number for commit in ledgers[file.ledger].commits), default=0)
    return not file.name.startswith(COMMITS) or (commit_number(file.name) or 0) <= last


def _groups(files: Iterable[ObjectInfo]) -> Iterator[list[ObjectInfo]]:
    group: list[ObjectInfo] = []
    for each in files:
        if group and (len(group) >= _FILES or sum(file.size for file in group) + each.size > _GROUP):
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


def _refuse_other_dataset(dataset: Dataset, repository: HubFolder) -> None:
    """Refuse a repository that holds another run, other data, or streams that the dataset does not have."""
    run = read_run(repository)
    if run is not None and (differing := differences(run.compared(), dataset.run.compared())):
        raise mismatch(repository.url, differing, _OTHER_REPOSITORY)
    ours = {stream.number: stream.record.identity for stream in dataset.streams}
    for number, folder in find_streams(repository).items():
        stored = read_stream(repository.child(folder))
        if number not in ours:
            problem = f"{repository.url} holds stream {number}, which {dataset.root.url} does not have"
            raise UserError(problem, fix=f"push all streams of the dataset from one folder, or {_OTHER_REPOSITORY}")
        if stored is not None and (differing := differences(stored.identity.compared(), ours[number].compared())):
            raise mismatch(f"{repository.url}/{folder}", differing, _OTHER_REPOSITORY)


def _check_uploaded(repository: HubFolder, checksums: Mapping[str, str | None]) -> None:
    """Compare what the hub lists with the checksums of the uploaded files, which are None for deleted files."""
    listed = {each.key: each.etag for each in repository.list()}
    wrong = [key for key, checksum in checksums.items() if listed.get(key) != checksum]
    if wrong:
        raise StoreError(
            f"{repository.url} lists other content for {wrong[0]} than was uploaded",
            expected=str(checksums[wrong[0]]),
            found=str(listed.get(wrong[0])),
            fix="push again",
        )
