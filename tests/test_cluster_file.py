"""cluster.yaml: accepted by Ray's validator, with the promised properties, and on a simulated AWS its workers start."""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.request import Request, urlopen

import pytest
import yaml
from cluster_variants import GOOGLE, MACHINES, shipped_config, variant_config
from jsonschema import ValidationError
from ray.autoscaler._private.util import prepare_config, validate_config

ROOT = Path(__file__).parents[1]
RESOLVE = ROOT / "deploy" / "resolve_images.py"
GPU_IMAGE = "Deep Learning Base OSS Nvidia Driver GPU AMI (Ubuntu 24.04) "


@pytest.fixture
def config(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.chdir(ROOT)  # file_mounts are relative to it
    return shipped_config()


def test_rays_validator_accepts_it(config: dict[str, Any]) -> None:
    validate_config(prepare_config(config))


@pytest.mark.parametrize("beginning", [GOOGLE, MACHINES])
def test_rays_validator_accepts_the_variants(beginning: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    variant = variant_config(beginning)
    assert variant["provider"]["type"] != "aws"
    assert "boto3" not in str(variant["head_setup_commands"])
    prepared = prepare_config(variant)
    validate_config(prepared)
    assert max(each["max_workers"] for each in prepared["available_node_types"].values()) == variant["max_workers"]


def test_a_typo_would_be_noticed(config: dict[str, Any]) -> None:
    config["idle_timeout_minuts"] = config.pop("idle_timeout_minutes")
    with pytest.raises(ValidationError, match="idle_timeout_minuts"):
        validate_config(prepare_config(config))


def test_gpus_start_on_demand_and_the_head_has_none(config: dict[str, Any]) -> None:
    head, gpu = (config["available_node_types"][name] for name in (config["head_node_type"], "gpu"))
    assert head["resources"] == {"CPU": 0, "GPU": 0}
    assert (gpu["min_workers"], gpu["max_workers"]) == (0, config["max_workers"])
    assert gpu["resources"]["GPU"] >= 1
    assert config["idle_timeout_minutes"] > 0
    assert config["provider"]["cache_stopped_nodes"] is False


def test_commands_are_valid_bash(config: dict[str, Any]) -> None:
    for kind in ("setup", "head_setup", "head_start_ray", "worker_start_ray"):
        for command in config[f"{kind}_commands"]:
            checked = subprocess.run(["bash", "-n", "-c", command], capture_output=True, text=True, check=False)
            assert checked.returncode == 0, checked.stderr


def test_every_part_of_the_project_is_copied(config: dict[str, Any]) -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("not a git checkout: the files of the project are not known")
    parts = {line.split("/")[0] for line in listed.stdout.splitlines()} | {".git"}
    mounted = {there.removeprefix("~/reuse-sweep/"): here for there, here in config["file_mounts"].items()}
    assert mounted.pop("~/.ray/auth_token") == "~/.ray/auth_token"
    assert mounted == {part: part for part in parts}


def test_nothing_but_ssh_is_open_and_no_secret_is_in_the_file(config: dict[str, Any]) -> None:
    """Ray opens SSH only, unless the security group lists more; requests need the token."""
    assert set(config["provider"]["security_group"]) == {"GroupName"}
    assert "--dashboard-host=127.0.0.1" in " ".join(config["head_start_ray_commands"])
    assert any("RAY_AUTH_MODE=token" in command for command in config["setup_commands"])
    assert "HF_TOKEN" not in (ROOT / "cluster.yaml").read_text(encoding="utf-8")


def test_the_autoscaler_reads_the_file_with_resolved_images(config: dict[str, Any]) -> None:
    """Images are resolved before Ray starts, and the file that Ray gets is the one that was written."""
    _, resolve, start = config["head_start_ray_commands"]
    target = resolve.split()[-1]
    assert resolve == f"python ~/reuse-sweep/deploy/resolve_images.py ~/ray_bootstrap_config.yaml {target}"
    assert f"--autoscaling-config={target}" in start


@pytest.mark.parametrize("beginning", [GOOGLE, MACHINES])
def test_other_providers_need_no_lookup(beginning: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(ROOT)
    prepared = prepare_config(variant_config(beginning))
    source, target = tmp_path / "source.yaml", tmp_path / "target.yaml"
    source.write_text(yaml.safe_dump(prepared), encoding="utf-8")
    subprocess.run([sys.executable, str(RESOLVE), str(source), str(target)], check=True)
    assert yaml.safe_load(target.read_text(encoding="utf-8")) == prepared


class SimulatedAws:
    """moto's server, with images of the names that AWS uses, and with access control once it is switched on."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        images = [image("ami-0000000a", GPU_IMAGE + "20260101", "2026-01-01"), image("ami-0000000b", "Other", "2027")]
        images += [image("ami-0000000c", GPU_IMAGE + "20260301", "2026-03-01")]
        (folder / "images.json").write_text(json.dumps(images), encoding="utf-8")
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        for name in [name for name in os.environ if name.startswith("AWS_")]:
            monkeypatch.delenv(name)
        # Nothing may reach the real AWS, whatever the user of this machine has configured.
        self.use("testing", "testing", None, monkeypatch)
        monkeypatch.setenv("AWS_ENDPOINT_URL", self.url)
        monkeypatch.setenv("AWS_CONFIG_FILE", os.devnull)
        monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", os.devnull)
        command = [sys.executable, "-c", "from moto.server import main; main()", "-H", "127.0.0.1", "-p", str(port)]
        environment = {
            **os.environ,
            "MOTO_AMIS_PATH": str(folder / "images.json"),
            "MOTO_IAM_LOAD_MANAGED_POLICIES": "true",
        }
        with (folder / "moto.log").open("wb") as log:
            self.process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        until = time.monotonic() + 600
        while True:
            assert self.process.poll() is None, (folder / "moto.log").read_text()
            try:
                self.post("reset", b"")
                return
            except OSError:
                assert time.monotonic() < until, (folder / "moto.log").read_text()
                time.sleep(0.2)

    def post(self, path: str, data: bytes) -> None:
        headers = {"Content-Type": "application/json"}
        with urlopen(Request(f"{self.url}/moto-api/{path}", data=data, headers=headers)):
            pass

    def use(self, key: str, secret: str, session: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", key)
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", secret)
        if session is not None:
            monkeypatch.setenv("AWS_SESSION_TOKEN", session)


def image(ami_id: str, name: str, created: str) -> dict[str, Any]:
    return {
        "ami_id": ami_id,
        "name": name,
        "description": name,
        "owner_id": "898082745236",
        "owner_alias": "amazon",
        "public": True,
        "virtualization_type": "hvm",
        "architecture": "x86_64",
        "state": "available",
        "creation_date": created,
        "platform": None,
        "image_type": "machine",
        "hypervisor": "xen",
        "root_device_name": "/dev/sda1",
        "root_device_type": "ebs",
        "sriov": "simple",
    }


@pytest.fixture
def aws(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SimulatedAws]:
    for module in ("boto3", "moto.server"):
        pytest.importorskip(module, reason="needs moto's server and boto3: pip install 'moto[server]' boto3")
    simulated = SimulatedAws(tmp_path, monkeypatch)
    try:
        yield simulated
    finally:
        simulated.process.terminate()
        simulated.process.wait()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_head_starts_workers_with_the_role_that_ray_creates(
    aws: SimulatedAws, config: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`ray up` prepares the account. The head, with the rights of its role only, looks up the image and starts one."""
    import boto3
    from botocore.exceptions import ClientError
    from ray.autoscaler._private.aws import config as ray_aws
    from ray.autoscaler._private.aws.node_provider import AWSNodeProvider

    monkeypatch.setenv("HOME", str(tmp_path))  # Ray stores a key pair in ~/.ssh
    monkeypatch.setattr(ray_aws, "time", SimpleNamespace(sleep=lambda _: None))  # it waits for a real AWS
    prepared = ray_aws.bootstrap_aws(prepare_config(config))
    iam = boto3.client("iam", "us-west-2")
    role = iam.get_role(RoleName="ray-autoscaler-v1")["Role"]["Arn"]
    key = boto3.client("sts", "us-west-2").assume_role(RoleArn=role, RoleSessionName="head")["Credentials"]
    aws.use(key["AccessKeyId"], key["SecretAccessKey"], key["SessionToken"], monkeypatch)
    boto3.setup_default_session()
    aws.post("reset-auth", b"0")  # every request is checked from now on

    with pytest.raises(ClientError, match=r"AccessDenied|not authorized"):
        boto3.client("ssm", "us-west-2").get_parameters(Names=["/aws/service/any"])  # what resolve:ssm: would need
    source, target = tmp_path / "ray_bootstrap_config.yaml", tmp_path / "autoscaling.yaml"
    source.write_text(yaml.safe_dump(prepared), encoding="utf-8")
    done = subprocess.run([sys.executable, str(RESOLVE), str(source), str(target)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    resolved = yaml.safe_load(target.read_text(encoding="utf-8"))
    assert resolved["available_node_types"]["gpu"]["node_config"]["ImageId"] == "ami-0000000c", "the newest"
    provider = AWSNodeProvider(resolved["provider"], resolved["cluster_name"])
    (node,) = provider.create_node(resolved["available_node_types"]["gpu"]["node_config"], {}, 1).values()
    assert (node.image_id, node.instance_type) == ("ami-0000000c", "g5.2xlarge")


def test_a_missing_image_is_reported(aws: SimulatedAws, tmp_path: Path) -> None:
    assert aws.process.poll() is None
    source = tmp_path / "source.yaml"
    types = {"gpu": {"node_config": {"ImageId": "newest: no such image *"}}}
    source.write_text(yaml.safe_dump({"provider": {"region": "us-west-2"}, "available_node_types": types}))
    command = [sys.executable, str(RESOLVE), str(source), str(tmp_path / "target.yaml")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("error: Amazon has no image 'no such image *' in us-west-2")
    assert not (tmp_path / "target.yaml").exists()
