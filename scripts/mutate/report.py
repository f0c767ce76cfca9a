"""The closing table of a run of mutants, and the mutants that are known to change nothing."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import yaml

from config import ConfigError
from scripts.mutate.judge import Verdict

EXPLAINED = Path(__file__).parent / "equivalent.yaml"
WANTED = 0.95  # of the mutants that are not explained


def explained(path: Path = EXPLAINED) -> dict[tuple[str, str, str], str]:
    """{(file, before, after): why no test can tell the two apart}, the lines without their indentation.
    Raises ConfigError."""
    found = {}
    for entry in yaml.safe_load(path.read_text()) or []:
        if set(entry) != {"file", "before", "after", "reason"} or not str(entry["reason"]).strip():
            raise ConfigError(f"{path.name}: {entry} must have file, before, after and a reason")
        found[entry["file"], flat(entry["before"]), flat(entry["after"])] = entry["reason"]
    return found


def flat(text: str) -> str:
    return "\n".join(line.strip() for line in text.strip().splitlines())


def report(verdicts: Sequence[Verdict], reasons: dict[tuple[str, str, str], str]) -> tuple[list[str], bool]:
    """Lines to print, and whether the killed share is what is wanted."""
    alike = [v for v in verdicts if not v.stage and (v.file, flat(v.before), flat(v.after)) in reasons]
    alive = [v for v in verdicts if not v.stage and v not in alike]
    killed = [v for v in verdicts if v.stage]
    lines = []
    for v in alive:
        lines += [
            f"SURVIVED {v.file}:{v.line} ({v.operator}, {v.ran} tests run the line)",
            *[f"  {v.by}"] * bool(v.by),
            *(f"  - {line}" for line in v.before.splitlines()),
            *(f"  + {line}" for line in v.after.splitlines()),
            "",
        ]

    # by operator
    lines += [
        f"{'':<20} {'drawn':>6} {'explained':>10} {'tests':>6} {'verify':>7} {'hung':>5} {'survived':>9}"
    ]
    for name in [*sorted({v.operator for v in verdicts}), "all"]:
        counts = [
            Counter(v.operator for v in of)[name] if name != "all" else len(of)
            for of in (
                verdicts,
                alike,
                [v for v in killed if v.stage == "test"],
                [v for v in killed if v.stage == "verify"],
                [v for v in killed if v.hung],
                alive,
            )
        ]
        lines.append(f"{name:<20} " + " ".join(f"{n:>{w}}" for n, w in zip(counts, (6, 10, 6, 7, 5, 9))))
    share = len(killed) / max(len(killed) + len(alive), 1)
    lines.append(
        f"{len(killed)} of {len(killed) + len(alive)} mutants killed ({100 * share:.1f} %, "
        f"wanted {100 * WANTED:.0f} %); {len(alike)} more are explained in {EXPLAINED.name}"
    )
    return lines, share >= WANTED
