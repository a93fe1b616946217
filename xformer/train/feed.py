"""Training batches read ahead in a thread, each with the iterator state that goes on after it."""

from __future__ import annotations

import base64
import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol

CHECK_EVERY = 0.2  # seconds


class Batches(Protocol):
    """An iterator over batches (dicts of numpy arrays) that can say and be told where it is."""

    def __next__(self) -> dict[str, Any]: ...

    def get_state(self) -> Any:
        """The position: bytes, or what JSON can hold."""

    def set_state(self, state: Any) -> None:
        """Goes on as the iterator whose state this is would."""


class Feed:
    """Reads `batches` ahead of the training loop.

    While `next` waits for a batch, it calls `check` several times a second; what `check` raises ends it.

    Attributes:
      state: where the iterator is after the batches handed out so far, read-ahead not counted; JSON can hold it.
      waited: seconds that `next` has waited for data.
    """

    def __init__(
        self, batches: Batches, state: Any = None, ahead: int = 2, check: Callable[[], None] = lambda: None
    ) -> None:
        if state is not None:
            batches.set_state(_decode(state))
        self.state = state if state is not None else _encode(batches.get_state())
        self.waited = 0.0
        self.check = check
        self._batches = batches
        self._queue: queue.Queue[tuple[Any, Any]] = queue.Queue(ahead)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._read, name="xformer-feed", daemon=True)
        self._thread.start()

    def __enter__(self) -> Feed:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return self

    def __next__(self) -> dict[str, Any]:
        """The next batch; whatever reading it raised is raised here."""
        start = time.perf_counter()
        while True:
            try:
                batch, state = self._queue.get(timeout=CHECK_EVERY)
                break
            except queue.Empty:
                self.check()
        self.waited += time.perf_counter() - start
        if isinstance(batch, BaseException):
            raise batch
        self.state = state
        return batch

    def close(self) -> None:
        """Ends the thread; one that reads for more than a second is left behind."""
        self._closed.set()
        deadline = time.perf_counter() + 1
        while self._thread.is_alive() and time.perf_counter() < deadline:
            try:
                self._queue.get(timeout=0.01)
            except queue.Empty:
                continue

    def _read(self) -> None:
        try:
            while not self._closed.is_set():
                batch = next(self._batches)
                self._queue.put((batch, _encode(self._batches.get_state())))
        except StopIteration:
            self._queue.put((RuntimeError("the training data ended; batches('train', epochs=None) must not"), None))
        except BaseException as error:  # whatever it is, the training loop has to see it
            self._queue.put((error, None))


def _encode(state: Any) -> Any:
    return {"base64": base64.b64encode(state).decode()} if isinstance(state, bytes) else state


def _decode(state: Any) -> Any:
    return base64.b64decode(state["base64"]) if isinstance(state, dict) and set(state) == {"base64"} else state
