"""The scripts of scripts/slurm/ with stand-ins for srun, scontrol and the launcher: what is requeued and what
stays down; and every recipe of scripts/recipes against the rules at its own world size.
"""

import dataclasses
import json
import os
import pathlib
import re
import signal
import subprocess
import sys

import pytest
from waiting import wait_until

from config import ConfigError
from config.reading import resolve, split_argv
from config.reading.schedules import plan_pipeline
from config.site import read_site
from plan.batch_file import batch_text, node_shape, write_batch_file
from scripts import grid, plan

ROOT = pathlib.Path(__file__).parent.parent
SCRIPT = ROOT / "scripts" / "slurm" / "train.sbatch"
RECIPES = sorted((ROOT / "scripts" / "recipes").glob("*.sh"))
SRUN = """#!/bin/bash
options=()
while [[ $1 = -* ]]; do options+=("$1"); shift; done
echo "srun ${options[*]}" >> "$CALLS"
[ -z "${SRUN_CPUS_PER_TASK:-}" ] || echo "cores ${SRUN_CPUS_PER_TASK}" >> "$CALLS"
SLURM_NODEID=1 exec "$@"
"""
SCONTROL = """#!/bin/bash
echo "scontrol $*" >> "$CALLS"
case "$1 $2" in
    "show hostnames") printf "node7\\nnode8\\n" ;;
    "show node")
        echo "NodeName=$3 Arch=x86_64"
        echo "   NodeAddr=10.1.2.3 NodeHostName=host${3#node}"
        ;;
    "show job") echo "JobId=$3 ReqNodeList=(null) ExcNodeList=$EXCLUDED" ;;
esac
"""
# stands in for the launcher alone: waits for a STOP file where told to, leaves a checkpoint and an exit
# reason
PYTHON = """#!/bin/bash
case "$*" in *scripts.launch*) ;; *) exec "$REAL" "$@" ;; esac
echo "launch $*" >> "$CALLS"
echo "words of the ranks"
echo "secret $BEVATRON_STORE_SECRET" >> "$CALLS"
echo "network $NCCL_SOCKET_IFNAME $GLOO_SOCKET_IFNAME $NCCL_IB_HCA $NCCL_DEBUG" >> "$CALLS"
while [ -n "$WAIT" ] && [ ! -e "$RUN/STOP" ]; do sleep 0.02; done
[ -z "$WAIT" ] || echo "STOP says $(cat "$RUN/STOP")" >> "$CALLS"
rm -f "$RUN/STOP"
[ -z "$STEP" ] || mkdir -p "$RUN/checkpoints/step_$STEP"
[ -z "$CODE" ] || echo "{\\"code\\": $CODE$AGAIN}" > "$RUN/exit_reason$OF.json"
[ "$CODE" = 0 ] || exit ${DEATH:-1}  # what srun makes of many codes is not relied upon
"""


def submit(
    tmp_path, code="", step="", wait="", args=("llama3-tiny", "--log.name", "r"), usr1=False, again=None,
    of="", script=SCRIPT, **more,
):
    """Run a script of SLURM once -> (its exit code, the calls that were made, what it printed).

    code, again: what exit_reason.json says; of: .rankN where it is not rank 0's. step: of the checkpoint that
    the ranks leave. more: environment variables."""
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL), ("python", PYTHON)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    calls = tmp_path / "calls"
    calls.write_text("")
    env = {
        **os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "PYTHON": str(tmp_path / "python"), "REAL": sys.executable, "CALLS": str(calls),
        "RUN": str(tmp_path / "r"), "CODE": code, "STEP": step, "OF": of, "WAIT": wait,
        "AGAIN": "" if again is None else f', "requeue": {json.dumps(again)}',
        "SLURM_SUBMIT_DIR": str(ROOT), "SLURM_JOB_NODELIST": "node[7-8]", "SLURM_JOB_ID": "40123",
        "SLURM_NNODES": "2", "SLURM_GPUS_ON_NODE": "4", **more,
    }
    job = subprocess.Popen(
        ["bash", str(script), *args, "--log.dir", str(tmp_path)], env=env, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True,
    )
    if usr1:
        wait_until(lambda: "launch" in calls.read_text())
        for _ in range(2):  # SLURM may send it twice
            job.send_signal(signal.SIGUSR1)
    out, _ = job.communicate(timeout=60)
    return job.returncode, calls.read_text(), out


