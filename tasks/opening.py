"""Opens a benchmark: checks what it needs, gets its documents, builds lm-eval's task objects. Loads no model."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import datasets
from datasets.exceptions import DatasetNotFoundError
from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]
from jinja2 import UndefinedError
from lm_eval.api.task import ConfigurableTask
from lm_eval.tasks import TaskManager

from sampler.errors import InputError, UnavailableError
from sampler.hub import hub_problem, retry_hub
from tasks import code_exec, stock
from tasks.catalog import CATALOG, GENERATE, LOGLIKELIHOOD, Entry, nearest
from tasks.harness import Provenance, Task, quiet, select
from tasks.needs import cage_for, check_needs, seed_language_detection
from tasks.options import TaskOptions
from tasks.sources import Source, choose_source

KINDS = {"generate_until": GENERATE, "multiple_choice": LOGLIKELIHOOD, "loglikelihood": LOGLIKELIHOOD}


def open_task(name: str, options: TaskOptions | None = None) -> Task:
    """The benchmark `name` with its documents; whatever is missing is one sentence, before any model is loaded."""
    options = options or TaskOptions()
    entry = find_entry(name)
    fewshot = _checked_fewshot(entry, options)
    check_needs(entry, options)
    source = choose_source(options.data, dict(options.revisions))
    if entry.dataset:
        source.check(entry.dataset, gated=entry.gated)
    with quiet(), _no_progress():
        subtasks = _build(entry, options, source, fewshot)
    _check_examples(subtasks, fewshot)
    used = {task.config.dataset_path for task in subtasks.values() if _is_repository(task.config.dataset_path)}
    return Task(
        entry=entry,
        options=options,
        provenance=Provenance(source=source.kind, datasets={path: source.revision(path) for path in sorted(used)}),
        subtasks=subtasks,
        documents=select(entry, subtasks, options),
    )


def find_entry(name: str) -> Entry:
    """From the catalog, or made up for a task of lm-eval's own."""
    if name in CATALOG:
        return CATALOG[name]
    for entry in CATALOG.values():
        if name in (*entry.subtasks, *entry.also):
            return _subject(entry, name)
    kind, path = stock.index().get(name, (None, None))
    if path is None:
        raise nearest(name, sorted(stock.index()))
    return _other_group(name) if kind == "group" else _other_task(name)


def _subject(entry: Entry, name: str) -> Entry:
    """One subject of a group, with the group's prompts."""
    fields = {field: getattr(entry, field) for field in entry.__dataclass_fields__}
    return Entry(**fields | {"name": name, "subtasks": (name,), "documents": 0})


def _other_task(name: str) -> Entry:
    _, path = stock.index()[name]
    configuration = stock.configuration(path)
    output = configuration.get("output_type", "generate_until")
    if "class" in configuration or output not in KINDS:
        what = "is written in Python" if "class" in configuration else f"is of the kind {output}"
        raise InputError(f"task {name} {what}; {', '.join(KINDS)} are the kinds that can be run")
    if configuration.get("doc_to_image") or configuration.get("doc_to_audio"):
        raise InputError(f"task {name} shows pictures or sounds; only tasks of text can be run")
    return Entry(
        name=name,
        stock=path.parent.relative_to(stock.ROOT).as_posix(),
        subtasks=(name,),
        kind=KINDS[output],
        primary=_first_metric(configuration),
        metrics=(),
        documents=0,
        dataset=configuration["dataset_path"] if _is_repository(configuration.get("dataset_path")) else "",
        fewshot=configuration.get("num_fewshot") or 0,
        runs_code=bool(configuration.get("unsafe_code")),
    )


def _other_group(name: str) -> Entry:
    """A group outside the catalog must be of one kind and share its metrics."""
    _, path = stock.index()[name]
    members = [leaf for member in stock.configuration(path).get("task", []) for leaf in _leaves(member)]
    entries = [_other_task(member) for member in members]
    if len({(entry.kind, entry.primary, entry.runs_code) for entry in entries}) != 1:
        raise InputError(f"task {name} is a group of unlike tasks; name its tasks instead")
    kept = {field: getattr(entries[0], field) for field in entries[0].__dataclass_fields__}
    return Entry(**kept | {"name": name, "stock": ".", "subtasks": tuple(members), "metrics": (kept["primary"],)})


def _leaves(member: Any) -> Sequence[str]:
    """The tasks behind one entry of a group's list, which may be a task, a group or a task with changes."""
    name = str(member if isinstance(member, str) else member.get("task") or member.get("group"))
    if name not in stock.index():
        raise InputError(f"a group holds {name!r}, which is no task of its own; name its tasks instead")
    kind, path = stock.index()[name]
    if kind == "task":
        return [name]
    return [leaf for inner in stock.configuration(path).get("task", []) for leaf in _leaves(inner)]


def _first_metric(configuration: Mapping[str, Any]) -> str:
    metrics = configuration.get("metric_list") or [{"metric": "acc"}]
    metric, filters = metrics[0]["metric"], configuration.get("filter_list") or []
    return f"{metric},{filters[0]['name']}" if len(filters) > 1 else str(metric)


def _is_repository(path: str | None) -> bool:
    return path is not None and path.count("/") == 1


