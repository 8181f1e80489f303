"""A page that follows running trainings, served to this machine only, from the files that `watch` writes."""

import hashlib
import html
import sys
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock
from typing import Any

from steradian.reporting.data import find_runs, load
from steradian.reporting.page import document

__all__ = ["LiveServer"]

_WAITING = '<!doctype html><meta charset="utf-8"><meta http-equiv="refresh" content="2"><title>Steradian</title><p>{}'


class LiveServer(ThreadingHTTPServer):
    """Serves the page of some runs on the loopback address; the page loads again when the runs have changed.

    It answers two requests, for the page and for the state of the runs, and hands out no files. Requests under another
    host name are refused, so that no other site can read the page through the browser. `runs` are folders that `watch`
    wrote, or folders in which such folders are or will be; port 0 is any that is free.
    """

    daemon_threads = True

    def __init__(self, runs: Sequence[str | Path], *, port: int = 0, title: str | None = None) -> None:
        for path in runs:
            if not Path(path).is_dir():
                raise ValueError(f"runs must be folders, got {str(path)!r}, which is none")
        self._runs, self._title, self._lock, self._made = runs, title, Lock(), ("", "")
        super().__init__(("127.0.0.1", port), _Handler)
        self.url = f"http://127.0.0.1:{self.server_port}/"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser may leave before it has the page."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)

    def _recorded(self) -> list[Path]:
        return [run for run in find_runs(self._runs) if any(run.glob("part-*.parquet"))]

    def state(self) -> str:
        """A text that changes when a run does."""
        files = [file for run in self._recorded() for file in sorted(run.iterdir()) if not file.name.startswith(".")]
        seen = [(str(file), stat.st_size, stat.st_mtime_ns) for file in files for stat in (file.stat(),)]
        return hashlib.sha256(repr(seen).encode()).hexdigest()

    def page(self) -> str:
        """The page in the present state of the runs."""
        with self._lock:
            if (state := self.state()) != self._made[0]:
                try:
                    text = document(load(self._recorded()), self._title, live=state)
                except ValueError as error:  # no run has a record yet
                    text = _WAITING.format(html.escape(str(error)))
                self._made = (state, text)
            return self._made[1]


class _Handler(BaseHTTPRequestHandler):
    server: LiveServer

    def do_GET(self) -> None:
        answers = {"/": ("text/html", self.server.page), "/state": ("text/plain", self.server.state)}
        if self.headers.get("Host") not in {f"{name}:{self.server.server_port}" for name in ("127.0.0.1", "localhost")}:
            self.send_error(403)
        elif self.path not in answers:
            self.send_error(404)
        else:
            kind, answer = answers[self.path]
            body = answer().encode()
            self.send_response(200)
            self.send_header("Content-Type", f"{kind}; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Cache-Control", "no-store")
            self.end_headers()
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing is printed for each request."""
