"""A stand-in for the hosts of public corpora: a folder over HTTP, in a thread of the test."""

import contextlib
import hashlib
import http.server
import json
import pathlib
import threading
import urllib.parse
from collections.abc import Iterator


class CorpusServer(http.server.ThreadingHTTPServer):
    """Serves FOLDER/OWNER/DATASET/FILE with listings, ranges and ETags, and what huggingface_hub asks its hub
    for: does a revision exist, what is in a folder, and the content of a file.

    ranges: (file, first byte) of each request for content. failing: the next so many of them are answered
    with 500. has_ranges: whether parts are sent. held_from: requests from this byte on wait for `release`.
    is_damaging: whether the first byte of a file is sent wrong.
    """

    daemon_threads = True

    def __init__(self, folder: pathlib.Path) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.folder = folder
        self.ranges: list[tuple[str, int]] = []
        self.failing = 0
        self.has_ranges = True
        self.is_damaging = False
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
        parts = urllib.parse.unquote(urllib.parse.urlsplit(self.path).path).strip("/").split("/")
        if parts[0] == "api":
            self.answer_of_hub(self.server.folder.joinpath(*parts[2:4]), parts[4], parts[6:])
            return
        if "resolve" in parts:  # datasets/OWNER/DATASET/resolve/REVISION/FILE
            parts = [*parts[1:3], *parts[5:]]
        path = self.server.folder.joinpath(*parts)
        if path.is_dir():
            names = sorted(f"{each.name}/" if each.is_dir() else each.name for each in path.iterdir())
            links = "".join(f'<a href="{name}">{name}</a>\n' for name in names)
            self.answer(200, links.encode(), Content_Type="text/html")
        elif path.is_file():
            self.send_file(path.read_bytes(), path.name)
        else:
            self.answer(404, b"")

    do_HEAD = do_GET

    def answer_of_hub(self, dataset: pathlib.Path, kind: str, place: list[str]) -> None:
        answer: object = {"id": "/".join(dataset.parts[-2:]), "sha": "a" * 40, "siblings": []}
        if kind == "tree":
            answer = [hub_entry(path, dataset) for path in sorted(dataset.joinpath(*place).iterdir())]
        self.answer(200, json.dumps(answer).encode(), Content_Type="application/json")

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
        if self.server.is_damaging:
            content = bytes([content[0] ^ 1]) + content[1:]
        part = content[first : last + 1]
        span = f"bytes {first}-{first + len(part) - 1}/{len(content)}"
        self.answer(206, part, Content_Range=span, **headers)


def hub_entry(path: pathlib.Path, dataset: pathlib.Path) -> dict:
    """A row of a folder's listing. Files have the sha256 that Git LFS needs."""
    name = str(path.relative_to(dataset))
    if path.is_dir():
        return {"type": "directory", "oid": "0" * 40, "size": 0, "path": name}
    content = path.read_bytes()
    large = {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 130}
    oid = hashlib.sha1(content).hexdigest()
    return {"type": "file", "oid": oid, "size": len(content), "path": name, "lfs": large}


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
