"""Programs that start as a fork of one warm process, in a few hundredths of a second instead of seconds.

Most of what a test waits for when it starts train.py or a script is Python that imports torch. So
tests/conftest.py replaces subprocess.Popen with `ForkingPopen`. A test still says what a user types,

    subprocess.run([sys.executable, "train.py", "llama3-tiny"], cwd=ROOT)

and what starts is a fork of the zygote: a process that has imported everything and begun nothing. It has no
threads, has opened no file and has run no code of ours. The fork gets the argv, environment, folder, streams,
signals and descriptors of a real start, is a child of the process that started it, and ends through the
interpreter's own end. tests/test_zygote.py shows that both ways of starting behave alike.

What a fork cannot stand for starts as a real process: another interpreter, options of Python, code of another
folder, variables that Python, torch or Triton read while they are loaded. A test that needs a real start asks
for the fixture `real_starts`.
"""

import contextlib
import ctypes
import fcntl
import gc
import importlib
import importlib.util
import inspect
import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import types
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PRELOADED = (
    "train",
    "scripts.average",
    "scripts.compare",
    "scripts.convert",
    "scripts.evaluate",
    "scripts.generate",
    "scripts.grid",
    "scripts.launch",
    "scripts.plan",
    "scripts.prepare_data",
    "scripts.schedule",
    *(("lab.benchmarks.command",) if (ROOT / "lab").is_dir() else ()),
    "matplotlib.figure",
    "matplotlib.backends.backend_agg",
    "torch.distributed.run",
    "torch.utils._sympy.functions",
)
# programs that start others: each has a zygote of its own, since it can adopt only what a child of it forks
STARTERS = ("scripts.launch", "scripts.bench", "scripts.scaling", "torch.distributed.run")
# what is read while Python, torch, a BLAS or Triton is loaded
LOAD_TIME_PREFIXES = (
    "PYTHON", "OMP_", "MKL_", "KMP_", "GOMP_", "OPENBLAS_", "TRITON_", "TORCH_", "LD_", "LC_", "LANG",
)
LOAD_TIME_EXEMPT = (
    "PYTHONPATH",
    "OMP_NUM_THREADS",  # applied to torch in the fork
    "TORCH_GLOO_LAZY_INIT",
    "TORCH_NCCL_HIGH_PRIORITY",
)
OUR_NAMES = sorted({path.stem for path in ROOT.iterdir() if path.suffix == ".py" or path.is_dir()} - {""})
LOADS_TORCH = re.compile(rf"\b(import|from)\b.*\b(torch|{'|'.join(map(re.escape, OUR_NAMES))})\b")
PR_SET_NAME = 15
NAME = b"zygote"
PR_SET_CHILD_SUBREAPER = 36
MAX_FDS = 250
HIGH_FD = 500  # above the descriptors that a test passes on
ANSWER_SECONDS = 60.0
# runtime/processes.py: the only preexec_fn of a fork
DIES_WITH_PARENT = "death_signal_setter.<locals>.request_death_signal"

REAL_POPEN = subprocess.Popen


class Start(NamedTuple):
    """A program to run. kind: "-c", "-m" or "file"; program: the code, the module or the file."""

    kind: str
    program: str
    argv: list[str]
    folder: str
    environment: dict[str, str]
    parent: int  # the process id of the caller
    new_session: bool
    process_group: int  # -1: that of the caller
    dies_with_parent: bool
    ignored_signals: list[int]
    umask: int
    pass_fds: list[int]


# ---- the process that starts a program ---------------------------------------------------------------------


class Zygote:
    """The caller's end of a zygote that is its child. It dies with the caller."""

    def __init__(self, channel: socket.socket, environment: dict[str, str]) -> None:
        self.channel = channel
        self.environment = load_time_variables(environment)
        self.lock = threading.Lock()

    def fork(self, start: Start, fds: list[int]) -> int:
        """Forks a child of this process that runs a program; returns its process id.

        fds: its standard streams, then those of start.pass_fds.
        """
        request = os.memfd_create("start")
        with self.lock, adopting_orphans():
            try:
                os.write(request, json.dumps(start._asdict()).encode())
                socket.send_fds(self.channel, [b"+"], [request, *fds])
                self.channel.settimeout(ANSWER_SECONDS)
                answer = self.channel.recv(4)
            finally:
                os.close(request)
        if not answer:
            raise RuntimeError("the zygote of the tests has died")
        return int.from_bytes(answer, "little")


