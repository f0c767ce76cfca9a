"""Compare runs: differing settings, losses at equal tokens and at equal FLOPs, and speed.

The output is a table, a plot, or a self-contained HTML page. Training losses are means over the last
SMOOTHING of the tokens before a point, and every place that shows one says so; thus identical training gives
identical values, however long the runs are. Losses are compared at the tokens, and at the FLOPs, that the
shortest run has reached.
"""
import base64
import contextlib
import html
import io
import json
import math
import shlex
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from itertools import cycle, groupby, product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from config import Config, ConfigError, Tree, as_number, provenance
from config.numbers import short_number
from config.plots import INK, new_figure, plain_text, set_open_frame
from config.reading import Phase, Phases, flatten_tree, get_phases, resolve, shuffle_span
from config.terminal import table_lines
from config.tree import plain_data, value_at
from plan.count import flops_per_token, parameters
from plan.points import SMOOTHING, Array, smoothed
from runtime.goodput import FINISHED, STARTS_FILE, StartRecord, read_starts
from runtime.lines import NAME as METRICS_FILE
from runtime.lines import Rows, is_missing, read_metrics
from runtime.summary import SUMMARY_FILE
from scripts.compare import groups
from scripts.compare.groups import MeanCurve, SeedGroup, SeedStudy

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Keys that do not affect the result of a run: paths, logging, host resources.
PLACES = ("log.", "checkpoint.", "profile.", "train.threads", "data.cache", "data.prefetch")
COLOURS = ("#2a5caa", "#d9822b", "#4f8f63", "#b3362b", "#7a5aa6", "#8c6d46", "#3a9fb0", "#c25b93")
STYLES = {"-": "", "--": "7 4", ":": "2 3", "-.": "7 3 2 3"}  # {line style: SVG dashes}, to reuse colours
FIRST_TO_GO = (  # columns to omit in a narrow terminal
    "MFU", "tokens/s", "FLOPs", "params", "train loss", "tokens", "bits/byte",
)
MAX_DRAWN = 1500  # maximum points per curve
BAND_OPACITY = 0.18  # of the interval around a mean
HIDDEN_SHARE = 0.1  # fraction of first steps that the loss axis need not show
CHART = Path(__file__).with_name("chart.js")
SILENT_MINUTES = 10.0  # without a new line, after which a run may have died
# Keys that determine which tokens a loss is averaged over, and which tokens an evaluation reads.
TOKENIZER_KEYS = ("data.tokenizer", "data.path", "model.vocab")
EVALUATION_KEYS = (
    "data.path", "data.valid", "data.bos", "data.split", "data.doc_mask", "data.pack", "data.span",
    "data.fim_valid", "train.seq_len",
)
VALID_FIM_KEYS = ("data.fim_rate", "data.fim_spm_rate", "data.fim_split")  # if data.fim_valid is true
CODE, DATA = ORIGINS = "code", "data"  # what defines a run in addition to its settings
SHOWN_DIGITS = 12  # of a fingerprint
EVALUATION_SIZE = ("eval.batches", "train.global_batch")  # their product is the number of sequences
DIVERGED = "diverged"
STYLE = """
:root { color-scheme: light dark; --ink: #333; --paper: #fff; --rule: #e6e6e6 }
body { font: 15px/1.45 system-ui, sans-serif; color: var(--ink); background: var(--paper); max-width: 1220px;
  margin: 2em auto; padding: 0 1.2em }
h1 { overflow-wrap: anywhere }
.wide { overflow-x: auto }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; margin: 0.6em 0 }
th, td { text-align: right; padding: 0.25em 0.7em; border-bottom: 1px solid var(--rule) }
td { white-space: nowrap }
th { vertical-align: bottom }
th:first-child, td:first-child { text-align: left; white-space: normal; overflow-wrap: anywhere;
  min-width: 11em }
.wide img { width: 100%; min-width: 680px }
#chart .frame svg { display: block; touch-action: pan-y }
#chart text { fill: var(--ink); font-size: 12px }
#chart select, #chart label, #chart button { margin-right: 1em }
#chart button { font: inherit; color: inherit; background: none; border: 0; padding: 0.1em 0; cursor: pointer;
  text-align: left; overflow-wrap: anywhere }
#chart button[aria-pressed=false] { opacity: 0.4 }
#chart .reading { font-variant-numeric: tabular-nums; overflow-wrap: anywhere }
.grid { stroke: var(--rule) }
.cursor { stroke: var(--ink); stroke-dasharray: 2 2 }
.dot { stroke: var(--paper) }
summary { cursor: pointer; font-size: 1.2em; margin: 1.2em 0 }
@media (prefers-color-scheme: dark) {
  :root { --ink: #ddd; --paper: #191919; --rule: #3a3a3a }
  img { filter: invert(0.9) hue-rotate(180deg) }
}
"""
SINGLE_STEPS = int(1 / SMOOTHING)  # number of first steps whose means cover a single step
SMOOTHING_TEXT = (f"mean over the last {SMOOTHING:.0%} of the tokens before a point (a single step in the "
                  f"first {SINGLE_STEPS})")


