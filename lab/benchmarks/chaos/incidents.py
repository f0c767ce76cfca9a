"""A table of faults, each with the exit codes that must follow.

An incident is one start of the run with a disturbance. A fault may take two: one that interrupts the run, and
one that meets its remains.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass

from lab.benchmarks.chaos.layouts import (
    EVALUATE_EVERY,
    LAYOUTS,
    MEMORY_SAVES,
    SAVES,
    STEPS,
    RunLayout,
    elastic,
    moved_to,
)

KILLED = 128 + 9  # how a shell reports a process killed by SIGKILL
LAST_CHANCE = STEPS - 1  # the last step that has a successor
STEP_POINTS = (
    "step.begin", "step.load", "step.read", "step.compute", "step.backward", "step.end",
)
RANK_SAVE_POINTS = ("ckpt.pre_write", "ckpt.mid_shard", "ckpt.post_shard")  # reached by each rank
SAVE_POINTS = (  # reached by rank 0 only
    "ckpt.pre_index", "ckpt.mid_index", "ckpt.pre_rename", "ckpt.post_rename", "ckpt.pre_latest",
    "ckpt.mid_latest", "ckpt.pre_purge",
)
MEMORY_POINTS = ("memory.mid_shard", "memory.pre_send", "memory.pre_commit", "memory.post_commit")
REQUESTS = ("SIGTERM", "SIGUSR1")
HOLD = "sleep=1.5"  # time for the harness to see that a point is reached, and to act
RETRY_WORDS = "warning: a checkpoint was not saved"


@dataclass(frozen=True)
class Incident:
    """One start of the run, and how it is disturbed.

    what: a description. codes: the exit codes that are allowed. fault: the value of FAULT.
    more: arguments for train.py. layout: the one to start with, by default that of the round.
    send: (signal, target), sent at_s seconds after the start or when the fault point is reached; the target
        is a rank, "all" or "launcher".
    prepare: damage to the run folder before the start (lab/benchmarks/chaos/damage.py).
    stop_file: the text of a STOP file, written when the fault point is reached.
    says: texts that the output must contain. skipped: the step that metrics.jsonl must list as skipped.
    requeue: whether exit_reason.json must ask for a requeue.
    is_hang: the run needs parallel.timeout_s to end. wakes: whether stopped ranks are continued.
    """

    what: str
    codes: tuple[int, ...]
    fault: str = ""
    more: tuple[str, ...] = ()
    layout: RunLayout | None = None
    send: tuple[str, int | str] | None = None
    at_s: float | None = None
    prepare: str = ""
    stop_file: str | None = None
    says: tuple[str, ...] = ()
    requeue: bool | None = None
    skipped: int | None = None
    is_hang: bool = False
    wakes: bool = False


@dataclass(frozen=True)
class Situation:
    """The situation that a fault is drawn for.

    done: the step of the newest checkpoint on disk or in memory, 0 without one. clean_s: seconds of a run
    without faults.
    """

    draw: random.Random
    layout: RunLayout
    done: int
    clean_s: float

    def step(self, first: int = 1, last: int = LAST_CHANCE) -> int:
        """Return a random step that is still to come."""
        return self.draw.randint(max(first, self.done + 1), last)

    def save_step(self) -> int:
        return self.draw.choice([step for step in SAVES if step > self.done])

    def rank(self) -> int:
        return self.draw.randrange(self.layout.world)

    def save_point(self, rank: int) -> str:
        """Return a random point of a save that the rank reaches."""
        if rank == 0:
            return self.draw.choice((*RANK_SAVE_POINTS, *SAVE_POINTS))
        writes = not self.layout.has_replicas  # of replicas, only rank 0's is written
        return self.draw.choice([point for point in RANK_SAVE_POINTS if writes or point != "ckpt.mid_shard"])

    def lost(self) -> tuple[int, ...]:
        """Return the codes after one rank is killed: another rank reports it, if there is one."""
        return (KILLED,) if self.layout.world == 1 else (1,)

    def all_lost(self) -> tuple[int, ...]:
        """Return the codes after all ranks are killed. One may report another's death before it dies."""
        return (KILLED,) if self.layout.world == 1 else (1, KILLED)


Incidents = list[Incident]
Builder = Callable[[Situation], Incidents | None]  # None: the fault does not fit the situation


def at(point: str, step: int, action: str, rank: int | None = None) -> str:
    """Return a fault in the syntax of durable/faults.py."""
    who = "" if rank is None else f":rank={rank}"
    return f"{point}{who}:step={step}:act={action}"


# ---- kills -------------------------------------------------------------------------------------------------


