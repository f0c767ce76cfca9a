"""scripts/slurm/train.sbatch and scripts/scaling/ladder.sbatch under a real SLURM: two nodes on this machine
(slurm_cluster.py), a tiny model, gloo. However a job is interrupted, what it has trained in the end is bit
for bit what an uninterrupted job trains.

Skipped where SLURM is not installed. Debian: apt-get install slurmctld slurmd slurm-client munge
"""

import json
import pathlib
import sys

import pytest
import run_folder
import slurm_cluster
from ranks import MODEL, corpus

from checkpoint.disk import store

ROOT = pathlib.Path(__file__).parent.parent
MISSING = slurm_cluster.missing_programs()
pytestmark = pytest.mark.skipif(
    bool(MISSING),
    reason=f"no real SLURM here: {', '.join(MISSING)} not found "
    "(Debian: apt-get install slurmctld slurmd slurm-client munge)",
)

STEPS = 80
# the first start of a job that is to be interrupted: half a second a step; the next starts run freely
PYTHON = f"""#!/bin/bash
[ -z "$SLOW" ] || [ "${{SLURM_RESTART_COUNT:-0}}" != 0 ] || export FAULT="step.end:act=sleep=0.5"
exec {sys.executable} "$@"
"""
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED")


class Jobs:
    """Submits train.sbatch to the cluster and follows the jobs. home: of the runs and the jobs' output."""

    def __init__(self, cluster: slurm_cluster.Cluster, home: pathlib.Path) -> None:
        self.cluster = cluster
        self.home = home
        self.python = home / "python"
        self.python.write_text(PYTHON)
        self.python.chmod(0o755)
        self.data = corpus(home)

    def submit(self, name: str, *options: str, slow: bool = False, settings: tuple[str, ...] = ()) -> str:
        """-> the number of the job. options: of sbatch; slow: to be interrupted; settings: of train.py."""
        return self.sbatch(
            "--partition=low",
            "--nodes=2",
            f"--output={self.home}/{name}.out",
            *options,
            "scripts/slurm/train.sbatch",
            "llama3-tiny",
            *MODEL,
            *("--data.path", self.data, "--train.steps", str(STEPS)),
            *("--log.dir", str(self.home), "--log.name", name),
            *settings,
            SLOW="1" if slow else "",
        )

    def sbatch(self, *words: str, **variables: str) -> str:
        told = self.cluster.run(
            "sbatch", "--parsable", f"--chdir={ROOT}", *words, PYTHON=str(self.python), **variables
        )
        return told.strip()

    def wait_step(self, name: str, step: int, job: str) -> None:
        self.cluster.wait_for(
            f"step {step} of {name}", lambda: self.last_step(name) >= step or self.ended(job)
        )
        assert self.last_step(name) >= step, self.printed(name)

    def wait_end(self, job: str, seconds: float = 120) -> str:
        """-> its state and exit code, as "COMPLETED 0:0"."""
        self.cluster.wait_for(f"end of job {job}", lambda: self.ended(job), seconds)
        shown = self.cluster.job(job)
        return f"{shown['JobState']} {shown['ExitCode']}"

    def wait_restart(self, job: str) -> None:
        self.cluster.wait_for(f"restart of job {job}", lambda: self.restarts(job) > 0 or self.ended(job))
        assert self.restarts(job) > 0, self.cluster.job(job)

    def ended(self, job: str) -> bool:
        return self.cluster.job(job)["JobState"] in ENDED

    def restarts(self, job: str) -> int:
        return int(self.cluster.job(job)["Restarts"])

    def rows(self, name: str) -> list[dict]:
        file = self.home / name / "metrics.jsonl"
        lines = file.read_text().split("\n")[:-1] if file.exists() else []
        return [json.loads(line) for line in lines]

    def last_step(self, name: str) -> int:
        return max((row["step"] for row in self.rows(name)), default=-1)

    def printed(self, name: str) -> str:
        return (self.home / f"{name}.out").read_text()

    def result(self, name: str) -> tuple[list[tuple], dict[str, str]]:
        """Each step with its loss and gradient norm, and {key: sha256} of weights and moments."""
        story = [(row["step"], row["loss"], row["grad_norm"]) for row in self.rows(name) if "loss" in row]
        path = store.newest_checkpoint(self.home / name / "checkpoints", [])
        index = store.read_index(path)
        assert index["step"] == STEPS
        return story, {piece["key"]: piece["checksum"] for piece in index["pieces"]}

    def reason(self, name: str) -> dict:
        return run_folder.exit_reason(self.home / name)


