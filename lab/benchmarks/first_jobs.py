"""The jobs of `scripts.bench first`: what a forked process does for each section of the plan."""

import gc
import importlib.util
import json
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import pytest
import torch

from config import ConfigError
from kernels.attention_libraries import LIBRARIES
from lab.benchmarks import card, contestant, exchanges, rates, small_models, step_model
from lab.benchmarks.card import GIB, GpuMachine, fitted_shape, get_dtype, planned_bytes, with_fewer_layers
from lab.benchmarks.first_plan import SCENARIOS, Section
from lab.benchmarks.interpreted import interpret_kernels
from lab.benchmarks.jobs import ForkedJob, Report, begin_again_if_lost
from lab.benchmarks.process import last_error_line
from lab.benchmarks.shape import Shape
from plan.job import peak_flops_of_gpu
from plan.record.launches import CHIPS, Chip
from plan.record.rates import Work

ROOT = Path(__file__).parents[2]
MEMORY_SHARE = 0.9  # of the GPU, for all concurrent jobs
PROFILED_STEPS = 2
LIMIT_S = {"rates": 60.0, "kernels": 60.0, "models": 90.0, "modelled": 90.0, "exchanges": 40.0, "step": 75.0}
TINY_LIMIT_S = 120.0  # kernels are interpreted
ABSENT = (  # errors of a contestant that cannot run here
    "not installed",
    "needs a GPU",
    "has no graphs",
    "has no fp8",
    "no attention over packed",
)
IN_SEPARATE_PROCESSES = {"graphs", "libraries"}  # ours with another environment


@dataclass(frozen=True)
class FirstRun:
    """jobs: number of concurrent jobs. chip: the GPU of the step model. tests: a folder."""

    device: str
    is_tiny: bool
    site: str
    scratch: Path
    machine: GpuMachine
    jobs: int
    chip: Chip
    tests: str = "tests/kernels"

    def limit_s(self, kind: str) -> float:
        return TINY_LIMIT_S if self.is_tiny else LIMIT_S[kind]

    @property
    def memory_share(self) -> float:
        return MEMORY_SHARE / self.jobs


def get_jobs(section: Section, run: FirstRun) -> list[ForkedJob]:
    return KINDS[section.kind](section, run)


def use_own_kernels(device: str, share: float) -> None:
    """Run Triton's kernels in this process: interpreted on a CPU, with a fraction of the memory on a GPU."""
    if device == "cpu":
        interpret_kernels()
    else:
        torch.cuda.set_per_process_memory_fraction(share)


# ---- the card ----------------------------------------------------------------------------------------------


def card_job(device: str) -> ForkedJob:
    return ForkedJob("card", partial(report_card, device=device), 120.0)


def report_card(report: Report, done: frozenset[str], *, device: str) -> None:
    """Report whether a process of this run can use the GPU, and describe the GPU."""
    report(starting="card")
    if device == "cpu":
        report(row="card", state="ok", **asdict(CHIPS["h200"]))
        return
    started = time.perf_counter()
    torch.zeros(1, device=device)
    properties = torch.cuda.get_device_properties(0)
    free, _ = torch.cuda.mem_get_info()
    chip = Chip(
        properties.name,
        (properties.major, properties.minor),
        properties.multi_processor_count,
        properties.total_memory,
    )
    seconds = time.perf_counter() - started
    report(row="card", state="ok", **asdict(chip), note=f"{free / GIB:.1f} GiB free, context {seconds:.1f} s")


# ---- rates, kernels, models --------------------------------------------------------------------------------


def rates_jobs(section: Section, run: FirstRun) -> list[ForkedJob]:
    return [ForkedJob("rates", partial(report_rates, run=run), run.limit_s("rates"))]


def report_rates(report: Report, done: frozenset[str], *, run: FirstRun) -> None:
    if run.site:
        sys.path.append(run.site)  # attention libraries
    use_own_kernels(run.device, 1.0)
    rates.measure_rates(report, done, device=run.device, is_tiny=run.is_tiny)


def kernels_jobs(section: Section, run: FirstRun) -> list[ForkedJob]:
    """Return a job for each file with tests marked gpu."""
    jobs = []
    for file in files_of_tests(run.tests):
        test = partial(report_tests, file=str(file), run=run)
        jobs.append(ForkedJob(file.name, test, run.limit_s("kernels")))
    return jobs


def files_of_tests(folder: str) -> list[Path]:
    """Return the files with tests marked gpu. Raises ConfigError if there are none."""
    files = sorted((ROOT / folder).glob("test_*.py"))
    marked = [file for file in files if "mark.gpu" in file.read_text()]
    if not marked:
        raise ConfigError(f"--tests {folder}: no file of it has a test marked gpu")
    return marked


