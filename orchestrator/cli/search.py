"""`sweep --race --search N`: proposes configurations with Optuna, races them in rounds, and confirms the best one.

The flags list the policies and decode settings to choose from; every configuration is compared with k=1 at the first
decode settings. The search uses a random half of the documents. Each round races a few proposals against k=1 and gives
the results to Optuna, which proposes the next ones. Once a configuration is confirmed, later ones must also be faster
than the lower bound of its speed-up. Finally the best one runs on all documents of the other half, without a race. It
was chosen for its good estimates, so only documents that played no part in the choice give unbiased ones.

Each round, and the confirmation, is a sweep of its own in the folder of the search; search.json lists them.
"""

import json
import math
import random
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from orchestrator.analysis.gates import GENERATE
from orchestrator.analysis.results import Comparison
from orchestrator.analysis.verdicts import CONFIRMED, REJECTED, UNDECIDED
from orchestrator.cli.console import say
from orchestrator.cli.run_sweep import run
from orchestrator.cli.sweep import SweepCommand
from orchestrator.core.configuration import (
    DECODE_SETTINGS,
    FIRST,
    Configuration,
    first_settings,
    grid,
    varying_settings,
)
from orchestrator.planning.settings import SweepSettings
from orchestrator.report.section import build_section
from orchestrator.report.sweeps import read_sweeps
from orchestrator.running.stop import StopSignals
from orchestrator.store.files import DISK, make_folders, write_file
from sampler.errors import InputError
from sampler.policy import ReusePolicy

ROUND_SIZE = 4  # configurations raced together; fewer would learn more from each, and run k=1 more often
RANDOM_PROPOSALS = 6  # before Optuna has a model
ATTEMPTS = 30  # of Optuna to propose a configuration that was not tried
BASELINES = ("k1_first", "k1_last")  # replicates, which show how much measurements vary
CONFIRMATION = "confirmation"
OBJECTIVES = ("difference", "speedup")
STRENGTH, ANY = "strength", "any"  # the rank of a rule's number; a coordinate that a configuration does not have
RULE = re.compile("([a-z]+)=?([0-9.]*)")  # and its number


@dataclass(frozen=True, kw_only=True, slots=True)
class Proposal:
    """A configuration after its round: means over the tasks. Created by `_measured`; read by Optuna and stored."""

    configuration: str  # as --configurations takes it
    outcome: str  # confirmed if all tasks are, rejected if one is
    difference: float  # in accuracy, in points
    speedup: float  # geometric mean over tasks
    speedup_low: float  # the lowest bound of any task
    documents: int
    intervals: tuple[str, ...] = ()  # for people: both differences by task


