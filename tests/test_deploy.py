"""deploy/: the image's Dockerfile and the Kubernetes manifest, checked without Docker and Kubernetes."""

import re
import shlex
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.autoscaler._private.kuberay.autoscaling_config import _derive_autoscaling_config_from_ray_cr
from ray.autoscaler._private.util import validate_config

from orchestrator.cli.sweep import parse_sweep
from orchestrator.running.environment import OBJECT_STORE_BYTES

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"
DNS_LABEL = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
# Fields of ray.io/v1 in KubeRay's API reference, version 1.6.
FIELDS = {
    "RayJobSpec": (
        "activeDeadlineSeconds backoffLimit rayClusterSpec submitterPodTemplate metadata clusterSelector "
        "submitterConfig managedBy deletionStrategy entrypoint runtimeEnvYAML jobId submissionMode entrypointResources "
        "entrypointNumCpus entrypointNumGpus ttlSecondsAfterFinished shutdownAfterJobFinishes suspend"
    ),
    "RayClusterSpec": (
        "authOptions suspend managedBy autoscalerOptions headServiceAnnotations enableInTreeAutoscaling "
        "gcsFaultToleranceOptions headGroupSpec rayVersion workerGroupSpecs"
    ),
    "AutoscalerOptions": (
        "resources image imagePullPolicy securityContext idleTimeoutSeconds upscalingMode version env envFrom "
        "volumeMounts"
    ),
    "HeadGroupSpec": "template headService enableIngress rayStartParams serviceType resources labels",
    "WorkerGroupSpec": (
        "suspend groupName replicas minReplicas maxReplicas idleTimeoutSeconds rayStartParams template scaleStrategy "
        "numOfHosts resources labels"
    ),
    "PodSpec": "restartPolicy securityContext tolerations containers volumes",
    "Container": "name image ports env resources volumeMounts",
}


def pinned(package: str) -> str:
    found = re.search(rf"^{package}==(.+)$", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE)
    assert found is not None
    return found[1]


@pytest.fixture(scope="module")
def manifests() -> dict[str, dict[str, Any]]:
    loaded = yaml.safe_load_all((DEPLOY / "rayjob.yaml").read_text(encoding="utf-8"))
    return {manifest["kind"]: manifest for manifest in loaded}


@pytest.fixture(scope="module")
def cluster(manifests: dict[str, dict[str, Any]]) -> dict[str, Any]:
    spec: dict[str, Any] = manifests["RayJob"]["spec"]["rayClusterSpec"]
    return spec


def groups(cluster: dict[str, Any]) -> list[dict[str, Any]]:
    return [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]


def containers(cluster: dict[str, Any]) -> list[dict[str, Any]]:
    return [group["template"]["spec"]["containers"][0] for group in groups(cluster)]


def unknown_fields(manifests: dict[str, dict[str, Any]]) -> Iterator[str]:
    job = manifests["RayJob"]["spec"]
    cluster = job["rayClusterSpec"]
    parts = [("RayJobSpec", job), ("RayClusterSpec", cluster), ("AutoscalerOptions", cluster["autoscalerOptions"])]
    parts += [("HeadGroupSpec", cluster["headGroupSpec"])]
    parts += [("WorkerGroupSpec", group) for group in cluster["workerGroupSpecs"]]
    parts += [("PodSpec", group["template"]["spec"]) for group in groups(cluster)]
    parts += [("Container", container) for container in containers(cluster)]
    for kind, part in parts:
        yield from (f"{kind}.{name}" for name in part if name not in FIELDS[kind].split())


def test_the_manifest_has_the_kinds_and_fields_of_kuberay(manifests: dict[str, dict[str, Any]]) -> None:
    versions = {kind: manifest["apiVersion"] for kind, manifest in manifests.items()}
    assert versions == {"PersistentVolumeClaim": "v1", "RayJob": "ray.io/v1"}
    assert list(unknown_fields(manifests)) == []
    for manifest in manifests.values():
        assert DNS_LABEL.fullmatch(manifest["metadata"]["name"])


def test_names_are_valid_and_every_volume_exists(manifests: dict[str, dict[str, Any]], cluster: dict[str, Any]) -> None:
    claim = manifests["PersistentVolumeClaim"]["metadata"]["name"]
    for group in groups(cluster):
        pod = group["template"]["spec"]
        (container,) = pod["containers"]
        names = [container["name"], *(port["name"] for port in container.get("ports", ())), group.get("groupName", "x")]
        assert [name for name in names if not DNS_LABEL.fullmatch(name)] == []
        volumes = {volume["name"]: volume["persistentVolumeClaim"]["claimName"] for volume in pod["volumes"]}
        mounted = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        assert volumes == {"data": claim}
        assert mounted == {"data": "/data"}
        environment = {variable["name"]: variable.get("value") for variable in container["env"]}
        assert environment["HF_HOME"].startswith("/data/")


def test_head_and_workers_use_one_image_and_run_without_root(cluster: dict[str, Any]) -> None:
    assert len({container["image"] for container in containers(cluster)}) == 1
    for group in groups(cluster):
        security = group["template"]["spec"]["securityContext"]
        assert security["runAsNonRoot"] is True
        assert security["runAsUser"] == security["fsGroup"] == uid_of_the_image()


def test_requests_equal_limits(cluster: dict[str, Any]) -> None:
    """Kubernetes requires it for GPUs; for memory it keeps a pod from being evicted."""
    for container in containers(cluster):
        assert container["resources"]["requests"] == container["resources"]["limits"]


