"""Find a task by name: in the catalog, or among lm-eval's own YAML files without loading them all."""

import ast
import difflib
import functools
import importlib.util
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from sampler.errors import InputError
from sampler.records import GENERATE, LOGLIKELIHOOD
from tasks import hooks
from tasks.catalog import CATALOG, TaskSpec

KINDS = {"generate_until": GENERATE, "multiple_choice": LOGLIKELIHOOD, "loglikelihood": LOGLIKELIHOOD}
# Tests and row check of each dataset whose programs can be tested with the standard library alone.
CODE_DATASETS: dict[str, tuple[Any, Any]] = {
    "openai/openai_humaneval": (hooks.humaneval_tests, hooks.check_humaneval_row),
    "google-research-datasets/mbpp": (hooks.mbpp_tests, hooks.check_mbpp_row),
    "evalplus/mbppplus": (hooks.mbpp_tests, hooks.check_mbpp_row),
}
TASK_NAME = re.compile(r"""^["']?(task|group)["']?\s*:\s*["']?([\w.+:/-]+)["']?\s*(?:#.*)?$""", re.MULTILINE)


class _StockConfigLoader(yaml.SafeLoader):  # type: ignore[misc]
    """Reads !function tags as the names of the functions."""


_StockConfigLoader.add_constructor("!function", lambda loader, node: loader.construct_scalar(node))


def find_task_spec(name: str) -> TaskSpec:
    """The catalog's spec, or one derived from lm-eval's YAML files."""
    if name in CATALOG:
        return CATALOG[name]
    for spec in CATALOG.values():
        if name in (*spec.subtasks, *spec.variants):
            count = (spec.published_sizes | dict(spec.variants)).get(name, 0)
            return replace(spec, name=name, subtasks=(name,), document_count=count, sizes=())
    kind, _ = stock_tasks().get(name, (None, None))
    if kind is None:
        raise InputError(f"unknown task {name!r}: {_suggestion(name)}")
    return _stock_group_spec(name) if kind == "group" else _stock_task_spec(name)


def _suggestion(name: str) -> str:
    by_lowercase = {other.lower(): other for other in sorted(stock_tasks())}
    similar = difflib.get_close_matches(name.lower(), sorted(CATALOG), n=3, cutoff=0.5)
    close = difflib.get_close_matches(name.lower(), by_lowercase, n=4)
    similar += [by_lowercase[other] for other in close if other not in similar]
    if similar:
        return f"did you mean {', '.join(similar[:4])}?"
    return f"use one of {', '.join(CATALOG)} or the name of an lm-eval task"


def stock_root() -> Path:
    """lm-eval's directory of task files, found without importing lm-eval, which takes seconds."""
    package = importlib.util.find_spec("lm_eval")
    assert package is not None
    assert package.origin is not None
    return Path(package.origin).parent / "tasks"


@functools.cache
def stock_tasks(folder: str = ".") -> dict[str, tuple[str, Path]]:
    """All tasks and groups in a folder of lm-eval: name → ("task" or "group", file). The whole tree takes 1 s."""
    entries: dict[str, tuple[str, Path]] = {}
    for path in sorted((stock_root() / folder).rglob("*.yaml")):
        names = dict(TASK_NAME.findall(path.read_text(encoding="utf-8")))
        kind = "group" if "group" in names else "task"  # a group's file lists its members under "task"
        if kind in names:
            entries.setdefault(names[kind], (kind, path))
    return entries


def load_stock_config(path: Path) -> dict[str, Any]:
    """A task file merged with the files it includes. Functions are represented by their names."""
    with path.open(encoding="utf-8") as file:
        own: dict[str, Any] = yaml.load(file, Loader=_StockConfigLoader) or {}
    merged: dict[str, Any] = {}
    included = own.pop("include", [])
    for name in included if isinstance(included, list) else [included]:
        merged |= load_stock_config(path.parent / name)
    return merged | own


def is_hub_dataset(path: str | None) -> bool:
    return path is not None and path.count("/") == 1