def kill_rank_any_time(s: Situation) -> Incidents:
    after, rank = s.draw.uniform(0.0, 1.1 * s.clean_s), s.rank()
    codes = (0, KILLED) if s.layout.world == 1 else (0, 1, KILLED)
    return [Incident(f"SIGKILL of rank {rank}", codes, send=("SIGKILL", rank), at_s=after)]


def kill_all_any_time(s: Situation) -> Incidents:
    after = s.draw.uniform(0.0, 1.1 * s.clean_s)
    return [Incident("SIGKILL of all ranks", (0, 1, KILLED), send=("SIGKILL", "all"), at_s=after)]


def kill_launcher_any_time(s: Situation) -> Incidents | None:
    if s.layout.world == 1:
        return None
    after = s.draw.uniform(0.0, 1.1 * s.clean_s)
    return [Incident("SIGKILL of the launcher", (0, KILLED), send=("SIGKILL", "launcher"), at_s=after)]


def kill_launcher_in_step(s: Situation) -> Incidents | None:
    if s.layout.world == 1:
        return None
    fault = at(s.draw.choice(STEP_POINTS), s.step(), HOLD, rank=0)
    return [Incident("SIGKILL of the launcher", (KILLED,), fault, send=("SIGKILL", "launcher"))]


def kill_rank_in_step(s: Situation) -> Incidents:
    fault = at(s.draw.choice(STEP_POINTS), s.step(last=STEPS), "SIGKILL", s.rank())
    return [Incident("SIGKILL of a rank", s.lost(), fault)]


def kill_all_in_step(s: Situation) -> Incidents:
    fault = at(s.draw.choice(STEP_POINTS), s.step(last=STEPS), "SIGKILL")
    return [Incident("SIGKILL of all ranks", s.all_lost(), fault)]


def kill_in_evaluation(s: Situation) -> Incidents:
    steps = [step for step in range(EVALUATE_EVERY, STEPS + 1, EVALUATE_EVERY) if step > s.done]
    fault = at("eval.end", s.draw.choice(steps), "SIGKILL", s.rank())
    return [Incident("SIGKILL after an evaluation", s.lost(), fault)]


def kill_in_save(s: Situation) -> Incidents:
    rank = s.rank()
    fault = at(s.save_point(rank), s.save_step(), "SIGKILL", rank)
    return [Incident("SIGKILL in a save", s.lost(), fault)]


def kill_in_memory_save(s: Situation) -> Incidents | None:
    """The previous one is still there, and the next start resumes from it."""
    steps = [step for step in MEMORY_SAVES if step > s.done]
    if not s.layout.in_memory or not steps:
        return None
    fault = at(s.draw.choice(MEMORY_POINTS), s.draw.choice(steps), "SIGKILL", s.rank())
    return [Incident("SIGKILL in a save in memory", s.lost(), fault)]


def kill_under_elastic_launcher(s: Situation) -> Incidents | None:
    """The launcher restarts the remaining rank by itself, in the same job."""
    if s.layout.world == 1:
        return None
    last = s.layout.last_rank  # so that the fault finds no such rank in the next start
    fault = at(s.draw.choice(STEP_POINTS), s.step(last=STEPS), "SIGKILL", last)
    return [Incident("SIGKILL of a rank, and on with the other", (0,), fault, layout=elastic(s.layout))]


def kill_all_in_save(s: Situation) -> Incidents:
    fault = at(s.draw.choice(RANK_SAVE_POINTS), s.save_step(), "SIGKILL")
    return [Incident("SIGKILL of all ranks in a save", s.all_lost(), fault)]


# ---- stops -------------------------------------------------------------------------------------------------


def stop_rank(s: Situation) -> Incidents | None:
    if s.layout.world == 1:
        return None
    fault = at(s.draw.choice(STEP_POINTS), s.step(), "SIGSTOP", s.rank())
    says = ("error: rank ",)
    return [Incident("SIGSTOP of a rank", (76,), fault, says=says, requeue=True, is_hang=True)]


def stop_and_wake(s: Situation) -> Incidents:
    rank = s.draw.choice([None, s.rank()])
    fault = at(s.draw.choice(STEP_POINTS), s.step(), "SIGSTOP", rank)
    return [Incident("SIGSTOP, then SIGCONT in time", (0,), fault, wakes=True)]


def stop_launcher(s: Situation) -> Incidents | None:
    if s.layout.world == 1:
        return None
    fault = at(s.draw.choice(STEP_POINTS), s.step(), HOLD, rank=0)
    return [Incident("SIGSTOP of the launcher", (0,), fault, send=("SIGSTOP", "launcher"), wakes=True)]


# ---- requests to stop --------------------------------------------------------------------------------------