def report_tests(report: Report, done: frozenset[str], *, file: str, run: FirstRun) -> None:
    """Run a file's tests marked gpu, with a row for each."""
    if run.site:
        sys.path.append(run.site)
    options = ["-m", "gpu", "-q", "-o", "addopts=", "-p", "no:cacheprovider", "-p", "no:randomly"]
    share = [f"--memory-share={run.memory_share:.3f}"] if run.device == "cuda" else []
    rows = TestRows(Path(file).name, report, done)
    code = pytest.main([file, *options, *share, f"--rootdir={ROOT}"], plugins=[rows])
    if code == pytest.ExitCode.NO_TESTS_COLLECTED and rows.num_found:
        return  # all done already
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        raise RuntimeError(f"pytest ended with {pytest.ExitCode(code).name}")


class TestRows:
    """A pytest plugin that reports a row for each test and deselects those already done."""

    __test__ = False

    def __init__(self, file: str, report: Report, done: frozenset[str]) -> None:
        self.file = file
        self.report = report
        self.done = done
        self.num_found = 0
        self.row: dict = {}

    def get_name(self, nodeid: str) -> str:
        """Return test_norm.py::test_x[1], without the folder of the file."""
        return f"{self.file}::{nodeid.partition('::')[2]}"

    @pytest.hookimpl(trylast=True)  # after -m
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        self.num_found = len(items)
        left_out = [item for item in items if self.get_name(item.nodeid) in self.done]
        items[:] = [item for item in items if item not in left_out]
        config.hook.pytest_deselected(items=left_out)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            problem = last_error_line(str(report.longrepr))
            self.report(row=self.file, state="wrong", problem=problem)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.row = {"row": self.get_name(nodeid), "state": "ok"}
        self.report(starting=self.row["row"])

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and self.row["state"] != "wrong":
            crash = getattr(report.longrepr, "reprcrash", None)
            lines = (crash.message if crash else str(report.longrepr)).splitlines()
            self.row |= {"state": "wrong", "problem": lines[0][:160]}
        if report.skipped:
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
            self.row |= {"state": "absent", "problem": reason.removeprefix("Skipped: ")[:160]}
        self.row |= dict(report.user_properties)
        if report.when == "teardown":
            self.report(**self.row)
            if self.row["state"] == "wrong":
                begin_again_if_lost(self.report)


def models_jobs(section: Section, run: FirstRun) -> list[ForkedJob]:
    jobs = []
    for name in small_models.MODELS:
        jobs.append(ForkedJob(name, partial(report_small_model, name=name, run=run), run.limit_s("models")))
    return jobs


def report_small_model(report: Report, done: frozenset[str], *, name: str, run: FirstRun) -> None:
    use_own_kernels(run.device, run.memory_share)
    folder = Path(tempfile.mkdtemp(dir=run.scratch))  # an aborted job may have left a run behind
    small_models.report_model(report, name, run.device, run.is_tiny, folder)


def corpus_jobs(section: Section, run: FirstRun) -> list[ForkedJob]:
    """Return the job that makes the corpus, before all small models that read it run concurrently."""
    work = partial(small_models.report_corpus, device=run.device)
    return [ForkedJob("corpus", work, run.limit_s("models"))]


def exchanges_jobs(section: Section, run: FirstRun) -> list[ForkedJob]:
    """Return a job for a world of one, and one for a world with a rank per GPU, or two ranks on a CPU."""
    num_ranks = run.machine.num_gpus if run.device == "cuda" else 2
    jobs = []
    for world in sorted({1, num_ranks}):
        meet = tempfile.mktemp(dir=run.scratch, prefix="meet-")
        for rank in range(world):
            job = partial(
                exchanges.report_exchanges, device=run.device, rank=rank, world=world, meet=meet
            )
            jobs.append(
                ForkedJob(f"rank {rank} of {world}", job, run.limit_s("exchanges"), can_resume=world == 1)
            )
    return jobs


# ---- steps -------------------------------------------------------------------------------------------------


def step_jobs(section: Section, run: FirstRun) -> list[ForkedJob]:
    """Return a job for one contestant, with fewer layers as the alternative if memory does not suffice."""
    shape = fitted_shape(section.model, section.contestant, run.machine.memory_bytes, run.is_tiny)
    if shape is None:
        return [ForkedJob(section.name, partial(report_absence, name=section.name), 60.0)]
    smaller = with_fewer_layers(shape, get_dtype(section.contestant))
    alternative = step_job(section, run, smaller, f"{shape.layers} layers did not fit") if smaller else None
    return [step_job(section, run, shape, "", alternative)]


def step_job(
    section: Section, run: FirstRun, shape: Shape, note: str, alternative: ForkedJob | None = None
) -> ForkedJob:
    work = partial(report_step, section=section, run=run, shape=shape, note=note)
    return ForkedJob(section.name, work, run.limit_s("step"), alternative)


def report_absence(report: Report, done: frozenset[str], *, name: str) -> None:
    report(row=name, state="absent", problem=card.TOO_LARGE)