@dataclass(frozen=True)
class Run:
    """A run as read from its folder.

    steps, tokens, flops, loss, tokens_per_s, mfu: per step [steps], NaN if missing.
    has_targets: bool [steps], whether any target counts in the step; a step without targets has no loss.
    validation_tokens, validation_loss, validation_bpb (bits per byte): per evaluation [n].
    validated_with: {key: its values in the validated phases}, for the keys that determine which tokens an
    evaluation reads.
    finished: None if the last launch has not recorded how it ended.
    silent_minutes: time since the last line was written.
    origins: {one of ORIGINS: (identity, its text)}, or empty if not recorded.
    validation_data: fingerprints of the datasets that evaluations read.
    """
    name: str
    settings: dict[str, Any]
    parameters: int
    steps: Array
    tokens: Array
    flops: Array
    loss: Array
    tokens_per_s: Array
    mfu: Array
    has_targets: NDArray[np.bool_]
    validation_tokens: Array
    validation_loss: Array
    validation_bpb: Array
    validated_with: dict[str, tuple[Any, ...]]
    finished: bool | None
    silent_minutes: float
    origins: dict[str, tuple[Any, str]]
    validation_data: tuple[str, ...]

    @cached_property
    def smooth_loss(self) -> Array:
        """Smoothed training loss [steps]. A step without targets repeats the previous value."""
        numbers = np.arange(len(self.loss))
        last_known = np.maximum.accumulate(np.where(self.has_targets, numbers, 0))
        return smoothed(self.tokens, self.loss)[last_known]

    @property
    def has_diverged(self) -> bool:
        """Whether the loss of the last step with targets is non-finite."""
        losses = self.loss[self.has_targets]
        return len(losses) > 0 and not np.isfinite(losses[-1])

    def loss_at(self, tokens: float) -> float:
        """Return the smoothed training loss at `tokens`, or NaN before the first step of a branch."""
        return float(np.interp(tokens, self.tokens, self.smooth_loss, left=np.nan))

    def loss_at_flops(self, flops: float) -> float:
        return float(np.interp(flops, self.flops, self.smooth_loss, left=np.nan))


