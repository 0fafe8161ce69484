"""The sweep's command line and configuration files: which flags there are, which value wins, what is refused."""

import contextlib
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as run
from hypothesis import strategies as st

from orchestrator.cli.console import aliases, run_command
from orchestrator.cli.sweep import SweepCommand, merge_settings, parse_sweep, save_config, sweep_parser, without_force
from orchestrator.planning.settings import ALL_SETTINGS, SweepSettings
from sampler import InputError

FROZEN = {
    "Grid": "tasks k subsets reuse policies threshold small-block block-cache reveal configurations reference "
    "replicate no-replicate",
    "Model and data": "model family block-size data limit sample half fewshot chat-template no-chat-template thinking "
    "subset-size dtype batch-size max-new-tokens repeats seed shard-size",
    "Machine": "actors gpus-per-actor cpus-per-actor threads-per-actor accelerator-type resources address "
    "compile wait-for-nodes dashboard no-dashboard worker-timeout callback",
    "Run": "out name upload track store-steps skip-unavailable allow-code-execution unsafe-code-execution "
    "margin speedup race race-alpha search quiet config save-config dry-run device-profile force",
}
OTHER: dict[str, tuple[str, Any]] = {  # a value that is not the default, as typed and as read
    "tasks": ("mmlu, gsm8k", ("mmlu", "gsm8k")),
    "policies": ("k1,k2_5+4", ("k1", "k2_4-5")),
    "threshold": ("0.9,1", (0.9, 1.0)),
    "small-block": ("4,8", (4, 8)),
    "block-cache": ("on,off", (True, False)),
    "configurations": ("k1:threshold=0.8", ("k1:threshold=0.8",)),
    "reference": ("first", "first"),
    "model": ("owner/name@main", "owner/name@main"),
    "family": ("sdar", "sdar"),
    "block-size": ("16", 16),
    "data": ("bundled", "bundled"),
    "limit": ("5", 5),
    "sample": ("6", 6),
    "fewshot": ("0", 0),
    "subset-size": ("3", 3),
    "dtype": ("float32", "float32"),
    "batch-size": ("4", 4),
    "max-new-tokens": ("64", 64),
    "repeats": ("2", 2),
    "seed": ("9", 9),
    "shard-size": ("10", 10),
    "actors": ("3", 3),
    "gpus-per-actor": ("0.5", 0.5),
    "cpus-per-actor": ("2", 2.0),
    "threads-per-actor": ("2", 2),
    "accelerator-type": ("A100", "A100"),
    "resources": ("big=1,fast=0.5", ("big=1", "fast=0.5")),
    "address": ("127.0.0.1:6379", "127.0.0.1:6379"),
    "wait-for-nodes": ("60", 60.0),
    "callback": ("package.module:Class", ("package.module:Class",)),
    "track": ("mlflow,wandb", ("mlflow", "wandb")),
    "upload": ("file:///mnt/results", "file:///mnt/results"),
    "out": ("elsewhere", "elsewhere"),
    "name": ("mine", "mine"),
    "margin": ("3", 3.0),
    "speedup": ("1.5", 1.5),
    "race-alpha": ("0.1", 0.1),
}


def settings(*arguments: str) -> SweepSettings:
    return parse_sweep(["--tasks", "gsm8k", *arguments]).settings


def config(folder: Path, text: str) -> str:
    path = folder / "sweep.yaml"
    path.write_text(text)
    return str(path)


def refused(sentence: str, *arguments: str) -> None:
    with pytest.raises(InputError, match=re.escape(sentence)):
        parse_sweep(list(arguments))


def test_the_flags_are_these() -> None:
    """Frozen: a flag is a promise. Change this list on purpose."""
    groups = {group.title: group for group in sweep_parser()._action_groups if group.title in FROZEN}
    for title, names in FROZEN.items():
        options = [option for action in groups[title]._group_actions for option in action.option_strings]
        assert sorted(options) == sorted(f"--{name}" for name in names.split())


def test_every_setting_has_a_flag_and_every_flag_a_setting() -> None:
    assert ALL_SETTINGS.keys() - {"k", "subsets", "reuse"} == SweepSettings.__dataclass_fields__.keys()


def test_without_flags_everything_is_as_the_settings_say() -> None:
    assert parse_sweep(["--tasks", "gsm8k"]) == SweepCommand(settings=SweepSettings(tasks=("gsm8k",)))


