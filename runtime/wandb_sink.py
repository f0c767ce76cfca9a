"""Weights & Biases, at arm's length: it may fail, block or never answer, and training does not notice.

Promises: wandb is imported, started, fed and finished in one side thread behind a bounded queue; what does not fit is
dropped and counted; there is one warning, whatever happens; the end waits a few seconds and then gives up. The truth
is metrics.jsonl. A resumed run keeps its id (file wandb_id in the run folder), so that W&B shows one run.
"""
import atexit
import queue
import secrets
import threading
from pathlib import Path

from runtime.setup import Wandb, redact

WAIT = 5.0  # seconds the end waits for W&B
ROOM = 10_000  # records that may wait: hours of a blocked W&B at a step a second


class Sink:
    """mode off: an idle object with the same face, so that nobody asks whether there is one."""

    def __init__(self, settings: Wandb, run_dir: Path, name: str, tree: dict, room: int = ROOM):
        """`tree` is the resolved config as plain data. Returns at once; the thread does the rest."""
        self.settings = settings
        self.dropped = 0
        self.trouble: str | None = None  # the one warning
        self.warned = False
        self.ended = False
        self.queue: queue.Queue = queue.Queue(room)
        self.thread = threading.Thread(target=self.work, args=(Path(run_dir), name, tree), name="wandb", daemon=True)
        if settings.mode != "off":
            self.thread.start()

    def put(self, step: int, values: dict) -> None:
        """Hands over one record: W&B names it train/* and val/*. Never waits."""
        if self.settings.mode == "off":
            return
        try:
            if self.trouble:
                raise queue.Full
            self.queue.put_nowait((step, values))
        except queue.Full:
            self.dropped += 1

    def warning(self) -> str | None:
        """What went wrong, said once."""
        if self.warned or not (self.trouble or self.dropped):
            return None
        self.warned = True
        return f"W&B: {self.trouble or 'does not keep up'}; training goes on without it, metrics.jsonl has everything"

    def close(self, code: int = 0, wait: float = WAIT) -> None:
        """Sends what waits, finishes the run; gives up after `wait` seconds."""
        if self.settings.mode == "off" or self.ended:
            return
        self.ended = True
        try:
            self.queue.put_nowait((None, code))
        except queue.Full:  # it is stuck: nothing more to hope for
            wait = 0.0
        self.thread.join(wait)
        if self.thread.is_alive():
            self.dropped += self.queue.qsize()
            self.trouble = self.trouble or f"no answer in {wait:.0f} s at the end; {self.dropped} records not sent"
            # wandb would wait for its server once more in an exit hook, without end. What it wrote is on disk, for
            # `wandb sync`. atexit has no finer broom: the hooks of wandb are closures.
            atexit._clear()

    # ---- the side thread ---------------------------------------------------------------------------------------------

    def work(self, run_dir: Path, name: str, tree: dict) -> None:
        try:
            run = self.begin(run_dir, name, tree)
            while True:
                step, values = self.queue.get()
                if step is None:
                    run.finish(exit_code=values)
                    return
                run.log(values, step=step)
        except BaseException as e:  # wandb may raise SystemExit and KeyboardInterrupt too; none of them is ours
            words = (str(e).strip() or "no reason given").splitlines()[0]
            self.trouble = redact(f"{type(e).__name__}: {words}"[:200])

    def begin(self, run_dir: Path, name: str, tree: dict):
        import wandb
        s = self.settings
        folder = Path(s.dir or run_dir)
        folder.mkdir(parents=True, exist_ok=True)  # wandb would fall back to a temporary folder
        # console off: wandb must not sit between us and stdout; silent: it has one line to say, and we say it
        quiet = wandb.Settings(console="off", silent=True, save_code=False)
        return wandb.init(project=s.project, entity=s.entity, name=name, id=s.id or stable_id(run_dir), dir=str(folder),
                          mode=s.mode, resume="allow", config=tree, settings=quiet)


def stable_id(run_dir: Path) -> str:
    """The W&B id of this run folder, made on first use."""
    file = Path(run_dir) / "wandb_id"
    if not (file.exists() and file.read_text().strip()):
        file.write_text(secrets.token_hex(4) + "\n")
    return file.read_text().strip()
