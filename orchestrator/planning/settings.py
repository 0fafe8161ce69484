"""The settings of a sweep: everything a user can choose, with types, bounds, defaults and help.

Flags, YAML files, --save-config, validation and docs/settings.md all follow from the declarations here. A new setting
is one field. A new decode setting is one field made with `_decode_axis`, named as in `Configuration`.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from orchestrator.core.configuration import DECODE_SETTINGS, FIRST, OWN, Configuration, default_of
from orchestrator.core.system import TRACKER_PACKAGES
from orchestrator.planning.fields import (
    Setting,
    check_address,
    check_callback,
    check_name,
    check_resource,
    check_upload,
    display,
    problems_of,
    repeated,
    setting,
    settings_of,
)
from sampler.config import FAMILY_NAMES
from sampler.errors import InputError, InputErrors
from sampler.policy import ReusePolicy
from sampler.reveal import THRESHOLD, parse_reveal

GRID, MODEL, MACHINE, RUN = "Grid", "Model and data", "Machine", "Run"
HALVES = ("first", "second")
DTYPES = ("auto", "float32", "bfloat16", "float16")
SMALLEST_SHARE = 0.01  # of a GPU or core that an actor can reserve
WEEK_SECONDS = 604_800
TASKS_EXAMPLE = "give names such as gsm8k,minerva_math (`reuse-sweep tasks` lists them)"


def _check_layers(layers: str) -> str | None:
    return _input_error(lambda: ReusePolicy.grid(k=1, layers=layers))


def _input_error(make: Callable[[], object]) -> str | None:
    try:
        make()
    except InputError as error:
        return str(error)
    return None


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyGrid:
    """The policies of the cross product --k × --subsets × --reuse.

    k1 replays nothing, so it is not multiplied by the reuse modes. It is kept once per subset: these replicates show
    how much measurements vary.
    """

    k: tuple[int, ...] = setting(
        (1, 2, 3), group=GRID, metavar="N,N", minimum=1, cap=999_999, help="recompute on every N-th pass of a block"
    )
    subsets: tuple[str, ...] = setting(
        ("first", "middle", "last"),
        metavar="S,S",
        check=_check_layers,
        help="layers to replay: first, middle, last, all or 4-9+20",
    )
    reuse: tuple[str, ...] = setting(
        ("residual",), metavar="M,M", choices=("residual", "output"), help="what to replay: residual, output or both"
    )

    def __post_init__(self) -> None:
        problems = problems_of(self)
        if problems:
            raise InputErrors(problems)
        layers = [str(ReusePolicy.grid(k=1, layers=subset).layers) for subset in self.subsets]
        if (twice := repeated(layers)) is not None:
            raise InputError(f"--subsets must not contain {twice} twice")

    @property
    def policies(self) -> tuple[str, ...]:
        return tuple(
            str(ReusePolicy.grid(k=k, layers=layers, mode=mode if k > 1 else "residual"))
            for k in self.k
            for layers in self.subsets
            for mode in (self.reuse if k > 1 else self.reuse[:1])
        )


def _decode_axis(name: str, **declaration: Any) -> Any:
    """A decode setting with one or several values; the default is that of the configuration."""
    return setting((default_of(name),), **declaration)


def _model_axis(name: str, **declaration: Any) -> Any:
    """A decode setting whose default depends on the model, see `ModelConfig.decode_defaults`."""
    return setting(None, default_text=f"{display(default_of(name))}, or the model family's", **declaration)


def check_policy(name: str) -> str | None:
    return _input_error(lambda: ReusePolicy.parse(name))


def _check_configuration(text: str) -> str | None:
    def check() -> None:
        configuration = Configuration.parse(text)
        declared = settings_of(SweepSettings)
        wrong = [one for name in DECODE_SETTINGS for one in declared[name].problems((getattr(configuration, name),))]
        if wrong:
            raise InputError(f"{text}: {wrong[0]}")

    return _input_error(check)


def _check_reveal(name: str) -> str | None:
    return None if name == THRESHOLD else _input_error(lambda: parse_reveal(name))


def _check_gpus(gpus: float) -> str | None:
    if gpus == 0 or SMALLEST_SHARE <= gpus <= 1:
        return None
    return f"must be 0 or between {SMALLEST_SHARE} and 1 (got {display(gpus)}): an actor decodes on one device"


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepSettings:
    """What a user can choose about a sweep. None and "auto" are resolved later, from the model and the machine."""

    tasks: tuple[str, ...] = setting(
        group=GRID, metavar="A,B", example=TASKS_EXAMPLE, help="benchmarks from `reuse-sweep tasks`, or lm-eval tasks"
    )
    policies: tuple[str, ...] = setting(
        PolicyGrid().policies,
        metavar="P,P",
        check=check_policy,
        example="give names such as k1,k2_middle",
        default_text="",
        help="policies by name, such as k1,k2_middle, instead of --k, --subsets and --reuse",
    )
    threshold: tuple[float, ...] | None = _model_axis(
        "threshold",
        metavar="T,T",
        above=0,
        maximum=1,
        help="confidence needed to reveal a token; 1 reveals one per pass",
    )
    small_block: tuple[int, ...] | None = _model_axis(
        "small_block", metavar="N,N", minimum=1, help="positions that are denoised together; must divide the block size"
    )
    block_cache: tuple[bool, ...] = _decode_axis("block_cache", help="run passes on a small block alone where possible")
    reveal: tuple[str, ...] = _decode_axis(
        "reveal",
        metavar="R,R",
        check=_check_reveal,
        help="reveal rules, such as margin=0.5,topk=2; --threshold 0.9 is short for --reveal threshold=0.9",
    )
    configurations: tuple[str, ...] = setting(
        (),
        metavar="C,C",
        repeatable=True,
        check=_check_configuration,
        help="more configurations: policies with their own decode settings, such as k2_middle:threshold=0.9",
    )
    reference: str = setting(
        OWN,
        choices=(OWN, FIRST),
        help="decode settings of the k1 baseline: own are those of the configuration, first are the first ones listed",
    )
    replicate: bool = setting(True, help="run k1 twice if it is listed once, to measure the noise between runs")

    model: str = setting(
        "auto", group=MODEL, help="directory or Hub id[@revision]; auto is the 7B model with a GPU, otherwise tiny"
    )
    family: str | None = setting(
        None, choices=FAMILY_NAMES, default_text="from config.json", help="model family: " + ", ".join(FAMILY_NAMES)
    )
    block_size: int | None = setting(
        None, minimum=1, cap=4096, default_text="from config.json", help="tokens per block of the model"
    )
    data: str = setting(
        "auto",
        help="hub, bundled or a directory laid out like the Hub; auto is bundled for the model tiny, otherwise hub",
    )
    limit: int | None = setting(
        None, minimum=1, cap=10**9, default_text="all", help="first N documents of each subtask"
    )
    sample: int | None = setting(None, minimum=1, cap=10**9, help="N random documents spread over the subtasks")
    half: str | None = setting(
        None,
        choices=HALVES,
        default_text="both",
        help="run one random half of these documents, to choose a policy on the first and confirm it on the second",
    )
    fewshot: int | None = setting(
        None,
        minimum=0,
        cap=1000,
        aliases=("num-fewshot",),
        default_text="set by the task",
        help="worked examples in the prompt",
    )
    chat_template: bool = setting(
        True, aliases=("apply-chat-template",), help="format prompts with the model's chat template"
    )
    thinking: bool = setting(False, help="use the thinking mode of chat templates that have one (Qwen3)")
    subset_size: int | None = setting(
        None, minimum=1, default_text="12, or a third of the layers", help="number of layers in first, middle and last"
    )
    dtype: str = setting("auto", metavar="TYPE", choices=DTYPES, help=", ".join(DTYPES[1:]) + " or auto")
    batch_size: int = setting(1, minimum=1, cap=10**4, help="documents decoded together")
    max_new_tokens: int | None = setting(
        None,
        minimum=1,
        cap=10**6,
        aliases=("max-gen-toks",),
        default_text="set by the task",
        help="maximum length of an answer",
    )
    repeats: int = setting(1, minimum=1, cap=1000, help="number of times to run each trial")
    seed: int = setting(
        0, minimum=0, cap=2**32 - 1, default_text="0", help="random seed of the sample and of the trial order"
    )
    shard_size: int | None = setting(
        None, minimum=1, cap=10**9, default_text="as many as take a few seconds", help="documents per trial, at most"
    )

    actors: int | None = setting(
        None,
        group=MACHINE,
        minimum=1,
        cap=10**5,
        default_text="as many as fit",
        help="number of actors, each of which loads the model",
    )
    gpus_per_actor: float | None = setting(
        None,
        check=_check_gpus,
        default_text="1, or 0 without GPUs",
        help="GPUs of each actor; 0.5 puts two actors on a GPU",
    )
    cpus_per_actor: float | None = setting(
        None, minimum=SMALLEST_SHARE, default_text="1", help="cores to reserve for each actor"
    )
    compile: bool = setting(
        False, help="run passes through torch.compile, with CUDA graphs on a GPU; slow to start, see docs/gpu.md"
    )
    threads_per_actor: int | None = setting(
        None, minimum=1, cap=1024, aliases=("threads",), default_text="1 on a CPU", help="CPU threads of each actor"
    )
    accelerator_type: str | None = setting(
        None, metavar="TYPE", help="GPU model that actors need, as Ray names it: A100, H100, T4"
    )
    resources: tuple[str, ...] = setting(
        (),
        metavar="NAME=X,…",
        repeatable=True,
        check=check_resource,
        help="custom Ray resources that each actor needs (repeatable)",
    )
    address: str | None = setting(
        None,
        metavar="HOST:PORT",
        check=check_address,
        default_text="start Ray here",
        help="running Ray cluster to use",
    )
    wait_for_nodes: float = setting(
        1800.0,
        minimum=0,
        maximum=WEEK_SECONDS,
        unit="seconds",
        metavar="SECONDS",
        help="how long to wait for an autoscaler to add the first node",
    )
    dashboard: bool = setting(True, help="serve Ray's dashboard to this machine")
    callback: tuple[str, ...] = setting(
        (), metavar="MODULE:CLASS", repeatable=True, check=check_callback, help="Ray Tune callback to add (repeatable)"
    )
    worker_timeout: float = setting(
        600.0,
        minimum=1,
        maximum=WEEK_SECONDS,
        unit="seconds",
        metavar="SECONDS",
        help="replace an actor that has not responded for this long",
    )

    out: str = setting(
        "results", group=RUN, metavar="DIR", aliases=("output-path",), help="directory that contains the sweeps"
    )
    name: str | None = setting(None, check=check_name, default_text="model name", help="name of the sweep's directory")
    upload: str | None = setting(
        None, metavar="URL", check=check_upload, help="copy the sweep to this s3, gs or file URL while it runs"
    )
    track: tuple[str, ...] = setting(
        (),
        metavar="A,B",
        repeatable=True,
        choices=tuple(TRACKER_PACKAGES),
        help="send totals to experiment trackers: tensorboard, wandb, mlflow, trackio",
    )
    store_steps: bool = setting(
        False, help="store for each token the step that revealed it and its confidence; the report colours tokens by it"
    )
    skip_unavailable: bool = setting(False, help="skip tasks that are not available instead of reporting an error")
    allow_code_execution: bool = setting(
        False, aliases=("confirm-run-unsafe-code",), help="run generated programs in a sandbox"
    )
    unsafe_code_execution: bool = setting(False, help="run generated programs even without a sandbox")
    margin: float = setting(
        5.0, above=0, below=100, help="acceptable drop in accuracy in percentage points, declared in advance"
    )
    speedup: float = setting(1.2, above=1, help="speed-up that counts as faster, declared in advance")
    race: bool = setting(False, help="stop a configuration once its verdict is certain; see docs/statistics.md")
    race_alpha: float = setting(
        0.05, above=0, maximum=0.5, help="with --race: chance of any wrong verdict on a task, declared in advance"
    )
    search: int | None = setting(
        None,
        minimum=1,
        cap=1000,
        help="with --race: try N of the listed policies with decode settings, chosen by Optuna, and confirm the best",
    )
    quiet: bool = setting(False, help="do not show the live view")

    def __post_init__(self) -> None:
        problems = [*problems_of(self), *self._conflicts()]
        if problems:
            raise InputErrors(problems)
        canonical = tuple(str(ReusePolicy.parse(name)) for name in self.policies)
        if (twice := repeated(canonical)) is not None:
            raise InputError(f"--policies must not contain {twice} twice")
        object.__setattr__(self, "policies", canonical)
        at_k1 = {ReusePolicy.parse(name).k == 1 for name in canonical}
        if self.race and self.search is None and not (True in at_k1 and (False in at_k1 or self.configurations)):
            raise InputError(f"--race needs k1 and a policy to compare with it (got {', '.join(canonical)})")
        self._separate_thresholds()

    def _separate_thresholds(self) -> None:
        """Moves the X of each reveal rule threshold=X to `threshold`; lists `threshold` as a rule if it has a value.

        Without that rule there is no threshold, not even the model's default.
        """
        parsed = [None if name == THRESHOLD else parse_reveal(name) for name in self.reveal]
        named = [rule.value for rule in parsed if rule is not None and rule.word == THRESHOLD]
        thresholds = tuple(dict.fromkeys(float(value) for value in (*(self.threshold or ()), *named)))
        names = [THRESHOLD if rule is None or rule.word == THRESHOLD else str(rule) for rule in parsed]
        if (twice := repeated([name for name in names if name != THRESHOLD])) is not None:
            raise InputError(f"--reveal must not contain {twice} twice")
        first = [THRESHOLD] if thresholds and THRESHOLD not in names else []
        object.__setattr__(self, "threshold", thresholds or None)
        object.__setattr__(self, "reveal", tuple(dict.fromkeys([*first, *names])))

    def _conflicts(self) -> Iterator[str]:
        if self.limit is not None and self.sample is not None:
            yield "--limit and --sample must not be used together: choose the first N documents or N random ones"
        if self.gpus_per_actor == 0 and self.accelerator_type is not None:
            yield f"--accelerator-type {self.accelerator_type} needs --gpus-per-actor above 0 (got 0)"
        if self.search is not None and not self.race:
            yield "--search needs --race, which stops proposals that are certainly worse"
        if self.search is not None and self.half is not None:
            yield "--search and --half must not be used together: a search uses both halves"
        if self.race and self.repeats > 1:
            yield f"--race needs --repeats 1 (got {self.repeats}): it measures until each verdict is certain"

    @property
    def all_policies(self) -> tuple[str, ...]:
        """The policies of the grid and of --configurations."""
        listed = (Configuration.parse(text).policy for text in self.configurations)
        return tuple(dict.fromkeys((*self.policies, *listed)))

    @property
    def custom_resources(self) -> dict[str, float]:
        """Ray's custom resources that each actor needs, by name."""
        return {name: float(amount) for name, amount in (resource.split("=") for resource in self.resources)}

    def as_dict(self) -> dict[str, Any]:
        """The settings as JSON values, for sweep.json."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "SweepSettings":
        """The inverse of `as_dict`. Missing settings get their defaults; those of a newer version are ignored."""
        known: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in values.items()
            if name in cls.__dataclass_fields__
        }
        if (known.get("gpus_per_actor") or 0) > 1:  # earlier versions allowed this, and used one device
            known["gpus_per_actor"] = 1.0
        return cls(**known)


def _all_settings() -> Mapping[str, Setting]:
    declared = dict(settings_of(SweepSettings))
    return {"tasks": declared.pop("tasks"), **settings_of(PolicyGrid), **declared}


ALL_SETTINGS: Mapping[str, Setting] = _all_settings()  # of the command line, in the order of its help
