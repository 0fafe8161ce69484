"""The benchmarks by name, as data: which lm-eval tasks, prompts, metrics and packages. Loads nothing."""

import functools
import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from sampler import InputError
from tasks import hooks, sandbox
from tasks.documents import TaskOptions

GENERATE, LOGLIKELIHOOD = "generate", "loglikelihood"


BOX = "Please reason step by step, and put your final answer within \\boxed{}."


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One benchmark. `overrides` are lm-eval configuration keys that replace those of its stock YAML files."""

    name: str
    stock: str  # folder of the stock YAML files in lm_eval/tasks
    subtasks: tuple[str, ...]
    kind: str
    primary: str
    metrics: tuple[str, ...]  # all of them
    documents: int
    dataset: str
    fewshot: int = 0
    most_fewshot: int | None = None  # None: as many as the data has
    max_new_tokens: int | None = None
    overrides: Mapping[str, Any] = field(default_factory=dict)
    whole: Mapping[str, Any] | None = None  # a complete configuration, where the stock files cannot be read
    check: Callable[[Mapping[str, Any]], str | None] = hooks.accept_any_row  # what is wrong with a row of its data
    packages: tuple[str, ...] = ()  # modules to import
    install: str = ""  # the command that brings them
    punkt: bool = False  # needs NLTK's sentence splitter
    gated: bool = False
    runs_code: bool = False
    also: tuple[str, ...] = ()  # lm-eval tasks of the same make, to be named on their own

    @property
    def is_group(self) -> bool:
        return self.subtasks != (self.name,)


GSM8K = Entry(
    name="gsm8k",
    stock="gsm8k",
    subtasks=("gsm8k",),
    kind=GENERATE,
    primary="exact_match,flexible-extract",
    metrics=("exact_match,flexible-extract", "exact_match,strict-match"),
    documents=1319,
    dataset="openai/gsm8k",
    max_new_tokens=2048,
    check=hooks.check_gsm8k_row,
    overrides={
        "doc_to_text": "Question: {{question}}\n" + BOX,
        "filter_list": [
            {
                "name": "strict-match",
                "filter": [
                    {"function": "regex", "regex_pattern": "#### (\\-?[0-9\\.\\,]+)"},
                    {"function": "take_first"},
                ],
            },
            {
                "name": "flexible-extract",
                "filter": [
                    {"function": "custom", "filter_fn": hooks.boxed_or_all},
                    # lm-eval's pattern, but a number has a digit: "$." after a box is none.
                    {"function": "regex", "group_select": -1, "regex_pattern": "(-?[$.,]*[0-9][$0-9.,]*)"},
                    {"function": "take_first"},
                ],
            },
        ],
    },
)


MINERVA_MATH = Entry(
    name="minerva_math",
    stock="minerva_math",
    subtasks=tuple(
        f"minerva_math_{subject}"
        for subject in (
            "algebra",
            "counting_and_prob",
            "geometry",
            "intermediate_algebra",
            "num_theory",
            "prealgebra",
            "precalc",
        )
    ),
    kind=GENERATE,
    primary="math_verify",
    metrics=("math_verify", "exact_match"),
    documents=5000,
    dataset="EleutherAI/hendrycks_math",
    most_fewshot=4,
    max_new_tokens=2048,
    check=hooks.check_minerva_math_row,
    overrides={"doc_to_text": "Problem:\n{{problem}}\n\n" + BOX, "process_results": hooks.math_scores},
    packages=("math_verify", "latex2sympy2_extended", "sympy", "antlr4"),
    install='pip install "lm_eval[math]"',
)


MMLU_SUBJECTS = (  # noqa: SIM905 - 57 lines would say no more
    "abstract_algebra anatomy astronomy business_ethics clinical_knowledge college_biology college_chemistry "
    "college_computer_science college_mathematics college_medicine college_physics computer_security "
    "conceptual_physics econometrics electrical_engineering elementary_mathematics formal_logic global_facts "
    "high_school_biology high_school_chemistry high_school_computer_science high_school_european_history "
    "high_school_geography high_school_government_and_politics high_school_macroeconomics high_school_mathematics "
    "high_school_microeconomics high_school_physics high_school_psychology high_school_statistics "
    "high_school_us_history high_school_world_history human_aging human_sexuality international_law jurisprudence "
    "logical_fallacies machine_learning management marketing medical_genetics miscellaneous moral_disputes "
    "moral_scenarios nutrition philosophy prehistory professional_accounting professional_law "
    "professional_medicine professional_psychology public_relations security_studies sociology us_foreign_policy "
    "virology world_religions"
).split()


MMLU = Entry(
    name="mmlu",
    stock="mmlu/default",
    subtasks=tuple(f"mmlu_{subject}" for subject in MMLU_SUBJECTS),
    kind=LOGLIKELIHOOD,
    primary="acc",
    metrics=("acc",),
    documents=14042,
    dataset="cais/mmlu",
    most_fewshot=5,
    check=hooks.check_mmlu_row,
)


IFEVAL = Entry(
    name="ifeval",
    stock="ifeval",
    subtasks=("ifeval",),
    kind=GENERATE,
    primary="prompt_level_strict_acc",
    metrics=(
        "prompt_level_strict_acc",
        "inst_level_strict_acc",
        "prompt_level_loose_acc",
        "inst_level_loose_acc",
    ),
    documents=541,
    dataset="google/IFEval",
    most_fewshot=0,
    max_new_tokens=2048,
    check=hooks.check_ifeval_row,
    overrides={"process_results": hooks.ifeval_scores},
    packages=("langdetect", "immutabledict", "nltk"),
    install='pip install "lm_eval[ifeval]"',
    punkt=True,
)


# lm-eval's humaneval_instruct, written out: its YAML fetches a code runner from the Hub when it is read. No stop
# strings, because theirs (a new line that begins with def, class, if, …) would cut an answer that defines a helper.
HUMANEVAL = Entry(
    name="humaneval",
    stock="humaneval",
    subtasks=("humaneval",),
    kind=GENERATE,
    primary="pass@1",
    metrics=("pass@1",),
    documents=164,
    dataset="openai/openai_humaneval",
    most_fewshot=0,
    max_new_tokens=1024,
    check=hooks.check_humaneval_row,
    runs_code=True,
    whole={
        "task": "humaneval",
        "dataset_path": "openai/openai_humaneval",
        "unsafe_code": True,
        "output_type": "generate_until",
        "test_split": "test",
        "doc_to_text": (
            "Write a solution to the following problem and make sure that it passes the tests:\n"
            "```python\n{{ prompt }}\n```\n"
        ),
        "gen_prefix": "Here is the completed function:\n```python\n{{ prompt }}\n",
        "doc_to_target": "{{test}}\ncheck({{entry_point}})",
        "generation_kwargs": {"until": [], "do_sample": False},
        "filter_list": [
            {"name": "create_test", "filter": [{"function": "custom", "filter_fn": hooks.programs}]},
        ],
        "metadata": {"version": 4.0},
    },
)


GPQA = Entry(
    name="gpqa",
    stock="gpqa/n_shot",
    subtasks=("gpqa_main_n_shot",),
    kind=LOGLIKELIHOOD,
    primary="acc",
    metrics=("acc", "acc_norm"),
    documents=448,
    dataset="Idavidrein/gpqa",
    fewshot=5,
    check=hooks.check_gpqa_row,
    overrides={"process_docs": hooks.gpqa_documents},
    gated=True,
    also=("gpqa_diamond_n_shot", "gpqa_extended_n_shot"),
)


CATALOG = {entry.name: entry for entry in (GSM8K, MINERVA_MATH, MMLU, IFEVAL, HUMANEVAL, GPQA)}


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
        return sandbox.find_cage()
    except sandbox.NoCage as error:
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