@pytest.mark.parametrize("name", OTHER)
@pytest.mark.parametrize("spelling", ["--{}", "underscores", "equals", "file", "file underscores"])
def test_every_flag_in_every_spelling(name: str, spelling: str, tmp_path: Path) -> None:
    typed, value = OTHER[name]
    tasks = [] if name == "tasks" else ["--tasks", "gsm8k"]
    if spelling.startswith("file"):
        key = name.replace("-", "_") if "underscores" in spelling else name
        arguments = ["--config", config(tmp_path, f"{key}: {typed}\n")]
    elif spelling == "equals":
        arguments = [f"--{name.replace('-', '_')}={typed}"]
    else:
        flag = f"--{name}"
        arguments = [flag.replace("-", "_").replace("__", "--") if spelling == "underscores" else flag, typed]
    read = parse_sweep([*tasks, *arguments]).settings
    assert getattr(read, name.replace("-", "_")) == value
    assert getattr(SweepSettings(tasks=("gsm8k",)), name.replace("-", "_")) != value


@pytest.mark.parametrize("name", ["skip-unavailable", "allow-code-execution", "unsafe-code-execution", "quiet"])
def test_switches(name: str, tmp_path: Path) -> None:
    field = name.replace("-", "_")
    assert not getattr(settings(), field)
    assert getattr(settings(f"--{name}"), field)
    assert getattr(settings(f"--{field}"), field)
    assert getattr(settings("--config", config(tmp_path, f"{field}: yes")), field)


@pytest.mark.parametrize("name", ["chat-template", "dashboard"])
def test_switches_that_can_be_denied(name: str, tmp_path: Path) -> None:
    field = name.replace("-", "_")
    assert getattr(settings(), field)
    assert not getattr(settings(f"--no-{name}"), field)
    assert not getattr(settings(f"--no_{field}"), field)
    for text in (f"{name}: off", f"no-{name}: on", f"no_{field}: true", f'{name}: "no"'):
        assert not getattr(settings("--config", config(tmp_path, text)), field), text
    denied = config(tmp_path, f"{name}: false")
    assert getattr(settings("--config", denied, f"--{name}"), field), "a flag wins over the file"


def test_lm_evals_own_names(tmp_path: Path) -> None:
    words = "--num_fewshot 3 --output_path there --batch_size 2 --max_gen_toks 9 --confirm_run_unsafe_code"
    made = settings(*words.split())
    assert (made.fewshot, made.out, made.batch_size, made.max_new_tokens) == (3, "there", 2, 9)
    assert made.allow_code_execution
    assert not made.unsafe_code_execution
    filed = settings("--config", config(tmp_path, "num_fewshot: 3\noutput_path: there"))
    assert (filed.fewshot, filed.out) == (3, "there")


def test_help_shows_one_spelling_of_each_flag_grouped_with_examples() -> None:
    text = sweep_parser().format_help()
    assert not re.search(r"--\w+_\w+", text.partition("examples:")[0])
    assert not any(re.search(rf"--{name}(?![\w-])", text) for name in aliases(ALL_SETTINGS))
    assert all(f"\n{title}:\n" in text for title in FROZEN)
    examples = [line.split()[2:] for line in text.splitlines() if line.startswith("  reuse-sweep sweep ")]
    assert len(examples) >= 4
    for words in examples:
        assert "--config" in words or parse_sweep(words)
    assert max(len(line) for line in text.partition("examples:")[0].splitlines()) <= 100


def test_policies_from_the_grid_flags() -> None:
    assert settings("--k", "1,2", "--subsets", "first,4-9", "--reuse", "output").policies == (
        "k1_first",
        "k1_4-9",
        "k2_first.output",
        "k2_4-9.output",
    )
    assert settings("--k", "2").policies == ("k2_first", "k2_middle", "k2_last")
    assert len(settings("--reuse", "residual,output").policies) == 15


@pytest.mark.parametrize("rival", ["--k=1", "--subsets=first", "--reuse=output"])
def test_policies_and_grid_exclude_each_other(rival: str, tmp_path: Path) -> None:
    flag = rival.partition("=")[0]
    refused(f"--policies and {flag} must not be used together", "--tasks", "gsm8k", "--policies", "k1", rival)
    both = config(tmp_path, f"policies: k1\n{rival[2:].replace('=', ': ')}")
    refused(f"--policies and {flag} must not be used together", "--tasks", "gsm8k", "--config", both)
    filed = config(tmp_path, "policies: [k1_all]")
    assert settings("--config", filed, rival).policies != ("k1_all",), "a flag wins over the file's other way"
    gridded = config(tmp_path, rival[2:].replace("=", ": "))
    assert settings("--config", gridded, "--policies", "k1_all").policies == ("k1_all",)


