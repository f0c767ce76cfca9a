"""The phases of a run: keys that change at some step (train.phases).

A phase keeps the weights, the optimizer state and the position in each source (data/sources.py), and changes
some keys: the blend, the sequence length and RoPE base, the batch, the learning rate, the layout. Keys that
it does not state keep their previous values.

    - after_tokens: 2e9
      train.seq_len: 8192
      model.mixer.rope.base: 500000
    - after_steps: 3000
      data.path: 0.5 data/web 0.5 data/math
      optim.decay: linear

A run without train.phases has one phase.
"""
import contextlib
import itertools
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from config.axes import AXES
from config.reading.parse import parse_key
from config.schema import Config, TrainConfig, rest_of_ramp, sequences_seen, steps_to_see
from config.strict import ConfigError, Tree, read_yaml_value
from config.tree import differing_leaves, has_path, plain_data, value_at, with_values

STARTS = ("after_steps", "after_tokens")  # of the run; each phase has exactly one

# {section: keys that a phase may change}. None of them changes what a checkpoint holds, except model.context
# with learned positions, which config/reading/rules.py refuses.
CHANGEABLE = {
    "model": "context mixer.window mixer.kernel mixer.rope.base mixer.rope.scaling mixer.rope.scaling.factor "
             "mixer.rope.scaling.original mixer.rope.scaling.low_freq mixer.rope.scaling.high_freq "
             "mixer.rope.scaling.mscale mixer.rope.scaling.mscale_all mixer.rope.scaling.short "
             "mixer.rope.scaling.long dropout lora.dropout mtp.weight "
             "mlp.router.aux.weight mlp.router.z_loss mlp.router.jitter mlp.router.bias_rate mlp.capacity "
             "mlp.capacity.factor mlp.capacity.drop mlp.capacity.pad",
    "train": "seq_len micro_batch global_batch ramp",
    "optim": "lr min_lr warmup decay decay_fraction decay_steps beta1 beta2 momentum weight_decay "
             "groups clip",
    "parallel": f"{' '.join(axis.key for axis in AXES)} sp async_tp vpp schedule stages cp_kind ep_chunks "
                "ep_bound zero recompute recompute_parts recompute_stages offload",
    "data": "path doc_mask fim_rate fim_spm_rate fim_split",
}
SCHEDULE_KEYS = tuple(  # any of them starts a new schedule
    f"optim.{key}" for key in ("lr", "min_lr", "warmup", "decay", "decay_fraction", "decay_steps")
)

WHOLE_PARTS = {  # parts that a phase may add or remove, and an example
    "model.mixer.rope.scaling": "{kind: yarn, factor: 8}",
    "model.mlp.capacity": "{factor: 1.25}",
}
LAYOUT = ("parallel.", "train.micro_batch")  # prefixes of keys that assign work to ranks


@dataclass(frozen=True)
class Phase:
    """Consecutive steps with the same values.

    `number` counts from 1. `steps_before` and `tokens_before` say how far the run is when the phase begins.
    `cfg` has the values, without phases, and `changes` the keys (section.key) that the phase states.
    """
    number: int
    steps_before: int
    tokens_before: int
    cfg: Config
    changes: tuple[str, ...] = ()

    @property
    def begins_schedule(self) -> bool:
        """Return whether the learning rate schedule restarts."""
        return self.number == 1 or any(key in self.changes for key in SCHEDULE_KEYS)

    def tokens_seen(self, steps: int) -> int:
        """Return the tokens of the run after `steps` steps, the last of which is in this phase."""
        train = self.cfg.train
        return self.tokens_before + sequences_seen(train, steps - self.steps_before) * train.seq_len


