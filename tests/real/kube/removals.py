"""What an API server itself tells of removals: a watch that has nothing to do with gpukeeper's own."""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
from contextlib import suppress
from types import TracebackType

from tests.real.kube.api import Api, path_of

LONGEST = 3600  # seconds


class Removals:
    """`at`: by uid, when (by this machine's clock) the server said that it is gone. One kind in one namespace."""

    def __init__(self, api: Api, what: str, namespace: str) -> None:
        self.at: dict[str, float] = {}
        self._api, self._path = api, path_of(what, namespace)
        self._stream: http.client.HTTPResponse | None = None
        self._connection: http.client.HTTPSConnection | None = None
        self._socket: socket.socket | None = None
        self._thread = threading.Thread(target=self._hear, daemon=True)

    def __enter__(self) -> Removals:
        newest = self._api.must("GET", self._path, query={"limit": 1})["metadata"]["resourceVersion"]
        api = self._api
        self._connection = http.client.HTTPSConnection(api.host, api.port, timeout=LONGEST, context=api._context)
        query = f"?watch=true&resourceVersion={newest}&timeoutSeconds={LONGEST}"
        self._connection.request("GET", self._path + query, headers={"Authorization": f"Bearer {api._token}"})
        self._socket = self._connection.sock
        self._stream = self._connection.getresponse()
        assert self._stream.status == 200, self._stream.read()
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        assert self._connection is not None
        assert self._socket is not None
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread; a stream that is read cannot be closed
        self._thread.join(10)
        self._connection.close()

    def wait(self, uids: set[str], deadline: float) -> bool:
        """All of them are gone."""
        ends = time.monotonic() + deadline
        while not uids <= self.at.keys():
            if time.monotonic() > ends:
                return False
            time.sleep(0.02)
        return True

    def _hear(self) -> None:
        assert self._stream is not None
        try:
            while line := self._stream.readline():
                heard = time.time()
                event = json.loads(line)
                if event["type"] == "DELETED":
                    self.at[event["object"]["metadata"]["uid"]] = heard
        except (OSError, ValueError, AttributeError, http.client.HTTPException):
            return  # closed by us, or with its server: who needs it all says so