@pytest.mark.slow
def test_the_time_limit_stops_saves_and_requeues(tmp_path):
    rc, calls, out = submit(tmp_path, code="75", step="00000005", wait="1", usr1=True)
    assert rc == 0 and "scontrol requeue 40123" in calls, out
    assert "STOP says requeue\n" in calls
    assert "srun --ntasks-per-node=1 --kill-on-bad-exit=1\n" in calls
    # node7 is not the name of a host
    words = "--nproc 4 --nnodes 2 --node-rank 1 --rdzv 10.1.2.3:10123 -- llama3-tiny --log.name r"
    assert f"launch -m scripts.launch {words} " in calls
    assert (tmp_path / "r" / "REQUEUE").exists() and not (tmp_path / "r" / "STOP").exists()


@pytest.mark.slow
def test_each_job_seals_the_words_of_its_ranks(tmp_path):
    """With a secret of its own, which is not that of the job before; one that is given counts."""
    told = [re.findall("secret (.*)\n", submit(tmp_path, code="0")[1]) for _ in range(2)]
    (first,), (second,) = told
    assert first != second and all(re.fullmatch("[0-9a-f]{32}", secret) for secret in (first, second))
    assert "secret mine\n" in submit(tmp_path, code="0", BEVATRON_STORE_SECRET="mine")[1]


@pytest.mark.parametrize("excluded, then", [("(null)", "node8"), ("node[1-2]", "node[1-2],node8")])
def test_a_node_whose_device_computes_wrongly_is_left_out(tmp_path, excluded, then):
    """It is named by its host, and what the user excludes stays excluded. The run's folder has the log."""
    reason = ', "requeue": true, "rank": 4, "host": "host8", "wrong_device": true'
    words = {"code": "80", "step": "00000005", "of": ".rank4", "AGAIN": reason, "EXCLUDED": excluded}
    rc, calls, out = submit(tmp_path, **words)
    assert rc == 0 and "requeued without node8, where a device computes wrongly" in out
    requeue, *_, update = calls[calls.index("scontrol requeue"):].splitlines()
    assert requeue == "scontrol requeue 40123"
    assert update == f"scontrol update JobId=40123 ExcNodeList={then}"
    assert (tmp_path / "r" / "slurm-40123.out").read_text() == "words of the ranks\n"


FIVE, EIGHT, TEN = ({"step": f"000000{step}"} for step in ("05", "08", "10"))
LOST = {"code": "1", "of": ".rank3"}  # rank 0 is the one that died: another says so
REQUEUED = (0, "scontrol requeue 40123")
# {what ends: the starts of a job, each with (its exit code, what it prints) or REQUEUED}
ENDS = {
    "a hang, while steps advance": (
        ({"code": "76", **EIGHT}, REQUEUED),
        ({"code": "76", **EIGHT}, (76, "no new checkpoint")),
        ({"code": "82", **TEN}, REQUEUED),  # 08 and 09 are not octal numbers
        ({"code": "75"}, (75, "no new checkpoint")),
    ),
    **{
        f"code {code}, which a restart cannot mend": (({"code": str(code), **FIVE}, (code, "")),)
        for code in (2, 77, 79, 81, 1)
    },
    "a stop by hand, for good": (({"code": "75", "again": False, **FIVE}, (75, "for good")),),
    "a lost peer, while steps advance": (
        ({**LOST, "again": True, **FIVE}, REQUEUED),
        ({**LOST, "again": True, **FIVE}, (1, "no new checkpoint")),
        ({**LOST, "again": False, **EIGHT}, (1, "")),  # an error of the code
    ),
    **{
        f"ranks that {what} ended without a word, while steps advance": (
            ({"DEATH": death, **FIVE}, REQUEUED),
            ({"DEATH": death, **FIVE}, (int(death), "no new checkpoint")),
            # what a rank has said counts more
            ({"DEATH": death, "code": "79", "of": ".rank2", **EIGHT}, (79, "")),
        )
        for what, death in (("want of memory", "137"), ("SIGSEGV", "139"), ("SIGBUS", "135"),
                            ("a signal before they could save", "75"))
    },
    "a reason that is not JSON": (({"code": "x", **FIVE}, (1, "")),),
    "the end": (({"code": "0", **TEN}, (0, "")),),
}


