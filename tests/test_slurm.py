"""Submissions to Slurm: the script, what is refused, and how jobs stand; sbatch and squeue are small stand-ins."""

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from orchestrator.slurm.flags import parse
from orchestrator.slurm.job import Job, seconds
from orchestrator.slurm.script import script_of
from orchestrator.slurm.status import lines, queue, submitted
from orchestrator.slurm.submit import submit
from sampler.errors import InputError

SECRET = "hf_a-secret-that-nobody-may-see"
SWEEP = ("--tasks", "gsm8k", "--model", "tiny", "--name", "s")
ASKED = ("--nodes", "2", "--time", "12:00:00")


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_TOKEN", SECRET)
    return tmp_path


def stand_in(monkeypatch: pytest.MonkeyPatch, folder: Path, name: str, body: str) -> None:
    """A program of this name, first on the path."""
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
def test_times_mean_what_slurm_means(time: str, expected: int) -> None:
    assert seconds(time) == expected


@pytest.mark.parametrize(
    "time",
    [
        *("", "soon", "12h", "1:2:3:4", "-5", "0", "00:00:00", "1:", "12:00:00\n#SBATCH -N9"),
        *("99:99:99", "1:60", "12:00:75", "1-24", "1-0:60", "-1", "1-", "٣"),
    ],
)
def test_other_times_are_refused(time: str) -> None:
    with pytest.raises(InputError, match=r"^--time .* allowed"):
        seconds(time)


def test_the_sweep_is_told_to_stop_before_the_end() -> None:
    assert Job(nodes=1, time="12:00:00").warning == 120
    assert Job(nodes=1, time="2").warning == 30


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
)


@pytest.mark.parametrize("job", [Job(nodes=1, time="30"), FULL], ids=["small", "full"])
def test_the_script_is_good_bash(job: Job, tmp_path: Path) -> None:
    setup = tmp_path / "a set-up.sh"
    setup.write_text("module load cuda\n", encoding="utf-8")
    path = tmp_path / "it's here" / "001.sh"
    path.parent.mkdir()
    for made in (job, Job(nodes=2, time="30", setup=setup)):
        text = script_of(made, ["--tasks", "a b;c"], name="s", path=path, here=tmp_path, dashboard=True)
        path.write_text(text, encoding="utf-8")
        assert subprocess.run(["bash", "-n", str(path)], check=False).returncode == 0
        assert "--tasks 'a b;c'" in text
        assert SECRET not in text
        assert "HF_TOKEN" not in text


def test_the_script_asks_for_what_was_asked_for(tmp_path: Path) -> None:
    text = script_of(FULL, ["--tasks", "gsm8k"], name="s", path=tmp_path / "001.sh", here=tmp_path, dashboard=False)
    asked = [line.removeprefix("#SBATCH --") for line in text.splitlines() if line.startswith("#SBATCH")]
    wanted = {"nodes=4", "gpus-per-node=2", "time=2-00", "account=a", "partition=gpu", "qos=high", "mem=64G"}
    assert wanted | {"constraint=a100&nvlink", "requeue", "signal=B:USR1@120", "dependency=singleton"} <= set(asked)
    assert "scontrol requeue" in text
    assert "--include-dashboard=false" in text
    again = script_of(Job(nodes=1, time="5"), [], name="s", path=tmp_path / "x.sh", here=tmp_path, dashboard=True)
    assert "scontrol requeue" not in again
    assert f'"on Slurm, continue with:" sbatch {tmp_path}/x.sh' in again


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((*ASKED,), "the sweep's flags are missing"),
        (("--nodes", "two", "--time", "5", "--", *SWEEP), "--nodes two: a whole number"),
        (("--nodes", "0", "--time", "5", "--", *SWEEP), "--nodes 0: a whole number of at least 1"),
        (("--nodes", "1", "--time", "noon", "--", *SWEEP), "--time 'noon': minutes"),
        (("--nodes", "1", "--", *SWEEP), "--time"),
        ((*ASKED, "--gpus-per-node", "-1", "--", *SWEEP), "--gpus-per-node -1"),
        ((*ASKED, "--partition", "a b", "--", *SWEEP), "--partition 'a b'"),
        ((*ASKED, "--mem", "much", "--", *SWEEP), "--mem 'much'"),
        ((*ASKED, "--setup", "nowhere.sh", "--", *SWEEP), "--setup nowhere.sh: a file"),
        ((*ASKED, "--colour", "--", *SWEEP), "--colour"),
        ((*ASKED, "--", "--tasks", ""), "--tasks is empty"),
        ((*ASKED, "--", *SWEEP, "--k", "x"), "--k x"),
        ((*ASKED, "--", *SWEEP, "--address", "auto"), "--address names a Ray cluster"),
        ((*ASKED, "--", *SWEEP, "--gpus-per-actor", "1"), "--gpus-per-actor 1: no machine here has more than 0"),
        ((*ASKED, "--", *SWEEP, "--actors", "3"), "--actors 3: with 1 CPU each there is room for 2"),
        ((*ASKED, "--", "--tasks", "gsm8k"), "has no GPU"),
        ((*ASKED, "--", *SWEEP, "--out", "50%"), "a path without %"),
        ((*ASKED, "--requeue", "--", *SWEEP, "--force"), "--force with --requeue"),
    ],
)
def test_a_mistake_is_one_sentence(arguments: tuple[str, ...], said: str) -> None:
    with pytest.raises(InputError) as caught:
        parse(arguments)
    assert said in caught.value.sentences[0]
    assert "\n" not in caught.value.sentences[0]


