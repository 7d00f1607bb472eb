"""Saving by the chief of ranks that do not wait for each other."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from tfcluster.runtime.keras.strategies.async_coordination import Progress
from tfcluster.runtime.keras.train.chief_only_saving import ChiefOnlySaving, Name
from tfcluster.runtime.keras.training_session import Session

T = TypeVar("T")


class AsyncSaving(ChiefOnlySaving):
    """Lets only the chief save. Outside of ``fit``, the other ranks wait for it."""

    def __init__(
        self,
        session: Session,
        progress: Progress,
        settle_loops: Callable[[], None],
    ) -> None:
        super().__init__(session)
        self._progress = progress
        self._settle_loops = settle_loops

    def chief_only(
        self, act: Callable[[], T], what: str, name: Name | None = None
    ) -> T | str | None:
        """Call ``act`` on the chief; see ``ChiefOnlySaving``.

        ``name`` is ignored: the ranks do not compare it, since they do not wait for
        each other here. Within ``fit``, other ranks return None at once. Outside of
        ``fit``, they raise CollectiveError if ``act`` raised on the chief.
        """
        session = self._session
        if session.within("saving"):
            return act()
        if not session.inside_keras:
            self._settle_loops()
        session.settle(what)
        if session.inside_keras:
            if not session.chief:
                return None
            with session.saving(what):
                return act()
        if not session.chief:
            return self._progress.wait_for_writing()
        try:
            with session.saving(what):
                result = act()
        except Exception as error:
            self._progress.written("", error=f"the chief could not save: {error}")
            raise
        self._progress.written(result if isinstance(result, str) else "")
        return result