def test_a_flag_wins_over_its_rival_in_the_file(tmp_path: Path) -> None:
    filed = config(tmp_path, "limit: 5\nseed: 4")
    made = settings("--config", filed, "--sample", "7")
    assert (made.limit, made.sample, made.seed) == (None, 7, 4)


def test_defaults_then_file_then_flags(tmp_path: Path) -> None:
    filed = config(tmp_path, "tasks: [mmlu, ifeval]\nbatch-size: 4\nlimit: 10\nname: 2024\nactors: null\n")
    made = parse_sweep(["--config", filed, "--limit", "20"]).settings
    assert made == SweepSettings(tasks=("mmlu", "ifeval"), batch_size=4, limit=20, name="2024")


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("block-cache: on", (True,)),
        ("block_cache: [on, off]", (True, False)),
        ("block-cache: off,on", (False, True)),
        ("block-cache: 'off'", (False,)),
        ("block-cache: [true]", (True,)),
    ],
)
def test_yamls_on_and_off(text: str, values: tuple[bool, ...], tmp_path: Path) -> None:
    assert settings("--config", config(tmp_path, text)).block_cache == values


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("batch-sise: 4", "unknown setting 'batch-sise'; did you mean batch-size?"),
        ("zzzzzz: 4", "unknown setting 'zzzzzz'; known: tasks, k, subsets"),
        ("force: true", "'force' must be given on the command line"),
        ("dry-run: true", "'dry-run' must be given on the command line"),
        ("limit: 5\nlimit: 6", "'limit' occurs twice"),
        ("batch-size: 5\nbatch_size: 6", "'batch_size' occurs twice"),
        ("dashboard: on\nno-dashboard: on", "'no-dashboard' occurs twice"),
        ("limit: ten", "sweep.yaml: limit must be a whole number (got ten)"),
        ("limit: 1.5", "sweep.yaml: limit must be a whole number (got 1.5)"),
        ("limit: true", "sweep.yaml: limit must be a whole number (got on)"),
        ("limit: [1]", "sweep.yaml: limit must be a whole number (got [1])"),
        ("margin: [5]", "sweep.yaml: margin must be a number (got [5])"),
        ("margin: .nan", "sweep.yaml: margin must be a number (got nan)"),
        ("margin: yes", "sweep.yaml: margin must be a number (got on)"),
        ('name: "a\\0b"', "sweep.yaml: name must not contain control characters (got 'a\\x00b')"),
        ("model: no", "sweep.yaml: model must be text, in quotes in a YAML file (got off)"),
        ("tasks: [gsm8k, [mmlu]]", "sweep.yaml: tasks must be text"),
        ("tasks: {gsm8k: 1}", "sweep.yaml: tasks must be text"),
        ("block-cache: maybe", "sweep.yaml: block-cache must be on or off (got maybe)"),
        ("block-cache: 1", "sweep.yaml: block-cache must be on or off (got 1)"),
        ("no-dashboard: 3", "no-dashboard must be on or off (got 3)"),
        ("quiet: perhaps", "sweep.yaml: quiet must be on or off (got perhaps)"),
        ("- gsm8k", "must contain keys and values such as limit: 100"),
        ("a: b: c", "is not valid YAML (line 1: mapping values are not allowed here"),
        ("tasks: !!python/object:os.system x", "is not valid YAML (line 1: could not determine a constructor"),
        ("? [a]\n: b", "is not valid YAML"),
        ("\0", "is not valid YAML"),
    ],
)
def test_a_file_that_is_not_right(text: str, sentence: str, tmp_path: Path) -> None:
    refused(sentence, "--config", config(tmp_path, text), *([] if "tasks" in text else ["--tasks", "gsm8k"]))


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    refused(f"--config {tmp_path} cannot be read (Is a directory)", "--config", str(tmp_path))
    refused("cannot be read (No such file or directory)", "--config", str(tmp_path / "x"))
    (tmp_path / "latin").write_bytes(b"name: \xff\xfe")
    refused("is not valid YAML", "--config", str(tmp_path / "latin"))