def _stock_task_spec(name: str) -> TaskSpec:
    _, path = stock_tasks()[name]
    config = load_stock_config(path)
    output_type = config.get("output_type", "generate_until")
    if "class" in config:
        raise InputError(f"task {name} is written in Python; only tasks defined in YAML can be run")
    if output_type not in KINDS:
        raise InputError(f"task {name} has the output type {output_type}; supported are {', '.join(KINDS)}")
    if config.get("doc_to_image") or config.get("doc_to_audio"):
        raise InputError(f"task {name} uses images or audio; only text tasks can be run")
    spec = TaskSpec(
        name=name,
        stock_folder=path.parent.relative_to(stock_root()).as_posix(),
        subtasks=(name,),
        kind=KINDS[output_type],
        primary=_first_metric(config),
        metrics=(),
        document_count=0,
        dataset=config["dataset_path"] if is_hub_dataset(config.get("dataset_path")) else "",
        fewshot=config.get("num_fewshot") or 0,
        runs_code=bool(config.get("unsafe_code")),
    )
    return _with_code_tests(spec, config, path) if spec.runs_code and spec.dataset in CODE_DATASETS else spec


def _with_code_tests(spec: TaskSpec, config: dict[str, Any], path: Path) -> TaskSpec:
    """Add the tests that the sandbox runs, or return `spec` unchanged if its metric is pass@k for a k other than 1.

    Importing the task's utils.py would download a code runner from the Hub. Only its functions and imports from the
    standard library are executed.
    """
    metric = config["metric_list"][0]
    if metric.get("k", [1]) != [1]:
        return spec
    tree = ast.parse((path.parent / "utils.py").read_text(encoding="utf-8"))
    tree.body = [node for node in tree.body if isinstance(node, ast.FunctionDef) or _imports_standard_library(node)]
    functions: dict[str, Any] = {}
    exec(compile(tree, str(path), "exec"), functions)
    primary = "pass@1" if "k" in metric else "pass_at_1"
    code_tests, check_row = CODE_DATASETS[spec.dataset]
    return replace(
        spec,
        primary=primary,
        metrics=(primary,),
        code_tests=code_tests,
        check_row=check_row,
        full_config=_with_functions(config, functions),
    )


def _imports_standard_library(node: ast.stmt) -> bool:
    names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
    names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
    return bool(names) and all(name in sys.stdlib_module_names for name in names)


def _with_functions(value: Any, functions: Mapping[str, Any]) -> Any:
    """Replace each name of a function in utils.py by the function."""
    if isinstance(value, dict):
        return {key: _with_functions(item, functions) for key, item in value.items()}
    if isinstance(value, list):
        return [_with_functions(item, functions) for item in value]
    if isinstance(value, str) and value.startswith("utils."):
        return functions[value.removeprefix("utils.")]
    return value


def _stock_group_spec(name: str) -> TaskSpec:
    members = _member_tasks(name)
    specs = [_stock_task_spec(member) for member in members]
    if len({(spec.kind, spec.primary, spec.runs_code) for spec in specs}) != 1:
        raise InputError(f"task {name} is a group of tasks with different kinds or metrics; name its tasks instead")
    return replace(specs[0], name=name, stock_folder=".", subtasks=tuple(members), metrics=(specs[0].primary,))


def _member_tasks(name: str) -> Sequence[str]:
    """The tasks of a group, including those of nested groups; for a task, the task itself."""
    if name not in stock_tasks():
        raise InputError(f"a group contains {name!r}, which has no file of its own; name the group's tasks instead")
    kind, path = stock_tasks()[name]
    if kind == "task":
        return [name]
    members = load_stock_config(path).get("task", [])  # names, or configurations that modify a task or a group
    names = [str(item if isinstance(item, str) else item.get("task") or item.get("group")) for item in members]
    return [task for member in names for task in _member_tasks(member)]


def _first_metric(config: Mapping[str, Any]) -> str:
    metrics = config.get("metric_list") or [{"metric": "acc"}]
    metric, filters = metrics[0]["metric"], config.get("filter_list") or []
    return f"{metric},{filters[0]['name']}" if len(filters) > 1 else str(metric)
