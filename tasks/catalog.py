"""The catalog of benchmarks: the lm-eval tasks, prompts, metrics and required packages of each."""

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from sampler.errors import InputError
from sampler.records import GENERATE, LOGLIKELIHOOD
from tasks import hooks, sandbox
from tasks.documents import TaskOptions

BOX = "Please reason step by step, and put your final answer within \\boxed{}."


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskSpec:
    """A benchmark. `overrides` are lm-eval configuration keys that replace those of its stock YAML files."""

    name: str
    stock_folder: str  # of the stock YAML files, relative to lm_eval/tasks
    subtasks: tuple[str, ...]
    kind: str  # GENERATE or LOGLIKELIHOOD
    primary: str  # the metric that decides whether a document is correct
    metrics: tuple[str, ...]
    document_count: int  # as published; 0 if unknown
    dataset: str  # on the Hub
    sizes: tuple[int, ...] = ()  # of each subtask, if there are several
    answer_tokens: int | None = None  # in a typical answer of Fast_dLLM_v2_7B; None if unknown
    fewshot: int = 0
    max_fewshot: int | None = None  # None: limited by the data
    max_new_tokens: int | None = None
    overrides: Mapping[str, Any] = field(default_factory=dict)
    full_config: Mapping[str, Any] | None = None  # replaces the stock files where those cannot be used
    check_row: hooks.CheckRow = hooks.accept_any_row
    packages: tuple[str, ...] = ()  # modules that must be importable
    install_command: str = ""  # installs `packages`
    needs_punkt: bool = False  # NLTK's sentence splitter data
    gated: bool = False
    runs_code: bool = False
    # The tests of a document, from its row and lm-eval's target; None: only lm-eval's own runner can execute them.
    code_tests: Callable[[dict[str, Any], str], sandbox.CodeTests] | None = None
    variants: Mapping[str, int] = field(default_factory=dict)  # other lm-eval tasks, with their number of documents

    @property
    def published_sizes(self) -> dict[str, int]:
        """The number of documents of each subtask; empty if it is not known."""
        sizes = self.sizes or (self.document_count,)
        known = self.document_count and len(sizes) == len(self.subtasks)
        return dict(zip(self.subtasks, sizes, strict=True)) if known else {}

    @property
    def is_group(self) -> bool:
        return self.subtasks != (self.name,)


GSM8K = TaskSpec(
    name="gsm8k",
    stock_folder="gsm8k",
    subtasks=("gsm8k",),
    kind=GENERATE,
    primary="exact_match,flexible-extract",
    metrics=("exact_match,flexible-extract", "exact_match,strict-match"),
    document_count=1319,
    answer_tokens=331,  # measured: 436,484 tokens in 1,319 answers
    dataset="openai/gsm8k",
    max_new_tokens=2048,
    check_row=hooks.check_gsm8k_row,
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
                    {"function": "custom", "filter_fn": hooks.extract_boxed},
                    # lm-eval's pattern, but requiring a digit, so that "$." after a box does not match.
                    {"function": "regex", "group_select": -1, "regex_pattern": "(-?[$.,]*[0-9][$0-9.,]*)"},
                    {"function": "take_first"},
                ],
            },
        ],
    },
)


MINERVA_MATH = TaskSpec(
    name="minerva_math",
    stock_folder="minerva_math",
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
    document_count=5000,
    sizes=(1187, 474, 479, 903, 540, 871, 546),
    answer_tokens=500,  # an estimate, like those below
    dataset="EleutherAI/hendrycks_math",
    max_fewshot=4,
    max_new_tokens=2048,
    check_row=hooks.check_minerva_math_row,
    overrides={"doc_to_text": "Problem:\n{{problem}}\n\n" + BOX, "process_results": hooks.score_minerva_math},
    packages=("math_verify", "latex2sympy2_extended", "sympy", "antlr4"),
    install_command='pip install "lm_eval[math]"',
)


