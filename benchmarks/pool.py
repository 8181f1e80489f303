"""Worker processes that may be killed: one task at a time each, a limit per task, a fresh one for each that died."""

import multiprocessing
import multiprocessing.connection
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

__all__ = ["Pool"]

Task = tuple[Callable[..., Any], tuple[Any, ...]]


class _Worker:
    def __init__(self, context: Any, setup: Callable[[], None]) -> None:
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, setup), daemon=True)
        self.process.start()
        theirs.close()
        self.task: Task | None = None
        self.started = 0.0

    def begin(self, task: Task) -> None:
        self.task, self.started = task, time.monotonic()
        self.connection.send(task)

    def kill(self) -> None:
        self.process.kill()
        self.process.join()
        self.connection.close()


def _serve(connection: Any, setup: Callable[[], None]) -> None:
    setup()
    while True:
        try:
            function, arguments = connection.recv()
        except EOFError:
            return
        connection.send(function(*arguments))


class Pool:
    """Runs tasks in processes that have imported everything once.

    Args:
        size: number of processes.
        setup: called once in each.
        preload: modules that are imported before the processes part.
        limit: seconds after which a task is given up and its process killed.
    """

    def __init__(self, size: int, setup: Callable[[], None], *, preload: list[str], limit: float) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(preload)
        self._setup, self._limit = setup, limit
        self._workers = [_Worker(self._context, setup) for _ in range(size)]

    def run(self, tasks: Iterable[Task], *, until: float, most: int | None = None) -> Iterator[tuple[Task, Any]]:
        """Results as they come, each with its task; a string where the process died or was given up.

        Args:
            tasks: a function that can be pickled, and its arguments.
            until: the `time.monotonic` at which what is under way is dropped.
            most: tasks under way at a time; all processes unless given.
        """
        waiting = iter(tasks)
        while time.monotonic() < until:
            busy = sum(worker.task is not None for worker in self._workers)
            for i, worker in enumerate(self._workers):
                if worker.task is None and (most is None or busy < most):
                    task = next(waiting, None)
                    if task is None:
                        break
                    self._begin(i, task)
                    busy += 1
            if not busy:
                return
            yield from self._collect()
        for i, worker in enumerate(self._workers):
            if worker.task is not None:
                self._replace(i)

    def _begin(self, i: int, task: Task) -> None:
        try:
            self._workers[i].begin(task)
        except OSError:  # it died while it had nothing to do
            self._replace(i)
            self._workers[i].begin(task)

    def _collect(self) -> Iterator[tuple[Task, Any]]:
        busy = {worker.connection: i for i, worker in enumerate(self._workers) if worker.task is not None}
        for connection in multiprocessing.connection.wait(list(busy), timeout=1):
            worker = self._workers[busy.pop(connection)]
            task, worker.task = worker.task, None
            try:
                yield task, worker.connection.recv()
            except (EOFError, ConnectionResetError):
                worker.process.join(5)
                code = worker.process.exitcode
                self._replace(self._workers.index(worker))
                yield task, f"the process died with exit code {code}"
        for i in busy.values():
            if time.monotonic() - self._workers[i].started > self._limit:
                task = self._workers[i].task
                self._replace(i)
                yield task, f"no answer in {self._limit:.0f} s"

    def _replace(self, i: int) -> None:
        self._workers[i].kill()
        self._workers[i] = _Worker(self._context, self._setup)

    def close(self) -> None:
        """End all processes."""
        for worker in self._workers:
            worker.kill()
