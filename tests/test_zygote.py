"""A program that starts as a fork of the zygote is like one that starts as a process of its own."""

import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import zygote
from waiting import has_ended, wait_until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the zygote needs Linux's prctl")
ROOT = Path(__file__).parent.parent

# What a program can know of its start; written to the file that its first word names.
PROBE = """
import json, os, signal, sys, threading
import numpy, random, torch
read = {
    "argv": sys.argv[2:],
    "arguments of python": sys.orig_argv[-2:],
    "folder": os.getcwd(),
    # readline sets two where it is loaded: here, not in the environment that Python knows
    "environment": {n: v for n, v in os.environ.items() if n not in ("COLUMNS", "LINES")},
    "path": [entry for entry in sys.path if not entry.endswith("tests/hooks")],  # of --record
    "main": [__name__, __spec__ and __spec__.name, sys.modules["__main__"].__dict__ is globals()],
    "file": globals().get("__file__"),
    "parent": os.getppid(),
    "session": os.getsid(0) == os.getpid(),
    "process group": os.getpgid(0) in (os.getpid(), os.getpgid(os.getppid())),
    "leads its group": os.getpgid(0) == os.getpid(),
    "umask": os.umask(0o22),
    "threads of Python": threading.active_count(),
    "threads of torch": torch.get_num_threads(),
    "seeds": [torch.initial_seed(), str(numpy.random.get_state()[1][:3]), random.random()],
    "handlers": {n: str(signal.getsignal(n)) for n in (1, 2, 10, 12, 13, 15, 17, 25)},
    "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
    # not those of a zygote, nor that of --record
    "descriptors": [
        n for n in range(100) if os.path.exists(f"/proc/self/fd/{n}")
        and not os.readlink(f"/proc/self/fd/{n}").startswith(os.environ.get("BEVATRON_TRACE", "none"))
    ],
    "inheritable": [os.get_inheritable(n) for n in (0, 1, 2)],
    "streams": [
        (s.encoding, s.errors, s.line_buffering, s.mode) for s in (sys.stdin, sys.stdout, sys.stderr)
    ],
    "input": sys.stdin.read(),
    "flags": str(sys.flags),
}
open(sys.argv[1], "w").write(json.dumps(read, sort_keys=True, indent=1))
print("on stdout")
print("on stderr", file=sys.stderr)
"""


def both_ways(monkeypatch, start):
    """start() with a fork, and with a real start."""
    results = []
    for is_on in (True, False):
        monkeypatch.setattr(zygote.ForkingPopen, "is_on", is_on)
        results.append(start())
    return results


def differences(forked, real):
    """{what: (in the fork, in the real start)}; the ends are (code, stdout, stderr)."""
    (seen, end), (seen_really, real_end) = forked, real
    assert end == real_end and seen.keys() == seen_really.keys()
    assert not set(map(str, seen.pop("seeds"))) & set(map(str, seen_really.pop("seeds")))
    return {name: (seen[name], seen_really[name]) for name in seen if seen[name] != seen_really[name]}


@pytest.fixture
def probe(tmp_path, monkeypatch):
    """probe(kind, **how): what the program saw, forked and really started, and (code, stdout, stderr)."""
    reasons = []
    monkeypatch.setattr(zygote, "note_real_start", lambda reason, args: reasons.append(reason))

    def run(kind, *words, **how):
        out = tmp_path / "seen.json"
        if kind == "-c":
            command = ["-c", PROBE, out, *words]
        elif kind == "-m":
            (tmp_path / "probe_module.py").write_text(PROBE)
            command = ["-m", "probe_module", out, *words]
        else:
            (tmp_path / "probe.py").write_text(PROBE)
            command = [tmp_path / "probe.py", out, *words]
        how.setdefault("cwd", ROOT)

        def start():
            out.unlink(missing_ok=True)
            words = [sys.executable, *command]
            done = subprocess.run(words, capture_output=True, text=True, timeout=120, **how)
            return json.loads(out.read_text()), (done.returncode, done.stdout, done.stderr)

        seen = both_ways(monkeypatch, start)
        assert len(reasons) == 1, f"a fork was asked for, but: {reasons}"
        reasons.clear()
        return seen

    return run


@pytest.mark.slow(core=["-m"])
@pytest.mark.parametrize("kind", ["-c", "-m", "file"])
def test_a_program_sees_the_same_start(probe, tmp_path, kind):
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}", "A_WORD": "of its own\n"}
    environment.pop("HOME", None)
    forked, real = probe(kind, "--option", "ä word", input="said\n", env=environment)
    assert not differences(forked, real)


LOADED_WITH = zygote.load_time_variables(dict(os.environ))


@pytest.mark.parametrize(
    "how",
    [
        {"start_new_session": True},
        {"umask": 0o77},
        {"env": {**os.environ, "OMP_NUM_THREADS": "1"}},
        {"env": {"PATH": "/usr/bin", **LOADED_WITH}},
    ],
    ids=["session", "umask", "threads", "bare environment"],
)
def test_it_starts_as_it_is_asked_to(probe, how):
    forked, real = probe("-c", **how)
    assert not differences(forked, real)