def read_run(folder: Path) -> Run:
    """Read a run. Raises ConfigError, naming the folder, if it contains no run or no step yet."""
    try:
        cfg = resolve(None, str(folder / "config.yaml"), [])
    except (OSError, ConfigError) as error:
        raise ConfigError(f"{folder}: no run that can be read ({error}); give folders that train.py has "
                          "written, such as runs/NAME") from error
    # read these before the steps: a run that ends in between then still counts as running and is reread
    summary, starts = read_summary(folder), known_starts(folder)
    steps, evaluations = read_metrics(folder)
    if not steps:
        raise ConfigError(f"{folder}: no step in metrics.jsonl yet; leave the run out, or wait for its first")

    tokens = column(steps, "tokens")
    flops = flops_of_tokens(cfg, tokens)
    if summary.get("tokens"):  # accounts for document lengths
        flops *= summary["flops"] / flops_of_tokens(cfg, np.array([summary["tokens"]]))[0]
    all_steps = column(steps, "step")
    evaluated = [
        row for row in evaluations
        if all_steps[0] <= row["step"] <= all_steps[-1] and not is_missing(row, "val_loss")
    ]
    return Run(
        name=folder.name,
        settings=flat_settings(cfg),
        parameters=parameters(cfg.model)["total"],
        steps=all_steps,
        tokens=tokens,
        flops=flops,
        loss=column(steps, "loss"),
        tokens_per_s=column(steps, "tokens_per_s"),
        mfu=column(steps, "mfu"),
        has_targets=np.array([not is_missing(row, "loss") for row in steps]),
        # interpolate, since not every step of a long run was read
        validation_tokens=np.interp(column(evaluated, "step"), all_steps, tokens),
        validation_loss=column(evaluated, "val_loss"),
        validation_bpb=column(evaluated, "val_bpb"),
        validated_with=validation_settings(cfg, [row["step"] for row in (*evaluated, steps[-1])]),
        finished=how_it_ended(summary, starts, last_step=steps[-1]["step"]),
        silent_minutes=silent_minutes(folder),
        origins=read_origins(folder),
        validation_data=read_validation_data(folder),
    )


def read_origins(folder: Path) -> dict[str, tuple[Any, str]]:
    """Read Run.origins; if launches differ in code or data, it lists all of them in order."""
    records = provenance.read_records(folder)
    if not records:
        return {}
    codes = {record["code"]["hash"]: code_text(folder, record["code"]) for record in records}
    data = dict.fromkeys(item["identity"] for item in get_datasets(records) if "split" not in item)
    return {
        CODE: (tuple(codes), ", ".join(codes.values())),
        DATA: (tuple(data), ", ".join(identity[:SHOWN_DIGITS] for identity in data)),
    }


def get_datasets(records: list[Tree]) -> list[Tree]:
    """Return the datasets that the launches of a run have read."""
    return [item for record in records for item in record.get("inputs", {}).get("data", [])]


def read_validation_data(folder: Path) -> tuple[str, ...]:
    """Read Run.validation_data."""
    data = get_datasets(provenance.read_records(folder))
    own = [item for item in data if "split" in item]
    return tuple(dict.fromkeys(item["identity"] for item in own or data))


def code_text(folder: Path, code: Tree) -> str:
    """Format as "ab12cd3" or "ab12cd3+ (1234.patch)"."""
    patch = f" ({provenance.patch_path(folder, code).name})" if code.get("patch") else ""
    return provenance.label(code) + patch


def read_summary(folder: Path) -> dict[str, Any]:
    """Read summary.json of the last launch that has ended; empty if none has."""
    try:
        summary = json.loads((folder / SUMMARY_FILE).read_text())
    except (OSError, ValueError):
        return {}
    return summary if isinstance(summary, dict) else {}


def known_starts(folder: Path) -> list[StartRecord]:
    try:
        return read_starts(folder)
    except OSError:
        return []


def flops_of_tokens(cfg: Config, tokens: Array) -> Array:
    """Return model FLOPs [n] of a run's first tokens [n], by phase, with attention over whole sequences."""
    phases = get_phases(cfg).all
    ends = [*(phase.tokens_before for phase in phases[1:]), np.inf]
    found = np.zeros(len(tokens))
    for phase, end in zip(phases, ends):
        of_phase = np.clip(tokens, phase.tokens_before, end) - phase.tokens_before
        found += of_phase * flops_per_token(
            phase.cfg.model, phase.cfg.train.seq_len, groups=phase.cfg.optim.groups)
    return found


def how_it_ended(summary: dict[str, Any], starts: list[StartRecord], last_step: int) -> bool | None:
    """Return whether the run is finished, or None if the last launch is still training or was killed.

    A summary of another step, or one followed by a launch that has not ended, belongs to an earlier launch.
    """
    if starts and starts[-1].exit_code is None:
        return None
    if summary.get("step") == last_step:
        return bool(summary.get("finished"))
    return starts[-1].exit_code == FINISHED if starts else None


