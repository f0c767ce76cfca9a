"""Runs the cells of scripts.verify --precision and judges them."""
import itertools
import tempfile
from dataclasses import replace
from pathlib import Path

from config import Config
from durable.pool import WorkerPool
from lab.proof.precision.accumulation import accumulation_errors
from lab.proof.precision.cells import Cell
from lab.proof.precision.errors import BoundedError
from lab.proof.precision.job import SPOILT_STEP, precision_config, single_process, write_corpus
from lab.proof.precision.recorded_run import RecordedRun, train_and_record
from lab.proof.precision.row_errors import row_errors
from lab.proof.precision.single_run import digit_errors, norm_errors, unmoved_matrices, update_errors
from lab.proof.precision.two_runs import compare_runs
from lab.proof.verify.overrides import Overrides

Verdict = tuple[list[str], list[BoundedError]]  # (outright errors, every number with its bound)


def judge(run: RecordedRun, reference: RecordedRun | None, against: str) -> Verdict:
    """Judge a run alone, and against a reference if there is one (see compare_runs)."""
    wrong = [*run.wrong, *unmoved_matrices(run)]
    errors = [*norm_errors(run), *digit_errors(run), *update_errors(run)]
    if run.cfg.parallel.compress_tokens != "none":
        errors += row_errors(run.rows)
    if reference is not None:
        errors += compare_runs(run, reference, against)
    return wrong, errors


class Prover:
    """Runs cells on warm ranks, and caches the single-process runs, since several cells share each.

    `data` is the prefix of the data set. `pool` has `world` ranks and is closed by the caller; by default the
    prover starts its own. `overrides` are model keys to set in every job.
    """

    def __init__(
        self,
        name: str,
        world: int,
        pool: WorkerPool | None = None,
        *,
        overrides: Overrides = Overrides(),
    ) -> None:
        self.name = name
        self.world = world
        self.overrides = overrides
        self.folder = tempfile.TemporaryDirectory(prefix="bevatron-precision-")
        self.root = Path(self.folder.name)
        self.data = write_corpus(self.root)
        self.single_pool = WorkerPool(1)
        self.pool = pool or (self.single_pool if world == 1 else WorkerPool(world))
        self.own_pools = {self.single_pool, self.pool} - {pool}
        self.known_runs: dict[str, RecordedRun] = {}

    def close(self) -> None:
        for pool in self.own_pools:
            pool.close()
        self.folder.cleanup()

    def single(self, cfg: Config, spoilt: frozenset[int]) -> RecordedRun:
        """Run the job in one process, with a NaN in the gradients of the spoilt steps."""
        alone = single_process(cfg)
        key = repr((alone, sorted(spoilt)))
        if key not in self.known_runs:
            self.known_runs[key] = train_and_record(self.single_pool, alone, self.root / "one", spoilt)
        return self.known_runs[key]

    def exact(self, cfg: Config, skipped: frozenset[int]) -> RecordedRun:
        """Run the job in one process in fp64, skipping the same steps as the run in cfg's dtype."""
        exact_cfg = replace(
            cfg,
            train=replace(cfg.train, dtype="fp64", fp8=None),
            optim=replace(cfg.optim, states="fp32"),
        )
        return self.single(exact_cfg, skipped)

    def prove(self, cell: Cell) -> Verdict:
        """Judge one process of the cell's dtype against fp64, and the cell against that process."""
        cfg = cell.config(self.name, self.world, self.data, self.overrides)
        spoilt = frozenset({SPOILT_STEP})
        run = reference = self.single(cfg, spoilt)
        skipped = frozenset(step["step"] for step in reference.steps[1:] if not step["ok"])
        wrong, errors = judge(reference, self.exact(cfg, skipped), "fp64")

        if self.world > 1:
            run = train_and_record(self.pool, cfg, self.root / "many", spoilt)
            wrong_of_layout, errors_of_layout = judge(run, reference, "layout")
            wrong = [f"one process: {what}" for what in wrong] + wrong_of_layout
            errors = errors + errors_of_layout

        if cfg.train.dtype == "fp16":
            scales = [step["scale"] for step in run.steps]
            fell = any(later < earlier for earlier, later in itertools.pairwise(scales))
            grew = any(later > earlier for earlier, later in itertools.pairwise(scales))
            if not (fell and grew):
                wrong.append(f"the loss scale never fell, or never grew: {scales}")
        return wrong, errors

    def prove_sums(self, dtype: str, zero: int) -> Verdict:
        """Judge the accumulation of microbatches, without a layout."""
        plain = precision_config(self.name, self.data, dtype, "sgd", overrides=self.overrides)
        cfg = replace(plain, parallel=replace(plain.parallel, zero=zero))
        errors = accumulation_errors(self.pool, cfg, self.root)
        return [], errors