@dataclass(frozen=True)
class Phases:
    """The phases of a run, in order. `whole` is the config that states them."""
    whole: Config
    all: tuple[Phase, ...]

    def of_step(self, step: int) -> Phase:
        """Return the phase of a step (counted from 1)."""
        return next(phase for phase in reversed(self.all) if phase.steps_before < max(step, 1))

    def from_step(self, step: int) -> tuple[Phase, ...]:
        """Return the phases that are not over after `step`."""
        return self.all[self.of_step(step + 1).number - 1:]

    def after(self, phase: Phase) -> Phase | None:
        """Return the next phase, or None after the last."""
        return self.all[phase.number] if phase.number < len(self.all) else None

    def last_step(self, phase: Phase, steps: int) -> int:
        """Return the last step of a phase, in a run of `steps` steps."""
        following = self.after(phase)
        return steps if following is None else min(steps, following.steps_before)

    def get_schedule(self, step: int) -> Phase:
        """Return the phase in which the learning rate schedule of a step begins."""
        here = self.of_step(step).number
        return next(phase for phase in reversed(self.all[:here]) if phase.begins_schedule)

    def schedule_end(self, schedule: Phase) -> int | None:
        """Return the step at which a phase's schedule ends, or None if it ends with the run."""
        if schedule.cfg.optim.decay_steps is not None:
            return schedule.cfg.optim.decay_steps
        later = [phase.steps_before for phase in self.all[schedule.number:] if phase.begins_schedule]
        return later[0] if later else None

    def tokens_seen(self, steps: int) -> int:
        """Return the number of tokens in the first `steps` steps of the run."""
        return self.of_step(steps).tokens_seen(steps)

    def steps_to_see(self, tokens: float) -> int:
        """Return the smallest number of steps that reads at least this many tokens."""
        phase = next(phase for phase in reversed(self.all) if phase.tokens_before < max(tokens, 1))
        return phase.steps_before + steps_to_see_tokens(phase.cfg.train, tokens - phase.tokens_before)


def steps_to_see_tokens(train: TrainConfig, tokens: float) -> int:
    return steps_to_see(train, math.ceil(tokens / train.seq_len))


# ---- reading -----------------------------------------------------------------------------------------------

def phases_text(value: object) -> str | None:
    """Return train.phases as stored in the config: one line of JSON. `value` is a file path, such a line, or
    a list.

    Raises ConfigError, naming file and key.
    """
    if value in (None, "none", "None"):
        return None
    where = where_stated(value)
    if isinstance(value, str):
        value = list_of_text(value) if is_list_text(value) else read_yaml_value(value)
    if not isinstance(value, (list, tuple)) or not value:
        raise ConfigError(
            f"{where}: expected a list of phases, each with after_steps or after_tokens and keys"
        )
    rows = [parse_phase(row, f"{where}: phase {number}") for number, row in enumerate(value, 2)]
    return json.dumps(rows)


def where_stated(value: object) -> str:
    """Return the source of the phases for messages: their file, or the key."""
    return value if isinstance(value, str) and not is_list_text(value) else "train.phases"


def is_list_text(value: str) -> bool:
    return value.lstrip().startswith("[")


def list_of_text(text: str) -> list[Any]:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ConfigError(f"train.phases: not a list in JSON: {error}; give a YAML file") from None


def parse_phase(row: object, where: str) -> Tree:
    """Parse one phase into typed values, with parts as plain data. Raises ConfigError that begins with
    `where`."""
    if not isinstance(row, dict):
        raise ConfigError(f"{where}: expected keys and values, got {row!r}")
    starts = [key for key in STARTS if key in row]
    if len(starts) != 1:
        raise ConfigError(f"{where}: give exactly one of after_steps and after_tokens; "
                          f"got {' and '.join(starts) or 'none'}")
    parsed: Tree = {}
    for key, value in row.items():
        name = f"{where}: {key}"
        if key in STARTS:
            parsed[key] = parse_start(value, name)
            continue
        parsed[key] = plain_data(parse_key(str(key), value, name))
        check_changeable(str(key), name)
    if len(parsed) == 1:
        raise ConfigError(f"{where}: changes nothing; state a key, or leave the phase out")
    return parsed


def parse_start(value: object, name: str) -> int:
    try:
        number = float(value)  # pyright: ignore[reportArgumentType]  YAML reads 2e9 as text
    except (TypeError, ValueError):
        number = math.nan
    if isinstance(value, bool) or not number >= 1 or math.isinf(number) or number != int(number):
        raise ConfigError(f"{name}: {value!r} must be a whole number above 0")
    return int(number)


def check_changeable(path: str, name: str) -> None:
    """Raise ConfigError if a phase cannot change this key."""
    section, _, key = path.partition(".")
    allowed = CHANGEABLE.get(section, "").split()
    if key in allowed:
        return
    may = f"of {section}.* it may change {', '.join(allowed)}" if allowed else \
        f"it may change keys of {', '.join(CHANGEABLE)}"
    raise ConfigError(f"{name}: cannot change in a phase; {may}")


# ---- derived values ----------------------------------------------------------------------------------------