@pytest.mark.slow(core=["a stop by hand, for good"])
@pytest.mark.parametrize("starts", ENDS.values(), ids=ENDS)
def test_what_is_requeued_and_what_stays_down(tmp_path, starts):
    for words, (code, said) in starts:
        rc, calls, out = submit(tmp_path, **words)
        assert rc == code and said in calls + out, (words, out)
        assert ("scontrol requeue" in calls) == ((code, said) == REQUEUED), (words, out)
        assert "Traceback" not in out


@pytest.mark.slow
def test_the_reason_of_an_earlier_run_does_not_count(tmp_path):
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "exit_reason.json").write_text(json.dumps({"code": 75}))
    assert submit(tmp_path, step="00000005")[0] == 1


@pytest.mark.slow
def test_a_branch_says_where_its_run_is(tmp_path):
    """Its folder follows from the source, which the script does not read."""
    words = ("--log.name", "r", "--checkpoint.branch", "runs/first@100")
    rc, calls, out = submit(tmp_path, code="0", step="00000105", args=words)
    assert rc == 0 and "--checkpoint.branch runs/first@100" in calls, out
    rc, calls, out = submit(tmp_path, args=("--checkpoint.branch", "runs/first@100"))
    assert rc == 2 and "srun" not in calls
    assert "error: checkpoint.branch: under sbatch give --log.name and --log.dir too" in out


@pytest.mark.slow
def test_a_mistake_never_starts_the_ranks(tmp_path):
    rc, calls, out = submit(tmp_path, args=("llama3-tiny", "--parallel.tpp", "2"))
    assert rc == 2 and not calls and "did you mean parallel.tp?" in out


@pytest.mark.slow
def test_a_recipe_with_more_arguments(tmp_path):
    args = ("scripts/recipes/llama3-8b.sh", "--log.name", "r", "--data.path", "a b")
    _, calls, _ = submit(tmp_path, code="0", args=args)
    assert "-- llama3-8b " in calls and "--data.path a b" in calls and "--words" not in calls


@pytest.mark.slow(every=2)
@pytest.mark.parametrize("file", RECIPES, ids=lambda f: f.stem)
def test_a_recipe_is_legal_at_its_size(file):
    text = file.read_text()
    world = int(re.search(r"^WORLD=(\d+)$", text, re.MULTILINE)[1])
    out = subprocess.run(["bash", str(file), "--words"], capture_output=True, text=True, check=True).stdout
    plan_pipeline(resolve(*split_argv(out.splitlines())), world)
    assert f"on {world:,} GPUs" in text and f"--nodes {world // 8} " in text
    assert "arXiv" in text or "our choice" in text


@pytest.mark.slow
def test_what_the_cluster_needs_comes_from_one_file(tmp_path):
    """Variables of NCCL, another Python, and a container with its folders."""
    (tmp_path / "cluster.sh").write_text(
        f"export PYTHON={tmp_path}/python CONTAINER=/images/b.sqsh CONTAINER_MOUNTS=/data\n"
        'echo "modules loaded" >> "$CALLS"\n'
    )
    environment = str(tmp_path / "cluster.sh")
    more = {"BEVATRON_ENVIRONMENT": environment, "PYTHON": "none"}
    rc, calls, out = submit(tmp_path, code="0", step="00000005", **more)
    assert rc == 0 and calls.startswith("modules loaded\n"), out
    options = f"--container-workdir={ROOT} --container-mounts={ROOT},/data"
    assert f"--container-image=/images/b.sqsh {options}" in calls
    rc, calls, out = submit(tmp_path, BEVATRON_ENVIRONMENT=str(tmp_path / "none.sh"))
    assert rc == 1 and not calls and "none.sh" in out


