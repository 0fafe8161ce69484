"""Submissions to Slurm: script, rejected input, Ray's token and job status, with small sbatch and squeue programs."""

import json
import os
import re
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from orchestrator.cli.slurm import parse_submission
from orchestrator.slurm.job import Job, parse_time_limit, query_squeue, status_lines, submitted_jobs
from orchestrator.slurm.submit import job_machine, render_script, submit, token_environment
from sampler.config import FULL_MODEL
from sampler.errors import InputError

SECRET = "hf_a-secret-that-nobody-may-see"
SWEEP = ("--tasks", "gsm8k", "--model", "tiny", "--name", "s")
SLURM = ("--nodes", "2", "--time", "12:00:00")


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory; the home directory next to it is empty."""
    here, home = tmp_path / "here", tmp_path / "home"
    here.mkdir()
    home.mkdir()
    monkeypatch.chdir(here)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("HF_TOKEN", SECRET)
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    return here


@pytest.fixture
def token_file(here: Path) -> Path:
    return here.parent / "home" / ".ray" / "auth_token"


def install(monkeypatch: pytest.MonkeyPatch, folder: Path, name: str, body: str) -> None:
    """Puts a program of this name first on the path."""
    path = folder / "bin" / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/sh\n{body}\n", encoding="utf-8")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    if str(path.parent) not in os.environ["PATH"]:
        monkeypatch.setenv("PATH", f"{path.parent}:{os.environ['PATH']}")


@pytest.mark.parametrize(
    ("time", "expected"),
    [
        ("30", 1800),
        ("90:00", 5400),
        ("1:30", 90),
        ("12:00:00", 43200),
        ("2-0", 172800),
        ("1-2:30", 95400),
        ("0-0:1:5", 65),
    ],
)
def test_times_are_read_as_slurm_reads_them(time: str, expected: int) -> None:
    assert parse_time_limit(time) == expected


@pytest.mark.parametrize(
    "time",
    [
        *("", "soon", "12h", "1:2:3:4", "-5", "0", "00:00:00", "1:", "12:00:00\n#SBATCH -N9"),
        *("99:99:99", "1:60", "12:00:75", "1-24", "1-0:60", "-1", "1-", "٣"),
    ],
)
def test_other_times_are_rejected(time: str) -> None:
    with pytest.raises(InputError, match=r"^--time must "):
        parse_time_limit(time)


def test_the_sweep_gets_a_signal_before_the_time_limit() -> None:
    assert Job(nodes=1, time="12:00:00").warning_seconds == 120
    assert Job(nodes=1, time="2").warning_seconds == 30


FULL = Job(
    nodes=4,
    time="2-00",
    gpus_per_node=2,
    account="a",
    partition="gpu",
    qos="high",
    constraint="a100&nvlink",
    mem="64G",
    requeue=True,
    sbatch=("reservation=r", "comment=it's a # test", "exclusive"),
)


def directives(script: str) -> list[str]:
    return [line.removeprefix("#SBATCH --") for line in script.splitlines() if line.startswith("#SBATCH")]


@pytest.mark.parametrize("job", [Job(nodes=1, time="30"), FULL], ids=["small", "full"])
def test_the_script_is_valid_bash(job: Job, tmp_path: Path) -> None:
    setup, image = tmp_path / "a set-up.sh", tmp_path / "an image.sif"
    setup.write_text("module load cuda\n", encoding="utf-8")
    image.touch()
    path = tmp_path / "it's here" / "001.sh"
    path.parent.mkdir()
    for each in (job, Job(nodes=2, time="30", setup=setup, container=str(image))):
        text = render_script(
            each, ["--tasks", "a b;c"], name="s", path=path, here=tmp_path, dashboard=True, binds=[path.parent]
        )
        path.write_text(text, encoding="utf-8")
        assert subprocess.run(["bash", "-n", str(path)], check=False).returncode == 0
        assert "--tasks 'a b;c'" in text
        assert SECRET not in text
        assert "HF_TOKEN" not in text


def test_the_script_requests_what_the_flags_say(tmp_path: Path) -> None:
    text = render_script(FULL, ["--tasks", "gsm8k"], name="s", path=tmp_path / "001.sh", here=tmp_path, dashboard=False)
    wanted = {"nodes=4", "gpus-per-node=2", "time=2-00", "account=a", "partition=gpu", "qos=high", "mem=64G"}
    wanted |= {"constraint=a100&nvlink", "requeue", "signal=B:USR1@120", "dependency=singleton"}
    assert wanted | {"reservation=r", 'comment="it\'s a # test"', "exclusive"} <= set(directives(text))
    assert "scontrol requeue" in text
    assert "--include-dashboard=false" in text
    small = render_script(Job(nodes=1, time="5"), [], name="s", path=tmp_path / "x.sh", here=tmp_path, dashboard=True)
    assert "scontrol requeue" not in small
    assert "apptainer" not in small
    assert f'"on Slurm, continue with:" sbatch {tmp_path}/x.sh' in small


def test_typed_gpus_are_requested_and_counted() -> None:
    submission = parse_submission((*SLURM, "--gpus-per-node", "a100:4", "--", *SWEEP))
    assert "gpus-per-node=a100:4" in submission.job.directives()
    machine = job_machine(submission.job)
    assert (machine.most("GPU"), machine.largest("GPU")) == (8, 4)
    assert submission.job.cpus == 8


def test_values_of_a_repeated_list_option_are_joined() -> None:
    options = ("--sbatch", "mail-type=END", "--sbatch", "--exclusive", "--sbatch=--mail-type=FAIL", "--sbatch", "nice")
    found = parse_submission((*SLURM, *options[:2], *options[4:], "--", *SWEEP)).job.directives()
    assert {"mail-type=END,FAIL", "nice"} <= set(found)
    assert "exclusive" in parse_submission((*SLURM, "--sbatch=--exclusive", "--", *SWEEP)).job.directives()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((*SLURM,), "the flags of the sweep are missing"),
        (("--nodes", "two", "--time", "5", "--", *SWEEP), "--nodes must be a whole number (got two)"),
        (("--nodes", "0", "--time", "5", "--", *SWEEP), "--nodes must be at least 1 (got 0)"),
        (("--nodes", "1", "--time", "noon", "--", *SWEEP), "--time must be minutes"),
        (("--nodes", "1", "--", *SWEEP), "--time"),
        ((*SLURM, "--gpus-per-node", "-1", "--", *SWEEP), "--gpus-per-node must be at least 0 (got -1)"),
        ((*SLURM, "--gpus-per-node", "a100", "--", *SWEEP), "TYPE:NUMBER, such as 4 or a100:4 (got 'a100')"),
        ((*SLURM, "--gpus-per-node", "a100:", "--", *SWEEP), "(got 'a100:')"),
        ((*SLURM, "--gpus-per-node", "a100:2,v100:1", "--", *SWEEP), "(got 'a100:2,v100:1')"),
        ((*SLURM, "--gpus-per-node", "a100:0", "--", *SWEEP), "requests no GPU"),
        ((*SLURM, "--gpus-per-node", "2.5", "--", *SWEEP), "(got '2.5')"),
        ((*SLURM, "--partition", "a b", "--", *SWEEP), "--partition must be a name"),
        ((*SLURM, "--mem", "much", "--", *SWEEP), "--mem must be the memory of a node, such as 64G (got 'much')"),
        ((*SLURM, "--setup", "nowhere.sh", "--", *SWEEP), "--setup nowhere.sh does not exist"),
        ((*SLURM, "--container", "nowhere.sif", "--", *SWEEP), "--container nowhere.sif does not exist"),
        ((*SLURM, "--container", 'docker://a"b', "--", *SWEEP), "--container must be an image without"),
        ((*SLURM, "--sbatch", "time=5", "--", *SWEEP), "--sbatch time is not allowed: use --time"),
        ((*SLURM, "--sbatch", "output=x", "--", *SWEEP), "--sbatch output is not allowed: the log is written to"),
        ((*SLURM, "--sbatch", "array=1-3", "--", *SWEEP), "--sbatch array is not allowed: a sweep is one job"),
        ((*SLURM, "--sbatch=--job-name=x", "--", *SWEEP), "--sbatch job-name is not allowed"),
        ((*SLURM, "--sbatch", "gres=gpu:a100:2", "--", *SWEEP), "use --gpus-per-node"),
        ((*SLURM, "--sbatch", "gres=nvme:1,gpu", "--", *SWEEP), "use --gpus-per-node"),
        ((*SLURM, "--sbatch", "-N", "--", *SWEEP), "--sbatch"),
        ((*SLURM, "--sbatch=-N=3", "--", *SWEEP), "long name of an sbatch option (got '-N=3')"),
        ((*SLURM, "--sbatch", "C=x", "--", *SWEEP), "long name of an sbatch option (got 'C=x')"),
        ((*SLURM, "--sbatch", "comment=", "--", *SWEEP), "--sbatch comment= has no value"),
        ((*SLURM, "--sbatch", "comment=a\n#SBATCH -N9", "--", *SWEEP), "without double quotes, backslashes and line"),
        ((*SLURM, "--sbatch", 'comment=a"b', "--", *SWEEP), "without double quotes, backslashes and line breaks"),
        ((*SLURM, "--sbatch", "nice=1", "--sbatch", "nice=2", "--", *SWEEP), "--sbatch nice must be given only once"),
        ((*SLURM, "--colour", "--", *SWEEP), "--colour"),
        ((*SLURM, "--", "--tasks", ""), "--tasks must not be empty"),
        ((*SLURM, "--", *SWEEP, "--k", "x"), "--k must be a whole number (got x)"),
        ((*SLURM, "--", *SWEEP, "--address", "auto"), "--address must not be used with Slurm"),
        (
            (*SLURM, "--", *SWEEP, "--gpus-per-actor", "1"),
            "--gpus-per-actor must be at most 0",
        ),
        ((*SLURM, "--", *SWEEP, "--actors", "3"), "--actors must be at most 2"),
        ((*SLURM, "--", "--tasks", "gsm8k"), "needs a GPU"),
        ((*SLURM, "--", *SWEEP, "--out", "50%"), "a path without %"),
        ((*SLURM, "--requeue", "--", *SWEEP, "--force"), "--force and --requeue must not be used together"),
        ((*SLURM, "--", *SWEEP, "--dry-run"), "--dry-run must come before the --"),
    ],
)
def test_wrong_input_is_reported_in_one_sentence(arguments: tuple[str, ...], message: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_submission(arguments)
    assert message in caught.value.sentences[0]
    assert "\n" not in caught.value.sentences[0]


def test_every_directive_of_ours_is_refused_as_an_option(tmp_path: Path) -> None:
    """A second value would silently replace it."""
    text = render_script(FULL, [], name="s", path=tmp_path / "001.sh", here=tmp_path, dashboard=False)
    own = [directive.partition("=")[0] for directive in directives(text)]
    for key in (key for key in own if key not in ("reservation", "comment", "exclusive")):
        with pytest.raises(InputError, match=f"--sbatch {key} is not allowed: .+"):
            Job(nodes=1, time="5", sbatch=(f"{key}=1",))


def test_a_container_sees_every_path_of_the_sweep(here: Path) -> None:
    other = here.parent / "other"
    for name in ("model", "data", "out"):
        (other / name).mkdir(parents=True)
    (here / "sweep.yaml").write_text(f"model: {other}/model\n", encoding="utf-8")
    flags = ("--config", "sweep.yaml", "--tasks", "gsm8k", f"--data={other}/data", "--out", str(other / "out"))
    binds = parse_submission((*SLURM, "--container", "docker://x", "--", *flags)).binds
    assert set(binds) == {here, other / "model", other / "data", other / "out"}
    (here.parent / "a,b").mkdir()
    with pytest.raises(InputError, match=r"--container needs paths without colons and commas.*a,b"):
        parse_submission((*SLURM, "--container", "docker://x", "--", *SWEEP, "--out", "../a,b"))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--tasks", "gsm9k", "--model", "tiny"), "gsm9k"),
        (("--tasks", "gsm8k", "--model", "tiny", "--policies", "k2_400"), "400"),
        (("--tasks", "gsm8k", "--model", "tiny", "--data", "nowhere"), "--data nowhere does not exist"),
        (("--tasks", "gsm8k", "--model", "./nowhere", "--data", "bundled"), "./nowhere"),
        (("--tasks", "gsm8k", "--model", "/no/such/model"), "/no/such/model"),
        (("--tasks", "gsm9k", "--model", "owner/model"), "gsm9k"),
        (("--tasks", "gsm8k", "--model", "owner/model", "--data", "nowhere"), "--data nowhere does not exist"),
    ],
)
def test_a_sweep_that_cannot_run_is_not_submitted(here: Path, flags: tuple[str, ...], message: str) -> None:
    with pytest.raises(InputError) as caught:
        submit(parse_submission((*SLURM, "--dry-run", "--", *flags)))
    assert message in caught.value.sentences[0]
    assert not list(here.iterdir())


def test_a_model_on_the_hub_is_assumed_to_exist(here: Path) -> None:
    """A node may reach the Hub even if the login node does not."""
    text = submit(parse_submission((*SLURM, "--dry-run", "--", "--tasks", "gsm8k,mmlu", "--model", "owner/model")))
    assert "--model owner/model" in text
    assert not list(here.iterdir())


def test_gpus_must_be_requested_where_there_are_some(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(
        monkeypatch, tmp_path, "sinfo", 'case "$*" in *=cpu*) echo "(null)";; *) echo "gpu:a100:4(S:0-1),gpu:8";; esac'
    )
    for model in ((), ("--model", FULL_MODEL)):
        with pytest.raises(
            InputError, match=r"--gpus-per-node is missing, and this cluster has GPUs \(a100:4, 8 per node\)"
        ):
            parse_submission((*SLURM, "--", "--tasks", "gsm8k", *model))
    assert parse_submission((*SLURM, "--gpus-per-node", "4", "--", "--tasks", "gsm8k")).job.gpus_per_node == 4
    assert parse_submission((*SLURM, "--", *SWEEP)).job.gpus_per_node == 0, "the bundled model, by name"
    for flags in (("--partition", "cpu"), ("--gpus-per-node", "0")):
        with pytest.raises(
            InputError, match="--model auto needs a GPU, and the job requests none: add --gpus-per-node"
        ):
            parse_submission((*SLURM, *flags, "--", "--tasks", "gsm8k"))


def test_a_dry_run_prints_the_plan_at_the_top_of_the_script(tmp_path: Path) -> None:
    flags = (*SLURM, "--gpus-per-node", "a100:2", "--dry-run")
    text = submit(parse_submission((*flags, "--", "--tasks", "gsm8k,mmlu", "--model", FULL_MODEL)))
    path = tmp_path / "job.sh"
    path.write_text(text, encoding="utf-8")
    assert subprocess.run(["bash", "-n", str(path)], check=False).returncode == 0
    plan, _, script = text.partition("\n#SBATCH ")
    shebang, *lines = plan.splitlines()
    assert shebang == "#!/bin/bash"
    plan = "\n".join(lines)
    assert all(line.startswith("#") for line in lines)
    assert "15.9 GB per actor at batch size 1, of 38.8 GB (A100 with 40 GB" in plan
    assert re.search(r"# time +about .* hours on one actor, .* on 4 actors", plan)
    assert re.search(r"# --mem +not given; a node needs about \d+\.\d GB: --mem \d+G", plan)
    assert "nodes=2" in script
    small = submit(parse_submission((*SLURM, "--dry-run", "--", *SWEEP)))
    assert "# task       gsm8k: " in small


def test_a_missing_sbatch_is_reported(here: Path) -> None:
    command = [sys.executable, "-m", "orchestrator.slurm", "submit", *SLURM, "--", *SWEEP]
    environment = {**os.environ, "PATH": str(here), "PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run(command, cwd=here, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: sbatch is not on the path")
    assert done.stderr.count("\n") == 1
    assert not (here / "results").exists()


def test_a_dry_run_creates_nothing(here: Path) -> None:
    assert submit(parse_submission((*SLURM, "--dry-run", "--", *SWEEP))).startswith("#!/bin/bash\n")
    assert [path for path in here.parent.rglob("*") if path not in (here, here.parent / "home")] == []


def test_script_and_job_number_are_kept(here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SBATCH_PARTITION", "somewhere")
    body = 'for last; do :; done; cp "$last" "$last.seen"; printf "%s\\n" "$@" > "$last.argv"; echo "77;cluster"'
    install(monkeypatch, tmp_path, "sbatch", body)
    message = submit(parse_submission((*SLURM, "--partition", "gpu", "--sbatch", "comment=two words", "--", *SWEEP)))
    folder = here / "results" / "s" / "slurm"
    assert message.startswith(f"job 77; its log: {folder}/001-77.log\ntime limit 12:00:00 (h:min:s); ")
    given = (folder / "001.sh.argv").read_text().splitlines()
    wanted = {"--partition=gpu", "--export=ALL", f"--output={folder}/001-%j.log", "--comment=two words"}
    assert wanted <= set(given), "options on the command line take precedence over SBATCH_PARTITION"
    assert (folder / "001.sh").read_text() == (folder / "001.sh.seen").read_text()
    assert json.loads((folder / "001.json").read_text())["job"] == "77"
    submit(parse_submission((*SLURM, "--", *SWEEP)))  # a directory with scripts alone can still become a sweep's
    assert [job.script.name for job in submitted_jobs(folder.parent)] == ["001.sh", "002.sh"]


def test_the_token_is_created_once_and_passed_through_the_environment(
    here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, token_file: Path
) -> None:
    seen = tmp_path / "seen"
    install(monkeypatch, tmp_path, "sbatch", f'echo "$RAY_AUTH_TOKEN" >> {seen}; echo "$*" >> {tmp_path}/argv; echo 1')
    messages = [submit(parse_submission((*SLURM, "--", *SWEEP))) for _ in range(2)]
    token = token_file.read_text(encoding="ascii")
    assert len(bytes.fromhex(token)) == 32
    assert stat.S_IMODE(token_file.stat().st_mode) == 0o600
    assert stat.S_IMODE(token_file.parent.stat().st_mode) == 0o700
    assert seen.read_text().split() == [token, token]
    assert list(token_file.parent.iterdir()) == [token_file]
    scripts = [path.read_text() for path in (here / "results").rglob("*") if path.is_file()]
    assert len(scripts) == 4
    assert not [text for text in (*messages, *scripts, (tmp_path / "argv").read_text()) if token in text]


def test_ray_finds_the_token_that_was_created(token_file: Path) -> None:
    """Ray's own command prints it, so a person can use it for the dashboard."""
    token = token_environment()
    ray = [sys.executable, "-m", "ray.scripts.scripts", "get-auth-token"]
    assert subprocess.run(ray, capture_output=True, text=True, check=True).stdout == token["RAY_AUTH_TOKEN"]
    assert str(token_file) in token["REUSE_SWEEP_TOKEN_SOURCE"]


