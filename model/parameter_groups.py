"""The rules of optim.groups, which need the names of the whole model."""
from collections.abc import Iterator

from config import Config
from config.parameter_groups import ParameterGroup, find_group, parse_groups
from config.rule import Rule
from config.strict import ConfigError
from model.describe import all_parameters
from parallel.sharding.spec import ADAPTER_ROLES, ROLES


def group_rules(cfg: Config, world: int) -> Iterator[Rule]:
    """Check optim.groups against the names of the whole model: each group has parameters, those that are
    stored together have one group, only what decays has a weight decay, and something trains."""
    try:
        groups = parse_groups(cfg.optim.groups)
    except ConfigError as error:
        yield Rule(False, str(error))
        return
    if not groups:
        return

    decays = dict.fromkeys(groups, False)  # {group that has a parameter: whether any of them decays}
    found: set[ParameterGroup] = set()
    trains = False
    for spec, keys in all_parameters(cfg.model):
        of_keys = [find_group(groups, spec.role, key) for key in keys]
        apart = next((place for place, group in enumerate(of_keys) if group != of_keys[0]), None)
        if apart is not None:
            yield Rule(
                False,
                f"optim.groups: {keys[0]} and {keys[apart]} are updated together, and not in the same group; "
                "write a pattern that has both, such as layers.*.attn.*")
        is_free = cfg.model.lora is None or spec.role in ADAPTER_ROLES
        trains |= is_free if of_keys[0] is None else of_keys[0].lr_factor > 0
        if of_keys[0] is not None:
            found.add(of_keys[0])
            decays[of_keys[0]] |= spec.has_decay
    yield Rule(trains, "optim.groups: every parameter has lr_factor 0, and nothing trains; leave some out")
    for group in groups:
        known = f"a role ({', '.join(ROLES)}) or a pattern of names such as layers.*.attn.*"
        yield Rule(
            group in found,
            f"optim.groups: {group.names} names no parameter that an earlier group leaves; use {known}")
        yield Rule(
            group.weight_decay is None or decays[group],
            f"optim.groups: {group.names}: weight_decay {group.weight_decay}, and none of these parameters "
            "decays (norms and biases have no weight decay); leave it out")
        yield Rule(
            group.weight_decay is None or group.lr_factor > 0,
            f"optim.groups: {group.names}: weight_decay {group.weight_decay}, and lr_factor 0 freezes these "
            "parameters; leave weight_decay out")
