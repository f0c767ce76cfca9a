"""A stand-in for the hosts of public corpora: a folder over HTTP, in a thread of the test."""

import contextlib
import hashlib
import http.server
import pathlib
import threading
from collections.abc import Iterator


class CorpusServer(http.server.ThreadingHTTPServer):
    """Serves FOLDER/OWNER/DATASET/FILE with listings, ranges and ETags.

    ranges: (file, first byte) of each request for content. failing: the next so many of them are answered
    with 500. has_ranges: whether parts are sent. held_from: requests from this byte on wait for `release`.
    """

    daemon_threads = True

    def __init__(self, folder: pathlib.Path) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.folder = folder
        self.ranges: list[tuple[str, int]] = []
        self.failing = 0
        self.has_ranges = True
        self.held_from: int | None = None
        self.release = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, request, client_address) -> None:
        """A client that was killed says nothing here."""


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: CorpusServer

    def log_message(self, *args) -> None:
        pass

    def answer(self, code: int, body: bytes, **headers: str) -> None:
        self.send_response(code)
        for name, value in {"Content_Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def do_GET(self) -> None:
        path = self.server.folder / self.path.strip("/")
        if path.is_dir():
            names = sorted(f"{each.name}/" if each.is_dir() else each.name for each in path.iterdir())
            links = "".join(f'<a href="{name}">{name}</a>\n' for name in names)
            self.answer(200, links.encode(), Content_Type="text/html")
        elif path.is_file():
            self.send_file(path.read_bytes(), path.name)
        else:
            self.answer(404, b"")

    do_HEAD = do_GET

    def send_file(self, content: bytes, name: str) -> None:
        tag = f'"{hashlib.md5(content).hexdigest()}"'
        headers = {"ETag": tag, "Content_Type": "application/octet-stream"}
        wanted = self.headers.get("Range")
        if self.command == "HEAD" or wanted is None or not self.server.has_ranges:
            if self.command == "GET":
                self.server.ranges.append((name, 0))
            self.answer(200, content, **headers)
            return
        first, last = map(int, wanted.removeprefix("bytes=").split("-"))
        self.server.ranges.append((name, first))
        if self.server.failing:
            self.server.failing -= 1
            self.answer(500, b"")
            return
        if self.server.held_from is not None and first >= self.server.held_from:
            self.server.release.wait()
        part = content[first : last + 1]
        span = f"bytes {first}-{first + len(part) - 1}/{len(content)}"
        self.answer(206, part, Content_Range=span, **headers)


@contextlib.contextmanager
def serving(folder: pathlib.Path) -> Iterator[CorpusServer]:
    """Serve a folder until the end of the block."""
    server = CorpusServer(folder)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.release.set()
        server.shutdown()
        server.server_close()
        thread.join()
