"""Which cases of a long table, and which slow tests, a run of all tests takes: a draw by commit, so that
every commit meets others and none takes long.

`bash scripts/test.sh --all`, or naming a file, runs every case.

    bash scripts/test.sh --all --durations=0 > LOG; python tests/draw.py LOG

writes tests/slow.json anew: the functions whose cases take SLOW_S seconds or more, on the machine that ran
them.
"""

import json
import math
import random
import re
import subprocess
import sys
import zlib
from collections import defaultdict
from pathlib import Path
from statistics import mean

SLOW = Path(__file__).with_name("slow.json")  # {function: seconds of a case}
SLOW_S = 15.0
BUDGET_S = 1200.0  # of the slow cases that a run takes, in the seconds of slow.json
ALWAYS = (  # however slow
    "tests/test_docs.py",  # a command of a page needs what those before it have made
    "tests/test_invariance.py",  # the core of the proof
    "tests/test_strict_layouts.py",
    "tests/test_real_slurm.py",  # skips itself where no scheduler is installed
)
DURATION = re.compile(r"([0-9.]+)s (?:call|setup) +(tests/\S+?)(\[.*)?")

# tests of many cases that guard one thing in many shapes: the share of each function's cases that a run takes
SHARES = {
    "tests/chaos/test_real_runs.py": 0.5,
    "tests/config/test_unused.py": 0.5,
    "tests/kernels/test_aot.py": 0.15,
    "tests/kernels/test_fp8_grouped.py": 0.5,
    "tests/kernels/test_model.py": 0.5,
    "tests/kernels/test_partial_attention.py": 0.5,
    "tests/model/test_mtp.py": 0.3,
    "tests/optim/test_noise.py": 0.5,
    "tests/optim/test_states.py": 0.5,
    "tests/oracle/test_oracle_families.py": 0.5,
    "tests/oracle/test_oracle_formulas.py": 0.5,
    "tests/parallel/context/test_ring.py": 0.5,
    "tests/parallel/wire/test_compressed_runs.py": 0.3,
    "tests/parallel/wire/test_ledger.py": 0.1,
    "tests/parallel/wire/test_messages.py": 0.35,
    "tests/plan/test_buckets.py": 0.5,
    "tests/plan/test_memory.py": 0.2,
    "tests/proof/test_module_costs.py": 0.06,
    "tests/proof/test_mutate.py": 0.5,
    "tests/proof/test_precision.py": 0.15,
    "tests/scripts/test_convert.py": 0.2,
    "tests/test_async_save.py": 0.25,
    "tests/test_defaults.py": 0.5,
    "tests/test_editing.py": 0.25,
    "tests/test_ema.py": 0.5,
    "tests/test_fp8_training.py": 0.3,
    "tests/test_golden.py": 0.5,
    "tests/test_invariance.py": 0.15,
    "tests/test_layouts.py": 0.12,
    "tests/test_layouts_resume.py": 0.25,
    "tests/test_memory_checkpoints.py": 0.2,
    "tests/test_model_keys.py": 0.3,
    "tests/test_parallel_keys.py": 0.3,
    "tests/test_replicas.py": 0.4,
    "tests/test_rerun.py": 0.15,
    "tests/test_resume.py": 0.2,
    "tests/test_spikes.py": 0.5,
}


def commit_seed() -> int:
    """Of this commit: every commit draws other cases, and the same commit the same ones."""
    here = Path(__file__).parent
    done = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=here)
    return zlib.crc32(done.stdout.encode())


def drawn(cases: dict[str, list], share: float, seed: int) -> set:
    """Of the cases {function: [case]} the share of each function's, rounded up, in a draw that the seed
    decides.
    """
    kept = set()
    for function, every in cases.items():
        stream = random.Random(f"{seed}/{function}")
        kept.update(stream.sample(every, math.ceil(share * len(every))))
    return kept


def leave_out(files: dict[str, str], seed: int) -> set[str]:
    """files: {node id of a case: its file} -> the ids that this seed's run leaves out."""
    tables: dict[str, dict[str, list]] = defaultdict(lambda: defaultdict(list))
    for case, file in files.items():
        if file in SHARES:
            tables[file][function_of(case)].append(case)
    left = set()
    for file, cases in tables.items():
        left |= {case for every in cases.values() for case in every} - drawn(cases, SHARES[file], seed)
    seconds = json.loads(SLOW.read_text())
    slow: dict[str, float] = {}
    for case in files:
        if case not in left and function_of(case) in seconds:
            slow[case] = seconds[function_of(case)]
    return left | beyond_budget(slow, seed)


def function_of(case: str) -> str:
    """The test without its parameters."""
    return case.partition("[")[0]


def beyond_budget(seconds: dict[str, float], seed: int) -> set[str]:
    """Of slow cases {node id: its seconds} those that the budget has no room for, in an order that the seed
    decides.
    """
    order = sorted(seconds)
    random.Random(f"{seed}/slow").shuffle(order)
    left, spent = set(), 0.0
    for case in order:
        if spent + seconds[case] > BUDGET_S:
            left.add(case)
        else:
            spent += seconds[case]
    return left


def main(log: str) -> None:
    """Writes SLOW from what pytest has printed."""
    found: dict[str, list[float]] = defaultdict(list)
    for line in Path(log).read_text().splitlines():
        if match := DURATION.fullmatch(line.strip()):
            found[match[2]].append(float(match[1]))
    slow: dict[str, float] = {}
    for function, each in sorted(found.items()):
        if mean(each) >= SLOW_S and not function.startswith(ALWAYS):
            slow[function] = round(mean(each), 1)
    SLOW.write_text(json.dumps(slow, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
