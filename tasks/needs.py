"""What a benchmark needs on this machine besides its documents: packages, splitter data, leave to run code."""

import functools
import importlib.util
from importlib.metadata import PackageNotFoundError, version

from sampler import InputError
from tasks import code_exec
from tasks.catalog import Entry
from tasks.options import TaskOptions


def check_needs(entry: Entry, options: TaskOptions) -> None:
    """An InputError for the first thing that is missing; nothing is downloaded, no model is touched."""
    missing = [name for name in entry.packages if importlib.util.find_spec(name) is None]
    if missing:
        raise InputError(f"task {entry.name} needs the package {missing[0]}, which is missing: {entry.install}")
    if "antlr4" in entry.packages and not _antlr().startswith("4.11"):
        raise InputError(f"task {entry.name} needs antlr4-python3-runtime 4.11, not {_antlr()}: {entry.install}")
    if entry.punkt:
        _check_punkt(entry)
    if entry.runs_code:
        cage_for(entry.name, options)
        if entry.whole is None and not options.unsafe_code_execution:
            raise InputError(
                f"task {entry.name} runs programs by lm-eval's own runner, which has no cage: "
                "only --unsafe-code-execution allows that; humaneval is caged"
            )


def cage_for(name: str, options: TaskOptions) -> str:
    """The cage generated programs will run in; without leave or without a cage, an InputError."""
    if not options.code_execution_allowed:
        raise InputError(
            f"task {name} runs programs that a model wrote: allow it with --allow-code-execution or "
            "HF_ALLOW_CODE_EVAL=1"
        )
    if options.unsafe_code_execution:
        return "none"
    try:
        return code_exec.find_cage()
    except code_exec.NoCage as error:
        raise InputError(
            f"task {name} runs programs that a model wrote, and this machine gives no cage for them ({error}); "
            "--unsafe-code-execution runs them without one"
        ) from None


def _antlr() -> str:
    try:
        return version("antlr4-python3-runtime")
    except PackageNotFoundError:
        return "none"


def _check_punkt(entry: Entry) -> None:
    import nltk  # an extra: the catalog says who needs it

    try:
        nltk.data.find("tokenizers/punkt_tab/english/")
    except LookupError:
        raise InputError(
            f"task {entry.name} splits sentences with NLTK's punkt_tab data, which is not here: "
            "python -m nltk.downloader punkt_tab (or set NLTK_DATA to a folder that has it)"
        ) from None


@functools.cache
def seed_language_detection() -> None:
    """langdetect draws at random; with a seed the same text is always the same language."""
    from langdetect import DetectorFactory

    DetectorFactory.seed = 0