@pytest.fixture(scope="module")
def jobs(tmp_path_factory):
    home = tmp_path_factory.mktemp("slurm")
    (home / "cluster").mkdir()
    with slurm_cluster.started(home / "cluster") as cluster:
        yield Jobs(cluster, home)


@pytest.fixture(scope="module")
def uninterrupted(jobs):
    """The result of a job that nobody disturbs."""
    job = jobs.submit("whole")
    assert jobs.wait_end(job) == "COMPLETED 0:0", jobs.printed("whole")
    return jobs.result("whole")


def finishes_as(uninterrupted, jobs, name, job):
    """The job was started again, and ends as if nothing had happened."""
    assert jobs.wait_end(job) == "COMPLETED 0:0", jobs.printed(name)
    assert jobs.restarts(job) == 1
    assert jobs.result(name) == uninterrupted


def test_a_job_on_two_nodes_trains_to_the_end(jobs, uninterrupted):
    story, _ = uninterrupted
    assert [step for step, *_ in story] == list(range(1, STEPS + 1))
    printed = jobs.printed("whole")
    assert "world 2" in printed, printed
    assert f"ended with code 0 at step {STEPS} (step -1 when it started, restart 0)" in printed
    assert jobs.reason("whole")["code"] == 0


def test_before_its_time_limit_a_job_is_saved_and_requeued(jobs, uninterrupted):
    job = jobs.submit("limit", "--time=2", "--signal=B:USR1@85", slow=True)
    jobs.wait_restart(job)
    printed = jobs.printed("limit")
    assert "STOP found" in printed and "ended with code 75 at step " in printed, printed
    finishes_as(uninterrupted, jobs, "limit", job)


