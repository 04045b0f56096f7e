"""launch/kubernetes.yaml: every field is one of Kubeflow Trainer's, and its parts fit together."""

import copy
import json
import re
import socket
import subprocess

import pytest

from fla_cp.train.exit_codes import DIVERGED, MISTAKE
from tests.support.manifests import TYPES, documents, problems
from tests.support.processes import ROOT, environment
from tests.support.warm_python import warm_python

MANIFEST = ROOT / "launch/kubernetes.yaml"


@pytest.fixture
def runtime():
    return documents(MANIFEST)[0]


@pytest.fixture
def job():
    return documents(MANIFEST)[1]


def node(runtime):
    (found,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    return found


def test_every_field_is_known_and_has_its_type(runtime, job):
    assert (runtime["kind"], job["kind"]) == ("TrainingRuntime", "TrainJob")
    assert problems(runtime) == problems(job) == []


def at(document, path):
    """The object in which a path such as `spec.rules.0.name` ends, and the last key."""
    *parents, last = [int(x) if x.isdigit() else x for x in path.split(".")]
    for key in parents:
        document = document[key]
    return document, last


POD = "spec.template.spec.replicatedJobs.0.template.spec"
WRONG = [
    (1, "spec.trainer.numNode", 2, "TrainJob.spec.trainer has no field numNode"),
    (1, "spec.trainer.numNodes", "2", "spec.trainer.numNodes must be of type integer, got '2'"),
    (1, "spec.trainer.numNodes", True, "must be of type integer, got True"),
    (1, "spec.trainer.args", [["--cp", 8]], "args[0] must be of type string"),
    (1, "spec.trainer.resourcesPerNode.limits", {"nvidia.com/gpu": [8]}, "limits[nvidia.com/gpu]"),
    (1, "spec.runtimeRef", {"kind": "TrainingRuntime"}, "TrainJob.spec.runtimeRef lacks name"),
    (1, "spec.runtimeRef.kind", "Runtime", "must be one of ClusterTrainingRuntime, TrainingRun"),
    (1, "apiVersion", "kubeflow.org/v1", "must be one of trainer.kubeflow.org/v1alpha1"),
    (1, "kind", "PyTorchJob", "kind must be one of TrainJob, TrainingRuntime, got 'PyTorchJob'"),
    (0, "spec.mlPolicy.torch.numProcPerNode", 8, "mlPolicy.torch has no field numProcPerNode"),
    (0, "spec.mlPolicy", [], "TrainingRuntime.spec.mlPolicy must be of type object"),
    (0, f"{POD}.podFailurePolicy.rules.0.action", "FailJobSet", "must be one of Count, FailIndex"),
    (0, f"{POD}.podFailurePolicy.rules.0.onExitCodes.values.1", "3", "values[1] must be of type"),
    (0, f"{POD}.template.spec.restartPolice", "Never", "template.spec has no field restartPolice"),
    (0, f"{POD}.template.spec.containers.0.volumeMount", [], "has no field volumeMount"),
    (0, f"{POD}.template.spec.volumes.1.emptyDir.sizeLimits", "1Gi", "has no field sizeLimits"),
]


@pytest.mark.parametrize("which, path, value, message", WRONG, ids=[row[1] for row in WRONG])
def test_a_wrong_field_is_refused(which, path, value, message, runtime, job, tmp_path):
    wrong = copy.deepcopy((runtime, job)[which])
    parent, key = at(wrong, path)
    parent[key] = value
    assert message in "\n".join(problems(wrong))
    (tmp_path / "wrong.yaml").write_text(json.dumps(wrong))  # JSON is YAML
    with pytest.raises(AssertionError, match=re.escape(message)):
        documents(tmp_path / "wrong.yaml")


def test_every_reference_of_the_schema_is_in_it():
    named = re.findall(r'"\$ref": "(\w+)"', json.dumps(TYPES))
    assert set(named) <= TYPES.keys() and len(named) > 30


def test_the_job_finds_its_runtime_and_the_trainer_its_container(runtime, job):
    reference = job["spec"]["runtimeRef"]
    assert (reference["kind"], reference["name"]) == (runtime["kind"], runtime["metadata"]["name"])
    replicated = node(runtime)
    labels = replicated["template"]["metadata"]["labels"]
    assert labels["trainer.kubeflow.org/trainjob-ancestor-step"] == "trainer"
    pod = replicated["template"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["name"] == replicated["name"] == "node"  # names that Trainer looks for
    mounted = [mount["name"] for mount in container["volumeMounts"]]
    assert sorted(mounted) == sorted(volume["name"] for volume in pod["volumes"])
    trainer = job["spec"]["trainer"]
    assert trainer["numNodes"] == runtime["spec"]["mlPolicy"]["numNodes"] == 2
    gpus = trainer["resourcesPerNode"]["limits"]["nvidia.com/gpu"]
    assert gpus == trainer["numProcPerNode"] == 8
    names = [variable["name"] for variable in trainer.get("env", []) + container.get("env", [])]
    assert not [name for name in names if name.startswith("PET_")]  # Trainer refuses them


def test_restarts_know_the_exit_codes(runtime):
    policy = runtime["spec"]["template"]["spec"]["failurePolicy"]
    assert policy["maxRestarts"] > 0
    (rule,) = policy["rules"]
    assert rule["action"] == "FailJobSet"
    assert rule["onJobFailureReasons"] == ["PodFailurePolicy"]
    job = node(runtime)["template"]["spec"]
    assert job["backoffLimit"] == 0
    assert job["template"]["spec"]["restartPolicy"] == "Never"  # Jobs with such a policy need it
    (rule,) = job["podFailurePolicy"]["rules"]
    assert rule["action"] == "FailJob"
    assert rule["onExitCodes"]["containerName"] == "node"
    assert (rule["onExitCodes"]["operator"], rule["onExitCodes"]["values"]) == (
        "In",
        [MISTAKE, DIVERGED],
    )


RANK = """
import os, sys
import torch.distributed as dist
dist.init_process_group("gloo")
# print would write this in pieces, because torchrun starts ranks with -u
os.write(1, f"rank {dist.get_rank()} of {dist.get_world_size()}\\n".encode())
dist.barrier()
dist.destroy_process_group()
sys.exit(int(sys.argv[1]))
"""


def test_two_hosts_meet_by_the_variables_of_the_torch_policy(job, tmp_path):
    (tmp_path / "rank.py").write_text(RANK)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    python, *words = job["spec"]["trainer"]["command"]
    assert python == "python"
    hosts = []
    for host in range(2):
        variables = {
            "PET_NNODES": "2",
            "PET_NPROC_PER_NODE": "2",
            "PET_NODE_RANK": str(host),
            "PET_MASTER_ADDR": "127.0.0.1",
            "PET_MASTER_PORT": str(port),
        }
        process = subprocess.Popen(
            [*warm_python(), *words, "rank.py", str(DIVERGED)],
            cwd=tmp_path,
            env=environment(**variables),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        hosts.append(process)
    try:
        shown = [process.communicate(timeout=300) for process in hosts]
    finally:
        for process in hosts:
            process.kill()
    assert [process.returncode for process in hosts] == [DIVERGED] * 2, shown
    lines = sorted(line for out, _ in shown for line in out.splitlines())
    assert lines == [f"rank {rank} of 4" for rank in range(4)]