def test_the_file_of_the_cluster_changes_nothing_as_it_comes():
    lines = (SCRIPT.parent / "environment.sh").read_text().splitlines()
    assert all(line.startswith("#") or not line for line in lines)


def test_a_batch_file_of_the_planner_is_a_job_like_others(tmp_path):
    """It starts the ranks with the words of the plan, and those that follow on the line of sbatch."""
    file = tmp_path / "job.sbatch"
    shape, words = node_shape(8, node=4), "llama3-tiny --train.steps 7"
    text = batch_text(shape, title="a plan", file=file, name="llama3-tiny", words=words)
    write_batch_file(file, text)
    rc, calls, out = submit(tmp_path, code="75", step="00000005", args=("--log.name", "r"), script=file)
    assert rc == 0 and "scontrol requeue 40123" in calls, out
    assert "-- llama3-tiny --train.steps 7 --log.name r --log.dir" in calls


@pytest.mark.slow
def test_a_sweep_takes_the_line_of_its_task(tmp_path):
    lines = ("--log.name a --optim.lr 1e-3", "--log.name r --optim.lr 2e-3", "--optim.lr 3")
    (tmp_path / "sweep.txt").write_text("\n".join(lines) + "\n")
    args = (str(tmp_path / "sweep.txt"), "llama3-tiny")
    sweep = {"script": SCRIPT.parent / "sweep.sbatch", "args": args}
    ends = {"code": "75", "step": "00000005", "wait": "1", "usr1": True}
    rc, calls, out = submit(tmp_path, SLURM_ARRAY_TASK_ID="1", **ends, **sweep)
    assert rc == 0 and "scontrol requeue 40123" in calls and "STOP says requeue" in calls, out
    assert "-- llama3-tiny --log.dir" in calls and "--log.name r --optim.lr 2e-3 --log.name r\n" in calls
    for task in ("2", "3"):  # a line without a name, and none
        rc, calls, out = submit(tmp_path, SLURM_ARRAY_TASK_ID=task, **sweep)
        assert rc == 2 and not calls and f"line {task} of " in out and "has no --log.name" in out


def test_a_task_of_a_grid_is_the_job_of_its_run(tmp_path):
    """scripts.grid --sbatch: an array with a task for each run, which has cores for all of its ranks."""
    file = tmp_path / "grid.sbatch"
    argv = ["llama3-tiny", "--log.dir", str(tmp_path), "--over", "train.seed", "1", "2", "3"]
    argv += ["--parallel.tp", "2", "--nproc", "2"]
    assert grid.main([*argv, "--log.name", "g", "--sbatch", str(file)]) == 0
    lines = set(file.read_text().splitlines())
    assert {"#SBATCH --array=0-2", "#SBATCH --cpus-per-task=2", "#SBATCH --gpus-per-node=2"} <= lines
    assert {"#SBATCH --nodes=1", "#SBATCH --requeue", "#SBATCH --signal=B:USR1@300"} <= lines
    assert "#SBATCH --exclusive" not in lines
    assert len(json.loads((tmp_path / "g" / "grid.json").read_text())["cells"]) == 3

    cpu = tmp_path / "cpu.sbatch"
    assert grid.main([*argv, "--log.name", "c", "--sbatch", str(cpu), "--train.device", "cpu"]) == 0
    assert "--gpus-per-node" not in cpu.read_text() and "#SBATCH --cpus-per-task=2" in cpu.read_text()

    # its two ranks, though the node shows eight GPUs
    more = {"SLURM_CPUS_PER_TASK": "2", "SLURM_NNODES": "1", "SLURM_GPUS_ON_NODE": "8"}
    more |= {"script": file, "args": ()}
    ends = {"code": "75", "step": "00000005", "wait": "1", "usr1": True}
    rc, calls, out = submit(tmp_path, SLURM_ARRAY_TASK_ID="1", **ends, **more)
    assert rc == 0 and "scontrol requeue 40123" in calls and "STOP says requeue" in calls, out
    assert "cores 2\n" in calls and "launch -m scripts.launch --nproc 2 --nnodes 1 " in calls
    assert "-- llama3-tiny " in calls and "--train.seed 2 " in calls and "--log.name train.seed=2\n" in calls
    rc, calls, out = submit(tmp_path, SLURM_ARRAY_TASK_ID="3", **more)
    assert rc == 2 and not calls and "error: task 3: no such run" in out


