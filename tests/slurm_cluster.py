"""A real SLURM of two nodes, n1 and n2, on this machine: munged, slurmctld and two slurmd, all in one folder,
on ports of their own. Nothing of the machine's own SLURM is read, or left changed.

Waits that are SLURM's own are short: a requeued job is held for 5 s instead of 120, since the hold follows
the lifetime of a credential (AuthInfo=cred_expire).
"""

import contextlib
import getpass
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

# Debian: apt-get install slurmctld slurmd slurm-client munge
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue", "scancel")
NODES = ("n1", "n2")
HOLD_SECONDS = 5  # of a requeued job

CONF = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmUser={user}
FirstJobId={first_job}
SlurmdUser={user}
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.socket,cred_expire={hold}

StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log

ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SlurmdParameters=config_overrides
ReturnToService=2
SlurmctldTimeout=30
SlurmdTimeout=10
KillWait=5
MinJobAge=600

SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,sched_interval=1,sched_min_interval=100000
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE

{nodes}
PartitionName=low Nodes=n1,n2 Default=YES PriorityTier=1 PreemptMode=REQUEUE GraceTime=60 State=UP
PartitionName=high Nodes=n1,n2 PriorityTier=10 PreemptMode=OFF State=UP
"""


def missing_programs() -> list[str]:
    return [program for program in PROGRAMS if find_program(program) is None]


def find_program(name: str) -> str | None:
    """Daemons are in sbin, which a user's PATH may lack."""
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as open_together:
        sockets = [open_together.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


class Cluster:
    """folder: of all its files. env: of commands that talk to it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.conf = folder / "slurm.conf"
        self.env = {**os.environ, "SLURM_CONF": str(self.conf)}
        for name in [name for name in self.env if name.startswith(("SLURM_", "SBATCH_", "SALLOC_"))]:
            if name != "SLURM_CONF":  # of a job in which the tests run
                del self.env[name]
        self.daemons: dict[str, subprocess.Popen[bytes]] = {}

    # ---- daemons

    def start(self) -> None:
        """Raises RuntimeError with the end of the logs if the nodes are not idle in time."""
        for name in ("state", *(f"spool.{node}" for node in NODES)):
            (self.folder / name).mkdir()
        self.write_conf()
        self.start_munge()
        self.start_daemon("slurmctld", "-D", "-c", "-f", str(self.conf))
        for node in NODES:
            self.start_node(node)
        self.wait_for("idle nodes", lambda: self.states() == {"n1": "idle", "n2": "idle"}, seconds=60)

    def write_conf(self) -> None:
        host = socket.gethostname().split(".")[0]
        controller_port, *ports = free_ports(1 + len(NODES))
        nodes = [
            f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=4 State=UNKNOWN"
            for node, port in zip(NODES, ports, strict=True)
        ]
        text = CONF.format(
            host=host,
            controller_port=controller_port,
            user=getpass.getuser(),
            folder=self.folder,
            hold=HOLD_SECONDS,
            first_job=1 + os.getpid() % 20000,  # the ranks' port follows from it: two of these tests may run
            nodes="\n".join(nodes),
        )
        self.conf.write_text(text)

    def start_munge(self) -> None:
        folder = self.folder
        (folder / "munge.key").write_bytes(os.urandom(128))
        (folder / "munge.key").chmod(0o400)
        self.start_daemon(
            "munged",
            "--foreground",
            "--force",  # folders above may be writable for all, as /tmp is
            f"--socket={folder}/munge.socket",
            f"--key-file={folder}/munge.key",
            f"--pid-file={folder}/munge.pid",
            f"--log-file={folder}/munge.log",
            f"--seed-file={folder}/munge.seed",
            "--num-threads=2",
        )
        self.wait_for("munge", lambda: (folder / "munge.socket").exists(), seconds=20)

    def start_node(self, node: str) -> None:
        self.start_daemon("slurmd", "-D", "-N", node, "-f", str(self.conf), key=node)

    def start_daemon(self, program: str, *arguments: str, key: str = "") -> None:
        path = find_program(program)
        assert path is not None
        with open(self.folder / f"{key or program}.out", "ab") as out:
            self.daemons[key or program] = subprocess.Popen(
                [path, *arguments], env=self.env, stdin=subprocess.DEVNULL, stdout=out, stderr=out,
                start_new_session=True,
            )

    def kill_node(self, node: str) -> None:
        """As if it lost its power: its slurmd and all processes of its jobs are killed."""
        daemon = self.daemons.pop(node)
        daemon.kill()
        daemon.wait()
        for pid in self.job_processes(node):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def job_processes(self, node: str = "") -> list[int]:
        """Processes of the jobs of this cluster, and the slurmstepd over them; node: of that one alone."""
        found: list[int] = []
        for folder in Path("/proc").glob("[0-9]*"):
            pid = int(folder.name)
            with contextlib.suppress(OSError):
                command = (folder / "cmdline").read_bytes()
                environment = (folder / "environ").read_bytes().split(b"\0")
                is_ours = f"SLURM_CONF={self.conf}".encode() in environment
                is_step = b"slurmstepd" in command or any(
                    entry.startswith(b"SLURM_JOB_ID=") for entry in environment
                )
                is_there = not node or f"SLURMD_NODENAME={node}".encode() in environment
                if is_ours and is_step and is_there and pid != os.getpid():
                    found.append(pid)
        return found

    def stop(self) -> None:
        """Ends the jobs, then the daemons, whatever state they are in."""
        if "slurmctld" in self.daemons:
            with contextlib.suppress(subprocess.SubprocessError):
                self.run("scancel", "--user", getpass.getuser(), check=False, seconds=10)
                self.wait_for("no jobs", lambda: not self.run("squeue", "-h").strip(), seconds=15)
        for _, daemon in reversed(self.daemons.items()):  # munged is the last
            daemon.terminate()
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        for pid in self.job_processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    # ---- commands

    def run(self, *command: str, check: bool = True, seconds: float = 30, **more: str) -> str:
        """Returns its stdout. more: variables of the environment."""
        done = subprocess.run(
            command, env={**self.env, **more}, capture_output=True, text=True, timeout=seconds
        )
        if check and done.returncode:
            raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
        return done.stdout

    def states(self) -> dict[str, str]:
        """{node: idle, allocated, down, ...}"""
        shown = self.run("sinfo", "-h", "-N", "-p", "low", "-o", "%N %T", check=False)
        return dict(line.split() for line in shown.splitlines())

    def job(self, number: str) -> dict[str, str]:
        """The fields that scontrol shows of a job."""
        shown = self.run("scontrol", "--oneliner", "show", "job", number)
        return dict(word.split("=", 1) for word in shown.split() if "=" in word)

    def wait_for(self, what: str, is_true: Callable[[], object], seconds: float = 90) -> None:
        """Raises RuntimeError with the end of the logs if it is not true in time."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if is_true():
                return
            time.sleep(0.1)
        raise RuntimeError(f"no {what} within {seconds:g} s\n{self.last_lines()}")

    def last_lines(self) -> str:
        text = ""
        for log in sorted([*self.folder.glob("*.log"), *self.folder.glob("*.out")]):
            lines = log.read_text(errors="replace").splitlines()[-20:]
            text += "\n".join([f"---- {log.name}", *lines, ""])
        return text


@contextlib.contextmanager
def started(folder: Path) -> Iterator[Cluster]:
    cluster = Cluster(folder)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()