def test_a_token_of_the_environment_is_used_as_ray_uses_it(
    here: Path, monkeypatch: pytest.MonkeyPatch, token_file: Path
) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(here / "mine"))
    with pytest.raises(InputError, match=r"cannot be read from .*mine \(No such file"):
        token_environment()
    (here / "mine").write_text("\n", encoding="ascii")
    with pytest.raises(InputError, match="mine is empty"):
        token_environment()
    (here / "mine").write_text("abc\n", encoding="ascii")
    assert token_environment()["RAY_AUTH_TOKEN"] == "abc"
    monkeypatch.setenv("RAY_AUTH_TOKEN", "def")
    assert token_environment()["RAY_AUTH_TOKEN"] == "def"
    assert not token_file.exists()


def test_a_home_directory_that_cannot_be_written_is_reported(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (here.parent / "file").touch()
    monkeypatch.setenv("HOME", str(here.parent / "file"))
    with pytest.raises(InputError, match="set RAY_AUTH_TOKEN"):
        token_environment()


def test_slurms_refusal_is_reported(here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refusal = "sbatch: error: Batch job submission failed: Requested node configuration is not available"
    install(monkeypatch, tmp_path, "sbatch", f"echo 'sbatch: something' >&2; echo '{refusal}' >&2; exit 1")
    with pytest.raises(InputError, match=r"rejected the job: Requested node configuration is not available .*nodes=2"):
        submit(parse_submission((*SLURM, "--", *SWEEP)))
    assert not list((here / "results").iterdir())


def test_a_directory_of_other_files_is_left_alone(here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, tmp_path, "sbatch", "echo 1")
    (here / "results" / "s").mkdir(parents=True)
    (here / "results" / "s" / "thesis.txt").touch()
    with pytest.raises(InputError, match="is not empty"):
        submit(parse_submission((*SLURM, "--", *SWEEP)))


def test_status_of_jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "s" / "slurm"
    folder.mkdir(parents=True)
    for number, job in (("001", "7"), ("002", "8")):
        (folder / f"{number}.json").write_text(json.dumps({"job": job, "submitted": "2026-01-01"}))
    (folder / "001-7.log").write_text("a\nstopped; continue with: it\n\n")
    jobs = submitted_jobs(tmp_path / "s")
    install(
        monkeypatch, tmp_path, "squeue", 'echo "8|RUNNING|1:02|12:00:00|2|n[1-2]"; echo "9|PENDING|0:00|1:00|1|(x)"'
    )
    assert list(status_lines(jobs, query_squeue(["7", "8"]))) == [
        "job 7, submitted 2026-01-01: no longer in the queue",
        f"  {folder}/001-7.log: stopped; continue with: it",
        "job 8, submitted 2026-01-01: running, 1:02 of 12:00:00, 2 nodes n[1-2]",
    ]
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "squeue cannot be run here" in next(status_lines(jobs, query_squeue(["7", "8"])))