SITE = """
account: mine
partition: gpu
time: 12:00:00
gpus_per_node: 4
cores_per_rank: 12
exclude: "node[3-5],node9"
options: [--mem=0]
interface: ib0
environment: {NCCL_IB_HCA: mlx5_0, NCCL_DEBUG: WARN}
container: /images/b.sqsh
"""
OF_SITE = {"--account=mine", "--partition=gpu", "--time=12:00:00", "--exclude=node[3-5],node9", "--mem=0"}


def submitted(tmp_path, *words, site=SITE, **more):
    """What scripts.submit does, with a stand-in for sbatch -> (its exit code, words of sbatch, stderr)."""
    (tmp_path / "site.yaml").write_text(site)
    (tmp_path / "sbatch").write_text('#!/bin/bash\nprintf "%s\\n" "$BEVATRON_SITE" "$@" > "$CALLS"\n')
    (tmp_path / "sbatch").chmod(0o755)
    (tmp_path / "calls").write_text("")
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "CALLS": str(tmp_path / "calls"), **more}
    command = [sys.executable, "-m", "scripts.submit", "--site", str(tmp_path / "site.yaml"), *words]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    return done.returncode, (tmp_path / "calls").read_text().splitlines(), done.stderr


SCRIPTS = [*SCRIPT.parent.glob("*.sbatch"), *(ROOT / "scripts" / "scaling").glob("*.sbatch")]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda file: f"{file.parent.name}-{file.stem}")
def test_every_script_is_submitted_with_what_the_site_says(tmp_path, script):
    words = ("--nodes", "2", str(script), "llama3-tiny", "--optim.lr", "1e-3")
    code, called, error = submitted(tmp_path, *words)
    assert code == 0, error
    assert called[0] == str(tmp_path / "site.yaml") and tuple(called[-len(words):]) == words
    assert set(called[1:-len(words)]) == OF_SITE | {"--gpus-per-node=4", "--cpus-per-gpu=12"}


def test_what_stands_on_the_line_or_in_a_file_of_the_planner_counts_more(tmp_path):
    """A later option of sbatch wins; two that exclude each other are never given."""
    _, called, _ = submitted(tmp_path, "--account", "other", "--gpus-per-node", "2", str(SCRIPT))
    assert called.index("--account=mine") < called.index("--account") and "--gpus-per-node=4" not in called
    assert "--cpus-per-gpu=12" in called
    _, called, _ = submitted(tmp_path, "--cpus-per-task=9", str(SCRIPT))
    assert "--cpus-per-gpu=12" not in called and "--gpus-per-node=4" in called
    for words in (("-c9",), ("-c", "9")):
        _, called, _ = submitted(tmp_path, *words, str(SCRIPT))
        assert "--cpus-per-gpu=12" not in called
    for words in (("--gres=gpu:2",), ("--gres", "gpu:2"), ("-G2",), ("--gpus", "2"), ("--gpus-per-task=2",)):
        _, called, _ = submitted(tmp_path, *words, str(SCRIPT))
        assert "--gpus-per-node=4" not in called, words
    _, called, _ = submitted(tmp_path, "--gres=scratch:1", str(SCRIPT), "name", "--gpus-per-node", "2")
    assert "--gpus-per-node=4" in called  # what follows the script is its own
    for gpus in ("--gpus-per-node=1", "--gres=gpu:1", "-G 1"):
        (tmp_path / "made.sbatch").write_text(f"#SBATCH {gpus}\n#SBATCH --cpus-per-task=12\n")
        _, called, _ = submitted(tmp_path, str(tmp_path / "made.sbatch"))
        assert set(called[1:-1]) == OF_SITE