def request_to_rank(s: Situation) -> Incidents:
    point, signal = s.draw.choice(STEP_POINTS), s.draw.choice(REQUESTS)
    fault = at(point, s.step(), signal, s.rank())
    return [Incident("a signal to a rank", (75,), fault, requeue=True)]


def request_to_all(s: Situation) -> Incidents:
    point, signal = s.draw.choice(STEP_POINTS), s.draw.choice(REQUESTS)
    fault = at(point, s.step(), signal)
    return [Incident("a signal to all ranks", (75,), fault, requeue=True)]


def request_to_launcher(s: Situation) -> Incidents | None:
    if s.layout.world == 1:
        return None
    fault = at(s.draw.choice(STEP_POINTS), s.step(), HOLD, rank=0)
    send = (s.draw.choice(REQUESTS), "launcher")
    return [Incident("a signal to the launcher", (75,), fault, send=send, requeue=True)]


def request_in_save(s: Situation) -> Incidents | None:
    """A background save may reach that point when the run is at its last step."""
    steps = [step for step in SAVES if s.done < step < STEPS]
    if not steps:
        return None
    rank = s.rank()
    codes = (75, 0) if s.layout.is_async else (75,)
    point, signal = s.save_point(rank), s.draw.choice(REQUESTS)
    fault = at(point, s.draw.choice(steps), signal, rank)
    return [Incident("a signal in a save", codes, fault)]


def request_twice(s: Situation) -> Incidents:
    step = s.step()
    fault = "; ".join((at("step.begin", step, "SIGTERM"), at("ckpt.mid_shard", step, "SIGTERM")))
    return [Incident("SIGTERM, and again in the save", (75,), fault, requeue=True)]


def stop_file(s: Situation) -> Incidents:
    word = s.draw.choice(("", "requeue\n"))
    fault = at("step.begin", s.step(), HOLD, rank=0)
    return [Incident("a STOP file", (75,), fault, stop_file=word, requeue=bool(word))]


# ---- disks -------------------------------------------------------------------------------------------------


def full_disk(s: Situation) -> Incidents:
    step = s.save_step()
    rank = 0 if s.layout.has_replicas else s.rank()
    fault = at("ckpt.mid_shard", step, "ENOSPC", rank)
    if step == STEPS:
        return [Incident("a full disk at the last save", (82,), fault, says=("ENOSPC",), requeue=True)]
    if s.draw.random() < 0.5:
        return [Incident("a full disk", (0,), fault, says=("ENOSPC", RETRY_WORDS))]
    none = ("--checkpoint.failed_saves", "0")
    return [Incident("a full disk, no failure excused", (82,), fault, none, says=("ENOSPC",), requeue=True)]


def left_in_the_middle(s: Situation, step: int) -> Incident:
    return Incident("SIGKILL of all ranks", s.all_lost(), at("step.begin", step, "SIGKILL"))


def left_after_save(s: Situation, step: int) -> Incident:
    """The checkpoint of the step is there, although a background save may end steps later."""
    there = at("ckpt.pre_purge", step, "SIGKILL", rank=0)
    return Incident(f"SIGKILL after the save of step {step}", s.lost(), there)


def flipped_newest(s: Situation) -> Incidents | None:
    """There are two checkpoints: the older one is used."""
    if s.done or s.layout.in_memory:  # the next start resumes from memory
        return None
    flipped = Incident("the newest is damaged", (0,), prepare="flip newest", says=("is rejected: ",))
    return [left_after_save(s, SAVES[1]), flipped]


def flipped_all(s: Situation) -> Incidents | None:
    """No checkpoint is good. With the bytes restored, the run resumes."""
    if s.layout.in_memory:
        return None
    flipped = Incident("all are damaged", (79,), prepare="flip all", says=("no good checkpoint",))
    return [left_in_the_middle(s, STEPS), flipped, Incident("they are restored", (0,), prepare="mend")]


def damaged_metrics(s: Situation) -> Incidents:
    return [
        left_in_the_middle(s, s.step(first=7, last=STEPS)),
        Incident("a line is damaged", (0,), prepare="damage metrics"),
    ]


def lost_latest(s: Situation) -> Incidents:
    return [
        left_in_the_middle(s, s.step(first=7, last=STEPS)),
        Incident("`latest` names nothing", (0,), prepare="lose latest"),
    ]


# ---- numbers, errors and settings --------------------------------------------------------------------------


def nan_on_one_rank(s: Situation) -> Incidents | None:
    """All ranks skip the step. A kill before the next save makes the run repeat it, now without the fault."""
    step = next((step for step in (7, 3) if step > s.done), None)
    if s.layout.has_replicas or s.layout.in_memory or step is None:
        return None
    nan = at("step.backward", step, "nan", s.layout.last_rank)
    fault = f"{nan}; {at('step.begin', step + 2, 'SIGKILL')}"
    return [Incident("NaN in a gradient", s.all_lost(), fault, skipped=step)]