def test_an_empty_file_says_nothing(tmp_path: Path) -> None:
    assert settings("--config", config(tmp_path, "# nothing\n")) == settings()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "--tasks is required: give names such as gsm8k,minerva_math"),
        (["--tasks", ""], "--tasks must not be empty"),
        (["--tasks", "a,"], "--tasks must not contain an empty name"),
        (["--tasks", "a", "--limit", "ten"], "--limit must be a whole number (got ten)"),
        (["--tasks", "a", "--limit", "0.1"], "--limit must be a whole number (got 0.1)"),
        (["--tasks", "a", "--k", "1,x"], "--k must be a whole number (got x)"),
        (["--tasks", "a", "--k", "0"], "--k must be at least 1 (got 0)"),
        (["--tasks", "a", "--threshold", "0.9,high"], "--threshold must be a number (got high)"),
        (["--tasks", "a", "--margin", "-5"], "--margin must be between 0 and 100 (got -5)"),
        (["--tasks", "a", "--margin", "inf"], "--margin must be a number (got inf)"),
        (["--tasks", "a", "--block-cache", "both"], "--block-cache must be on or off (got both)"),
        (["--tasks", "a", "--lim", "5"], "unrecognized arguments: --lim 5"),
        (["--tasks", "a", "--limit"], "argument --limit: expected one argument"),
        (
            ["--tasks", "a", "--policies", "k1", "--force", "k2_middle"],
            "--force must name policies of this sweep: k1 (got k2_middle)",
        ),
        (["--tasks", "a", "--force", "x"], "unknown policy 'x'"),
        (["a"], "unrecognized arguments: a"),
    ],
)
def test_a_command_that_is_not_right(arguments: list[str], sentence: str) -> None:
    refused(sentence, *arguments)


@run(deadline=None)
@given(
    st.sampled_from([name for name, declared in ALL_SETTINGS.items() if declared.many or declared.kind is not bool]),
    st.text(max_size=12),
    st.data(),
)
def test_whatever_is_typed_or_filed_is_read_or_refused(name: str, typed: str, data: st.DataObject) -> None:
    """Never a traceback: settings, or an InputError of sentences."""
    filed = data.draw(
        st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5), st.lists)
    )
    for raw in (typed, filed):
        with contextlib.suppress(InputError):
            merge_settings({"tasks": "gsm8k", name: raw}, {})
        with contextlib.suppress(InputError):
            merge_settings({"tasks": "gsm8k"}, {} if raw is None else {name: raw}, "file")


def test_all_unreadable_values_are_reported_at_once() -> None:
    with pytest.raises(InputError) as error:
        settings("--limit", "x", "--margin", "y", "--k", "z")
    assert len(error.value.sentences) == 3


def test_mistakes_of_all_kinds_are_reported_at_once(tmp_path: Path) -> None:
    filed = config(tmp_path, "batch-sise: 4\nmargin: high\nspeedup: 0.5\nno-dashboard: perhaps")
    words = ["--limt", "5", "--limit", "x", "--k", "0,2", "--subsets", "early", "--reuse", "state", "--threshold", "7"]
    with pytest.raises(InputError) as error:
        parse_sweep(["--config", filed, *words, "--name", "a/b"])
    reported = "\n".join(error.value.sentences)
    for part in (
        "--limt 5", "unknown setting 'batch-sise'", "(got high)", "--speedup must be above 1", "(got perhaps)",
        "--limit must be a whole number (got x)", "--k must be at least 1", "unknown layers 'early'", "--reuse must be",
        "--threshold must be above 0 and at most 1 (got 7)", "--name must be a valid", "--tasks is required",
    ):  # fmt: skip
        assert part in reported, part
    assert len(error.value.sentences) == 12
    with pytest.raises(InputError) as unread:
        parse_sweep(["--config", str(tmp_path / "none.yaml"), "--limit", "0"])
    assert len(unread.value.sentences) == 2, "and nobody knows whether tasks are missing"


def test_what_goes_on_after_an_interrupted_force() -> None:
    for force in (["--force"], ["--force", "k1_first", "k2_last"], ["--force=k1_first"]):
        assert without_force(["--tasks", "a", *force, "--limit", "5"]) == ["--tasks", "a", "--limit", "5"]
        assert without_force([*force, "--tasks", "a"]) == ["--tasks", "a"]
        assert without_force(["--tasks", "a", *force]) == ["--tasks", "a"]


def test_command_options_are_not_settings() -> None:
    assert parse_sweep(["--tasks", "a", "--force"]).force == ()
    assert parse_sweep(["--tasks", "a"]).force is None
    assert parse_sweep(["--tasks", "a", "--force", "k1_first", "k2_last,k3_last"]).force == (
        "k1_first",
        "k2_last",
        "k3_last",
    )
    assert parse_sweep(["--tasks", "a", "--dry-run"]).dry_run
    assert parse_sweep(["--tasks", "a", "--save_config", "x.yaml"]).save_config == Path("x.yaml")


