"""``lockstep submit kubernetes``: what it prints, held to the schemas of those who read it, and what it refuses.

tests/schedulers starts what the manifests say.
"""

from __future__ import annotations

import copy
import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from lockstep.cli import main
from lockstep.schedulers.kubernetes import to_yaml

DOCUMENT = Path(__file__).parents[2] / "docs" / "many_machines.md"
_ALL = ["--nodes", "3", "-n", "4", "--cpus-per-rank", "2", "--gpus-per-rank", "1", "--mem", "64Gi", "--name", "digits"]
_ALL += ["--namespace", "lab", "--volume", "runs:/runs", "--volume", "data.v2:/data", "--env", "A=b c", "--grace", "90"]
CONTROLLERS = ["jobset", "job", "trainjob"]
#: Model of kubeflow_trainer_api for each kind that Kubernetes itself does not know.
_MODELS = {
    "JobSet": "JobsetV1alpha2JobSet",
    "TrainJob": "TrainerV1alpha1TrainJob",
    "TrainingRuntime": "TrainerV1alpha1TrainingRuntime",
}


def _run(*arguments: str) -> Result:
    done = CliRunner().invoke(main, ["submit", "kubernetes", "--image", "registry/train:1", *arguments])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exc_info
    return done


def _documents(*arguments: str) -> list[dict[str, Any]]:
    yaml = pytest.importorskip("yaml", reason="PyYAML comes with kubernetes-validate, which is not installed")
    done = _run(*arguments)
    assert done.exit_code == 0, done.output
    return list(yaml.safe_load_all(done.stdout))


def check(document: dict[str, Any]) -> None:
    """Hold a document to the schema or model of its kind; raise what they find."""
    model = _MODELS.get(document["kind"])
    if model is None:
        validate = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
        validate.validate(document, "1.33", strict=True)
        return
    models = pytest.importorskip("kubeflow_trainer_api.models", reason="kubeflow_trainer_api is not installed")
    # The models drop what they do not know, so what comes back has to be what went in.
    back = getattr(models, model).from_dict(document).to_dict()
    assert json.loads(json.dumps(back)) == document


@pytest.mark.parametrize("controller", CONTROLLERS)
@pytest.mark.parametrize("options", [_ALL, ["-n", "1"], [*_ALL, "--rdzv", "service"]])
def test_a_manifest_is_valid(controller: str, options: list[str]) -> None:
    for document in _documents("--controller", controller, *options, "train.py", "--lr", "0.1"):
        check(document)


def _places(node: Any) -> list[tuple[Any, Any]]:
    """Every mapping and each of its keys but those that the user may choose."""
    found = []
    if isinstance(node, dict):
        for key, value in node.items():
            if key not in ("labels", "selector", "requests", "limits"):
                found += [(node, key), *_places(value)]
    elif isinstance(node, list):
        found = [place for each in node for place in _places(each)]
    return found


@pytest.mark.parametrize("controller", CONTROLLERS)
def test_a_typo_in_any_word_of_a_manifest_is_found(controller: str) -> None:
    unnoticed = []
    for document in _documents("--controller", controller, *_ALL, "train.py"):
        for index in range(len(_places(document))):
            broken = copy.deepcopy(document)
            node, key = _places(broken)[index]
            if key in ("apiVersion", "kind") and node is broken:
                continue  # by which the schema is chosen
            node[f"{key}z"] = node.pop(key)
            try:
                check(broken)
            except Exception:  # noqa: BLE001  (each of the libraries raises its own)
                continue
            unnoticed.append(f"{document['kind']}: {key}")
    assert not unnoticed