MMLU_SUBJECTS = (  # noqa: SIM905 - shorter than a list of 57 lines
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
MMLU_SIZES = (  # noqa: SIM905
    "100 135 152 100 265 144 100 100 100 173 102 100 235 114 145 378 126 100 310 203 100 165 198 193 390 "
    "270 238 151 545 216 204 237 223 131 121 108 163 112 103 234 100 783 346 895 306 311 324 282 1534 272 "
    "612 110 245 201 100 166 171"
).split()


MMLU = TaskSpec(
    name="mmlu",
    stock_folder="mmlu/default",
    subtasks=tuple(f"mmlu_{subject}" for subject in MMLU_SUBJECTS),
    kind=LOGLIKELIHOOD,
    primary="acc",
    metrics=("acc",),
    document_count=14042,
    sizes=tuple(map(int, MMLU_SIZES)),
    dataset="cais/mmlu",
    max_fewshot=5,
    check_row=hooks.check_mmlu_row,
)


IFEVAL = TaskSpec(
    name="ifeval",
    stock_folder="ifeval",
    subtasks=("ifeval",),
    kind=GENERATE,
    primary="prompt_level_strict_acc",
    metrics=(
        "prompt_level_strict_acc",
        "inst_level_strict_acc",
        "prompt_level_loose_acc",
        "inst_level_loose_acc",
    ),
    document_count=541,
    answer_tokens=400,
    dataset="google/IFEval",
    max_fewshot=0,
    max_new_tokens=2048,
    check_row=hooks.check_ifeval_row,
    overrides={"process_results": hooks.score_ifeval},
    packages=("langdetect", "immutabledict", "nltk"),
    install_command='pip install "lm_eval[ifeval]"',
    needs_punkt=True,
)


# lm-eval's humaneval_instruct as a full configuration, because loading its YAML downloads a code runner from the Hub.
# It has no stop strings: lm-eval's (a new line that starts with def, class, if, …) would cut off answers with helpers.
HUMANEVAL = TaskSpec(
    name="humaneval",
    stock_folder="humaneval",
    subtasks=("humaneval",),
    kind=GENERATE,
    primary="pass@1",
    metrics=("pass@1",),
    document_count=164,
    answer_tokens=200,
    dataset="openai/openai_humaneval",
    max_fewshot=0,
    max_new_tokens=1024,
    check_row=hooks.check_humaneval_row,
    runs_code=True,
    code_tests=hooks.humaneval_tests,
    full_config={
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
            {"name": "create_test", "filter": [{"function": "custom", "filter_fn": hooks.build_programs}]},
        ],
        "metadata": {"version": 4.0},
    },
)


GPQA = TaskSpec(
    name="gpqa",
    stock_folder="gpqa/n_shot",
    subtasks=("gpqa_main_n_shot",),
    kind=LOGLIKELIHOOD,
    primary="acc",
    metrics=("acc", "acc_norm"),
    document_count=448,
    dataset="Idavidrein/gpqa",
    fewshot=5,
    check_row=hooks.check_gpqa_row,
    overrides={"process_docs": hooks.shuffle_gpqa_documents},
    gated=True,
    variants={"gpqa_diamond_n_shot": 198, "gpqa_extended_n_shot": 546},
)


CATALOG = {spec.name: spec for spec in (GSM8K, MINERVA_MATH, MMLU, IFEVAL, HUMANEVAL, GPQA)}


def check_requirements(spec: TaskSpec, options: TaskOptions) -> None:
    """Raise an InputError if a package, NLTK data, permission or sandbox is missing. Downloads nothing."""
    missing = [name for name in spec.packages if importlib.util.find_spec(name) is None]
    if missing:
        raise InputError(f"task {spec.name} needs the package {missing[0]}, which is missing: {spec.install_command}")
    if "antlr4" in spec.packages and not _antlr_version().startswith("4.11"):
        raise InputError(
            f"task {spec.name} needs antlr4-python3-runtime 4.11 (found {_antlr_version()}): {spec.install_command}"
        )
    if spec.needs_punkt:
        _check_punkt(spec)
    if spec.runs_code:
        require_sandbox(spec.name, options)
        if spec.code_tests is None and not options.unsafe_code_execution:
            raise InputError(
                f"task {spec.name} uses lm-eval's own program runner, which has no sandbox; allow it with "
                "--unsafe-code-execution, or use humaneval or mbpp, which run in a sandbox"
            )


def require_sandbox(name: str, options: TaskOptions) -> bool:
    """Whether generated programs run in a sandbox.

    Raises an InputError if running them is not allowed, or if they need a sandbox and none works on this machine.
    """
    if not options.code_execution_allowed:
        raise InputError(
            f"task {name} runs model-generated programs: allow it with --allow-code-execution or HF_ALLOW_CODE_EVAL=1"
        )
    if options.unsafe_code_execution:
        return False
    try:
        sandbox.find_sandbox()
    except sandbox.SandboxError as error:
        raise InputError(
            f"task {name} runs model-generated programs, and this machine has no sandbox for them ({error}); "
            "--unsafe-code-execution runs them without a sandbox"
        ) from None
    return True


def _antlr_version() -> str:
    try:
        return version("antlr4-python3-runtime")
    except PackageNotFoundError:
        return "none"


def _check_punkt(spec: TaskSpec) -> None:
    import nltk  # optional: listed in the packages of the tasks that need it

    try:
        nltk.data.find("tokenizers/punkt_tab/english/")
    except LookupError:
        raise InputError(
            f"task {spec.name} needs NLTK's punkt_tab data, which is missing: "
            "python -m nltk.downloader punkt_tab (or set NLTK_DATA to a directory that has it)"
        ) from None
