"""Which functions does a test run, and which files does it open, in whatever process? Every process of a test
run maps one file and sets one byte a function.

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


def start(folder: str) -> None:
    """Trace this thread, those it starts and the processes that it forks.

    folder has `lines.json`: {"width": bytes of a row, "first": {a file: the place of its line 0 in a row}}. A
    call marks the first line of its function; a file that is opened, or named to a program, marks its line 0.
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