def get_phases(cfg: Config, where: str = "train.phases") -> Phases:
    """Return the phases of a run. `where` names their source in messages.

    Raises ConfigError if a phase does not begin after the one before it, or has a sequence length that does
    not fit the others.
    """
    first = replace(cfg, train=replace(cfg.train, phases=None))
    found = [Phase(1, 0, 0, first)]
    for row in json.loads(cfg.train.phases or "[]"):
        found.append(next_phase(found[-1], row, where))
    phases = Phases(cfg, tuple(found))
    for phase in phases.all:
        try:
            check_span(phases, phase)
        except ConfigError as error:
            stated = f"{where}: phase {phase.number}: " if len(found) > 1 else ""
            raise ConfigError(f"{stated}{error}") from None
    return phases


def next_phase(before: Phase, row: Tree, where: str) -> Phase:
    """Return the phase described by a row of train.phases. Raises ConfigError if it does not begin later."""
    number = before.number + 1
    start = next(key for key in STARTS if key in row)
    train = before.cfg.train
    if start == "after_steps":
        steps = row[start]
    else:  # round up to whole steps
        steps = before.steps_before + steps_to_see_tokens(train, row[start] - before.tokens_before) \
            if row[start] > before.tokens_before else 0
    if steps <= before.steps_before:
        raise ConfigError(
            f"{where}: phase {number}: {start}: {row[start]:,} is not after the beginning of phase "
            f"{before.number} (step {before.steps_before:,}, {before.tokens_before:,} tokens); list the "
            "phases in order"
        )
    changes = tuple(key for key in row if key not in STARTS)
    for key in changes:
        part = key.rpartition(".")[0]
        if not has_path(before.cfg, key) and part not in changes:
            raise ConfigError(
                f"{where}: phase {number}: {key}: there is no {part} before the phase; {whole_part(part)}")
    cfg = with_changes(before.cfg, {key: parse_key(key, row[key], key) for key in changes})
    decay_steps = cfg.optim.decay_steps
    if decay_steps is not None and "optim.decay_steps" in changes and decay_steps <= steps:
        raise ConfigError(
            f"{where}: phase {number}: optim.decay_steps: {decay_steps:,} is a step of the run, and must "
            f"come after step {steps:,}, where the phase begins; raise it, or leave it out"
        )
    return Phase(number, steps, before.tokens_seen(steps), cfg, changes)


def whole_part(part: str) -> str:
    """Return what to do if a phase sets a key of a part that did not exist before."""
    example = WHOLE_PARTS.get(part)
    return f"state all of it, as {part}: {example}" if example else "state it from the beginning"


def with_changes(cfg: Config, changes: Tree) -> Config:
    """Return the config of a phase with these changes. train.ramp ends with its phase, and
    optim.decay_steps with its schedule."""
    ended: Tree = {"train.ramp": None}
    if any(key in changes for key in SCHEDULE_KEYS):
        ended["optim.decay_steps"] = None
    return with_values(cfg, {**ended, **changes})


def with_values_from(cfg: Config, number: int, values: Tree) -> Config:
    """Return the config of a run with values changed from a phase on, unless a later phase states them."""
    if number == 1:
        return with_values(cfg, values)
    rows = json.loads(cfg.train.phases or "[]")
    rows[number - 2] |= values
    return with_values(cfg, {"train.phases": json.dumps(rows)})


def with_next_layout(cfg: Config, number: int) -> Config:
    """Return the config of a run in which a phase takes the layout and micro-batch of the next one."""
    here, following = get_phases(cfg).all[number - 1:number + 1]
    values = {path: value for path, value in differing_keys(here.cfg, following.cfg).items()
              if path.startswith(LAYOUT)}
    return with_values_from(cfg, number, values)


def shuffle_span(phases: Phases, phase: Phase) -> int:
    """Return how many tokens stay together when a phase shuffles samples (data.span); one sample with
    data.pack best_fit."""
    if phases.whole.data.pack == "best_fit":
        return phase.cfg.train.seq_len
    longest = max(each.cfg.train.seq_len for each in phases.all)
    return max(phases.whole.data.span or longest, phase.cfg.train.seq_len)


def check_span(phases: Phases, phase: Phase) -> None:
    """Raise ConfigError if the sequences of a phase do not evenly fill its span."""
    seq_len, span = phase.cfg.train.seq_len, shuffle_span(phases, phase)
    if span % seq_len:
        raise ConfigError(
            f"train.seq_len: {seq_len} does not divide {span}, the tokens that stay together when samples "
            "are shuffled (data.span, or the longest train.seq_len of all phases); use a divisor, or "
            "another data.span"
        )


@contextlib.contextmanager
def named(phase: Phase) -> Iterator[None]:
    """Prefix a ConfigError with the phase, except for the first phase."""
    try:
        yield
    except ConfigError as error:
        if phase.number == 1:
            raise
        raise ConfigError(f"train.phases: phase {phase.number}: {error}") from None