def silent_minutes(folder: Path) -> float:
    """Return the minutes since the run wrote a line, by the clocks of this machine and of the file system."""
    newest = 0.0
    for name in (METRICS_FILE, STARTS_FILE):
        with contextlib.suppress(OSError):
            newest = max(newest, (folder / name).stat().st_mtime)
    return max(0.0, time.time() - newest) / 60


def column(rows: Rows, name: str) -> Array:
    """Return a column of the rows, with NaN for missing numbers."""
    return np.array([np.nan if row.get(name) is None else row[name] for row in rows], float)


def flat_settings(cfg: Config) -> dict[str, Any]:
    """Return {section.key: value}, without the keys in PLACES."""
    settings = flatten_tree(plain_data(cfg))
    return {key: value for key, value in settings.items() if not key.startswith(PLACES)}


def validation_settings(cfg: Config, steps: list[int]) -> dict[str, tuple[Any, ...]]:
    """Return {key: its values in the phases of these steps, in order, without consecutive duplicates}."""
    phases = get_phases(cfg)
    numbers = sorted({phases.of_step(step).number for step in steps})
    rows = [effective_validation_settings(phases, phases.all[number - 1]) for number in numbers]
    return {key: tuple(value for value, _ in groupby(row[key] for row in rows)) for key in rows[0]}


def effective_validation_settings(phases: Phases, phase: Phase) -> dict[str, Any]:
    """Return {key: its effective value in a validation during the phase}."""
    found = {key: value_at(phase.cfg, key) for key in EVALUATION_KEYS}
    if phase.cfg.data.valid is not None:  # replaces a split of data.path
        found["data.path"] = found["data.split"] = None
    if phase.cfg.data.pack == "stream":
        found["data.span"] = shuffle_span(phases, phase)
    for key in VALID_FIM_KEYS:
        found[key] = value_at(phase.cfg, key) if phase.cfg.data.fim_valid else None
    found[" x ".join(EVALUATION_SIZE)] = math.prod(value_at(phase.cfg, key) for key in EVALUATION_SIZE)
    return found


def different_settings(runs: list[Run]) -> dict[str, list[Any]]:
    """Return {section.key: its value in each run} for the keys that differ; None if a run lacks the key."""
    differing: dict[str, list[Any]] = {}
    for key in dict.fromkeys(key for run in runs for key in run.settings):
        values = [run.settings.get(key) for run in runs]
        if any(value != values[0] for value in values):
            differing[key] = values
    return differing


def different_origins(runs: list[Run]) -> dict[str, list[Any]]:
    """Return {one of ORIGINS: its text for each run} for those that differ.

    Empty if a run has not recorded its origins, since then no difference is known.
    """
    if not all(run.origins for run in runs):
        return {}
    pairs = {name: [run.origins[name] for run in runs] for name in ORIGINS}
    return {
        name: [words for _, words in origins]
        for name, origins in pairs.items()
        if len({identity for identity, _ in origins}) > 1
    }


def differences(runs: list[Run]) -> dict[str, list[Any]]:
    """Return the differences in code, data and settings."""
    return {**different_origins(runs), **different_settings(runs)}


def doubts(runs: list[Run]) -> list[str]:
    """Return a line for each reason why losses in nats per token may not be comparable between these runs."""
    differing = differences(runs)
    if all(run.origins for run in runs) and DATA not in differing:
        differing.pop("data.path", None)  # the same tokens in another location
    lines: list[str] = []
    tokenizer = [key for key in TOKENIZER_KEYS if key in differing]
    if tokenizer:
        lines.append(f"{', '.join(tokenizer)}: not the same; where tokenizers differ, nats per token do not "
                     "compare, and bits/byte do")
    validated = [run.validated_with for run in runs]
    evaluation = [key for key in validated[0] if any(other[key] != validated[0][key] for other in validated)]
    if all(run.origins for run in runs):
        is_same_data = len({run.validation_data for run in runs}) == 1
        evaluation = [key for key in evaluation if not (is_same_data and is_same_mixture(key, validated))]
        evaluation = evaluation if is_same_data else [DATA, *evaluation]
    if evaluation:
        lines.append(f"{', '.join(evaluation)}: not the same; validation losses are of different tokens")
    return lines