@pytest.mark.parametrize("site, says", [
    ("acount: a", "acount: no such key; did you mean account?"),
    ("nodes: 3", "nodes: no such key; there are account, partition, qos, "),
    ("account: a b", "account: expected one word, got 'a b'"),
    ("time: tomorrow", "time: tomorrow is not a time limit; write HOURS:MINUTES:SECONDS or DAYS-HOURS"),
    ("gpus_per_node: 0", "gpus_per_node: expected a whole number of at least 1, got 0"),
    ("exclude: [a b]", "exclude: expected one word, got 'a b'"),
    ("exclude: ['node[3']", "exclude: 'node[3' names no nodes; write node7 or node[3-5]"),
    ("options: --mem=0", "options: expected a list of options of sbatch, such as [--mem=0], got '--mem=0'"),
    ("container_mounts: [/data]", "container_mounts: nothing is mounted without container; name its image"),
    ("environment: {A-B: 1}", "environment: A-B cannot be the name of a variable"),
    ("environment: {A: true}", "environment: A: expected text, got True; write it in \"quotes\""),
    ("environment: {A: 12.10}", "environment: A: expected text, got 12.1; write it in \"quotes\""),
])
def test_a_mistake_in_the_site_file_is_one_line(tmp_path, site, says):
    code, called, error = submitted(tmp_path, str(SCRIPT), site=site)
    assert (code, called) == (2, [])
    (line,) = error.splitlines()
    assert line.startswith(f"error: {tmp_path}/site.yaml: {says}")

    # a job that finds such a file starts no ranks; a grid writes no array
    rc, calls, out = submit(tmp_path, BEVATRON_SITE=str(tmp_path / "site.yaml"))
    assert rc == 2 and not calls and says in out
    argv = ["llama3-tiny", "--log.dir", str(tmp_path), "--log.name", "g", "--over", "train.seed", "1", "2"]
    with pytest.raises(ConfigError, match=re.escape(says)):
        grid.main([*argv, "--sbatch", str(tmp_path / "g.sbatch"), "--site", str(tmp_path / "site.yaml")])
    assert not (tmp_path / "g.sbatch").exists() and not (tmp_path / "g").exists()


def test_a_job_has_the_variables_and_the_container_of_its_site(tmp_path):
    """What its environment has already stays as it is; cores that it asked for reach the ranks."""
    (tmp_path / "site.yaml").write_text(SITE)
    (tmp_path / "cluster.sh").write_text(f"export PYTHON={tmp_path}/python\n")
    more = {"BEVATRON_SITE": str(tmp_path / "site.yaml"), "NCCL_DEBUG": "INFO", "SLURM_CPUS_PER_TASK": "48"}
    more |= {"BEVATRON_ENVIRONMENT": str(tmp_path / "cluster.sh")}
    rc, calls, out = submit(tmp_path, code="0", step="00000005", **more)
    assert rc == 0 and f"--container-image=/images/b.sqsh --container-workdir={ROOT}" in calls, out
    assert "cores 48\n" in calls
    assert "network ib0 ib0 mlx5_0 INFO\n" in calls