def report_step(
    report: Report, done: frozenset[str], *, section: Section, run: FirstRun, shape: Shape, note: str
) -> None:
    """Measure a contestant and report its row."""
    report(starting=section.name)
    base, *flags = section.contestant.split("+")
    num_steps = card.GPU_STEPS if run.device == "cuda" else card.CPU_STEPS
    settings = {"shape": asdict(shape), "device": run.device, **num_steps}
    if base == "ours":
        settings["profile"] = PROFILED_STEPS
    row = {
        "model": section.model,
        "contestant": section.contestant,
        "shape": asdict(shape),
        "planned gib": planned_bytes(shape, get_dtype(section.contestant)) / GIB,
    }
    row |= {"note": note} if note else {}

    if base != "ours" or IN_SEPARATE_PROCESSES & set(flags):
        found = absent_libraries(run.site) if "libraries" in flags else None
        found = found or measure_in_process(report, section.contestant, settings, run.site)
    else:
        found = measure_here(report, section.contestant, settings)
    if "problem" in found:
        is_absent = any(words in found["problem"] for words in ABSENT)
        report(row=section.name, state="absent" if is_absent else "wrong", **row, **found)
        return
    figures = card.derived_figures(found, shape, peak_flops_of_gpu(run.machine.card, "bf16"))
    report(row=section.name, state="ok", **row, **found, **figures)


def measure_here(report: Report, name: str, settings: dict) -> dict:
    started = time.perf_counter()
    first: list[float] = []

    def phase(**message: object) -> None:
        if message.get("phase") == "first step":
            first.append(round(time.perf_counter() - started, 1))
        report(**message)

    try:
        return contestant.measure(name, settings, phase) | {"first s": first[0]}
    except Exception as error:
        traceback.print_exc()
        return {"problem": contestant.find_problem(error)}
    finally:
        gc.collect()


def measure_in_process(report: Report, name: str, settings: dict, site: str) -> dict:
    """Measure a contestant in a child process of this session, which ends with it."""
    command = [sys.executable, "-m", "lab.benchmarks.contestant", name, json.dumps(settings)]
    env = card.make_environment(name, site)
    first = None
    last: dict = {}
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=env, cwd=ROOT, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            last = json.loads(line)
            if last.get("phase") == "first step":
                first = last["s"]
            report(phase=last.get("phase", "end"))
    if "done" in last:
        return last["done"] | {"first s": first}
    return {"problem": last.get("error", f"exit code {process.returncode} in phase {last.get('phase')}")}


def absent_libraries(site: str) -> dict | None:
    """Return why no library of a site folder can be used here, or None if one can."""
    if not site:
        return {"problem": "not installed: --site names no folder with attention libraries"}
    names = {library.module.partition(".")[0] for library in LIBRARIES} - {"torch", "kernels"}
    found = [name for name in names if importlib.util.find_spec(name) or any(Path(site).glob(f"{name}*"))]
    return None if found else {"problem": f"not installed: none of {', '.join(sorted(names))} in {site}"}


# ---- the step model ----------------------------------------------------------------------------------------


def modelled_jobs(section: Section, run: FirstRun) -> list[ForkedJob]:
    jobs = []
    for step, scenario in SCENARIOS.items():
        work = partial(report_modelled, step=step, scenario=scenario, run=run)
        jobs.append(ForkedJob(f"model of {step}", work, run.limit_s("modelled")))
    return jobs


def report_modelled(
    report: Report, done: frozenset[str], *, step: str, scenario: str, run: FirstRun
) -> None:
    """Count FLOPs and bytes of the step's launches; measured rates convert them to time (measured.py)."""
    row = f"model of {step}"
    report(starting=row)
    model, _, name = step.partition(" ")
    shape = fitted_shape(model, name, run.machine.memory_bytes, run.is_tiny)
    if shape is None:
        report(row=row, step=step, state="absent", problem=card.TOO_LARGE)
        return
    recorded = step_model.recorded_step(scenario, run.chip, shape)
    works = Counter(Work.of(judged) for judged in recorded.works if judged.launch.launches)
    flops = step_model.flops_per_token(recorded.cfg.model, shape.seq, recorded.documents) * shape.tokens
    report(
        row=row,
        step=step,
        state="ok",
        works=[[*work, count] for work, count in works.items()],
        host=recorded.host,
        host_reads=len(recorded.host_reads),
        layers=shape.layers,
        model_flops=flops,
        peak_flops=peak_flops_of_gpu(run.machine.card, "bf16"),
    )


KINDS: dict[str, Callable[[Section, FirstRun], list[ForkedJob]]] = {
    "rates": rates_jobs,
    "kernels": kernels_jobs,
    "corpus": corpus_jobs,
    "models": models_jobs,
    "modelled": modelled_jobs,
    "exchanges": exchanges_jobs,
    "step": step_jobs,
}