def is_same_mixture(key: str, validated: list[dict[str, tuple[Any, ...]]]) -> bool:
    """Return whether a key of paths names the same number of datasets with the same weights in all runs.

    validated: Run.validated_with of each run.
    """
    if key not in ("data.path", "data.valid"):
        return False
    return len({tuple(map(normalize_shares, values[key])) for values in validated}) == 1


def normalize_shares(paths: str | None) -> tuple[Fraction, ...]:
    """Return the normalized weights of a blend: (1,) for a single path, () for none."""
    if not paths:
        return ()
    if as_number(paths.split()[0]) is None:
        return (Fraction(1),)
    numbers = map(as_number, shlex.split(paths)[::2])
    weights = [weight for weight in numbers if weight is not None]
    return tuple(weight / sum(weights) for weight in weights)


# ---- as a table --------------------------------------------------------------------------------------------


def is_flops_another_axis(runs: list[Run]) -> bool:
    """Return whether FLOPs per token differ between runs, so that equal FLOPs are not equal tokens."""
    ratios = np.concatenate([run.flops / run.tokens for run in runs])
    return not np.allclose(ratios, ratios[0], rtol=1e-6)


def table_rows(runs: list[Run]) -> list[dict[str, str]]:
    """Return a row for each run: {column: text}."""
    tokens = min(run.tokens[-1] for run in runs)
    flops = min(run.flops[-1] for run in runs)
    has_flops = is_flops_another_axis(runs)
    rows: list[dict[str, str]] = []
    for run in runs:
        rows.append({
            "run": run.name,
            "params": short_number(run.parameters),
            "tokens": short_number(run.tokens[-1]),
            "FLOPs": f"{run.flops[-1]:.2e}",
            "val loss": last_text(run.validation_loss),
            "bits/byte": bits_text(run),
            "train loss": DIVERGED if run.has_diverged else loss_text(run.smooth_loss[-1]),
            f"at {short_number(tokens)} tokens": loss_text(run.loss_at(tokens)),
            **({f"at {flops:.2e} FLOPs": loss_text(run.loss_at_flops(flops))} if has_flops else {}),
            "tokens/s": median_text(run.tokens_per_s, short_number),
            "MFU": median_text(run.mfu, "{:.1%}".format),
            "state": get_state(run),
        })
    return rows


def numbers(runs: list[Run]) -> list[dict[str, Any]]:
    """Return the same as numbers, for programs, with null for missing values.

    at_tokens, at_flops: training losses at the tokens and FLOPs of the shortest run.
    """
    tokens = min(run.tokens[-1] for run in runs)
    flops = min(run.flops[-1] for run in runs)
    rows: list[dict[str, Any]] = []
    for run in runs:
        row = {
            "parameters": run.parameters,
            "tokens": run.tokens[-1],
            "flops": run.flops[-1],
            "val_loss": run.validation_loss[-1] if len(run.validation_loss) else np.nan,
            "val_bpb": run.validation_bpb[-1] if len(run.validation_bpb) else np.nan,
            "train_loss": run.smooth_loss[-1],
            "at_tokens": run.loss_at(tokens),
            "at_flops": run.loss_at_flops(flops),
            "tokens_per_s": median(run.tokens_per_s),
            "mfu": median(run.mfu),
        }
        finite = {key: float(value) if np.isfinite(value) else None for key, value in row.items()}
        rows.append({"run": run.name, **finite, "state": get_state(run)})
    return rows


def last_text(losses: Array) -> str:
    if not len(losses):
        return "none"
    return loss_text(losses[-1]) if np.isfinite(losses[-1]) else DIVERGED


def bits_text(run: Run) -> str:
    """Format the bits per byte of the last evaluation; "n/a" if its bytes are not known."""
    return loss_text(run.validation_bpb[-1]) if len(run.validation_bpb) else "none"


def get_state(run: Run) -> str:
    if run.finished is not None:
        return "finished" if run.finished else "stopped"
    if run.silent_minutes < SILENT_MINUTES:
        return "running"
    return f"no news for {run.silent_minutes:,.0f} min"


