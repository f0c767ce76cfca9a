"""One round: a run that is disturbed once or twice, restarted until it has finished, and then examined."""

import json
import random
import shutil
from dataclasses import dataclass, field
from pathlib import Path

from lab.benchmarks.chaos import damage, evidence
from lab.benchmarks.chaos.incidents import (
    FAULTS,
    FROM_THE_START,
    IN_FP64,
    Incident,
    Situation,
    left_in_the_middle,
)
from lab.benchmarks.chaos.layouts import RunLayout, in_fp64
from lab.benchmarks.chaos.start import Ended, RunningStart

UNDISTURBED = Incident("nothing", (0,))
LIMIT_FACTOR = 4.0  # time limit of a start, in multiples of a clean run
LIMIT_S = 45.0  # on top of that; a launcher kills the remaining ranks 30 s after a failure
DISTURBED_BEFORE = 1 / 3  # fraction of rounds with another kill before the fault
LAST_EARLY_STEP = 7  # the latest step for that kill
SHOWN_LINES = 12  # of the output of a start with a wrong ending


@dataclass(frozen=True)
class Reference:
    """A run without a fault."""

    folder: Path
    evidence: evidence.Evidence
    seconds: float


@dataclass(frozen=True)
class Draw:
    """A round as drawn by the seed."""

    number: int
    fault: str
    layout: RunLayout
    disturbed_before: bool


@dataclass
class Report:
    """The outcome of a round.

    starts: a description and the exit code of each. lost_s: time beyond a clean run. commit: of the code.
    """

    draw: Draw
    starts: list[str] = field(default_factory=list)
    codes: list[int] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    lost_s: float = 0.0
    commit: str = ""


def draw_rounds(seed: int, rounds: int, layouts: list[RunLayout], faults: list[str]) -> list[Draw]:
    """Draw faults and layouts in turn, each in a seeded order, so that few rounds already cover many."""
    stream = random.Random(f"chaos {seed}")
    fitting = {fault: [layout for layout in layouts if fits(fault, layout)] for fault in faults}
    faults = [fault for fault in faults if fitting[fault]]
    if not faults:
        return []
    drawn: list[Draw] = []
    waiting: list[str] = []
    decks = {name: [] for name in faults}
    for number in range(rounds):
        if not waiting:
            waiting = stream.sample(faults, len(faults))
        fault = waiting.pop()
        if not decks[fault]:
            decks[fault] = stream.sample(fitting[fault], len(fitting[fault]))
        layout = decks[fault].pop()
        before = stream.random() < DISTURBED_BEFORE and fault not in FROM_THE_START
        drawn.append(Draw(number, fault, in_fp64(layout) if fault in IN_FP64 else layout, before))
    return drawn


def fits(fault: str, layout: RunLayout) -> bool:
    """Return whether the fault can be injected into a run of this layout."""
    situation = Situation(random.Random(0), layout, done=0, clean_s=1.0)
    return FAULTS[fault](situation) is not None