@pytest.mark.parametrize("controller", CONTROLLERS)
@pytest.mark.parametrize(("rdzv", "first"), [("service", None), ("file:/runs/meet", "file:/runs/meet")])
def test_launchers_that_find_each_other_restart_by_themselves(controller: str, rdzv: str, first: str | None) -> None:
    documents = _documents("--controller", controller, *_ALL, "--rdzv", rdzv, "--max-restarts", "3", "train.py")
    job = _jobs_of(documents[-1 if controller == "job" else 0])
    assert job["backoffLimit"] == 3, "new pods for those that were killed"
    rules = job["podFailurePolicy"]["rules"]
    assert [rule["action"] for rule in rules] == ["Ignore", "Ignore", "FailJob"]
    assert rules[2]["onExitCodes"]["values"] == [75, 137]
    host = {"job": "digits-0", "jobset": "digits-node-0-0", "trainjob": "digits-node-0-0"}[controller]
    if controller == "trainjob":
        command = documents[1]["spec"]["trainer"]["command"]
    else:
        (container,) = job["template"]["spec"]["containers"]
        command, port = container["command"], container["ports"][0]["containerPort"]
        assert port == 29400
    words = ["--nnodes", "3", "--rdzv", first or f"{host}.digits", "--max-restarts", "3"]
    assert " ".join(words) in " ".join(command)
    assert "--master-addr" not in command
    if controller == "jobset":
        assert documents[0]["spec"]["failurePolicy"] == {"maxRestarts": 0}


@pytest.mark.parametrize(
    ("rdzv", "text"),
    [
        ("host0", "expected 'service', or file:/FOLDER"),
        ("file:runs", "expected 'service', or file:/FOLDER"),
        ("file:/elsewhere", "on no --volume"),
        ("file:/runs2", "on no --volume"),
    ],
)
def test_a_place_where_pods_can_t_meet_is_refused(rdzv: str, text: str) -> None:
    done = _run("--controller", "job", *_ALL, "--rdzv", rdzv, "train.py")
    assert done.exit_code == 2
    assert text in done.stderr


@pytest.mark.parametrize("controller", CONTROLLERS)
def test_a_pod_has_what_ranks_need(controller: str) -> None:
    documents = _documents("--controller", controller, *_ALL, "train.py")
    job = _jobs_of(documents[-1 if controller == "job" else 0])
    pod = job["template"]["spec"]
    assert (job["completions"], job["parallelism"], job["completionMode"]) == (3, 3, "Indexed")
    assert pod["restartPolicy"] == "Never"
    assert pod["terminationGracePeriodSeconds"] == 120, "more than --grace"
    assert {"name": "shm", "emptyDir": {"medium": "Memory"}} in pod["volumes"]
    (container,) = pod["containers"]
    assert [mount["mountPath"] for mount in container["volumeMounts"]] == ["/dev/shm", "/runs", "/data"]
    rules = job["podFailurePolicy"]["rules"]
    assert [rule["action"] for rule in rules] == ["Ignore", "Ignore"]
    assert rules[0]["onPodConditions"] == [{"type": "DisruptionTarget", "status": "True"}]
    assert rules[1]["onExitCodes"] == {"containerName": container["name"], "operator": "In", "values": [75]}
    amounts = {"cpu": "8", "memory": "64Gi", "nvidia.com/gpu": "4"}
    if controller == "trainjob":
        trainer = documents[1]["spec"]["trainer"]
        assert trainer["resourcesPerNode"] == {"requests": amounts, "limits": amounts}
        assert (trainer["numNodes"], trainer["numProcPerNode"]) == (3, 4)
        assert documents[1]["spec"]["runtimeRef"]["name"] == documents[0]["metadata"]["name"]
    else:
        assert container["resources"] == {"requests": amounts, "limits": amounts}
        assert container["env"] == [{"name": "A", "value": "b c"}]
    assert all(document["metadata"] == {"name": "digits", "namespace": "lab"} for document in documents)


def _jobs_of(document: dict[str, Any]) -> Any:
    """The spec of the Job that a Job, a JobSet or a TrainingRuntime makes."""
    spec = document["spec"]
    if document["kind"] == "TrainingRuntime":
        spec = spec["template"]["spec"]
    return spec["replicatedJobs"][0]["template"]["spec"] if "replicatedJobs" in spec else spec


