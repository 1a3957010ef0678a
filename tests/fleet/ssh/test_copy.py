"""What is copied: what git would keep."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from spile.errors import UserError
from spile.hosts.files import files_to_copy, list_files


def git(folder: Path, *words: str) -> None:
    subprocess.run(
        ["git", "-c", "user.name=a", "-c", "user.email=a@b", *words], cwd=folder, check=True, capture_output=True
    )


def make(folder: Path, *paths: str) -> None:
    for path in paths:
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(path)


def test_a_repository(tmp_path: Path) -> None:
    make(
        tmp_path,
        "kept.py",
        "gone.py",
        "new.py",
        "out/model.ckpt",
        "é ü\n.txt",
        "spile-run-1/a.log",
        "sub/x.py",
        "sub/y.ckpt",
    )
    (tmp_path / ".gitignore").write_text("*.ckpt\n")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", "kept.py", "gone.py")
    (tmp_path / "gone.py").unlink()
    names = files_to_copy(tmp_path, 10**9).names
    assert names == (".gitignore", "kept.py", "new.py", "sub/x.py", "é ü\n.txt")
    assert list_files(tmp_path / "sub") == ["x.py"]


def test_no_repository_but_a_gitignore(tmp_path: Path) -> None:
    make(tmp_path, "a.py", "deep/b.ckpt", "deep/c.py", "spile-run-1/a.log")
    (tmp_path / "deep" / ".gitignore").write_text("*.ckpt\n")
    assert list_files(tmp_path) == ["a.py", "deep/.gitignore", "deep/c.py"]


def test_a_repository_within(tmp_path: Path) -> None:
    make(tmp_path, "a.py", "inner/b.py", "inner/c.ckpt")
    (tmp_path / "inner" / ".gitignore").write_text("*.ckpt\n")
    git(tmp_path, "init", "-q")
    git(tmp_path / "inner", "init", "-q")
    git(tmp_path / "inner", "add", "b.py")
    git(tmp_path / "inner", "commit", "-qm", "x")
    assert list_files(tmp_path) == ["a.py", "inner/.gitignore", "inner/b.py"]


def test_without_git(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path, "a.py", ".git/config", "b/c.py")
    monkeypatch.setenv("PATH", "/nowhere")
    assert list_files(tmp_path) == ["a.py", "b/c.py"]
    make(tmp_path, ".gitignore")
    with pytest.raises(UserError, match=r"^no git here: expected git, to read \.gitignore\. Install git\.$"):
        list_files(tmp_path)


def test_nothing_and_too_much(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"^nothing to copy in .*\. Run the command in the folder of your code, or add --no-copy\.$"
    ):
        files_to_copy(tmp_path, 10)
    make(tmp_path, "a-file-of-more-than-ten-bytes")
    with pytest.raises(UserError, match=r"is large: expected at most 1e-08 GB to copy, found 0\.0 GB\. Ignore data in"):
        files_to_copy(tmp_path, 10)