def loss_text(loss: float) -> str:
    return "n/a" if np.isnan(loss) else f"{loss:.4f}"


def median(values: Array) -> float:
    """Return the median without the first step, which compiles and connects, or NaN if nothing is left."""
    known = values[1:] if len(values) > 1 else values
    known = known[np.isfinite(known)]
    return float(np.median(known)) if len(known) else np.nan


def median_text(values: Array, get_text: Callable[[float], str]) -> str:
    middle = median(values)
    return "n/a" if np.isnan(middle) else get_text(middle)


def text_table(rows: list[dict[str, str]], width: int | None = None) -> list[str]:
    """Format rows in aligned columns, the first to the left and numbers to the right.

    A last line names the columns that do not fit. width: the width of the terminal.
    """
    first = next(iter(rows[0]))
    return table_lines(rows, to_left=[first], first_to_go=FIRST_TO_GO, width=width, whole_in="--json")


# ---- as a picture ------------------------------------------------------------------------------------------


def get_x_axes(runs: list[Run]) -> dict[str, Callable[[Run], Array]]:
    """Return {x axis: function that returns its values [steps] for a run}."""
    axes: dict[str, Callable[[Run], Array]] = {"tokens": lambda run: run.tokens}
    if is_flops_another_axis(runs):
        axes["FLOPs"] = lambda run: run.flops
    return axes


def looks() -> Iterator[tuple[str, str]]:
    """Yield (style, colour) for each curve."""
    return cycle(product(STYLES, COLOURS))


def drawn_steps(run: Run) -> Array:
    """Return the indices of at most MAX_DRAWN steps."""
    return np.unique(np.linspace(0, len(run.loss) - 1, MAX_DRAWN).astype(int))


@dataclass(frozen=True)
class CurveLooks:
    """of_run: {name: (style, colour)}. of_group: those of the groups of several seeds, which are drawn as
    means; their runs have their colour."""
    of_run: dict[str, tuple[str, str]]
    of_group: list[tuple[SeedGroup, tuple[str, str]]]

    @property
    def in_a_mean(self) -> set[str]:
        """Names of the runs of these groups."""
        return {run.name for group, _ in self.of_group for run in group.runs}


def choose_looks(runs: list[Run], study: SeedStudy | None) -> CurveLooks:
    """Give each mean, and each run that is in none, a look of its own."""
    unused = looks()
    repeated = [group for group in study.groups if len(group.runs) > 1] if study else []
    of_group = [(group, next(unused)) for group in repeated]
    of_run = {run.name: (":", colour) for group, (_, colour) in of_group for run in group.runs}
    for run in runs:
        if run.name not in of_run:
            of_run[run.name] = next(unused)
    return CurveLooks(of_run, of_group)


def draw_runs(runs: list[Run], study: SeedStudy | None = None) -> bytes:
    """Plot losses over tokens, and also over FLOPs if that differs. Returns a PNG.

    Runs of a group of several seeds are thin, and its mean has a band.
    """
    drawing = new_figure(11, 4.6)
    panels = get_x_axes(runs)
    all_axes = drawing.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    chosen = choose_looks(runs, study)
    for axes, (unit, x_of) in zip(all_axes, panels.items()):
        draw_means(axes, unit, x_of, chosen)
        draw_single_runs(axes, x_of, runs, chosen)

    limits = loss_limits(runs, HIDDEN_SHARE)
    if limits is not None:
        all_axes[0].set_ylim(*limits)
    all_axes[0].set_ylabel("loss (nats per token)")
    for axes, unit in zip(all_axes, panels):
        axes.set_xlabel(unit)
        set_open_frame(axes)
    all_axes[-1].legend(frameon=False, fontsize=9)
    title = f"lines: training loss, {SMOOTHING_TEXT}; dots: validation"
    title += "; bands: 95 % intervals of means" if chosen.of_group else ""
    drawing.suptitle(title, x=0.01, ha="left", fontsize=10, color=INK)
    out = io.BytesIO()
    drawing.savefig(out, format="png")
    return out.getvalue()


