"""Which functions does a test run, and which files does it open, in any process? Every process of a test run
maps one file and sets one byte a function.

The file `hits` starts with a 4-byte number, the index of the running test (0: none yet), followed by a row of
bytes for each test. Ranks that are forked, spawned or killed all write to the same pages, so nothing is lost
when a process dies, and a rank that serves many tests (durable/pool.py) reads the index at every call.
"""

import json
import mmap
import os
import sys
import threading
from pathlib import Path

HEAD = 4  # size of the number in bytes


def start(folder: str) -> None:
    """Trace this thread, the threads it starts and the processes it forks.

    `folder` contains `lines.json`: {"width": bytes of a row, "first": {file: offset of its line 0 in a row}}.
    A call marks the first line of its function; opening a file, or passing it to a program, marks its line 0.
    """
    plan = json.loads(Path(folder, "lines.json").read_text())
    first, width = plan["first"], plan["width"]
    file = os.open(Path(folder, "hits"), os.O_RDWR)
    hits = mmap.mmap(file, 0)
    os.close(file)

    def mark(place):
        hits[HEAD + int.from_bytes(hits[:HEAD], "little") * width + place] = 1

    def mark_call(frame, event, arg):
        place = first.get(frame.f_code.co_filename)
        if place is not None:
            mark(place + frame.f_code.co_firstlineno)

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
                    mark(place)

    sys.addaudithook(mark_file)
    threading.settrace(mark_call)
    sys.settrace(mark_call)