def change_text(before: Phase, phase: Phase) -> str:
    """Format a change: "phase 2 after step 1,000 (2,048,000 tokens): train.seq_len 256 -> 512, optim.lr
    0.001 -> 0.0003"."""
    parts: list[str] = []
    changes = [*phase.changes]
    steps = phase.steps_before - before.steps_before
    if "train.ramp" not in changes and rest_of_ramp(before.cfg.train, steps):
        changes.append("train.ramp")  # cut off before train.global_batch
    for path in changes:
        parts.append(f"{path} {value_at(before.cfg, path)} -> {value_at(phase.cfg, path)}")
    start = f"phase {phase.number} after step {phase.steps_before:,} ({phase.tokens_before:,} tokens)"
    return f"{start}: {', '.join(parts)}"


def change_lines(phases: Phases) -> list[str]:
    """Return change_text of every phase after the first."""
    return [change_text(*pair) for pair in itertools.pairwise(phases.all)]


def differing_keys(old: Config, new: Config) -> Tree:
    """Return {section.key: new value} of the keys that differ."""
    return {path: value for path, (_, value) in differing_leaves(old, new).items()}


# ---- resumed runs ------------------------------------------------------------------------------------------

# keys that may change in a phase that has begun; check_same_schedule covers optim.decay_steps
FREE_IN_PAST = (*LAYOUT, "optim.decay_steps")


def real_changes(before: Phase, phase: Phase) -> Tree:
    """Return {section.key: value} of what a phase changes: the keys that differ, and those of a new
    schedule, which restarts even with equal values."""
    found = differing_keys(before.cfg, phase.cfg)
    return found | {path: value_at(phase.cfg, path) for path in phase.changes if path in SCHEDULE_KEYS}


def same_plan(old: Config, new: Config, free: tuple[str, ...] = ()) -> bool:
    """Return whether the phases of two runs have the same effect, however they are written. `free` lists
    prefixes of keys that may differ."""
    plans: list[list[tuple[int, Tree]]] = []
    for cfg in (old, new):
        plans.append([])
        for before, phase in itertools.pairwise(get_phases(cfg).all):
            changes = {path: value for path, value in real_changes(before, phase).items()
                       if not path.startswith(free)}
            if changes:
                plans[-1].append((phase.steps_before, changes))
    return plans[0] == plans[1]


@dataclass(frozen=True)
class Difference:
    """How two plans of phases differ from a step on: in a key, or in what is stated about it."""
    phase: int
    what: str
    first: int
    there: Any
    here: Any


def first_difference(old: Phases, new: Phases, step: int) -> Difference | None:
    """Return how two plans differ in what the first `step` steps read and how they train, or None.

    With None, both can continue the same checkpoint. Compares the values in effect, whichever phase states
    them.
    """
    begun = [[phase for phase in plan.all if phase.steps_before < max(step, 1)] for plan in (old, new)]
    later = [phase for phases in begun for phase in phases[1:]]
    stated = {path for phase in later for path in phase.changes if not path.startswith(FREE_IN_PAST)}
    for before in sorted({phase.steps_before for phases in begun for phase in phases}):
        left, right = (plan.of_step(before + 1) for plan in (old, new))
        pairs: dict[str, tuple[Any, Any]] = {"data.span": (shuffle_span(old, left), shuffle_span(new, right))}
        if "data.path" in stated:  # otherwise the checkpoint's data is compared
            pairs["data.path"] = (left.cfg.data.path, right.cfg.data.path)
        if max(left.number, right.number) > 1:  # otherwise the runs' settings are compared
            pairs |= {path: (value_at(left.cfg, path), value_at(right.cfg, path)) for path in stated}
            pairs["train.ramp"] = (ramp_from(left, before), ramp_from(right, before))
            begins = [stated_schedule(phase, before) for phase in (left, right)]
            if bool(begins[0]) != bool(begins[1]):
                key = begins[0] or begins[1]
                words = [value_at(phase.cfg, key) if has else "as before" for phase, has in
                         zip((left, right), begins)]
                pairs[key] = (words[0], words[1])
        for path, (there, here) in pairs.items():
            if there != here:
                return Difference(max(left.number, right.number), path, before + 1, there, here)
    return open_difference(old, new, step)


def ramp_from(phase: Phase, step: int) -> str | None:
    """Return the rest of a phase's ramp after a step of the run."""
    return rest_of_ramp(phase.cfg.train, step - phase.steps_before)