class Harness:
    """Runs rounds in its folder, with one corpus and one clean run per layout."""

    def __init__(self, home: Path, data: str, seed: int) -> None:
        self.home = home
        self.data = data
        self.seed = seed
        self.references: dict[str, Reference] = {}

    def arguments(self, layout: RunLayout, name: str) -> list[str]:
        paths = ["--data.path", self.data, "--log.dir", str(self.home), "--log.name", name]
        if layout.in_memory:
            paths += ["--checkpoint.memory_dir", str(self.home)]
        return [*layout.arguments(), *paths]

    def reference(self, layout: RunLayout) -> Reference:
        """Return the clean run of a layout, made on first use. Raises RuntimeError if it fails."""
        if layout.name not in self.references:
            name = f"clean-{layout.name.replace(' ', '-')}"
            folder = self.home / name
            start = RunningStart(layout, UNDISTURBED, folder, self.arguments(layout, name), limit_s=300.0)
            ended = start.run()
            if ended.code:
                raise RuntimeError(f"a run without a fault ends with {ended.code}:\n{ended.output}")
            found = evidence.read_evidence(folder)
            self.references[layout.name] = Reference(folder, found, ended.seconds)
        return self.references[layout.name]

    def run_round(self, draw: Draw) -> Report:
        """Disturb and restart a run, and compare it with the clean run."""
        report = Report(draw)
        clean = self.reference(draw.layout)
        stream = random.Random(f"chaos {self.seed} round {draw.number}")
        folder = self.home / f"round-{draw.number}"

        # disturb it
        layout = draw.layout
        if draw.disturbed_before:
            early = Situation(stream, layout, 0, clean.seconds)
            kill = left_in_the_middle(early, early.step(last=LAST_EARLY_STEP))
            self.start(kill, layout, folder, report, stream)
        done = evidence.newest_step(folder)
        for incident in FAULTS[draw.fault](Situation(stream, layout, done, clean.seconds)) or ():
            layout = incident.layout or layout
            self.start(incident, layout, folder, report, stream)

        # let it finish
        self.start(UNDISTURBED, layout, folder, report, stream)
        report.lost_s = max(report.lost_s - clean.seconds, 0.0)
        if not report.problems:
            report.problems += self.final_problems(draw, layout, folder, clean)
        if not report.problems:
            shutil.rmtree(folder)
        return report

    def start(self, incident: Incident, layout: RunLayout, folder: Path, report: Report,
              stream: random.Random) -> None:
        """Run one start and check what must hold after it. Does nothing if the round has already failed."""
        if report.problems:
            return
        done_to_it = ""
        if incident.prepare:
            aside = folder.parent / f"{folder.name}-aside"
            done_to_it = f" ({damage.prepare(incident.prepare, folder, aside, stream)})"
        limit_s = LIMIT_FACTOR * max(ref.seconds for ref in self.references.values()) + LIMIT_S
        arguments = self.arguments(layout, folder.name)
        ended = RunningStart(layout, incident, folder, arguments, limit_s).run()
        timing = f" after {incident.at_s:.1f} s" if incident.at_s is not None else ""
        report.starts.append(
            f"{incident.what}{timing}{done_to_it} [{incident.fault}] -> {ended.code}, {ended.seconds:.0f} s"
        )
        report.codes.append(ended.code)
        report.lost_s += ended.seconds
        wrong = start_problems(incident, ended, folder, limit_s)
        if incident.prepare != "flip all":
            wrong += evidence.checkpoint_problems(folder)
        if wrong:
            tail = ended.output.strip().splitlines()[-SHOWN_LINES:]
            report.problems += [*wrong, "the end of its output:", *(f"  | {line}" for line in tail)]

    def final_problems(self, draw: Draw, layout: RunLayout, folder: Path, clean: Reference) -> list[str]:
        """Return what is wrong with a finished run."""
        lost_lines = 1 if draw.fault == "line of metrics.jsonl damaged" else 0
        try:
            found = evidence.read_evidence(folder)
        except (ValueError, OSError) as error:
            return [str(error)]
        problems = evidence.folder_problems(folder)
        if layout is draw.layout:
            return problems + evidence.differences(found, clean.evidence, lost_lines)
        problems += evidence.ledger_problems(found, clean.evidence, lost_lines, exact=False)
        return problems + evidence.weight_problems(folder, clean.folder)


def start_problems(incident: Incident, ended: Ended, folder: Path, limit_s: float) -> list[str]:
    """Return what is wrong with how a start ended."""
    if ended.is_late:
        return [f"it had not ended after {limit_s:.0f} s"]
    problems = []
    if ended.code not in incident.codes:
        problems.append(f"the exit code is {ended.code}, not {' or '.join(map(str, incident.codes))}")
    if incident.fault and not ended.fired:
        problems.append("the fault did not happen")
    if ended.orphans:
        problems.append(f"{ended.orphans} processes are left")
    for words in incident.says:
        if words not in ended.output:
            problems.append(f"nothing was said of {words!r}")
    if incident.requeue is not None:
        problems += reason_problems(folder, ended.code, incident.requeue)
    if incident.skipped is not None:
        skipped = [row["step"] for row in evidence.read_rows(folder) if row.get("skipped")]
        if skipped != [incident.skipped]:
            problems.append(f"steps {skipped} were skipped, not {incident.skipped}")
    return problems


def reason_problems(folder: Path, code: int, requeue: bool) -> list[str]:
    """Check that exit_reason.json has the exit code and the expected requeue flag."""
    try:
        reason = json.loads((folder / "exit_reason.json").read_text())
    except (OSError, ValueError) as error:
        return [f"exit_reason.json: {error}"]
    if (reason["code"], reason["requeue"]) != (code, requeue):
        return [f"exit_reason.json says {reason['code']}, requeue {reason['requeue']}: not {code}, {requeue}"]
    return []