def nan_again_and_again(s: Situation) -> Incidents | None:
    """NaN in the five steps up to the save of step 10, which must not happen."""
    if s.layout.has_replicas or s.layout.in_memory or s.done > 5:
        return None
    fault = "; ".join(at("step.backward", step, "nan", s.layout.last_rank) for step in range(6, 11))
    return [Incident("NaN in five steps", (77,), fault, says=("error: ",), requeue=False)]


def replica_differs(s: Situation) -> Incidents | None:
    """One bit, or a NaN, in the summed gradient of one rank: nothing is saved after it."""
    if not s.layout.has_replicas:
        return None
    fault = at("step.backward", s.step(last=STEPS), s.draw.choice(("bitflip", "nan")), s.rank())
    says = ("replicas differ at step ",)
    return [Incident("a replica differs", (80,), fault, says=says, requeue=True)]


def exception(s: Situation) -> Incidents:
    fault = at(s.draw.choice(STEP_POINTS), s.step(last=STEPS), "raise", s.rank())
    says = ("InjectedFault: injected at ",)
    return [Incident("an exception", (1,), fault, says=says, requeue=False)]


def out_of_memory(s: Situation) -> Incidents:
    fault = at(s.draw.choice(STEP_POINTS), s.step(last=STEPS), "ENOMEM", s.rank())
    return [Incident("out of memory", (81,), fault, says=("out of memory: ",), requeue=False)]


def other_settings(s: Situation) -> Incidents:
    """There is a checkpoint; without one the run would start from scratch, with any settings."""
    refused = Incident("another seed", (2,), more=("--train.seed", "5"), says=("train.seed",))
    if s.done or not s.layout.is_async:
        return [left_in_the_middle(s, s.step(first=6, last=STEPS)), refused]
    return [left_after_save(s, SAVES[0]), refused]


def other_layout(s: Situation) -> Incidents:
    """Later starts have another layout; the results must match those of the initial one."""
    fitting = [layout for layout in LAYOUTS if layout.words != s.layout.words]
    if not s.layout.model:  # without experts, ep has nothing to shard
        fitting = [layout for layout in fitting if not layout.model]
    other = s.draw.choice(fitting)
    moved = moved_to(s.layout, other)
    return [
        left_in_the_middle(s, s.step(first=6, last=STEPS)),
        Incident(f"resumes as {other.name}", (0,), layout=moved),
    ]


FAULTS: dict[str, Builder] = {
    "SIGKILL of a rank at any time": kill_rank_any_time,
    "SIGKILL of all ranks at any time": kill_all_any_time,
    "SIGKILL of the launcher at any time": kill_launcher_any_time,
    "SIGKILL of the launcher in a step": kill_launcher_in_step,
    "SIGKILL of a rank in a step": kill_rank_in_step,
    "SIGKILL of all ranks in a step": kill_all_in_step,
    "SIGKILL of a rank after an evaluation": kill_in_evaluation,
    "SIGKILL of a rank in a save": kill_in_save,
    "SIGKILL of all ranks in a save": kill_all_in_save,
    "SIGKILL of a rank in a save in memory": kill_in_memory_save,
    "SIGKILL of a rank under --nproc 1:2": kill_under_elastic_launcher,
    "SIGSTOP of a rank": stop_rank,
    "SIGSTOP and SIGCONT in time": stop_and_wake,
    "SIGSTOP of the launcher": stop_launcher,
    "SIGTERM or SIGUSR1 to a rank": request_to_rank,
    "SIGTERM or SIGUSR1 to all ranks": request_to_all,
    "SIGTERM or SIGUSR1 to the launcher": request_to_launcher,
    "SIGTERM or SIGUSR1 in a save": request_in_save,
    "SIGTERM twice": request_twice,
    "STOP file": stop_file,
    "disk full": full_disk,
    "byte flipped in the newest checkpoint": flipped_newest,
    "byte flipped in all checkpoints": flipped_all,
    "line of metrics.jsonl damaged": damaged_metrics,
    "latest names nothing": lost_latest,
    "NaN on one rank": nan_on_one_rank,
    "NaN in five steps": nan_again_and_again,
    "replica differs": replica_differs,
    "exception on one rank": exception,
    "out of memory on one rank": out_of_memory,
    "other settings": other_settings,
    "another layout": other_layout,
}
# two layouts round alike only in fp64
IN_FP64 = ("another layout", "SIGKILL of a rank under --nproc 1:2")
FROM_THE_START = ("byte flipped in the newest checkpoint",)  # faults that must come first