def stated_schedule(phase: Phase, before: int) -> str:
    """Return the first key with which a phase starts a schedule right after step `before`, or ""."""
    if phase.steps_before != before or phase.number == 1:
        return ""
    return next((path for path in SCHEDULE_KEYS if path in phase.changes), "")


def open_difference(old: Phases, new: Phases, step: int) -> Difference | None:
    """Return a difference in later steps that matters now, or None.

    While sequences are shorter than their span, the sample order of a source depends on how much of it is
    read before its sequence length changes or the blend drops it.
    """
    here = [plan.of_step(step) for plan in (old, new)]
    if shuffle_span(new, here[1]) <= here[1].cfg.train.seq_len:
        return None
    ends: list[tuple[int | None, Any]] = []  # (step, what is read from then on)
    for plan, phase in zip((old, new), here):
        ends.append((None, None))
        for before, following in itertools.pairwise(plan.all[phase.number - 1:]):
            if following.cfg.train.seq_len != phase.cfg.train.seq_len:
                ends[-1] = following.steps_before, "another train.seq_len"
                break
            if following.cfg.data.path != before.cfg.data.path:
                ends[-1] = following.steps_before, following.cfg.data.path
    if ends[0] != ends[1]:
        words = [f"after step {end:,} (to {what})" if end else "never" for end, what in ends]
        number = max(phase.number for phase in here)
        return Difference(number, "the length or blend changes", step + 1, words[0], words[1])
    last = ends[0][0] or step
    starts = {phase.steps_before for plan in (old, new) for phase in plan.all}
    for before in sorted({step, *(start for start in starts if step < start < last)}):
        left, right = (plan.of_step(before + 1) for plan in (old, new))
        pairs = {path: (value_at(left.cfg, path), value_at(right.cfg, path))
                 for path in ("train.global_batch", "data.path")}
        pairs["train.ramp"] = (ramp_from(left, before), ramp_from(right, before))
        for path, values in pairs.items():
            if values[0] != values[1] and before < last:
                return Difference(max(left.number, right.number), path, before + 1, *values)
    return None


def get_horizon(cfg: Config) -> int | None:
    """Return the steps of a run that states steps or tokens, or None if it states FLOPs."""
    train = cfg.train
    return get_phases(cfg).steps_to_see(train.tokens) if train.tokens else train.steps


def check_same_schedule(
    old: Phases, new: Phases, step: int, where: str, horizons: tuple[int, int]
) -> bool:
    """Return whether the learning rate schedule of a checkpoint (`where`, at this step) still ends at the
    same step.

    `horizons` are those of the checkpoint's run and of the run that continues it. A new horizon or
    optim.decay_steps is intentional. Raises ConfigError if instead a change of phases moves the end, and so
    the rates of the next steps.
    """
    schedule = new.get_schedule(step)
    ends = [phases.schedule_end(phases.get_schedule(step)) for phases in (old, new)]
    old_end, new_end = (end or horizon for end, horizon in zip(ends, horizons))
    if schedule.cfg.optim.decay_steps is not None or ends == [None, None] or old_end == new_end:
        return old_end == new_end
    place = "" if schedule.number == 1 else f" in phase {schedule.number}"
    raise ConfigError(
        f"train.phases: {where} is at step {step:,}, in a learning-rate schedule that ends at step "
        f"{old_end:,}, and with these phases it would end at step {new_end:,}; set optim.decay_steps "
        f"{old_end}{place} to keep its rates, or {new_end} to change them"
    )


def check_same_past(old: Phases, new: Phases, step: int, where: str) -> list[str]:
    """Compare the phases of a checkpoint (`where`, at this step) with those of the run that continues it.

    Returns a note for each later phase that is new or changed. Raises ConfigError if what the checkpoint went
    through differs.
    """
    difference = first_difference(old, new, step)
    if difference is not None:
        what, there, here = difference.what, difference.there, difference.here
        remedy = "set it back; phases after that step may change"
        if what == "data.span" and there < here:
            remedy = (f"set --data.span {there}: sources that continue with longer sequences then begin a "
                      "new epoch")
        raise ConfigError(
            f"train.phases: {where} is at step {step:,}, with phase {difference.phase}: {what} {there}, not "
            f"{here} (from step {difference.first:,} on); {remedy}"
        )
    known = [(phase.steps_before, real_changes(*pair)) for pair in itertools.pairwise(old.all)
             for phase in pair[1:]]
    notes: list[str] = []
    for before, phase in itertools.pairwise(new.all):
        changes = real_changes(before, phase)
        if phase.steps_before >= step and changes and (phase.steps_before, changes) not in known:
            notes.append(f"new: {change_text(before, phase)}")
    return notes