class Proposer:
    """Proposes configurations with Optuna, through Ray Tune. The same results lead to the same proposals."""

    def __init__(self, space: Sequence[str], seed: int) -> None:
        import optuna
        import torch
        from ray import tune
        from ray.tune.search.optuna import OptunaSearch

        optuna.logging.set_verbosity(optuna.logging.ERROR)
        torch.set_num_threads(1)  # the Gaussian process is small: more threads take many times as long
        self._random = random.Random(seed)
        self._coordinates = coordinates(space)
        domains: dict[str, Any] = {}
        for name in next(iter(self._coordinates.values())):
            values = sorted({own[name] for own in self._coordinates.values()} - {ANY})
            if values:  # no rule has layers in a space of decode settings
                ranks = all(isinstance(value, int) for value in values)
                domains[name] = tune.randint(0, max(values) + 1) if ranks else tune.choice(values)
        sampler = optuna.samplers.GPSampler(
            seed=seed, n_startup_trials=min(RANDOM_PROPOSALS, len(space)), deterministic_objective=False
        )
        self._optuna = OptunaSearch(
            space=OptunaSearch.convert_search_space(domains),
            metric=list(OBJECTIVES),
            mode=["max"] * len(OBJECTIVES),
            sampler=sampler,
        )
        self._asked = 0
        self._waiting: dict[str, str] = {}  # Optuna's trial ids, by configuration
        self._known: dict[str, Proposal] = {}

    def propose(self, number: int) -> list[str]:
        """Up to this many configurations that were not proposed before."""
        chosen: list[str] = []
        for _ in range(number):
            left = [one for one in self._coordinates if one not in self._known and one not in chosen]
            if left:
                chosen.append(self._ask(chosen) or self._random.choice(left))
        return chosen

    def _ask(self, chosen: Sequence[str]) -> str | None:
        for _ in range(ATTEMPTS):
            self._asked += 1
            name = str(self._asked)
            found = self._nearest(self._optuna.suggest(name))
            if found in self._known:
                self._optuna.on_trial_complete(name, asdict(self._known[found]))
            elif found is None or found in chosen:
                self._optuna.on_trial_complete(name, error=True)
            else:
                self._waiting[found] = name
                return found
        return None

    def _nearest(self, point: Mapping[str, Any]) -> str | None:
        """The configuration at this point, or else the one whose rule has the closest number."""
        exact = [name for name in point if name != STRENGTH]
        possible = {
            found: own
            for found, own in self._coordinates.items()
            if all(own[name] in (ANY, point[name]) for name in exact)
        }
        return min(possible, key=lambda found: abs(possible[found][STRENGTH] - point[STRENGTH]), default=None)

    def tell(self, results: Iterable[Proposal]) -> None:
        for result in results:
            self._known[result.configuration] = result
            if (name := self._waiting.pop(result.configuration, None)) is not None:
                self._optuna.on_trial_complete(name, asdict(result))


def search_space(settings: Mapping[str, Any]) -> list[str]:
    """All policies with all decode settings of a sweep, and k=1 with settings that are not the first."""
    reference = first_settings(settings)
    at_k1 = [one for one in grid({**settings, "policies": ["k1"]}) if one != reference]
    found = [*at_k1, *(one for one in grid(settings) if ReusePolicy.parse(one.policy).k != 1)]
    return [one.to_text(reference) for one in found]


def coordinates(space: Sequence[str]) -> dict[str, dict[str, Any]]:
    """The point of each configuration: its rule, the rule's number, its layers, and the decode settings that vary.

    Numbers are replaced by their ranks in the space. ANY stands for what a configuration does not have, such as layers,
    or a threshold under another reveal rule.
    """
    parsed = [Configuration.parse(text) for text in space]
    values = {name: sorted({getattr(one, name) for one in parsed}) for name in varying_settings(parsed)}
    places: dict[str, dict[Any, int | str]] = {
        name: {value: str(value) if isinstance(value, bool | str) else rank for rank, value in enumerate(known)}
        for name, known in values.items()
    }
    rules: list[tuple[str, float, str]] = []
    for one in parsed:
        policy = ReusePolicy.parse(one.policy)
        word = RULE.fullmatch(str(policy.rule))
        assert word is not None
        rule = ".".join(["k1" if policy.k == 1 else word[1], *policy.rule.options])
        rules.append((rule, float(word[2] or 0), policy.layers or ANY))
    numbers = {rule: sorted({n for r, n, _ in rules if r == rule}) for rule, *_ in rules}
    return {
        text: {
            "rule": rule,
            "layers": layers,
            STRENGTH: numbers[rule].index(number),
            **{name: place[getattr(one, name)] if one.uses(name) else ANY for name, place in places.items()},
        }
        for text, one, (rule, number, layers) in zip(space, parsed, rules, strict=True)
    }


def best_of(proposals: Iterable[Proposal], margin: float) -> Proposal | None:
    """The fastest confirmed configuration, else the fastest that was not rejected and lies within the margin."""
    possible = [one for one in proposals if one.outcome != REJECTED and one.difference >= -margin]
    return max(possible, key=lambda one: (one.outcome == CONFIRMED, one.speedup), default=None)


