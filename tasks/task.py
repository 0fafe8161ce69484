"""Open a benchmark as a Task: lm-eval's prompts and metrics, one document at a time.

Requests are built for one document at a time, so memory does not grow with the task. No model is needed.
"""

import contextlib
import json
import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
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
from lm_eval.utils import apply_template

from sampler.errors import InputError, UnavailableError
from sampler.hub import hub_problem, retry_hub
from sampler.records import GENERATE
from tasks import lookup, sandbox
from tasks.catalog import TaskSpec, check_requirements, require_sandbox
from tasks.documents import Description, Document, Provenance, TaskOptions, published_documents, select_documents
from tasks.sources import Folder, Source, choose_source

FEWSHOT_SEED = 1234  # lm-eval's; reset for every document, so that its examples do not depend on earlier documents
BOOTSTRAP_ITERATIONS = 100_000
MAX_CACHED_PROMPTS = 1024
SLOW_METRICS = ("bleu", "chrf", "chrf++", "ter")  # lm-eval bootstraps these with 100 iterations

ChatTemplate = Callable[..., str]
Metrics = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Task:
    """A benchmark with its documents loaded."""

    spec: TaskSpec
    options: TaskOptions
    provenance: Provenance
    subtasks: Mapping[str, Any]  # lm-eval tasks by name
    documents: Sequence[Document]
    _contexts: dict[Any, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def kind(self) -> str:
        return self.spec.kind

    @property
    def primary(self) -> str:
        return self.spec.primary

    @property
    def fewshot(self) -> int:
        return _fewshot(self.spec, self.options)

    @property
    def lm_eval_tasks(self) -> list[Any]:
        """The argument for `lm_eval.simple_evaluate(tasks=…)`: the same task objects, in a group if this is one."""
        if not self.spec.is_group:
            return list(self.subtasks.values())
        metrics = [name.partition(",")[0] for name in self.spec.metrics]
        aggregates = [AggMetricConfig(metric=name, weight_by_size=True) for name in dict.fromkeys(metrics)]
        group = Group(name=self.name, aggregate_metric_list=aggregates)
        for subtask in self.subtasks.values():
            group.add(subtask)
        return [group]

    def describe(self, document: Document) -> Description:
        """The document's question, options and correct answer as text."""
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
        """lm-eval's requests for a document. `chat_template` renders messages; None means plain text."""
        task = self.subtasks[document.subtask]
        content = task.task_docs[document.index]
        requests = task.construct_requests(
            doc=content,
            ctx=self._context(document, chat_template),
            metadata=(document.subtask, document.index, task.config.repeats),
            apply_chat_template=chat_template is not None,
            chat_template=chat_template,
        )
        return requests if isinstance(requests, list) else [requests]

    def _context(self, document: Document, chat_template: ChatTemplate | None) -> Any:
        """The prompt of a document. Recent prompts are cached: a sweep runs many configurations on the same shard."""
        key = (document.subtask, document.index, chat_template)
        if key not in self._contexts:
            task = self.subtasks[document.subtask]
            content = task.task_docs[document.index]
            task.set_fewshot_seed(seed=FEWSHOT_SEED)
            if len(self._contexts) >= MAX_CACHED_PROMPTS:
                del self._contexts[next(iter(self._contexts))]
            self._contexts[key] = task.fewshot_context(
                content,
                num_fewshot=task.config.num_fewshot or 0,
                apply_chat_template=chat_template is not None,
                fewshot_as_multiturn=True,
                chat_template=chat_template,
                gen_prefix=task.doc_to_prefix(content),
            )
        return self._contexts[key]

    def score(self, document: Document, requests: Sequence[Instance]) -> Metrics:
        """A document's metrics, from requests whose `resps` hold all responses.

        As in the catalog, a metric's name includes the filter only if the task has several.
        """
        task = self.subtasks[document.subtask]
        task._instances = list(requests)  # the only way to apply lm-eval's filters to one document
        task.apply_filters()
        task._instances = None
        metrics: Metrics = {}
        filters = list(requests[0].filtered_resps)
        for filter_name in filters:
            responses = [request.filtered_resps[filter_name] for request in requests]
            for metric, value in task.process_results(requests[0].doc, responses).items():
                metrics[f"{metric},{filter_name}" if len(filters) > 1 else metric] = _without_numpy(value)
        return metrics

    def correct(self, metrics: Metrics) -> bool | None:
        """Whether the primary metric counts the document as correct; None if it is not a yes/no metric."""
        value = metrics.get(self.primary)
        return bool(value) if value in (0, 1) else None

    def aggregate(self, results: Iterable[tuple[Document, Metrics]]) -> dict[str, dict[str, Any]]:
        """lm-eval's `results`: each metric with its standard error, per subtask and for the group."""
        values: dict[str, dict[str, list[Any]]] = defaultdict(lambda: defaultdict(list))
        for document, metrics in sorted(results, key=lambda result: result[0].index):
            for name, value in metrics.items():
                values[document.subtask][name].append(value)
        scores = {
            name: _aggregate_subtask(task, values[name]) for name, task in self.subtasks.items() if name in values
        }
        for group in self.lm_eval_tasks:
            if isinstance(group, Group):
                for name in self.subtasks.keys() - scores.keys():
                    group.pop(name)
                scores[self.name] = dict(group.aggregate(scores))
        return scores


def _aggregate_subtask(task: Any, values_by_metric: Mapping[str, list[Any]]) -> dict[str, Any]:
    scores: dict[str, Any] = {"name": task.config.task, "alias": task.config.task_alias or task.config.task}
    scores["sample_len"] = max(len(values) for values in values_by_metric.values())
    for name, values in values_by_metric.items():
        metric, comma, filter_name = name.rpartition(",")
        metric, filter_name = (metric, filter_name) if comma else (name, task._filters[0].name)
        combine = task.aggregation().get(metric, mean)
        error = stderr_for_metric(combine, bootstrap_iters=100 if metric in SLOW_METRICS else BOOTSTRAP_ITERATIONS)
        scores[f"{metric},{filter_name}"] = combine(values)
        scores[f"{metric}_stderr,{filter_name}"] = error(values) if error and len(values) > 1 else "N/A"
    return scores


def _without_numpy(value: Any) -> Any:
    """The value with numpy numbers and arrays converted to Python numbers and lists."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, list | tuple):
        return [_without_numpy(item) for item in value]
    return value


@contextlib.contextmanager
def quiet_lm_eval() -> Iterator[None]:
    """Suppress lm-eval's configuration warnings and the progress bars of datasets."""
    logger = logging.getLogger("lm_eval")
    level, progress_bars = logger.level, not datasets.are_progress_bars_disabled()
    logger.setLevel(logging.ERROR)
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        logger.setLevel(level)
        if progress_bars:
            datasets.enable_progress_bars()


def open_task(name: str, options: TaskOptions | None = None) -> Task:
    """Load the benchmark `name`. Raises an InputError if it is unknown or anything that it needs is missing."""
    options = options or TaskOptions()
    spec = lookup.find_task_spec(name)
    fewshot = _fewshot(spec, options)
    if spec.max_fewshot is not None:
        _check_fewshot(spec.name, fewshot, spec.max_fewshot)
    check_requirements(spec, options)
    source = choose_source(options.data, dict(options.revisions))
    if spec.dataset:
        source.check(spec.dataset, gated=spec.gated)
    with quiet_lm_eval():
        subtasks = _build_subtasks(spec, options, source, fewshot)
    for subtask, task in subtasks.items():
        # If examples come from the evaluated split, the document being evaluated is not one of them.
        reserved = 1 if task.fewshot_cfg.split == task.config.test_split else 0
        available = max(0, len(task.sampler.df) - reserved) if hasattr(task, "sampler") else 0
        _check_fewshot(subtask, fewshot, available)
    used = {task.config.dataset_path for task in subtasks.values() if lookup.is_hub_dataset(task.config.dataset_path)}
    return Task(
        spec=spec,
        options=options,
        provenance=Provenance(source=source.kind, datasets={path: source.revision(path) for path in sorted(used)}),
        subtasks=subtasks,
        documents=select_documents(spec.name, subtasks, options),
    )


def published_task(name: str, options: TaskOptions) -> Task | None:
    """The benchmark with its document ids but no content, for planning; None if its size is not in the catalog."""
    spec = lookup.find_task_spec(name)
    if not spec.published_sizes:
        return None
    return Task(
        spec=spec,
        options=options,
        provenance=Provenance(source="published", datasets={}),
        subtasks={},
        documents=published_documents(spec.published_sizes, options),
    )


def _fewshot(spec: TaskSpec, options: TaskOptions) -> int:
    return spec.fewshot if options.fewshot is None else options.fewshot


def _check_fewshot(name: str, fewshot: int, available: int) -> None:
    if fewshot > available:
        raise InputError(
            f"--fewshot must be at most {available}, the number of examples of task {name} (got {fewshot})"
        )


def _build_subtasks(spec: TaskSpec, options: TaskOptions, source: Source, fewshot: int) -> dict[str, Any]:
    """lm-eval's task objects, with the catalog's configuration and documents from `source`."""
    overrides: dict[str, Any] = {**spec.overrides, "num_fewshot": fewshot}
    if "langdetect" in spec.packages:
        _seed_language_detection()
    if spec.full_config is not None:
        config = {**spec.full_config, **overrides}
        if spec.code_tests is not None:
            config["metric_list"] = [{"metric": spec.primary, "aggregation": "mean", "higher_is_better": True}]
            config["process_results"] = _program_scorer(spec, config, sandboxed=require_sandbox(spec.name, options))
        subtasks = {spec.name: ConfigurableTask(config={**config, **_documents_override(spec, config, source)})}
    else:
        subtasks = _load_stock_tasks(spec, overrides, source)
    max_new_tokens = options.max_new_tokens or spec.max_new_tokens
    if max_new_tokens is not None and spec.kind == GENERATE:
        for task in subtasks.values():
            task.set_config(key="generation_kwargs", value={"max_gen_toks": max_new_tokens}, update=True)
    return subtasks


def _seed_language_detection() -> None:
    """Make langdetect deterministic."""
    from langdetect import DetectorFactory

    DetectorFactory.seed = 0


def _load_stock_tasks(spec: TaskSpec, overrides: Mapping[str, Any], source: Source) -> dict[str, Any]:
    paths = lookup.stock_tasks(spec.stock_folder)
    manager = TaskManager(include_path=str(lookup.stock_root() / spec.stock_folder), include_defaults=False)
    loaded: dict[str, Any] = {}
    for name in spec.subtasks:
        config = lookup.load_stock_config(paths[name][1])
        dataset = config.get("dataset_path")
        if not _has_subject(source, spec, config):
            continue
        # lm-eval applies overrides to a stock task only where it is a member of a group.
        member = {"task": name, **overrides, **_documents_override(spec, config, source)}
        group = {"group": f"{name}_alone", "task": [member]}
        try:
            loaded |= retry_hub(partial(manager.load, [group]))["tasks"]
        except ModuleNotFoundError as error:
            install = spec.install_command or f"pip install {error.name}"
            raise InputError(f"task {name} needs the package {error.name}, which is missing: {install}") from None
        except (KeyError, UndefinedError) as error:
            raise InputError(f"task {name} cannot read its first document: {error} is missing") from None
        except DatasetNotFoundError:
            raise InputError(f"task {name}: the Hub has no dataset {dataset}, or you have no access to it") from None
        except (HTTPError, OSError) as error:  # only where lm-eval downloads documents itself
            kind = UnavailableError if isinstance(error, ConnectionError) else InputError
            raise kind(f"task {name} cannot download its documents: {hub_problem(error)}") from None
    if not loaded:
        raise InputError(f"the {source.kind} documents include none for task {spec.name}")
    return loaded


def _has_subject(source: Source, spec: TaskSpec, config: Mapping[str, Any]) -> bool:
    """Whether `source` has the subject; only the bundled documents leave out subjects of a group."""
    if not isinstance(source, Folder) or source.kind != "bundled" or not spec.is_group:
        return True
    return source.has(str(config.get("dataset_path")), config.get("dataset_name"))


def _documents_override(spec: TaskSpec, config: Mapping[str, Any], source: Source) -> dict[str, Any]:
    """The lm-eval configuration key that loads a task's documents from `source`."""
    dataset, part = config.get("dataset_path"), config.get("dataset_name")
    if not lookup.is_hub_dataset(dataset) or (config.get("dataset_kwargs") or {}).get("data_files"):
        return {}  # lm-eval builds or downloads these documents itself
    assert isinstance(dataset, str)
    configured = [config.get(key) for key in ("test_split", "validation_split", "training_split", "fewshot_split")]
    configured.append((config.get("fewshot_config") or {}).get("split"))
    splits = list(dict.fromkeys(split for split in configured if split))
    evaluated = config.get("test_split") or config.get("validation_split")

    def load(**_: Any) -> dict[str, datasets.Dataset]:
        loaded = dict(source.load(dataset, part, splits, spec.check_row))
        if evaluated not in loaded:
            where = f"{dataset} ({part})" if part else dataset
            raise InputError(f"{where} has no files for its split {evaluated!r} in the {source.kind} source")
        for split in splits:  # a split of few-shot examples may be missing
            loaded.setdefault(split, loaded[evaluated].select([]))
        return loaded

    return {"custom_dataset": load}


def _program_scorer(spec: TaskSpec, config: Mapping[str, Any], *, sandboxed: bool) -> Callable[..., Metrics]:
    """A `process_results` function for pass@1: the share of a document's generated programs that pass its tests."""
    assert spec.code_tests is not None
    code_tests = spec.code_tests

    def score_programs(document: dict[str, Any], responses: Sequence[Any]) -> Metrics:
        (answer,) = responses
        programs = [answer] if isinstance(answer, str) else answer
        tests = code_tests(document, apply_template(config["doc_to_target"], document))
        passed = [sandbox.run_program(program, tests, sandboxed=sandboxed).passed for program in programs]
        return {spec.primary: sum(passed) / len(passed)}

    return score_programs
