import math

import pytest
import torch

from optim.guard import NonFiniteGuard, NonFiniteLoss, all_finite


@pytest.mark.slow(every=2)
@pytest.mark.parametrize(
    "loss, norm, good",
    [
        (1.0, 2.0, True),
        (math.nan, 2.0, False),
        (1.0, math.inf, False),
        (math.inf, -math.inf, False),
        (1e38, 3e38, True),
    ],
)
def test_judges_each_number(loss, norm, good):
    ok = all_finite(torch.tensor(loss), torch.tensor(norm))
    assert ok.dtype == torch.bool and ok.shape == () and bool(ok) == good


def test_does_not_wait_for_the_device():
    """On the meta device every look at a value raises: the verdict is reached without one."""
    meta = torch.empty((), device="meta")
    assert all_finite(meta, meta).device.type == "meta"


def test_five_in_a_row_end_the_run_wherever_the_host_looks():
    guard = NonFiniteGuard()
    guard.count_skipped([1, 1, 1, 1, 0])
    guard.count_skipped([1, 1])
    guard.count_skipped([])
    guard.count_skipped([1, 1])
    with pytest.raises(NonFiniteLoss, match="5 steps in a row"):
        guard.count_skipped([1])
    assert NonFiniteLoss.exit_code == 77
