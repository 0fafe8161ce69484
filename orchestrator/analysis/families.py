"""Which family a configuration belongs to: a decode setting of k=1 that was changed, or the rule of its policy."""

from orchestrator.analysis.pairs import Configuration, Settings

REFERENCE = "k=1"
DECODING = ("threshold", "small block", "block cache")  # in the order of Settings
SEVERAL = "several decode settings"
GRID, OUTPUT = "fixed grid", "output mode"
RULES = ("adaptive", "trim", "trim, random", "mlp", "attn", "skip", "stale")
FAMILIES = (REFERENCE, *DECODING, SEVERAL, GRID, OUTPUT, *RULES)


def place_of(family: str) -> tuple[int, str]:
    """Its place in tables and legends: rules that nobody has put into the order come last, by name."""
    return (FAMILIES.index(family), "") if family in FAMILIES else (len(FAMILIES), family)


def _changed(configuration: Configuration, reference: Settings) -> dict[str, float]:
    pairs = zip(DECODING, configuration.settings, reference, strict=True)
    return {name: now for name, now, usual in pairs if now != usual}


def short_name(configuration: Configuration, reference: Settings) -> str:
    """The policy, with only those decode settings that are not the reference's."""
    changed = _changed(configuration, reference).items()
    said = [f"{name} {('off', 'on')[now] if isinstance(now, bool) else f'{now:g}'}" for name, now in changed]
    return " ".join([configuration.policy, *said])


def family(configuration: Configuration, reference: Settings) -> str:
    """A policy is of its rule's family whatever its decode settings; k=1 is of the one setting that it changes."""
    if configuration.is_baseline:
        changed = [*_changed(configuration, reference)]
        return REFERENCE if not changed else changed[0] if len(changed) == 1 else SEVERAL
    if configuration.k is not None:
        return OUTPUT if configuration.mode == "output" else GRID
    rule = configuration.policy.partition("_")[0].partition("=")[0]
    return "trim, random" if rule == "trim" and configuration.policy.endswith(".random") else rule