@pytest.mark.parametrize(
    ("flags", "said"),
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
def test_what_the_sweep_would_refuse_is_refused_now(tmp_path: Path, flags: tuple[str, ...], said: str) -> None:
    with pytest.raises(InputError) as caught:
        submit(parse((*ASKED, "--dry-run", "--", *flags)))
    assert said in caught.value.sentences[0]
    assert not list(tmp_path.iterdir())


def test_what_is_on_the_hub_is_believed(tmp_path: Path) -> None:
    """A node may reach it, even if nobody does from here."""
    text = submit(parse((*ASKED, "--dry-run", "--", "--tasks", "gsm8k,mmlu", "--model", "owner/model")))
    assert "--model owner/model" in text
    assert not list(tmp_path.iterdir())


def test_without_slurm_the_command_says_so(tmp_path: Path) -> None:
    """The command as people type it, on a path without sbatch."""
    command = [sys.executable, "-m", "orchestrator.slurm", "submit", *ASKED, "--", *SWEEP]
    environment = {**os.environ, "PATH": str(tmp_path), "PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: sbatch is not on the path")
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "results").exists()


def test_a_dry_run_writes_nothing(tmp_path: Path) -> None:
    assert submit(parse((*ASKED, "--dry-run", "--", *SWEEP))).startswith("#!/bin/bash\n")
    assert not list(tmp_path.iterdir())


def test_script_and_number_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SBATCH_PARTITION", "somewhere")
    seen = 'for last; do :; done; cp "$last" "$last.seen"; printf "%s\\n" "$@" > "$last.told"; echo "77;cluster"'
    stand_in(monkeypatch, tmp_path, "sbatch", seen)
    said = submit(parse((*ASKED, "--partition", "gpu", "--", *SWEEP)))
    folder = tmp_path / "results" / "s" / "slurm"
    assert said.startswith(f"job 77; its log: {folder}/001-77.log\nit may take 12:00:00 (h:min:s) at a time; ")
    told = (folder / "001.sh.told").read_text().splitlines()
    assert {"--partition=gpu", "--export=ALL", f"--output={folder}/001-%j.log"} <= set(told), "before the environment"
    assert (folder / "001.sh").read_text() == (folder / "001.sh.seen").read_text()
    assert json.loads((folder / "001.json").read_text())["job"] == "77"
    submit(parse((*ASKED, "--", *SWEEP)))  # a folder that holds scripts alone can still become a sweep's
    assert [job.script.name for job in submitted(folder.parent)] == ["001.sh", "002.sh"]


def test_a_refused_job_is_told_in_slurms_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refusal = "sbatch: error: Batch job submission failed: Requested node configuration is not available"
    stand_in(monkeypatch, tmp_path, "sbatch", f"echo 'sbatch: something' >&2; echo '{refusal}' >&2; exit 1")
    with pytest.raises(InputError, match=r"refuses the job: Requested node configuration is not available .*nodes=2"):
        submit(parse((*ASKED, "--", *SWEEP)))
    assert not list((tmp_path / "results").iterdir())


def test_a_folder_that_is_no_sweeps_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, tmp_path, "sbatch", "echo 1")
    (tmp_path / "results" / "s").mkdir(parents=True)
    (tmp_path / "results" / "s" / "thesis.txt").touch()
    with pytest.raises(InputError, match="is not empty"):
        submit(parse((*ASKED, "--", *SWEEP)))


def test_how_jobs_stand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "s" / "slurm"
    folder.mkdir(parents=True)
    for number, job in (("001", "7"), ("002", "8")):
        (folder / f"{number}.json").write_text(json.dumps({"job": job, "submitted": "2026-01-01"}))
    (folder / "001-7.log").write_text("a\nstopped; continue with: it\n\n")
    jobs = submitted(tmp_path / "s")
    stand_in(
        monkeypatch, tmp_path, "squeue", 'echo "8|RUNNING|1:02|12:00:00|2|n[1-2]"; echo "9|PENDING|0:00|1:00|1|(x)"'
    )
    assert list(lines(jobs, queue(["7", "8"]))) == [
        "job 7, submitted 2026-01-01: no longer in the queue",
        f"  {folder}/001-7.log: stopped; continue with: it",
        "job 8, submitted 2026-01-01: running, 1:02 of 12:00:00, 2 nodes n[1-2]",
    ]
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "squeue cannot be asked here" in next(lines(jobs, queue(["7", "8"])))