def _checked_fewshot(entry: Entry, options: TaskOptions) -> int:
    fewshot = entry.fewshot if options.fewshot is None else options.fewshot
    if entry.most_fewshot is not None and fewshot > entry.most_fewshot:
        raise InputError(f"--fewshot {fewshot}: task {entry.name} has {entry.most_fewshot} worked examples to show")
    return fewshot


def _check_examples(subtasks: Mapping[str, Any], fewshot: int) -> None:
    for name, task in subtasks.items():
        # One more than shown: where examples come from the documents themselves, the asked one is left out.
        spare = 1 if task.fewshot_cfg.split == task.config.test_split else 0
        available = max(0, len(task.sampler.df) - spare) if hasattr(task, "sampler") else 0
        if fewshot > available:
            raise InputError(f"--fewshot {fewshot}: task {name} has {available} worked examples to show")


def _build(entry: Entry, options: TaskOptions, source: Source, fewshot: int) -> dict[str, Any]:
    """lm-eval's task objects, with our configuration over theirs and documents from our source."""
    common: dict[str, Any] = {**entry.overrides, "num_fewshot": fewshot}
    if entry.punkt:
        seed_language_detection()
    if entry.whole is not None:
        whole = {**entry.whole, **common}
        if entry.runs_code:
            cage = cage_for(entry.name, options)
            metric = {"metric": _pass_at_k(cage), "aggregation": "mean", "higher_is_better": True, "k": [1]}
            whole["metric_list"] = [metric]
        built = {entry.name: ConfigurableTask(config={**whole, **_documents(entry, whole, source)})}
    else:
        built = _from_stock(entry, common, source)
    tokens = options.max_new_tokens or entry.max_new_tokens
    for task in built.values():
        if tokens is not None and entry.kind == GENERATE:
            task.set_config(key="generation_kwargs", value={"max_gen_toks": tokens}, update=True)
    return built


def _from_stock(entry: Entry, common: Mapping[str, Any], source: Source) -> dict[str, Any]:
    index = stock.index(entry.stock)
    manager = TaskManager(include_path=str(stock.ROOT / entry.stock), include_defaults=False)
    built: dict[str, Any] = {}
    for name in entry.subtasks:
        configuration = stock.configuration(index[name][1])
        dataset, part = configuration.get("dataset_path"), configuration.get("dataset_name")
        if source.kind == "bundled" and entry.is_group and not source.holds(str(dataset), part):
            continue  # the bundled sets have some of the subjects
        item = {"task": name, **common, **_documents(entry, configuration, source)}
        try:
            # In a group's list of members, lm-eval lays keys over a stock task.
            wanted = [{"group": f"{name}_alone", "task": [item]}]
            built |= retry_hub(partial(manager.load, wanted))["tasks"]
        except ModuleNotFoundError as error:
            install = entry.install or f"pip install {error.name}"
            raise InputError(f"task {name} needs the package {error.name}, which is missing: {install}") from None
        except (KeyError, UndefinedError) as error:
            raise InputError(f"task {name} cannot read its first document: {error} is missing") from None
        except DatasetNotFoundError:
            raise InputError(f"task {name}: the Hub has no dataset {dataset} that you can read") from None
        except (HTTPError, OSError) as error:  # only where lm-eval downloads documents itself
            kind = UnavailableError if isinstance(error, ConnectionError) else InputError
            raise kind(f"task {name} cannot download its documents: {hub_problem(error)}") from None
    if not built:
        raise InputError(f"the {source.kind} documents hold nothing of task {entry.name}")
    return built


def _documents(entry: Entry, configuration: Mapping[str, Any], source: Source) -> dict[str, Any]:
    """The configuration key by which lm-eval asks us for a task's documents."""
    dataset, part = configuration.get("dataset_path"), configuration.get("dataset_name")
    if not _is_repository(dataset) or (configuration.get("dataset_kwargs") or {}).get("data_files"):
        return {}  # not a dataset repository: lm-eval knows how to make these documents
    assert isinstance(dataset, str)
    asked = [configuration.get(key) for key in ("test_split", "validation_split", "training_split", "fewshot_split")]
    asked.append((configuration.get("fewshot_config") or {}).get("split"))
    splits = list(dict.fromkeys(split for split in asked if split))

    def load(**_: Any) -> dict[str, datasets.Dataset]:
        found = dict(source.load(dataset, part, splits, entry.check))
        evaluated = asked[0] or asked[1]
        if evaluated not in found:
            where = f"{dataset} ({part})" if part else dataset
            raise InputError(f"{where} has no files for its split {evaluated!r} in the {source.kind} source")
        for split in splits:  # worked examples that are not there are none
            found.setdefault(split, found[evaluated].select([]))
        return found

    return {"custom_dataset": load}


def _pass_at_k(cage: str) -> Any:
    def pass_at_k(references: list[str], predictions: list[list[str]], k: list[int]) -> dict[str, float]:
        """The share of an answer's programs that pass; one is drawn, so pass@1 is their mean."""
        assert k == [1]
        (tests,), (programs,) = references, predictions
        passed = [code_exec.run(f"{program}\n{tests}", cage=cage).passed for program in programs]
        return {"pass@1": sum(passed) / len(passed)}

    return pass_at_k


class _no_progress:
    """datasets draws bars for steps of milliseconds."""

    def __enter__(self) -> None:
        self.shown = not datasets.are_progress_bars_disabled()
        datasets.disable_progress_bars()

    def __exit__(self, *_: object) -> None:
        if self.shown:
            datasets.enable_progress_bars()