def test_descriptors_that_are_passed_on_keep_their_numbers(probe):
    read, write = os.pipe()
    try:
        forked, real = probe("-c", pass_fds=[write])
    finally:
        os.close(read), os.close(write)
    assert not differences(forked, real) and forked[0]["descriptors"] == [0, 1, 2, write]


def test_signals_that_the_caller_ignores_stay_ignored(probe):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        forked, real = probe("-c")
    finally:
        signal.signal(signal.SIGHUP, before)
    assert not differences(forked, real) and forked[0]["handlers"]["1"] == "1"


ENDS = {  # {code: exit code}
    "pass": 0,
    "import sys; sys.exit(7)": 7,
    "import sys; sys.exit('a text')": 1,
    "import sys; sys.exit(None)": 0,
    "raise ValueError('ä wrong value')": 1,
    "import os; os._exit(9)": 9,
    "import os, signal; os.kill(os.getpid(), signal.SIGKILL)": -9,
    "import os, signal; os.kill(os.getpid(), signal.SIGINT)": -2,
    "import os, signal; os.kill(os.getpid(), signal.SIGTERM)": -15,
    "import atexit; atexit.register(print, 'at the end'); print('before')": 0,
    "import threading, time; threading.Thread(target=lambda: (time.sleep(0.1), print('last'))).start()": 0,
    "print('unfinished', end='')": 0,
    "import no_such_module": 1,
    "1 +": 1,
    "import sys; sys.stdout.close()": 0,
}


@pytest.mark.parametrize("code", ENDS, ids=str)
def test_a_forked_program_ends_as_a_real_one(monkeypatch, code):
    def start():
        command = [sys.executable, "-c", f"if 0: import torch  # so it is forked\n{code}"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
        return done.returncode, done.stdout, done.stderr

    forked, real = both_ways(monkeypatch, start)
    assert forked == real and forked[0] == ENDS[code], forked


def test_a_signal_reaches_a_running_program(monkeypatch):
    code = (
        "if 0: import torch\nimport signal, sys, time\n"
        "signal.signal(signal.SIGUSR1, lambda *_: sys.exit(75))\n"
        "print('ready', flush=True)\ntime.sleep(60)"
    )

    def start():
        codes = []
        for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGKILL):
            command = [sys.executable, "-c", code]
            with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
                assert process.stdout.readline() == "ready\n" and process.poll() is None
                process.send_signal(number)
                codes.append(process.wait(30))
        return codes

    forked, real = both_ways(monkeypatch, start)
    assert forked == real == [75, -15, -9]


def test_programs_that_a_program_starts_are_its_children(tmp_path, monkeypatch):
    """scripts.launch starts ranks: each is a child of the launcher, and dies with it."""
    words = ["llama3-tiny", "--train.steps", "100000", "--log.dir", tmp_path, "--log.name", "r"]
    command = [sys.executable, "-m", "scripts.launch", "--nproc", "2", "--", *words, "--data.path", "stdlib"]

    def start():
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        wait_until(lambda: len(zygote.children_of(process.pid)) == 2, 100)
        ranks = zygote.children_of(process.pid)
        process.kill()
        process.wait()
        return len(ranks), wait_until(lambda: all(map(has_ended, ranks)))

    forked, real = both_ways(monkeypatch, start)
    assert forked == real == (2, True)


@pytest.mark.slow(every=3)
@pytest.mark.parametrize(
    "command, how, reason",
    [
        (["-S", "-c", "import torch"], {}, "option -S"),
        (["-c", "print(1)"], {}, "loads no torch"),
        (["-c", "import torch"], {"preexec_fn": lambda: None}, "preexec_fn"),
        (["-c", "import torch"], {"env": {**os.environ, "TRITON_DEBUG": "1"}}, "TRITON_DEBUG"),
        (["-m", "scripts.plan"], {"cwd": "/"}, "other code"),
    ],
)
def test_what_a_fork_cannot_stand_for_is_a_real_start(monkeypatch, command, how, reason):
    reasons = []
    monkeypatch.setattr(zygote, "note_real_start", lambda reason, args: reasons.append(reason))
    subprocess.run([sys.executable, *command], **{"cwd": ROOT, "capture_output": True, "timeout": 120, **how})
    assert len(reasons) == 1 and reason in reasons[0]


def test_the_code_of_a_copied_checkout_is_not_ours(tmp_path):
    (tmp_path / "runtime").mkdir()
    (tmp_path / "train.py").touch()
    assert not zygote.finds_our_code(str(tmp_path), {"PYTHONPATH": str(ROOT)})
    assert zygote.finds_our_code("/", {"PYTHONPATH": str(ROOT)})


def test_threads_that_start_the_first_programs_share_a_zygote(monkeypatch):
    """Two would adopt each other's programs, and a start would wait for an answer that has gone astray."""
    made, real = [], zygote.start_zygote
    monkeypatch.setattr(zygote.ForkingPopen, "zygote", None)
    monkeypatch.setattr(zygote, "start_zygote", lambda: made.append(time.sleep(0.2)) or real())
    command = [sys.executable, "-c", "if 0: import torch\nprint(1)"]
    with ThreadPoolExecutor(3) as pool:
        done = list(pool.map(lambda _: subprocess.run(command, cwd=ROOT, capture_output=True), range(3)))
    assert [each.stdout for each in done] == [b"1\n"] * 3 and len(made) == 1