def search(command: SweepCommand, arguments: list[str], stop: StopSignals) -> int:
    """Returns the number of failed trials. The same command continues an interrupted search."""
    settings = command.settings
    if find_spec("optuna") is None:
        raise InputError("--search needs Optuna; install it with: pip install 'reuse-sweep[search]'")
    if command.force is not None:
        raise InputError("--force must not be used with --search: its proposals follow from the rows that it has")
    space = search_space(settings.as_dict())
    if not space:
        raise InputError(f"--search needs policies to choose from (got {', '.join(settings.policies)})")
    assert settings.search is not None
    wanted = min(settings.search, len(space))
    folder = Path(settings.out) / (settings.name or "search")
    declared = {name: getattr(settings, name) for name in ("search", "seed", "margin", "speedup", "race_alpha")}
    state = _State(folder, {**declared, "space": space, "tasks": list(settings.tasks)})
    proposer = Proposer(space, settings.seed)
    tried: list[Proposal] = []
    while len(tried) < wanted:
        proposed = proposer.propose(min(ROUND_SIZE, wanted - len(tried)))
        number, best = len(tried) // ROUND_SIZE + 1, best_of(tried, settings.margin)
        faster = best is not None and best.outcome == CONFIRMED and best.speedup_low > settings.speedup
        goal = best.speedup_low if best is not None and faster else settings.speedup
        results = state.results(number, proposed)
        if results is None:
            say(f"round {number}: {', '.join(proposed)}; {len(tried)} of {wanted} configurations tried")
            name = f"round-{number}"
            alpha = settings.race_alpha * len(proposed) / wanted
            part = replace(_compared(settings, proposed), name=name, half="first", speedup=goal, race_alpha=alpha)
            failed = _run(part, command, arguments, stop, folder)
            if failed or command.dry_run:
                return failed
            results = _measured(folder / name, proposed)
            state.add(number, proposed, results)
        proposer.tell(results)
        tried += results
    return _confirm(tried, state, command, arguments, stop, folder)


def _confirm(
    tried: Sequence[Proposal],
    state: "_State",
    command: SweepCommand,
    arguments: list[str],
    stop: StopSignals,
    folder: Path,
) -> int:
    settings, best = command.settings, best_of(tried, command.settings.margin)
    documents = sum(one.documents for one in tried)
    say(*_table(tried), sep="\n")
    if best is None:
        say(f"none of {len(tried)} is within {settings.margin:g} points of k=1: there is nothing to confirm")
        return 0
    say(f"best of {len(tried)}: {best.configuration}, now on the other half of the documents")
    part = replace(_compared(settings, [best.configuration]), name=CONFIRMATION, half="second", race=False)
    failed = _run(part, command, arguments, stop, folder)
    if failed:
        return failed
    (confirmed,) = _measured(folder / CONFIRMATION, [best.configuration])
    state.finish(confirmed)
    say(
        f"{best.configuration} is {confirmed.outcome} on documents it was not chosen on: "
        f"{'; '.join(confirmed.intervals)}",
        f"the search ran {documents:,} documents of {len(tried)} configurations, the confirmation "
        f"{confirmed.documents:,}",
        folder,
        sep="\n",
    )
    return 0


def _compared(settings: SweepSettings, proposed: Sequence[str]) -> SweepSettings:
    """A sweep of these configurations and of k=1 at the first decode settings."""
    first = {name: values[:1] for name in DECODE_SETTINGS if (values := getattr(settings, name))}
    return replace(settings, **first, policies=BASELINES, configurations=tuple(proposed), reference=FIRST, search=None)


def _run(settings: SweepSettings, command: SweepCommand, arguments: list[str], stop: StopSignals, folder: Path) -> int:
    upload = None if settings.upload is None else f"{settings.upload.rstrip('/')}/{settings.name}"
    part = replace(settings, out=str(folder), upload=upload)
    return run(replace(command, settings=part), arguments, stop)


