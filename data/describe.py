"""Header lines about the data of a phase: validation data, which targets count, epochs per dataset."""
from data.blend import source_names
from data.loader import BatchLoader


def describe_valid(data: BatchLoader, valid_data: BatchLoader) -> str:
    """Describe the datasets of data.valid and which of them are trained on."""
    trained = {dataset.index.identity for dataset in data.datasets}
    seen = [dataset.name for dataset in valid_data.datasets if dataset.index.identity in trained]
    note = f"   {' and '.join(seen)}: trained on, too, so its loss is not of unseen text" if seen else ""
    return f"{valid_data.describe_datasets()}{note}"


def describe_targets(data: BatchLoader, last_step: int, valid_data: BatchLoader, batches: int) -> str | None:
    """Describe the share of targets that count up to a step and in the batches of a validation, or return
    None if all count."""
    counts = data.count_targets(last_step)
    parts = [counts.describe()] if counts else []
    validated = valid_data.sample_targets(batches)
    if validated and not validated.targets:
        parts.append(f"none of a validation ({validated.looked_at:,} sequences looked at), which has no loss "
                     "then; raise eval.batches or train.seq_len")
    return "; ".join(parts) or None


def describe_passes(data: BatchLoader, last_step: int) -> str | None:
    """Describe the epochs of each dataset up to a step, or return None if none is repeated."""
    paths, epochs = zip(*data.passes(last_step))
    if max(epochs) <= 1:
        return None
    return ", ".join(f"{count:.3g} of {name}" for name, count in zip(source_names(list(paths)), epochs))