def test_files_of_the_planner_and_of_a_grid_have_what_the_site_says(tmp_path):
    """An array asks for cores for each rank, its loader and its checkpoints."""
    (tmp_path / "site.yaml").write_text(SITE)
    site, file = read_site(str(tmp_path / "site.yaml")), tmp_path / "grid.sbatch"
    argv = ["llama3-tiny", "--log.dir", str(tmp_path), "--log.name", "g", "--over", "train.seed", "1", "2"]
    argv += ["--parallel.tp", "2", "--nproc", "2", "--site", str(tmp_path / "site.yaml")]
    assert grid.main([*argv, "--sbatch", str(file)]) == 0
    words = dict(title="a plan", file=file, name="llama3-tiny", words="llama3-tiny")
    for text, own in (
        (file.read_text(), {"--gpus-per-node=2", "--cpus-per-task=24"}),
        (batch_text(node_shape(8, node=4), site=site, **words), {"--gpus-per-node=4", "--cpus-per-gpu=12"}),
    ):
        lines = text.splitlines()
        assert {f"#SBATCH {option}" for option in OF_SITE | own} <= set(lines)
        options = [line.split()[1].partition("=")[0] for line in lines if line.startswith("#SBATCH")]
        assert len(options) == len(set(options)), options
        assert f"export BEVATRON_SITE={tmp_path}/site.yaml" in lines
        subprocess.run(["bash", "-n"], input=text, text=True, check=True)


def test_a_site_without_a_batch_file_is_refused(tmp_path):
    argv = ["llama3-tiny", "--log.dir", str(tmp_path), "--log.name", "g", "--over", "train.seed", "1", "2"]
    with pytest.raises(ConfigError, match="--site: s.yaml does nothing without --sbatch FILE"):
        grid.main([*argv, "--list", "--site", "s.yaml"])
    with pytest.raises(ConfigError, match="--site: s.yaml does nothing without --sbatch FILE"):
        plan.main(["llama3-8b", "--gpus", "8", "--cluster", "h100-ib", "--site", "s.yaml"])


def test_the_example_of_a_site_is_one():
    site = read_site(str(ROOT / "configs" / "site.example.yaml"))
    assert all(getattr(site, field.name) for field in dataclasses.fields(site))


def test_a_preflight_is_a_task_for_each_gpu(tmp_path):
    """Without a launcher, whose ranks it does not need; its exit code is theirs."""
    script = SCRIPT.parent / "preflight.sbatch"
    more = {"script": script, "args": ("--disk-mb", "1"), "PYTHON": "echo", "SLURM_CPUS_PER_TASK": "8"}
    rc, calls, out = submit(tmp_path, **more)
    assert rc == 0 and out == f"-m scripts.preflight --disk-mb 1 --log.dir {tmp_path}\n"
    assert "srun --ntasks=8 --ntasks-per-node=4 --overcommit\n" in calls and "cores" not in calls
    (tmp_path / "fails").write_text("#!/bin/bash\nexit 80\n")
    (tmp_path / "fails").chmod(0o755)
    assert submit(tmp_path, **more | {"PYTHON": str(tmp_path / "fails")})[0] == 80


def test_an_interactive_start_ends_as_the_ranks_do(tmp_path):
    script = SCRIPT.parent / "interactive.sh"
    rc, calls, _ = submit(tmp_path, code="2", script=script)
    assert rc == 1 and "launch -m scripts.launch --nproc 4 --nnodes 2" in calls  # the stand-in's code
    assert "requeue" not in calls
    rc, calls, out = submit(tmp_path, script=script, SLURM_JOB_ID="")
    assert rc != 0 and not calls and "salloc" in out


def test_a_recipe_on_one_node_takes_the_launcher(tmp_path):
    (tmp_path / "python").write_text('#!/bin/bash\necho "$*"\n')
    (tmp_path / "python").chmod(0o755)
    environment = {**os.environ, "PYTHON": str(tmp_path / "python"), "GPUS": "4"}
    command = ["bash", "scripts/recipes/llama3-8b.sh", "--data.path", "a b"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("-m scripts.launch --nproc 4 -- llama3-8b ")
    assert done.stdout.endswith("--data.path a b\n") and "made for 512 GPUs" in done.stderr


def test_every_shell_script_parses():
    scripts = [*SCRIPT.parent.iterdir(), *RECIPES, *(ROOT / "scripts").glob("*.sh")]
    for file in scripts:
        subprocess.run(["bash", "-n", str(file)], check=True)
