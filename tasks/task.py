"""lm-eval's tasks document by document: prompts out, responses in, scores and aggregates. Knows no model.

Documents have a fixed order, ids that do not depend on how many are taken, and a hash of their content. Requests are
built for one document at a time, so memory does not grow with the task.
"""

import contextlib
import json
import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import datasets
from datasets.exceptions import DatasetNotFoundError
from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]
from jinja2 import UndefinedError
from lm_eval.api.group import Group
from lm_eval.api.instance import Instance
from lm_eval.api.metrics import mean, stderr_for_metric
from lm_eval.api.task import ConfigurableTask
from lm_eval.config.group import AggMetricConfig
from lm_eval.tasks import TaskManager

from sampler.errors import InputError, UnavailableError
from sampler.hub import hub_problem, retry_hub
from tasks import lookup, sandbox
from tasks.catalog import GENERATE, Entry, cage_for, check_needs, seed_language_detection
from tasks.documents import Description, Document, Provenance, TaskOptions, select_documents
from tasks.sources import Source, choose_source

FEWSHOT_SEED = 1234  # lm-eval's; set anew for every document, so its worked examples do not depend on those before it


BOOTSTRAP = 100_000


ChatTemplate = Callable[..., str]


Metrics = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Task:
    """An opened benchmark: its documents are there, its prompts and metrics are lm-eval's."""

    entry: Entry
    options: TaskOptions
    provenance: Provenance
    subtasks: Mapping[str, Any]  # lm-eval tasks by name
    documents: Sequence[Document]

    @property
    def name(self) -> str:
        return self.entry.name

    @property
    def kind(self) -> str:
        return self.entry.kind

    @property
    def primary(self) -> str:
        return self.entry.primary

    @property
    def fewshot(self) -> int:
        return self.entry.fewshot if self.options.fewshot is None else self.options.fewshot

    @property
    def evaluable(self) -> list[Any]:
        """What `lm_eval.simple_evaluate(tasks=…)` takes: the same task objects, as one group where it is one."""
        if not self.entry.is_group:
            return list(self.subtasks.values())
        metrics = [name.partition(",")[0] for name in self.entry.metrics]
        aggregates = [AggMetricConfig(metric=name, weight_by_size=True) for name in dict.fromkeys(metrics)]
        group = Group(name=self.name, aggregate_metric_list=aggregates)
        for subtask in self.subtasks.values():
            group.add(subtask)
        return [group]

    def describe(self, document: Document) -> Description:
        task = self.subtasks[document.subtask]
        content = task.task_docs[document.index]
        choices = task.doc_to_choice(content) if task.config.doc_to_choice is not None else None
        gold = task.doc_to_target(content)
        if choices is not None and isinstance(gold, int):
            gold = choices[gold]
        return Description(
            doc_id=document.doc_id,
            subtask=document.subtask,
            doc_hash=document.doc_hash,
            question=str(task.doc_to_text(content)),
            choices=None if choices is None else tuple(str(choice) for choice in choices),
            gold=gold if isinstance(gold, str) else json.dumps(gold),
            level=str(content["level"]) if isinstance(content.get("level"), str | int) else None,
        )

    def requests(self, document: Document, chat_template: ChatTemplate | None) -> list[Instance]:
        """lm-eval's requests for one document. `chat_template` renders messages; None leaves them plain text."""
        task = self.subtasks[document.subtask]
        content = task.task_docs[document.index]
        task.set_fewshot_seed(seed=FEWSHOT_SEED)
        context = task.fewshot_context(
            content,
            num_fewshot=task.config.num_fewshot or 0,
            apply_chat_template=chat_template is not None,
            fewshot_as_multiturn=True,
            chat_template=chat_template,
            gen_prefix=task.doc_to_prefix(content),
        )
        requests = task.construct_requests(
            doc=content,
            ctx=context,
            metadata=(document.subtask, document.index, task.config.repeats),
            apply_chat_template=chat_template is not None,
            chat_template=chat_template,
        )
        return requests if isinstance(requests, list) else [requests]

    def score(self, document: Document, requests: Sequence[Instance]) -> Metrics:
        """A document's metrics, once every request's `resps` holds its responses."""
        task = self.subtasks[document.subtask]
        task._instances = list(requests)  # the only way to have lm-eval's filters run on one document
        task.apply_filters()
        task._instances = None
        metrics: Metrics = {}
        for filter_name in requests[0].filtered_resps:
            responses = [request.filtered_resps[filter_name] for request in requests]
            values = task.process_results(requests[0].doc, responses)
            metrics |= {self._metric_name(metric, filter_name, requests[0]): value for metric, value in values.items()}
        return {name: _plain(value) for name, value in metrics.items()}

    def correct(self, metrics: Metrics) -> bool | None:
        """Whether the primary metric counts the document as right; None where it is no yes or no."""
        value = metrics.get(self.primary)
        return bool(value) if value in (0, 1) else None

    def aggregate(self, results: Iterable[tuple[Document, Metrics]]) -> dict[str, dict[str, Any]]:
        """lm-eval's `results`: per subtask, and for the group, each metric and its standard error."""
        raw: dict[str, dict[str, list[Any]]] = defaultdict(lambda: defaultdict(list))
        for document, metrics in sorted(results, key=lambda result: result[0].index):
            for name, value in metrics.items():
                raw[document.subtask][name].append(value)
        found = {name: self._aggregate_one(task, raw[name]) for name, task in self.subtasks.items() if name in raw}
        for group in self.evaluable:
            if isinstance(group, Group):
                for name in self.subtasks.keys() - found.keys():
                    group.pop(name)
                found[self.name] = dict(group.aggregate(found))
        return found

    def _aggregate_one(self, task: Any, raw: Mapping[str, list[Any]]) -> dict[str, Any]:
        alias = task.config.task_alias or task.config.task
        found: dict[str, Any] = {"name": task.config.task, "alias": alias}
        found["sample_len"] = max(len(values) for values in raw.values())
        for name, values in raw.items():
            metric, comma, filter_name = name.rpartition(",")
            metric, filter_name = (metric, filter_name) if comma else (name, task._filters[0].name)
            combine = task.aggregation().get(metric, mean)
            error = stderr_for_metric(combine, bootstrap_iters=100 if metric in SLOW_METRICS else BOOTSTRAP)
            found[f"{metric},{filter_name}"] = combine(values)
            found[f"{metric}_stderr,{filter_name}"] = error(values) if error and len(values) > 1 else "N/A"
        return found

    def _metric_name(self, metric: str, filter_name: str, request: Instance) -> str:
        """As in the catalog: the filter is part of a name only where there are several."""
        return f"{metric},{filter_name}" if len(request.filtered_resps) > 1 else metric