def _measured(folder: Path, proposed: Sequence[str]) -> list[Proposal]:
    """The results of a finished sweep for these configurations."""
    (data,) = read_sweeps([folder])
    tasks = build_section(data, figures=False).analysis.tasks
    base = first_settings(data.request["settings"])
    found = []
    for text in proposed:
        wanted = Configuration.parse(text, base)
        scored = Configuration(policy=wanted.policy)  # without decode settings
        results = {
            task.task: one
            for task in tasks
            for one in task.configurations
            if one.resolved.configuration == (wanted if task.kind == GENERATE else scored)
        }
        compared = {task: one.comparison for task, one in results.items() if one.comparison is not None}
        speeds = [one.speedup.tokens for one in compared.values() if one.speedup and one.speedup.tokens]
        outcomes = {one.verdict.outcome for one in compared.values()}
        points = [one.difference.points.value for one in compared.values()]
        found.append(
            Proposal(
                configuration=text,
                outcome=REJECTED if REJECTED in outcomes else CONFIRMED if outcomes == {CONFIRMED} else UNDECIDED,
                difference=sum(points) / max(1, len(points)),
                speedup=math.exp(sum(math.log(one.value) for one in speeds) / len(speeds)) if speeds else 1.0,
                speedup_low=min((one.low for one in speeds), default=1.0),
                documents=sum(one.documents for one in results.values()),
                intervals=tuple(_intervals(task, one) for task, one in compared.items()),
            )
        )
    return found


def _intervals(task: str, one: Comparison) -> str:
    points, speed = one.difference.points, one.speedup.tokens if one.speedup else None
    shown = f"{task} {points.value:+.1f} points ({points.low:+.1f} to {points.high:+.1f})"
    return shown if speed is None else f"{shown}, {speed.value:.2f}× ({speed.low:.2f} to {speed.high:.2f})"


def _table(tried: Sequence[Proposal]) -> list[str]:
    width = max(len(one.configuration) for one in tried)
    return [
        f"{one.configuration:{width}}  {one.outcome:9}  {one.documents:>6,} documents  {'; '.join(one.intervals)}"
        for one in sorted(tried, key=lambda one: -one.speedup)
    ]


class _State:
    """search.json: what was declared, each round with its proposals and results, and the confirmation."""

    def __init__(self, folder: Path, declared: Mapping[str, Any]) -> None:
        self._path = folder / "search.json"
        self._content: dict[str, Any] = {"declared": dict(declared), "rounds": {}, "confirmation": None}
        if self._path.exists():
            try:
                self._content = json.loads(self._path.read_bytes())
                before = self._content["declared"]
                changed = [name for name in declared if before[name] != json.loads(json.dumps(declared[name]))]
            except (OSError, ValueError, KeyError, TypeError):
                raise InputError(f"{self._path} cannot be read; choose another --name") from None
            if changed:
                raise InputError(
                    f"{folder} was searched with another {', '.join(changed)}: repeat the old values, or choose "
                    "another --name"
                )

    def results(self, number: int, proposed: Sequence[str]) -> list[Proposal] | None:
        """Of a round that has finished; None if it has not."""
        stored = self._content["rounds"].get(str(number))
        if stored is None:
            return None
        if [one["configuration"] for one in stored] != list(proposed):
            raise InputError(
                f"{self._path}: round {number} had other proposals, made by another version of Optuna; choose "
                "another --name"
            )
        return [Proposal(**{**one, "intervals": tuple(one["intervals"])}) for one in stored]

    def add(self, number: int, proposed: Sequence[str], results: Sequence[Proposal]) -> None:
        assert [one.configuration for one in results] == list(proposed)
        self._content["rounds"][str(number)] = [asdict(one) for one in results]
        self._write()

    def finish(self, confirmed: Proposal) -> None:
        self._content["confirmation"] = asdict(confirmed)
        self._write()

    def _write(self) -> None:
        make_folders(DISK, self._path.parent)
        write_file(DISK, self._path, json.dumps(self._content, indent=1).encode())