def test_a_preempted_job_is_saved_and_requeued(jobs, uninterrupted):
    job = jobs.submit("preempted", slow=True)
    jobs.wait_step("preempted", 2, job)
    urgent = jobs.sbatch("--partition=high", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=true")
    assert jobs.wait_end(urgent) == "COMPLETED 0:0"
    assert "ended with code 75 at step " in jobs.printed("preempted")
    finishes_as(uninterrupted, jobs, "preempted", job)


def test_an_empty_stop_file_ends_a_job_for_good(jobs):
    job = jobs.submit("stopped", slow=True)
    jobs.wait_step("stopped", 2, job)
    (jobs.home / "stopped" / "STOP").touch()
    assert jobs.wait_end(job) == "FAILED 75:0"
    assert jobs.restarts(job) == 0
    printed = jobs.printed("stopped")
    assert "stopped for good by a STOP file: not requeued" in printed, printed
    assert jobs.reason("stopped")["code"] == 75 and jobs.reason("stopped")["requeue"] is False


def test_a_stop_file_that_says_requeue_starts_it_again(jobs, uninterrupted):
    job = jobs.submit("again", slow=True)
    jobs.wait_step("again", 2, job)
    (jobs.home / "again" / "STOP").write_text("requeue\n")
    jobs.wait_restart(job)
    finishes_as(uninterrupted, jobs, "again", job)


def test_a_job_that_loses_a_node_continues_from_its_last_checkpoint(jobs, uninterrupted):
    """The node's slurmd and its ranks are killed. The ranks that are left end the job, which waits."""
    job = jobs.submit("lost", slow=True, settings=("--checkpoint.every", "2"))
    jobs.wait_step("lost", 5, job)
    jobs.cluster.kill_node("n2")
    jobs.cluster.run("scontrol", "update", "nodename=n2", "state=down", "reason=lost")
    jobs.wait_restart(job)
    assert jobs.last_step("lost") < STEPS
    jobs.cluster.start_node("n2")
    finishes_as(uninterrupted, jobs, "lost", job)


def test_an_array_of_jobs_runs_the_rungs_of_a_ladder(jobs):
    folder = jobs.home / "ladder"
    ladder = ["--depths", "2,3,4", "--flops", "6e9", "--budgets", "2", "--aspect", "16", "--head-dim", "8"]
    settings = [
        f"--{key}={value}"
        for key, value in {
            "data.path": jobs.data, "model.vocab": 257, "train.seq_len": 16, "train.global_batch": 4,
            "train.micro_batch": 4, "train.threads": 1, "eval.batches": 1,
        }.items()
    ]
    array = jobs.sbatch(
        "--partition=low", "--array=1-2", f"--output={jobs.home}/rung%a.out", "scripts/scaling/ladder.sbatch",
        str(folder), "llama3-tiny", *ladder, *settings,
    )
    for rung in ("1", "2"):
        assert jobs.wait_end(f"{array}_{rung}") == "COMPLETED 0:0", jobs.printed(f"rung{rung}")
    summaries = {file.parent.name: json.loads(file.read_text()) for file in folder.glob("*/summary.json")}
    assert len(summaries) == 4 and all(summary["finished"] for summary in summaries.values()), summaries


def test_a_job_has_the_options_of_its_site(jobs):
    """By scripts.submit; what stands on its line counts more."""
    site = jobs.home / "site.yaml"
    site.write_text("partition: high\ntime: 00:09:00\nexclude: [n2]\noptions: [--comment=of-the-site]\n")
    script = jobs.home / "shown.sh"
    script.write_text('#!/bin/bash\necho "$BEVATRON_SITE"\n')
    words = ("--parsable", "--nodes=1", "--time=00:08:00", f"--output={jobs.home}/shown.out", str(script))
    submit = (sys.executable, "-m", "scripts.submit", "--site", str(site), *words)
    job = jobs.cluster.run(*submit).strip()
    assert jobs.wait_end(job) == "COMPLETED 0:0"
    shown = jobs.cluster.job(job)
    expected = {"Partition": "high", "TimeLimit": "00:08:00", "ExcNodeList": "n2", "NodeList": "n1"}
    assert shown | expected | {"Comment": "of-the-site"} == shown
    assert jobs.printed("shown") == f"{site}\n"


def test_a_preflight_names_its_nodes_as_slurm_does(jobs):
    """Two ranks on each node, without a launcher; its exit code is that of the job."""
    def preflight(name, *words):
        options = ("--partition=low", "--nodes=2", f"--output={jobs.home}/{name}.out")
        words = ("--folder", str(jobs.home / "preflight"), "--disk-mb", "1", *words)
        return jobs.sbatch(*options, "scripts/slurm/preflight.sbatch", *words, GPUS_PER_NODE="2")

    free = ("--min-free-gb", "0", "--max-skew", "60")
    job = preflight("good", "--min-mb-s", "0", *free)
    assert jobs.wait_end(job) == "COMPLETED 0:0", jobs.printed("good")
    rows = [line.split()[:2] for line in jobs.printed("good").splitlines()]
    assert rows[1:3] == [["n1", "2"], ["n2", "2"]]
    job = preflight("slow", "--min-mb-s", "1e9", *free)
    assert jobs.wait_end(job) == "FAILED 82:0", jobs.printed("slow")
    assert "exclude: [n1, n2]\n" in jobs.printed("slow")


REQUEUED = """#!/bin/bash
source scripts/slurm/requeue.sh
nodes_of_hosts() { [ "$1" = - ] || echo "$1"; } # the nodes here are of one host
trap 'echo ended by SLURM; exit' TERM
echo "start ${SLURM_RESTART_COUNT:-0} on $SLURM_JOB_NODELIST"
[ "${SLURM_RESTART_COUNT:-0}" = 0 ] || exit 0
[ "${SLURM_ARRAY_TASK_ID:-1}" = 1 ] || { sleep 8; echo whole; exit 0; }
requeue "${BAD:-$SLURM_JOB_NODELIST}"
exit 0
"""


def test_a_job_comes_back_on_another_node(jobs):
    script = jobs.home / "requeued.sh"
    script.write_text(REQUEUED)
    out = jobs.home / "bad.out"
    words = ("--partition=low", "--nodes=1", "--requeue", "--open-mode=append")
    job = jobs.sbatch(*words, f"--output={out}", str(script))
    jobs.wait_restart(job)
    assert jobs.wait_end(job) == "COMPLETED 0:0", out.read_text()
    starts = [line.split()[-1] for line in out.read_text().splitlines() if line.startswith("start ")]
    assert len(starts) == 2 and starts[0] != starts[1], out.read_text()


def test_one_job_of_an_array_is_requeued_alone(jobs):
    """The last that starts has the number of the array."""
    script = jobs.home / "requeued.sh"
    script.write_text(REQUEUED)
    words = ("--partition=low", "--nodes=1", "--requeue", "--open-mode=append", "--array=0-1")
    array = jobs.sbatch(*words, f"--output={jobs.home}/array-%a.out", str(script), BAD="-")
    ends = [jobs.home / "array-0.out", jobs.home / "array-1.out"]
    jobs.cluster.wait_for("end of both", lambda: all(
        jobs.cluster.job(f"{array}_{number}")["JobState"] in ENDED for number in (0, 1)
    ), 240)
    first, second = (end.read_text() for end in ends)
    assert first.count("start ") == 1 and first.endswith("whole\n"), first
    assert second.count("start ") == 2, second