def draw_means(
    axes: "Axes", unit: str, x_of: Callable[[Run], Array], chosen: CurveLooks, *, scale: float = 1.0
) -> None:
    """Plot the mean of each group of several seeds over x_of(run), in `unit`, with its band.

    scale: factor of the sizes of lines and markers.
    """
    for group, (style, colour) in chosen.of_group:
        curve = groups.mean_curve_of(group, {unit: x_of}, MAX_DRAWN)
        x, name = curve.x[unit], plain_text(curve.name)
        axes.plot(x, curve.loss, style, color=colour, lw=1.8 * scale, label=name)
        low, high = curve.loss - curve.half, curve.loss + curve.half
        axes.fill_between(x, low, high, color=colour, alpha=BAND_OPACITY, lw=0)
        draw_validations(axes, curve.validation_x[unit], curve.validation_loss, colour=colour, scale=scale)


def draw_single_runs(
    axes: "Axes", x_of: Callable[[Run], Array], runs: list[Run], chosen: CurveLooks, *, scale: float = 1.0
) -> None:
    """Plot the loss of each run over x_of(run), and its validations. Runs of a mean are thin and unnamed.

    scale: factor of the sizes of lines and markers.
    """
    in_a_mean = chosen.in_a_mean
    for run in runs:
        style, colour = chosen.of_run[run.name]
        is_in_mean = run.name in in_a_mean
        shown, x = drawn_steps(run), x_of(run)
        named = {} if is_in_mean else {"label": plain_text(run.name)}
        width = scale * (0.6 if is_in_mean else 1.5)
        axes.plot(x[shown], run.smooth_loss[shown], style, color=colour, lw=width, **named)
        validated = np.interp(run.validation_tokens, run.tokens, x)
        draw_validations(axes, validated, run.validation_loss, colour=colour, scale=scale)


def draw_validations(axes: "Axes", x: Array, losses: Array, *, colour: str, scale: float) -> None:
    axes.plot(x, losses, "o", color=colour, ms=4.5 * scale, mec="white", mew=0.7 * scale)


def loss_limits(runs: list[Run], hidden_share: float) -> tuple[float, float] | None:
    """Return the limits (lower, upper) of the loss axis, None if no loss is finite.

    They contain all smoothed losses but those of the first `hidden_share` of the steps of each run.
    """
    late = np.concatenate([run.smooth_loss[int(hidden_share * len(run.loss)):] for run in runs])
    late = late[np.isfinite(late)]
    if not len(late):
        return None
    margin = 0.05 * (late.max() - late.min()) + 1e-6
    return late.min() - margin, late.max() + margin


# ---- as a page ---------------------------------------------------------------------------------------------


def curves(runs: list[Run], study: SeedStudy | None = None) -> dict[str, Any]:
    """Return the data for chart.js, with null for non-finite losses. What is in a mean is hidden at first."""
    axes = get_x_axes(runs)
    chosen = choose_looks(runs, study)
    drawn = [mean_data(groups.mean_curve_of(group, axes, MAX_DRAWN), style, colour)
             for group, (style, colour) in chosen.of_group]
    for run in runs:
        style, colour = chosen.of_run[run.name]
        shown = drawn_steps(run)
        validated = {unit: np.interp(run.validation_tokens, run.tokens, of_run(run))
                     for unit, of_run in axes.items()}
        drawn.append({
            "name": run.name,
            "colour": colour,
            "dash": STYLES[style],
            "x": {unit: of_run(run)[shown].tolist() for unit, of_run in axes.items()},
            "loss": finite_numbers(run.smooth_loss[shown]),
            "validation": {
                "x": {unit: values.tolist() for unit, values in validated.items()},
                "loss": finite_numbers(run.validation_loss),
            },
        })
    hidden = [run.name for group, _ in chosen.of_group for run in group.runs]
    return {"runs": drawn, "hidden_share": HIDDEN_SHARE, "hidden": hidden, "band_opacity": BAND_OPACITY}


