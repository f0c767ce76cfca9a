"""Which lines does a test run, in whatever process? Every process of a test run maps one file and sets one
byte a line.

The file `hits` is a number of 4 bytes, the test that runs now (0: none yet), and a row of bytes for each
test. Ranks that are forked, started anew or killed all write to the same pages, so that nothing is lost
with a process, and a rank that serves many tests (runtime/pool.py) reads the number of the test at every
call.
"""

import json
import mmap
import os
import sys
import threading
from pathlib import Path

HEAD = 4  # bytes of the number
ROWS = 4096  # tests that one traced run can have, and row 0


def start(folder: str) -> None:
    """Trace this thread, those it starts and the processes that it forks. folder has `lines.json`: {"width":
    bytes of a row, "first": {a source file: the place of its line 0 in a row}, "lines": whether each line is
    marked, or the first lines of functions alone, and the files that are opened or started (tests/footprints.py)}.
    """
    plan = json.loads(Path(folder, "lines.json").read_text())
    first, width, every_line = plan["first"], plan["width"], plan.get("lines", True)
    file = os.open(Path(folder, "hits"), os.O_RDWR)
    hits = mmap.mmap(file, 0)
    os.close(file)

    def call(frame, event, arg):
        place = first.get(frame.f_code.co_filename)
        if place is None:
            return None
        at = HEAD + int.from_bytes(hits[:HEAD], "little") * width + place
        hits[at + frame.f_lineno] = 1
        if not every_line:
            return None

        def line(frame, event, arg):
            if event == "line":
                hits[at + frame.f_lineno] = 1
            return line

        return line

    def mark_file(event, args):
        if event == "open":
            words = args[:1]
        elif event == "subprocess.Popen":
            words = args[1] if isinstance(args[1], (list, tuple)) else ()
        else:
            return
        for word in words:
            if isinstance(word, (str, os.PathLike)):
                place = first.get(os.path.abspath(word))
                if place is not None:
                    hits[HEAD + int.from_bytes(hits[:HEAD], "little") * width + place] = 1

    if not every_line:
        sys.addaudithook(mark_file)
    threading.settrace(call)
    sys.settrace(call)