def test_a_saved_configuration_is_the_same_sweep(tmp_path: Path) -> None:
    words = [word for name, (typed, _) in OTHER.items() if name != "sample" for word in (f"--{name}", typed)]
    made = parse_sweep([*words, "--no-dashboard", "--skip-unavailable"]).settings
    path = tmp_path / "saved.yaml"
    save_config(path, made)
    assert parse_sweep(["--config", str(path)]).settings == made
    assert [entry.name for entry in tmp_path.iterdir()] == ["saved.yaml"]
    with pytest.raises(InputError, match=r"--save-config .* cannot be written \(No such file or directory\)"):
        save_config(tmp_path / "no" / "x.yaml", made)
    with pytest.raises(InputError, match=r"--save-config .* cannot be written \(Is a directory\)"):
        save_config(tmp_path, made)
    assert not list(tmp_path.parent.glob(f".{tmp_path.name}*")), "nothing is left of it"


def test_problems_end_a_command_with_a_line_each_and_exit_2(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        run_command(lambda: print(parse_sweep(["--tasks", "a", "--limit", "0", "--margin", "0", "--name", "a b"])))
    assert ended.value.code == 2
    captured = capfd.readouterr()
    assert [line.partition(":")[0] for line in captured.err.splitlines()] == ["error"] * 3
    assert captured.out == ""


def test_repeatable_flags_add_up() -> None:
    command = parse_sweep(["--tasks", "gsm8k", "--resources", "big=1", "--resources", "fast=0.5"])
    assert command.settings.custom_resources == {"big": 1.0, "fast": 0.5}
    refused("--resources must be NAME=AMOUNT", "--tasks", "gsm8k", "--resources", "big")
    refused(
        "--resources must not contain GPU (got GPU=1): use --gpus-per-actor", "--tasks", "gsm8k", "--resources", "GPU=1"
    )
    refused("--callback must be MODULE:CLASS", "--tasks", "gsm8k", "--callback", "module.Class")
    refused(
        "--wait-for-nodes must be between 0 and 604,800 seconds (got -1)", "--tasks", "gsm8k", "--wait-for-nodes=-1"
    )


@pytest.mark.parametrize("url", ["s3://bucket/x", "file:///tmp/x", "gs://user:hidden@b/x", "x://#hidden"])
def test_results_are_written_to_a_local_directory(url: str, tmp_path: Path) -> None:
    """`s3://b/x` used to become a local folder of that name."""
    for arguments in (["--out", url], ["--config", config(tmp_path, f"out: '{url}'\n")]):
        with pytest.raises(InputError, match=r"--out must be a local directory \(got \w+://…\); --upload copies") as no:
            parse_sweep(["--tasks", "gsm8k", *arguments])
        assert "hidden" not in str(no.value)
    assert SweepSettings(tasks=("gsm8k",), out=url).out == url, "folders of earlier versions stay readable"


@pytest.mark.parametrize(
    "url",
    [
        "s3://user:hidden@bucket/x",
        "s3://hidden@bucket/x",
        "gs://hidden@bucket/x",
        "s3://bucket/x?access_key=hidden",
        "s3://bucket/x?region=a&secret_key=hidden",
        "s3://bucket/x?SessionToken=hidden",
        "s3://bucket/x?endpoint_override=http://user:hidden@host",
        "file://user:hidden@/x",
    ],
)
def test_an_upload_url_with_credentials_is_refused_and_not_shown(url: str) -> None:
    with pytest.raises(InputError, match="--upload must not contain credentials") as no:
        settings("--upload", url)
    assert "hidden" not in str(no.value)


@pytest.mark.parametrize(
    ("url", "sentence"),
    [
        ("bucket/x", "--upload must be a URL such as s3://BUCKET/FOLDER"),
        ("hdfs://user:hidden@a/b", "(got hdfs://…)"),
        ("S3://bucket/x", "(got S3://…)"),
        ("s3://user:hidden@bucket/x#y", "--upload must be a URL"),
        ("file://data/x", "must be an absolute path after file://, such as file:///data/copies"),
        ("s3://", "must contain a bucket"),
        ("gs:///x", "must contain a bucket"),
    ],
)
def test_upload_urls_that_are_refused(url: str, sentence: str) -> None:
    with pytest.raises(InputError, match=re.escape(sentence)) as no:
        settings("--upload", url)
    assert "hidden" not in str(no.value)


@pytest.mark.parametrize(
    "url", ["s3://bucket", "s3://b-1/x/?endpoint_override=http://127.0.0.1:1&scheme=http", "gs://anonymous@b/x"]
)
def test_upload_urls_that_are_allowed(url: str) -> None:
    assert settings("--upload", url).upload == url