def mean_data(curve: MeanCurve, style: str, colour: str) -> dict[str, Any]:
    """Return a mean and its band (low, high) for chart.js."""
    return {
        "name": curve.name,
        "colour": colour,
        "dash": STYLES[style],
        "x": {unit: values.tolist() for unit, values in curve.x.items()},
        "loss": finite_numbers(curve.loss),
        "low": finite_numbers(curve.loss - curve.half),
        "high": finite_numbers(curve.loss + curve.half),
        "validation": {
            "x": {unit: values.tolist() for unit, values in curve.validation_x.items()},
            "loss": finite_numbers(curve.validation_loss),
        },
    }


def finite_numbers(values: Array) -> list[float | None]:
    return [float(f"{value:.6g}") if np.isfinite(value) else None for value in values]


def chart(runs: list[Run], study: SeedStudy | None) -> list[str]:
    """Return the parts of a page that plot the losses, with an image for browsers without scripts."""
    picture = base64.b64encode(draw_runs(runs, study)).decode()
    data = json.dumps(curves(runs, study), separators=(",", ":")).replace("<", "\\u003c")
    bands = " Bands: 95 % intervals of the mean; a click on a run's name shows it." if study else ""
    return [
        f"<p>Lines: training loss, {SMOOTHING_TEXT}; dots: validation.{bands}</p>",
        "<div id=chart></div>",
        '<noscript><div class=wide>',
        f'<img alt="losses over tokens and FLOPs" src="data:image/png;base64,{picture}"></div></noscript>',
        f'<script type="application/json" id=curves>{data}</script>',
        f"<script>{CHART.read_text(encoding='utf-8')}</script>",
    ]


def page(runs: list[Run], refresh_s: int | None = None) -> str:
    """Return a self-contained HTML page. refresh_s: the interval at which a browser reloads it."""
    study = repeats(runs)
    differing = differences(runs)
    refresh = f'<meta http-equiv="refresh" content="{refresh_s}">' if refresh_s else ""
    parts = [
        "<!doctype html><html lang=en><head><meta charset=utf-8>",
        '<meta name=viewport content="width=device-width, initial-scale=1">',
        refresh,
        f"<title>{html.escape(', '.join(run.name for run in runs))}</title>",
        f"<style>{STYLE}</style></head><body>",
        f"<h1>{html.escape(runs[0].name) if len(runs) == 1 else f'{len(runs)} runs'}</h1>",
        *chart(runs, study),
        *(means_section(study) if study else []),
        "<h2>Results</h2>",
        html_table(table_rows(runs)),
        *(f"<p>{html.escape(line)}</p>" for line in doubts(runs)),
    ]
    if len(runs) > 1:
        parts.append("<h2>What differs in their code, data and settings</h2>")
        rows = [{"key": key} | {run.name: str(value) for run, value in zip(runs, values)}
                for key, values in differing.items()]
        parts.append(html_table(rows) if rows else "<p>Nothing.</p>")
    settings = runs[0].settings.items()
    same = [{"key": key, "value": str(value)} for key, value in settings if key not in differing]
    parts.append(f"<details><summary>Settings that all have: {len(same)}</summary>")
    parts += [html_table(same), "</details></body></html>\n"]
    return "\n".join(part for part in parts if part)


def repeats(runs: list[Run]) -> SeedStudy | None:
    """Return the groups of runs that differ in the seed alone, or None if each has a single run."""
    study = groups.study_seeds(runs)
    return study if study.has_repeats else None


def means_section(study: SeedStudy) -> list[str]:
    """Return the part of a page with the means over seeds and their differences."""
    tables = [html_table(rows) for rows in (groups.group_rows(study), groups.difference_rows(study)) if rows]
    lines = [f"<p>{html.escape(line)}</p>" for line in groups.notes(study)]
    return ["<h2>Means over seeds</h2>", *tables, *lines]


def html_table(rows: list[dict[str, str]]) -> str:
    heads = "".join(f"<th>{html.escape(name)}</th>" for name in rows[0])
    lines = [f"<div class=wide><table><tr>{heads}</tr>"]
    for row in rows:
        cells = "".join(f"<td>{html.escape(value)}</td>" for value in row.values())
        lines.append(f"<tr>{cells}</tr>")
    return "\n".join([*lines, "</table></div>"])
