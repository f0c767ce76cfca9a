"""The smoke run sends every verb of parallel/wire/comm.py: one that it leaves out meets NCCL in training."""

import contextlib
import dataclasses
import inspect
import io
import json
from collections import Counter
from unittest import mock

import torch

from benchmarks import smoke_exchanges
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
    """(the verbs that the checks called, the rows that the first rank printed)."""
    called: set[str] = set()

    def noted(name: str, function):
        def call(*args, **options):
            called.add(name)
            return function(*args, **options)
        return call

    group = dataclasses.replace(world.all_ranks(), ledger=Counter())
    printed = io.StringIO()
    with contextlib.ExitStack() as stack:
        for name in verbs():
            stack.enter_context(mock.patch.object(comm, name, noted(name, getattr(comm, name))))
        stack.enter_context(contextlib.redirect_stdout(printed))
        smoke_exchanges.run_checks(smoke_exchanges.Place(group, torch.device("cpu")))
    rows = [json.loads(line) for line in printed.getvalue().splitlines()]
    return sorted(called), [row for row in rows if "row" in row]


def test_every_verb_is_sent_and_right(ranks):
    assert len(verbs()) > 14
    for rank, (called, rows) in enumerate(ranks(2).run(checked)):
        assert set(called) == verbs()
        assert [row for row in rows if not row["ok"]] == []
        assert len(rows) == (len(smoke_exchanges.CHECKS) if rank == 0 else 0)
