"""How far a list was read. Pure: which query gets the next page, and whether an error ends the list."""

from __future__ import annotations

from collections.abc import Mapping

from gpukeeper.platforms.kubernetes.errors import ApiError, ClusterUnavailable, ResponseTooLarge


class Paging:
    def __init__(self, path: str, query: Mapping[str, object], limit: int) -> None:
        self._path, self._query, self._limit = path, query, limit
        self._token, self._expired = "", False
        self.inconsistent = False  # its pages are of different versions

    @property
    def query(self) -> dict[str, object]:
        return {**self._query, "limit": self._limit, "continue": self._token or None}

    @property
    def ended(self) -> bool:
        """After a page."""
        return not self._token

    def recovers_from(self, error: ApiError | ResponseTooLarge) -> bool:
        """Whether the same page can be requested again: a smaller one, or one of a later version, once."""
        if isinstance(error, ResponseTooLarge):
            smaller = self._limit > 1
            self._limit = max(1, self._limit // 4)
            return smaller
        if not (error.expired and self._token and error.continue_) or self._expired:
            return False
        self._token, self._expired, self.inconsistent = error.continue_, True, True
        return True

    def advance(self, following: str) -> None:
        """`following`: the token of the next page; empty: the list has ended."""
        if following and following == self._token:
            raise ClusterUnavailable(f"the cluster repeats the same page of {self._path}")
        self._token, self._expired = following, False
        # A token carries its version; naming one beside it is refused.
        self._query = {name: value for name, value in self._query.items() if not name.startswith("resourceVersion")}
