"""Rows in 8 bits (parallel.compress_tokens): all that arrive in a run, beside what was sent.

The same rows travel a second time as they are. The bound of each element is that of its block
(lab/proof/rounded_rows.py).
"""
import contextlib
import math
from collections.abc import Iterator
from typing import Any
from unittest import mock

from torch import Tensor

from lab.proof.precision.errors import BoundedError
from lab.proof.rounded_rows import error_bound
from parallel.expert import coded
from parallel.wire import comm
from parallel.wire.comm import PendingExchange

KINDS = ("tokens", "gradients")  # of rows: in the forward, in the backward


def error_of_rows(sent: Tensor, arrived: Tensor) -> float:
    """Return the largest error of rows [r, d] relative to its bound, infinite if a number that is not finite
    has become one."""
    if not sent.numel():
        return 0.0
    if (arrived.isfinite() & ~sent.isfinite()).any():
        return math.inf
    share = (arrived.double() - sent.double()).abs() / error_bound(sent)
    return float(share[share.isfinite()].max()) if share.isfinite().any() else 0.0


@contextlib.contextmanager
def watched_rows(worst: dict[str, float]) -> Iterator[None]:
    """Note in `worst` the largest error of rows sent by a run inside, {one of KINDS: error_of_rows}."""

    class WatchedRowExchange(coded.CodedRowExchange):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.kind = ""
            self.as_sent: dict[int, PendingExchange] = {}  # by chunk

        def start_sending(self, rows: Tensor, order: range) -> tuple[Tensor, ...]:
            result = super().start_sending(rows, order)
            self.kind = KINDS[order.step < 0]
            for chunk, part in enumerate(self.of_chunks(rows)):
                counts = self.counts[chunk]
                self.as_sent[chunk] = comm.start_all_to_all(part, counts.sent, counts.received, self.group)
            return result

        def wait_chunk(self, chunk: int) -> Tensor:
            arrived = super().wait_chunk(chunk)
            if chunk in self.as_sent:
                error = error_of_rows(self.as_sent.pop(chunk).wait(), arrived)
                worst[self.kind] = max(worst.get(self.kind, 0.0), error)
            return arrived

    with mock.patch.object(coded, "CodedRowExchange", WatchedRowExchange):
        yield


def row_errors(worst: dict[str, float]) -> list[BoundedError]:
    """Return what watched_rows has noted; rows of a kind that were never sent are an error."""
    return [
        BoundedError(what=f"8-bit {kind}", where="every step", error=worst.get(kind, math.nan), bound=1.0)
        for kind in KINDS
    ]
