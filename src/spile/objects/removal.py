"""The one rule by which anything is removed: exact names, ours alone, after the fence, once per explicit request.

Beginning a stream again, collecting garbage, mending a ledger and ending a fleet all go through here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

from spile.errors import StoreError

__all__ = ["Removal"]

_PARALLEL = 32


class Removal:
    """One request to remove things by their exact names.

    ``ours`` says whether a name is exactly of the shape that this dataset or fleet gives; ``fence`` keeps whoever
    might still use them from doing so, and is called once, before the first is removed: where it says False something
    is alive, and nothing is touched. ``remove`` removes one.
    """

    def __init__(
        self,
        where: str,
        *,
        ours: Callable[[str], bool],
        remove: Callable[[str], None],
        fence: Callable[[], bool] = lambda: True,
    ) -> None:
        self._where, self._ours, self._remove, self._fence = where, ours, remove, fence
        self._fenced: bool | None = None

    def fenced(self) -> bool:
        """Whether nobody uses them any more; asked of the world once."""
        if self._fenced is None:
            self._fenced = self._fence()
        return self._fenced

    def in_order(self, names: Iterable[str]) -> bool:
        """One after the other. False: something is alive, and all of them are as they were."""
        wanted = self._checked(names)
        if wanted and not self.fenced():
            return False
        for name in wanted:
            self._remove(name)
        return True

    def in_parallel(self, names: Iterable[str]) -> bool:
        """Many at a time, in no order; else as :meth:`in_order`."""
        wanted = self._checked(names)
        if wanted and not self.fenced():
            return False
        with ThreadPoolExecutor(_PARALLEL, thread_name_prefix="remove") as pool:
            for _ in pool.map(self._remove, wanted):
                pass
        return True

    def _checked(self, names: Iterable[str]) -> list[str]:
        """All of them are judged before the first is removed."""
        wanted = list(names)
        for name in wanted:
            if not self._ours(name):
                raise StoreError(
                    f"refused to remove {self._where}/{name}",
                    expected="a name of the shape that spile gives",
                    found="another",
                )
        return wanted
