"""A server of an object store in a process of its own, which a test can slow down, break and kill.

It speaks as much of S3 (for s3fs) and of WebHDFS (for fsspec's own client) as their clients ask for here:

    S3         PUT replaces a whole object or nothing, LIST knows prefixes, there are no folders
    WebHDFS    a file is made and then appended to, so that half of one can be seen; there are folders

    python tests/store_server.py FOLDER PORT [--delay S] [--die-at-write N] [--fail-from-write N]

Objects are files below FOLDER, and outlive the process. --die-at-write: the N-th write is written by half
(WebHDFS) or not at all (S3), and the process kills itself. --fail-from-write: from the N-th on, writes are
answered with 500.
"""

import argparse
import hashlib
import http.server
import json
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time
import urllib.parse
import urllib.request
from xml.sax.saxutils import escape

HDFS = "/webhdfs/v1"
DATE = "Wed, 25 Nov 2026 00:00:00 GMT"


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    root: pathlib.Path
    options: argparse.Namespace
    writes = 0
    lock = threading.Lock()

    def log_message(self, *args):
        with open(self.root.parent / "requests.log", "a") as log:
            log.write(f"{self.command} {self.path}\n")

    def answer(self, code: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(code)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        if "Content_Length" not in headers:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def body(self) -> bytes:
        if "chunked" not in self.headers.get("Transfer-Encoding", ""):
            data = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        else:
            data = b""
            while size := int(self.rfile.readline().split(b";")[0], 16):
                data += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
        if "aws-chunked" not in self.headers.get("Content-Encoding", ""):
            return data
        plain = b""
        while data:  # size;...\r\n bytes \r\n, and trailers after the chunk of size 0
            head, _, data = data.partition(b"\r\n")
            size = int(head.split(b";")[0], 16)
            if not size:
                break
            plain, data = plain + data[:size], data[size + 2 :]
        return plain

    def write(self, path: pathlib.Path, data: bytes, append: bool = False) -> bool:
        """False: the write was refused, and answered."""
        with self.lock:
            Handler.writes += 1
            number = Handler.writes
        if number >= self.options.fail_from_write:
            self.answer(500, b"the disk of the store is full")
            return False
        path.parent.mkdir(parents=True, exist_ok=True)
        if number == self.options.die_at_write:
            if append:
                with open(path, "ab") as file:
                    file.write(data[: len(data) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
        if append:
            with open(path, "ab") as file:
                file.write(data)
        else:
            temp = path.with_name(f".{path.name}.{number}.part")
            temp.write_bytes(data)
            temp.replace(path)
        return True

    def handle_request(self) -> None:
        time.sleep(self.options.delay)
        url = urllib.parse.urlsplit(self.path)
        query = dict(urllib.parse.parse_qsl(url.query, keep_blank_values=True))
        path = urllib.parse.unquote(url.path)
        if path.startswith(HDFS):
            self.hdfs(path.removeprefix(HDFS).strip("/"), query)
        else:
            self.s3(path.strip("/"), query)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = handle_request

    # ---- S3 ------------------------------------------------------------------------------------------------

    def s3(self, key: str, query: dict[str, str]) -> None:
        path = self.root / key
        if self.command == "PUT":
            data = self.body()
            if not (self.root / key.split("/")[0]).is_dir():
                self.answer(404, b"<Error><Code>NoSuchBucket</Code><Message>no such bucket</Message></Error>")
            elif self.write(path, data):
                self.answer(200, ETag=f'"{hashlib.md5(data).hexdigest()}"')
        elif self.command == "DELETE":
            path.unlink(missing_ok=True)
            self.answer(204)
        elif self.command == "GET" and "list-type" in query:
            self.list_s3(key, query)
        elif self.command in ("GET", "HEAD") and path.is_file():
            self.get_s3(path.read_bytes())
        elif self.command == "HEAD" and "/" not in key and path.is_dir():
            self.answer(200)
        else:
            self.answer(404, b"<Error><Code>NoSuchKey</Code><Message>no such key</Message></Error>")

    def get_s3(self, data: bytes) -> None:
        headers = {"ETag": f'"{hashlib.md5(data).hexdigest()}"', "Last_Modified": DATE}
        wanted = self.headers.get("Range")
        if self.command == "HEAD":
            self.answer(200, Content_Length=str(len(data)), **headers)
        elif wanted is None:
            self.answer(200, data, **headers)
        else:
            first, _, last = wanted.removeprefix("bytes=").partition("-")
            part = data[int(first) : int(last) + 1]
            span = f"bytes {first}-{int(first) + len(part) - 1}/{len(data)}"
            self.answer(206, part, Content_Range=span, **headers)

    def list_s3(self, bucket: str, query: dict[str, str]) -> None:
        home, prefix = self.root / bucket, query.get("prefix", "")
        if not home.is_dir():
            self.answer(404, b"<Error><Code>NoSuchBucket</Code><Message>no such bucket</Message></Error>")
            return
        files = [path for path in home.rglob("*") if path.is_file() and not path.name.endswith(".part")]
        keys = sorted(path.relative_to(home).as_posix() for path in files)
        rows, folders = "", set()
        for key in (key for key in keys if key.startswith(prefix)):
            rest = key.removeprefix(prefix)
            if query.get("delimiter") and "/" in rest:
                folders.add(prefix + rest.partition("/")[0] + "/")
                continue
            data = (home / key).read_bytes()
            rows += (
                f"<Contents><Key>{escape(key)}</Key><Size>{len(data)}</Size>"
                f'<ETag>"{hashlib.md5(data).hexdigest()}"</ETag>'
                "<LastModified>2026-11-25T00:00:00.000Z</LastModified></Contents>"
            )
        for folder in sorted(folders):
            rows += f"<CommonPrefixes><Prefix>{escape(folder)}</Prefix></CommonPrefixes>"
        head = f"<Name>{bucket}</Name><IsTruncated>false</IsTruncated>"
        text = f"<ListBucketResult>{head}{rows}</ListBucketResult>"
        self.answer(200, text.encode(), Content_Type="application/xml")

    # ---- WebHDFS -------------------------------------------------------------------------------------------

    def json(self, content: dict, code: int = 200) -> None:
        self.answer(code, json.dumps(content).encode(), Content_Type="application/json")

    def status(self, path: pathlib.Path) -> dict:
        stat = path.stat()
        return {
            "pathSuffix": path.name,
            "type": "DIRECTORY" if path.is_dir() else "FILE",
            "length": 0 if path.is_dir() else stat.st_size,
            "modificationTime": stat.st_mtime_ns // 10**6,
        }

    def hdfs(self, name: str, query: dict[str, str]) -> None:
        op, path = query["op"], self.root / name
        here = f"http://{self.headers['Host']}{HDFS}/{urllib.parse.quote(name)}?op={op}&data=true"
        if op in ("CREATE", "APPEND") and "data" not in query:  # as a name node, it sends one to a data node
            self.body()
            self.answer(307, Location=here)
        elif op == "CREATE":
            self.body()
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(b"")
            self.answer(201)
        elif op == "APPEND":
            if self.write(path, self.body(), append=True):
                self.answer(200)
        elif op == "MKDIRS":
            path.mkdir(parents=True, exist_ok=True)
            self.json({"boolean": True})
        elif not path.exists():
            error = {"exception": "FileNotFoundException", "message": f"File does not exist: /{name}"}
            self.json({"RemoteException": error}, 404)
        elif op == "GETFILESTATUS":
            self.json({"FileStatus": self.status(path)})
        elif op == "LISTSTATUS":
            inner = [path] if path.is_file() else sorted(path.iterdir())
            self.json({"FileStatuses": {"FileStatus": [self.status(file) for file in inner]}})
        elif op == "OPEN":
            first = int(query.get("offset", 0))
            self.answer(200, path.read_bytes()[first : first + int(query["length"])])
        elif op == "DELETE":
            path.rmdir() if path.is_dir() else path.unlink()
            self.json({"boolean": True})
        else:
            self.answer(400)


# ---- for tests ---------------------------------------------------------------------------------------------


class Server:
    """The process. It keeps its port and its objects when it is started again."""

    def __init__(self, folder: pathlib.Path, bucket: str = "bucket") -> None:
        self.root = folder / "objects"
        self.log = folder / "requests.log"
        (self.root / bucket).mkdir(parents=True)
        self.port = 0
        self.process: subprocess.Popen | None = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def start(self, *options: str) -> "Server":
        self.stop()
        command = [sys.executable, __file__, str(self.root), str(self.port), *options]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.port = int(self.process.stdout.readline())
        return self

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def is_alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def requests(self, *words: str) -> list[str]:
        """The requests so far that hold all of the words."""
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        return [line for line in lines if all(word in line for word in words)]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("port", type=int)
    parser.add_argument("--delay", type=float, default=0)
    parser.add_argument("--die-at-write", type=int)
    parser.add_argument("--fail-from-write", type=int, default=10**9)
    Handler.options = parser.parse_args()
    Handler.root = Handler.options.folder
    server = http.server.ThreadingHTTPServer(("127.0.0.1", Handler.options.port), Handler)
    print(server.server_port, flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
