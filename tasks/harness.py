"""lm-eval's tasks document by document: prompts out, responses in, scores and aggregates. Knows no model.

Documents have a fixed order, ids that do not depend on how many are taken, and a hash of their content. Requests are
built for one document at a time, so memory does not grow with the task.
"""

import contextlib
import hashlib
import json
import logging
import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lm_eval.api.group import Group
from lm_eval.api.instance import Instance
from lm_eval.api.metrics import mean, stderr_for_metric
from lm_eval.config.group import AggMetricConfig

from sampler import InputError
from tasks.catalog import Entry
from tasks.options import TaskOptions

FEWSHOT_SEED = 1234  # lm-eval's; set anew for every document, so its worked examples do not depend on those before it
BOOTSTRAP = 100_000

ChatTemplate = Callable[..., str]
Metrics = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Document:
    """One question of a task. `index` is its place in lm-eval's evaluation split."""

    doc_id: str
    subtask: str
    index: int
    doc_hash: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Description:
    """A document for people: as asked, with its options and what is right."""

    doc_id: str
    subtask: str
    doc_hash: str
    question: str
    choices: tuple[str, ...] | None
    gold: str
    level: str | None  # how hard it is, where its dataset says so


@dataclass(frozen=True, kw_only=True, slots=True)
class Provenance:
    """What the documents were made of; part of a result's identity."""

    source: str  # hub, folder or bundled
    datasets: Mapping[str, str]  # dataset: commit on the Hub, or a hash of the files read


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


def select(entry: Entry, subtasks: Mapping[str, Any], options: TaskOptions) -> list[Document]:
    """The chosen documents in their fixed order: subtask by subtask, each in the order of its data."""
    sizes = {name: len(task.task_docs) for name, task in subtasks.items()}
    chosen = {name: range(min(size, options.limit or size)) for name, size in sizes.items()}
    if options.sample is not None:
        chosen = _spread(sizes, options.sample, options.seed)
    if not any(chosen.values()):
        raise InputError(f"task {entry.name} has no documents here")
    return [document for name, task in subtasks.items() for document in _documents(name, task, list(chosen[name]))]


def _spread(sizes: Mapping[str, int], wanted: int, seed: int) -> dict[str, Any]:
    """A random `wanted`, each subtask in proportion. A larger sample with the same seed contains the smaller one."""
    ranked: list[tuple[float, str, int]] = []
    for name, size in sizes.items():
        generator = random.Random(f"{seed}:{name}")
        offset = generator.random()
        order = generator.sample(range(size), size)
        ranked += [((place + offset) / size, name, index) for place, index in enumerate(order)]
    chosen: dict[str, list[int]] = {name: [] for name in sizes}
    for _, name, index in sorted(ranked)[:wanted]:
        chosen[name].append(index)
    return {name: sorted(indices) for name, indices in chosen.items()}


def _documents(subtask: str, task: Any, indices: list[int]) -> Iterator[Document]:
    contents = task.task_docs.select(indices)  # a walk; asking for each by its place takes three times as long
    for index, content in zip(indices, contents, strict=True):
        text = json.dumps(content, sort_keys=True, ensure_ascii=False, default=str)
        digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
        yield Document(doc_id=f"{subtask}/{index}", subtask=subtask, index=index, doc_hash=digest[:16])


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