SLOW_METRICS = ("bleu", "chrf", "chrf++", "ter")  # lm-eval draws these a hundred times only


def _plain(value: Any) -> Any:
    """Numbers and lists instead of numpy's."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


@contextlib.contextmanager
def quiet(name: str = "lm_eval") -> Iterator[None]:
    """lm-eval tells each configuration it reads; ours are as we wrote them."""
    logger = logging.getLogger(name)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def open_task(name: str, options: TaskOptions | None = None) -> Task:
    """The benchmark `name` with its documents; whatever is missing is one sentence, before any model is loaded."""
    options = options or TaskOptions()
    entry = lookup.find_entry(name)
    fewshot = _checked_fewshot(entry, options)
    check_needs(entry, options)
    source = choose_source(options.data, dict(options.revisions))
    if entry.dataset:
        source.check(entry.dataset, gated=entry.gated)
    with quiet(), _no_progress():
        subtasks = _build(entry, options, source, fewshot)
    _check_examples(subtasks, fewshot)
    used = {task.config.dataset_path for task in subtasks.values() if lookup.is_repository(task.config.dataset_path)}
    return Task(
        entry=entry,
        options=options,
        provenance=Provenance(source=source.kind, datasets={path: source.revision(path) for path in sorted(used)}),
        subtasks=subtasks,
        documents=select_documents(entry.name, subtasks, options),
    )


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
    index = lookup.index(entry.stock)
    manager = TaskManager(include_path=str(lookup.ROOT / entry.stock), include_defaults=False)
    built: dict[str, Any] = {}
    for name in entry.subtasks:
        configuration = lookup.configuration(index[name][1])
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
    if not lookup.is_repository(dataset) or (configuration.get("dataset_kwargs") or {}).get("data_files"):
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
        passed = [sandbox.run(f"{program}\n{tests}", cage=cage).passed for program in programs]
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