def test_rays_autoscaler_finds_gpus_that_can_start_and_a_head_without_cpus(
    manifests: dict[str, dict[str, Any]], cluster: dict[str, Any]
) -> None:
    """By the code that the autoscaler's container runs on the RayCluster that KubeRay makes of the manifest."""
    metadata = {**manifests["RayJob"]["metadata"], "namespace": "default"}
    config = _derive_autoscaling_config_from_ray_cr({"metadata": metadata, "spec": cluster})
    validate_config(config)
    head = config["available_node_types"][config["head_node_type"]]
    (gpu,) = (kind for name, kind in config["available_node_types"].items() if name != config["head_node_type"])
    assert head["resources"]["CPU"] == 0
    assert head["resources"].get("GPU", 0) == 0
    assert (gpu["min_workers"], gpu["max_workers"]) == (0, 8)
    assert (gpu["resources"]["GPU"], gpu["resources"]["CPU"]) == (1, 4)


def test_the_cluster_has_this_projects_ray_and_a_token(cluster: dict[str, Any]) -> None:
    assert cluster["enableInTreeAutoscaling"] is True
    assert cluster["rayVersion"] == pinned("ray")
    assert cluster["authOptions"] == {"mode": "token"}
    for group in groups(cluster):
        assert int(group["rayStartParams"]["object-store-memory"]) == OBJECT_STORE_BYTES
        assert all(isinstance(value, str) for value in group["rayStartParams"].values())
        assert group["template"]["spec"]["restartPolicy"] == "Never"


def test_the_entrypoint_is_a_sweep_whose_results_are_on_the_volume(manifests: dict[str, dict[str, Any]]) -> None:
    spec = manifests["RayJob"]["spec"]
    program, _, module, *flags = shlex.split(spec["entrypoint"])
    assert (program, module) == ("python", "orchestrator.sweep")
    settings = parse_sweep(flags).settings
    assert (settings.address, settings.gpus_per_actor) == ("auto", 1)
    assert Path(settings.out).is_relative_to("/data")
    assert spec["shutdownAfterJobFinishes"] is True


def test_a_missing_secret_does_not_stop_the_head(cluster: dict[str, Any]) -> None:
    head, *workers = containers(cluster)
    (token,) = (variable for variable in head["env"] if variable["name"] == "HF_TOKEN")
    assert token["valueFrom"]["secretKeyRef"]["optional"] is True
    assert not [variable for worker in workers for variable in worker["env"] if variable["name"] == "HF_TOKEN"]


def instructions() -> list[tuple[str, str]]:
    """Of the Dockerfile, with continued lines joined and without comments."""
    text = (DEPLOY / "Dockerfile").read_text(encoding="utf-8")
    joined = re.sub(r"\\\n\s*", "", re.sub(r"^\s*#.*\n", "", text, flags=re.MULTILINE))
    pairs = [line.split(maxsplit=1) for line in joined.splitlines() if line.strip()]
    return [(name, rest) for name, rest in pairs]


def of_kind(name: str) -> list[str]:
    return [rest for kind, rest in instructions() if kind == name]


def uid_of_the_image() -> int:
    (found,) = re.findall(r"useradd --uid ([0-9]+)", " ".join(of_kind("RUN")))
    return int(found)


def test_the_image_is_built_from_files_that_exist() -> None:
    known = {"FROM", "RUN", "COPY", "ENV", "USER", "WORKDIR", "CMD"}
    assert {kind for kind, _ in instructions()} == known, "an entrypoint would break KubeRay's and Apptainer's commands"
    sources = [word for copy in of_kind("COPY") for word in copy.split()[:-1]]
    assert [source for source in sources if not (ROOT / source).exists()] == []
    kept = {line[1:] for line in ignored() if line.startswith("!")}
    assert set(sources) == kept, "everything else stays out of the build context"
    assert "*" in ignored()
    assert needed_by_pyproject() <= set(sources)


def ignored() -> list[str]:
    return (DEPLOY / "Dockerfile.dockerignore").read_text(encoding="utf-8").splitlines()


def needed_by_pyproject() -> set[str]:
    """Packages that pyproject.toml installs, and files that it names."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    (patterns,) = re.findall(r"^include = \[(.*)\]$", text, re.MULTILINE)
    wanted = re.findall(r'"(\w+\*)"', patterns)
    folders = {path.name for path in ROOT.iterdir() if (path / "__init__.py").exists()}
    return {name for name in folders if any(fnmatch(name, pattern) for pattern in wanted)} | {"README.md", "LICENSE"}


def test_pip_uses_the_constraints_and_python_is_new_enough() -> None:
    installs = [command for command in of_kind("RUN") if "pip install" in command]
    assert installs
    assert all("--constraint /opt/reuse-sweep/constraints.txt" in command for command in installs)
    (base,) = of_kind("FROM")
    version = re.fullmatch(r"python:3\.([0-9]+)-slim-\w+", base)
    assert version is not None
    assert int(version[1]) >= 11


def test_the_image_runs_as_a_user_and_has_what_kuberay_needs() -> None:
    assert of_kind("USER") == ["ray"]
    kinds = [kind for kind, _ in instructions()]
    assert "RUN" not in kinds[kinds.index("USER") :]
    (installed,) = (command for command in of_kind("RUN") if "apt-get install" in command)
    assert {"bash", "wget"} <= set(installed.split())
