"""lab/benchmarks/exchanges.py sends every verb of parallel/wire/comm.py, and sees a wrong one."""

import contextlib
import dataclasses
import inspect
from collections import Counter
from unittest import mock

import torch

from lab.benchmarks import exchanges
from parallel.wire import comm
from parallel.wire.comm import Group
from parallel.wire.world import World


def verbs() -> set[str]:
    """The functions that exchange something in a Group. start_collective is what the started ones share."""
    found = set()
    for name, function in vars(comm).items():
        if not inspect.isfunction(function) or function.__module__ != comm.__name__:
            continue
        parameter = inspect.signature(function).parameters.get("group")
        if parameter is not None and parameter.annotation is Group:
            found.add(name)
    return found - {"start_collective"}


def checked(world: World) -> tuple[list[str], list[dict]]:
    """(the verbs that the checks called, the rows that the first rank reports)."""
    called: set[str] = set()

    def noted(name: str, function):
        def call(*args, **options):
            called.add(name)
            return function(*args, **options)
        return call

    group = dataclasses.replace(world.all_ranks(), ledger=Counter())
    messages: list[dict] = []
    with contextlib.ExitStack() as stack:
        for name in verbs():
            stack.enter_context(mock.patch.object(comm, name, noted(name, getattr(comm, name))))
        exchanges.run_checks(
            exchanges.Place(group, torch.device("cpu")), lambda **message: messages.append(message)
        )
    return sorted(called), [message for message in messages if "row" in message]


def test_every_verb_is_sent_and_right(ranks):
    assert len(verbs()) > 14
    for called, rows in ranks(2).run(checked):
        assert set(called) == verbs()
        assert [row for row in rows if row["state"] != "ok"] == [] and len(rows) == len(exchanges.CHECKS)


def test_a_wrong_exchange_is_wrong(monkeypatch):
    def right(place, dtype):
        place.group.ledger["job", "x", "calls"] += 1
        return torch.ones(2, dtype=dtype), torch.ones(2, dtype=dtype)

    def wrong(place, dtype):
        got, expected = right(place, dtype)
        return (got + 1 if dtype == torch.bfloat16 else got), expected

    def left_out(place, dtype):
        return torch.ones(2), torch.ones(2)

    dtypes = (torch.float32, torch.bfloat16)
    checks = {"right": right, "wrong": wrong, "left out": left_out}
    monkeypatch.setattr(exchanges, "CHECKS", {name: (check, dtypes) for name, check in checks.items()})
    place = exchanges.Place(Group("job", (0,), 0, ledger=Counter()), torch.device("cpu"))
    messages = []
    exchanges.run_checks(place, lambda **message: messages.append(message))
    rows = [message for message in messages if "row" in message]
    assert [row["state"] for row in rows] == ["ok", "wrong", "wrong"]
    assert rows[1]["problem"] == "bfloat16: wrong" and rows[1]["note"] == "1 of 2 dtypes"
    assert rows[2]["problem"].startswith("float32: AssertionError: nothing was exchanged")