@contextlib.contextmanager
def adopting_orphans():
    """The zygote's grandchild becomes a child of this process, its nearest ancestor that adopts orphans."""
    prctl = ctypes.CDLL(None).prctl
    prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def start_zygote() -> Zygote:
    """Starts a zygote of this process, which loads while the caller continues."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        REAL_POPEN(
            [sys.executable, __file__, str(theirs.fileno())], cwd=ROOT,
            env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
            pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL,
        )
    return Zygote(ours, dict(os.environ))


def load_time_variables(environment: dict[str, str]) -> dict[str, str]:
    """The variables that a process reads while it is loaded, and not again."""
    found = {}
    for name, value in environment.items():
        if name.startswith(LOAD_TIME_PREFIXES) and name not in LOAD_TIME_EXEMPT:
            found[name] = value
    return found


class ForkingPopen(subprocess.Popen):
    """subprocess.Popen that starts our programs as forks of `zygote`, and all else as usual."""

    zygote: Zygote | None = None  # it starts with the first program that needs it
    starting = threading.Lock()
    owner = 0  # the process whose zygote that is; in a fork of it, every start is a real one
    is_on = True

    @classmethod
    def install(cls, zygote: Zygote | None = None) -> None:
        """Replaces subprocess.Popen in this process."""
        cls.zygote, cls.owner = zygote, os.getpid()
        subprocess.Popen = cls

    def _execute_child(self, *values):
        parameters = inspect.signature(REAL_POPEN._execute_child).bind(self, *values).arguments
        start = as_start(parameters) if ForkingPopen.is_on else "the test asks for it"
        if isinstance(start, str):
            note_real_start(start, parameters["args"])
            return super()._execute_child(*values)
        with ForkingPopen.starting:  # two threads that start one each would adopt each other's programs
            zygote = ForkingPopen.zygote = ForkingPopen.zygote or start_zygote()
        differs = zygote.environment.items() ^ load_time_variables(start.environment).items()
        if differs:
            note_real_start(f"read while torch is loaded: {sorted(differs)}", parameters["args"])
            return super()._execute_child(*values)

        streams = [
            stream if stream != -1 else number
            for number, stream in enumerate(
                (parameters["p2cread"], parameters["c2pwrite"], parameters["errwrite"])
            )
        ]
        self.pid = zygote.fork(start, [*streams, *start.pass_fds])
        self._child_created = True
        names = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        self._close_pipe_fds(*(parameters[name] for name in names))
        return None


def note_real_start(reason: str, args) -> None:
    """Writes why a start was a real one to the file that BEVATRON_REAL_STARTS names."""
    if file := os.environ.get("BEVATRON_REAL_STARTS"):
        with open(file, "a") as out:
            test = os.environ.get("PYTEST_CURRENT_TEST", "")
            print(json.dumps([reason, test, str(args)[:200]]), file=out)


def as_start(parameters: dict) -> Start | str:
    """Returns the program for a fork to run, or the reason why only a real process will do."""
    if ForkingPopen.owner != os.getpid():
        return "a fork has no zygote of its own"
    args = parameters["args"]
    if isinstance(args, (str, bytes, os.PathLike)) or parameters["shell"]:
        return "a shell or a single word"
    args = [os.fspath(word) for word in args]
    if args[0] != sys.executable or parameters["executable"] not in (None, args[0]):
        return "another program"
    preexec = getattr(parameters["preexec_fn"], "__qualname__", None)
    if preexec not in (None, DIES_WITH_PARENT) or not parameters["close_fds"]:
        return "preexec_fn or open descriptors"
    if any(parameters[name] is not None for name in ("uid", "gid", "gids", "startupinfo")):
        return "another user"

    environment = dict(os.environ if parameters["env"] is None else parameters["env"])
    environment = {os.fsdecode(name): os.fsdecode(value) for name, value in environment.items()}
    folder = os.path.realpath(os.fspath(parameters["cwd"] or os.getcwd()))
    if len(args) < 2:
        return "no program"
    if args[1] in ("-c", "-m"):
        kind, program, argv = args[1], args[2], args[2:] if args[1] == "-m" else ["-c", *args[3:]]
        if kind == "-c" and not LOADS_TORCH.search(program):
            return "loads no torch, so it starts as soon by itself"
        if not finds_our_code(folder, environment):
            return f"{kind} in a folder that finds other code"
    elif args[1].startswith("-"):
        return f"option {args[1]}"
    else:
        kind, program, argv = "file", args[1], args[1:]
        path = Path(folder, program).resolve()
        if ROOT not in path.parents and not finds_our_code(folder, environment):
            return "a file of another folder"
    return Start(
        kind=kind,
        program=program,
        argv=argv,
        folder=folder,
        environment=environment,
        parent=os.getpid(),
        new_session=bool(parameters["start_new_session"]),
        process_group=-1 if parameters.get("process_group") is None else parameters["process_group"],
        dies_with_parent=preexec is not None,
        ignored_signals=[n for n in signal.valid_signals() if signal.getsignal(n) is signal.SIG_IGN],
        umask=parameters["umask"],
        pass_fds=sorted(parameters["pass_fds"]),
    )


def finds_our_code(folder: str, environment: dict[str, str]) -> bool:
    """Whether `import train` finds the code of this checkout there, and no copy of it before."""
    for entry in (folder, *environment.get("PYTHONPATH", "").split(os.pathsep)):
        path = Path(folder, entry)
        if entry and (path / "train.py").exists() and (path / "runtime").is_dir():
            return path.resolve() == ROOT
    return False


# ---- the zygote --------------------------------------------------------------------------------------------


def serve(channel: socket.socket) -> Start:
    """Forks what the channel asks for. Returns in a fork alone, with what it has to run."""
    while True:
        message, fds, _, _ = socket.recv_fds(channel, 1, MAX_FDS)
        if not message:  # the caller has ended
            os._exit(0)
        middle = os.fork()
        if middle == 0:
            if os.fork():
                os._exit(0)  # its child is an orphan now, which the caller adopts
            return become(channel, fds)
        os.waitpid(middle, 0)
        for fd in fds:
            os.close(fd)


def become(channel: socket.socket, fds: list[int]) -> Start:
    """Turns a fork into what a real start would be; tells its process id."""
    request, *fds = fds
    os.lseek(request, 0, os.SEEK_SET)
    with open(request, encoding="utf-8") as file:
        start = Start(**json.load(file))
    while os.getppid() != start.parent:
        time.sleep(1e-4)
    if start.dies_with_parent:
        die_with_parent(start.parent)
    if start.new_session:
        os.setsid()
    elif start.process_group >= 0:
        os.setpgid(0, start.process_group)
    set_signals(start.ignored_signals)
    if start.umask >= 0:
        os.umask(start.umask)
    set_name(b"python")
    os.chdir(start.folder)
    os.environ.clear()
    os.environ.update(start.environment)

    reply = fcntl.fcntl(channel.fileno(), fcntl.F_DUPFD_CLOEXEC, HIGH_FD)
    channel.detach()
    place_descriptors(fds, [0, 1, 2, *start.pass_fds], keep=reply)
    sys.stdin = sys.__stdin__ = text_stream(0, "r", sys.stdin)
    sys.stdout = sys.__stdout__ = text_stream(1, "w", sys.stdout)
    sys.stderr = sys.__stderr__ = text_stream(2, "w", sys.stderr)
    with socket.socket(fileno=reply) as answer:
        answer.send(os.getpid().to_bytes(4, "little"))
    return start


def set_signals(ignored: list[int]) -> None:
    """Signals as a new Python has them. ignored: those that the caller ignores, which outlives an exec."""
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        handler = signal.SIG_DFL
        if number in ignored or number in (signal.SIGPIPE, signal.SIGXFSZ):
            handler = signal.SIG_IGN
        elif number == signal.SIGINT:
            handler = signal.default_int_handler
        with contextlib.suppress(OSError, ValueError):  # those of the C library
            if signal.getsignal(number) != handler:
                signal.signal(number, handler)


def text_stream(number: int, mode: str, like: io.TextIOWrapper) -> io.TextIOWrapper:
    """A standard stream as Python opens it. like: that of this process, of the same locale."""
    is_unbuffered = bool(os.environ.get("PYTHONUNBUFFERED")) and mode == "w"
    stream = io.TextIOWrapper(
        open(number, mode + "b", buffering=0 if is_unbuffered else -1, closefd=False),
        encoding=like.encoding,
        errors=like.errors,
        line_buffering=not is_unbuffered and (os.isatty(number) or number == 2),
        write_through=is_unbuffered,
    )
    stream.mode = mode
    return stream


def place_descriptors(sources: list[int], targets: list[int], keep: int) -> None:
    """Gives each source the number of its target, inheritable, and closes all others but `keep`."""
    moved = [fcntl.fcntl(source, fcntl.F_DUPFD_CLOEXEC, HIGH_FD) for source in sources]
    for copy, target in zip(moved, targets):
        os.dup2(copy, target, inheritable=True)
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in (keep, *targets):
            with contextlib.suppress(OSError):  # that of the listing itself
                os.close(int(name))


def set_name(name: bytes) -> None:
    """Sets the name in /proc/PID/comm."""
    ctypes.CDLL(None).prctl(PR_SET_NAME, name, 0, 0, 0)


def children_of(pid: int) -> list[int]:
    """The processes that a program has started, without its zygote."""
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(child) for child in text.split() if Path(f"/proc/{child}/comm").read_text() != "zygote\n"]


def die_with_parent(parent: int) -> None:
    from runtime.processes import death_signal_setter  # what preload() has imported

    death_signal_setter(parent)()


def with_own_zygote(channel: socket.socket) -> Start:
    """Serves, and returns in a fork what it has to run. A program that starts others has a zygote as its
    child, a fork from before its first line.
    """
    while True:
        start = serve(channel)
        if start.program not in STARTERS and start.kind != "-c":
            return start
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        program = os.getpid()
        if os.fork():
            theirs.close()
            high = socket.socket(fileno=fcntl.fcntl(ours.fileno(), fcntl.F_DUPFD_CLOEXEC, HIGH_FD))
            ours.close()
            ForkingPopen.install(Zygote(high, start.environment))
            return start
        die_with_parent(program)
        set_name(NAME)
        ours.close()
        null = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):  # else whoever reads the program's output would wait for this process, too
            os.dup2(null, stream)
        channel = theirs


def run(start: Start, path: list[str]) -> None:
    """Runs the program in this process, as python does. path: sys.path without what a start puts before."""
    first = {"-c": "", "-m": start.folder, "file": str(Path(start.folder, start.program).resolve().parent)}
    more = [entry for entry in start.environment.get("PYTHONPATH", "").split(os.pathsep) if entry]
    sys.path[:] = [first[start.kind], *(os.path.join(start.folder, entry) for entry in more), *path]
    sys.argv = list(start.argv)
    before = {"-c": ["-c", start.program], "-m": ["-m", start.program], "file": [start.program]}
    sys.orig_argv = [sys.executable, *before[start.kind], *start.argv[1:]]

    if threads := start.environment.get("OMP_NUM_THREADS"):
        sys.modules["torch"].set_num_threads(int(threads))

    sys.modules["torch"].seed()  # forks of one process would draw alike
    sys.modules["numpy"].random.seed()
    sys.excepthook = without_our_frames
    main = types.ModuleType("__main__")
    if start.kind == "-c":
        code = compile(start.program, "<string>", "exec")
    elif start.kind == "file":
        main.__file__ = os.path.abspath(start.program)
        code = compile(Path(main.__file__).read_bytes(), main.__file__, "exec")
    else:
        spec = importlib.util.find_spec(start.program)
        if spec is not None and spec.submodule_search_locations is not None:  # a package
            spec = importlib.util.find_spec(f"{start.program}.__main__")
        if spec is None:
            sys.exit(f"{sys.executable}: No module named {start.program}")
        main.__file__ = sys.argv[0] = spec.origin
        main.__spec__, main.__package__ = spec, spec.parent
        code = spec.loader.get_code(spec.name)
    sys.modules["__main__"] = main
    exec(code, main.__dict__)


def without_our_frames(kind: type[BaseException], error: BaseException, traceback) -> None:
    """The excepthook of a fork: what python prints, which begins with the program's own frame."""
    while traceback is not None and traceback.tb_frame.f_code.co_filename == __file__:
        traceback = traceback.tb_next
    sys.__excepthook__(kind, error.with_traceback(traceback), traceback)


def preload() -> list[str]:
    """Imports everything -> sys.path without what a start puts before it."""
    path = sys.path[1:]
    sys.path[:] = [str(ROOT), *path]
    import runtime  # noqa: F401  before torch (see there)

    for name in PRELOADED:
        importlib.import_module(name)
    if threading.active_count() > 1:  # those of numpy's BLAS do not count: it ends and starts them at a fork
        raise RuntimeError(f"a fork would lose the threads {threading.enumerate()[1:]}")
    gc.collect()
    gc.freeze()
    return path


if __name__ == "__main__":
    if "BEVATRON_TRACE" in os.environ:  # tests/footprints.py
        sys.path.append(str(ROOT / "tests" / "hooks"))
        import mutate_trace

        mutate_trace.start(os.environ["BEVATRON_TRACE"])
    PATH = preload()
    set_name(NAME)
    run(with_own_zygote(socket.socket(fileno=int(sys.argv[1]))), PATH)
