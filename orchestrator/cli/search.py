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
from sampler.records import GENERATE

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
            untried = [name for name in self._coordinates if name not in self._known and name not in chosen]
            if untried:
                chosen.append(self._ask(chosen) or self._random.choice(untried))
        return chosen

    def _ask(self, chosen: Sequence[str]) -> str | None:
        """A configuration suggested by Optuna that is neither known nor chosen; None if it suggests only others."""
        for _ in range(ATTEMPTS):
            self._asked += 1
            trial_id = str(self._asked)
            configuration = self._nearest(self._optuna.suggest(trial_id))
            if configuration in self._known:
                self._optuna.on_trial_complete(trial_id, asdict(self._known[configuration]))
            elif configuration is None or configuration in chosen:
                self._optuna.on_trial_complete(trial_id, error=True)
            else:
                self._waiting[configuration] = trial_id
                return configuration
        return None

    def _nearest(self, point: Mapping[str, Any]) -> str | None:
        """The configuration at this point, or else the one whose rule has the closest number."""
        exact = [name for name in point if name != STRENGTH]
        distances = {
            configuration: abs(own[STRENGTH] - point[STRENGTH])
            for configuration, own in self._coordinates.items()
            if all(own[name] in (ANY, point[name]) for name in exact)
        }
        return min(distances, key=lambda configuration: distances[configuration], default=None)

    def tell(self, results: Iterable[Proposal]) -> None:
        """Gives the results of a round to Optuna."""
        for result in results:
            self._known[result.configuration] = result
            if (trial_id := self._waiting.pop(result.configuration, None)) is not None:
                self._optuna.on_trial_complete(trial_id, asdict(result))


def search_space(settings: Mapping[str, Any]) -> list[str]:
    """All policies with all decode settings of a sweep, and k=1 with settings that are not the first."""
    reference = first_settings(settings)
    at_k1 = [configuration for configuration in grid({**settings, "policies": ["k1"]}) if configuration != reference]
    others = [configuration for configuration in grid(settings) if ReusePolicy.parse(configuration.policy).k != 1]
    return [configuration.to_text(reference) for configuration in (*at_k1, *others)]


def coordinates(space: Sequence[str]) -> dict[str, dict[str, Any]]:
    """The point of each configuration: its rule, the rule's number, its layers, and the decode settings that vary.

    Numbers are replaced by their ranks in the space. ANY stands for what a configuration does not have, such as layers,
    or a threshold under another reveal rule.
    """
    configurations = [Configuration.parse(text) for text in space]
    values = {name: sorted({getattr(c, name) for c in configurations}) for name in varying_settings(configurations)}
    ranks: dict[str, dict[Any, int | str]] = {
        name: {value: str(value) if isinstance(value, bool | str) else rank for rank, value in enumerate(known)}
        for name, known in values.items()
    }
    rules: list[tuple[str, float, str]] = []
    for configuration in configurations:
        policy = ReusePolicy.parse(configuration.policy)
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
            **{
                name: rank[getattr(configuration, name)] if configuration.uses(name) else ANY
                for name, rank in ranks.items()
            },
        }
        for text, configuration, (rule, number, layers) in zip(space, configurations, rules, strict=True)
    }


def best_of(proposals: Iterable[Proposal], margin: float) -> Proposal | None:
    """The fastest confirmed configuration, else the fastest that was not rejected and lies within the margin."""
    possible = [proposal for proposal in proposals if proposal.outcome != REJECTED and proposal.difference >= -margin]
    return max(possible, key=lambda proposal: (proposal.outcome == CONFIRMED, proposal.speedup), default=None)


def search(command: SweepCommand, arguments: list[str], stop: StopSignals) -> int:
    """Runs a search and returns the number of failed trials. The same command continues an interrupted search."""
    settings = command.settings
    if find_spec("optuna") is None:
        raise InputError("--search needs Optuna; install it with: pip install 'reuse-sweep[search]'")
    if command.force is not None:
        raise InputError(
            "--force must not be used with --search: a search chooses its proposals by the rows it already has"
        )
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
    """Runs the best configuration on the other half of the documents. Returns the number of failed trials."""
    settings, best = command.settings, best_of(tried, command.settings.margin)
    documents = sum(proposal.documents for proposal in tried)
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
    proposals = []
    for text in proposed:
        decoded = Configuration.parse(text, base)
        scored = Configuration(policy=decoded.policy)  # without decode settings
        results = {
            task.task: result
            for task in tasks
            for result in task.configurations
            if result.resolved.configuration == (decoded if task.kind == GENERATE else scored)
        }
        comparisons = {task: result.comparison for task, result in results.items() if result.comparison is not None}
        speeds = [c.speedup.tokens for c in comparisons.values() if c.speedup and c.speedup.tokens]
        outcomes = {comparison.verdict.outcome for comparison in comparisons.values()}
        points = [comparison.difference.points.value for comparison in comparisons.values()]
        proposals.append(
            Proposal(
                configuration=text,
                outcome=REJECTED if REJECTED in outcomes else CONFIRMED if outcomes == {CONFIRMED} else UNDECIDED,
                difference=sum(points) / max(1, len(points)),
                speedup=math.exp(sum(math.log(speed.value) for speed in speeds) / len(speeds)) if speeds else 1.0,
                speedup_low=min((speed.low for speed in speeds), default=1.0),
                documents=sum(result.documents for result in results.values()),
                intervals=tuple(_intervals(task, comparison) for task, comparison in comparisons.items()),
            )
        )
    return proposals


def _intervals(task: str, comparison: Comparison) -> str:
    """gsm8k -0.5 points (-2.0 to +1.0), 1.25× (1.20 to 1.30)"""
    points, speed = comparison.difference.points, comparison.speedup.tokens if comparison.speedup else None
    shown = f"{task} {points.value:+.1f} points ({points.low:+.1f} to {points.high:+.1f})"
    return shown if speed is None else f"{shown}, {speed.value:.2f}× ({speed.low:.2f} to {speed.high:.2f})"


def _table(tried: Sequence[Proposal]) -> list[str]:
    width = max(len(proposal.configuration) for proposal in tried)
    return [
        f"{proposal.configuration:{width}}  {proposal.outcome:9}  {proposal.documents:>6,} documents  "
        f"{'; '.join(proposal.intervals)}"
        for proposal in sorted(tried, key=lambda proposal: -proposal.speedup)
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
                    f"the search in {folder} began with another {', '.join(changed)}: repeat the old values, or choose "
                    "another --name"
                )

    def results(self, number: int, proposed: Sequence[str]) -> list[Proposal] | None:
        """The results of a round, or None if it has not finished."""
        stored = self._content["rounds"].get(str(number))
        if stored is None:
            return None
        if [proposal["configuration"] for proposal in stored] != list(proposed):
            raise InputError(
                f"{self._path}: round {number} had other proposals, made by another version of Optuna; choose "
                "another --name"
            )
        return [Proposal(**{**proposal, "intervals": tuple(proposal["intervals"])}) for proposal in stored]

    def add(self, number: int, proposed: Sequence[str], results: Sequence[Proposal]) -> None:
        assert [result.configuration for result in results] == list(proposed)
        self._content["rounds"][str(number)] = [asdict(result) for result in results]
        self._write()

    def finish(self, confirmed: Proposal) -> None:
        self._content["confirmation"] = asdict(confirmed)
        self._write()

    def _write(self) -> None:
        make_folders(DISK, self._path.parent)
        write_file(DISK, self._path, json.dumps(self._content, indent=1).encode())