def test_pods_are_found_by_name_before_they_are_ready() -> None:
    service, job = _documents("--controller", "job", *_ALL, "train.py")
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["publishNotReadyAddresses"] is True
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": job["metadata"]["name"]}
    assert job["spec"]["template"]["spec"]["subdomain"] == service["metadata"]["name"]
    (jobset,) = _documents("--controller", "jobset", *_ALL, "--max-restarts", "2", "train.py")
    assert jobset["spec"]["network"]["publishNotReadyAddresses"] is True
    assert jobset["spec"]["failurePolicy"] == {"maxRestarts": 2}


#: Strings that mean something else to YAML, or could.
_ODD = (
    """yes|No|null|~|1e5|0x10|1_000|12:30:45|2026-01-01|-|- a|a: b|#|{a}|it's|a"b|back\\slash|é|😀|*|&a|!t|%|@|None"""
)
_ODD += "|Memory|a.b/c-d|train-0.train|.inf|.nan|=|<<|0o7|on|y|true|>| |\t|\u2028|\x85|\x00|a\nb||[|?|'|,"


@pytest.mark.parametrize("text", [*_ODD.split("|"), "|"])
def test_every_string_comes_back_from_yaml(text: str) -> None:
    yaml = pytest.importorskip("yaml", reason="PyYAML comes with kubernetes-validate, which is not installed")
    document: Any = {
        "a": text,
        "list": [text, [text, {"b": text}], {"c": [text], "d": {}}, []],
        text or "e": 1,
        "t": True,
    }
    assert yaml.safe_load(to_yaml(document)) == document


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--controller", "job", "--max-restarts", "3"], "--max-restarts 3 with --controller job"),
        (["--controller", "job", "--name", "Train"], "--name Train: expected small letters"),
        (["--controller", "job", "--name", "4train"], "a letter first"),
        (["--controller", "job", "--name", "a" * 62], "at most 61 of them, since pods are named aaa"),
        (["--controller", "jobset", "--name", "a" * 60], "at most 54 of them"),
        (["--controller", "job", "--namespace", "a b"], "--namespace a b: expected small letters"),
        (["--controller", "job", "--image", "a b"], "--image 'a b': expected the name of an image"),
        (["--controller", "job", "--mem", "64 GB"], "--mem 64 GB: expected a size for each pod, such as 64Gi"),
        (["--controller", "job", "--volume", "runs"], "--volume runs: expected CLAIM:/PATH"),
        (["--controller", "job", "--volume", "runs:runs"], "--volume runs:runs: expected CLAIM:/PATH"),
        (["--controller", "job", "--volume", "runs:/dev/shm"], "expected CLAIM:/PATH"),
        (["--controller", "job", "--volume", "a:/x", "--volume", "b:/x"], "two are mounted at the same path"),
        (["--controller", "job", "--env", "A"], "--env A: expected NAME=VALUE"),
        (["--controller", "trainjob", "--env", "PET_NNODES=3"], "this variable is the controller's"),
        (["--controller", "job", "--grace", "0"], "--grace 0: the ranks need some seconds"),
        (["--controller", "job", "--grace", "inf"], "--grace inf: the ranks need some seconds"),
    ],
)
def test_options_that_make_no_sense(options: list[str], text: str) -> None:
    done = _run("-n", "2", *options, "train.py")
    assert done.exit_code == 2
    assert done.stdout == ""
    assert done.stderr.startswith("lockstep submit kubernetes: ")
    assert text in done.stderr


def test_the_document_shows_what_is_printed() -> None:
    command, shown = re.findall(
        r"```bash\n(lockstep submit kubernetes [^`]*?) > \S+\n```.*?```yaml\n(.*?)```", DOCUMENT.read_text(), re.DOTALL
    )[0]
    words = [word for word in shlex.split(command) if word != "\n"]
    done = CliRunner().invoke(main, words[1:])
    assert done.stdout == shown
