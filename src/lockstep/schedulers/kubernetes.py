"""Manifests for Kubernetes: an Indexed Job, a JobSet or a TrainJob with a pod for each machine, one launcher in each.

Sources: the API reference of Kubernetes (Job, Service), of JobSet (jobset.x-k8s.io/v1alpha2) and of Kubeflow's Trainer
(trainer.kubeflow.org/v1alpha1). The tests hold the manifests to the schemas and models of their makers.

Note [Pods that are replaced]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
When a node is drained or a pod evicted, its launcher gets SIGTERM, all ranks agree on a step, save, and every launcher
ends with 75. Neither the evicted pod (condition DisruptionTarget) nor the others (exit code 75) count as failures: the
Job makes new ones, which resume. ``podReplacementPolicy: Failed`` has it wait until the old ones are gone.

Any other failure ends the whole Job (``backoffLimit: 0``), since a single new pod would meet the others in the middle
of their steps. A JobSet then makes all pods anew, up to ``maxRestarts`` times; a Job of its own stays failed.

Launchers that find each other (``--rdzv``) restart their ranks by themselves, and let a new pod take the place of one
that was killed (137), up to ``backoffLimit`` times. A pod that ends with another code has the job's own exit code, as
all pods have: then no pod is made anew.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lockstep.schedulers.start import SAVED, StartCommand

#: The values of a manifest.
Yaml = Mapping[str, "Yaml"] | Sequence["Yaml"] | str | int | bool

#: The default of --master-port, and the port at which the launchers meet.
_PORT, _MEETING_PORT = 29500, 29400
#: Restarts unless the user gives a number.
_RESTARTS = 10
#: The exit code of a container that was killed, for lack of memory for example.
_KILLED = 137
#: Seconds that a pod has after --grace, in which the last ranks are killed and reported.
_MARGIN = 30
#: The container's name, which TrainJobs and JobSets of Kubeflow's runtimes require.
_CONTAINER = "node"
_LABEL = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?"
#: Characters of a host name.
_LONGEST = 63


class Controller(enum.Enum):
    """What starts the pods and replaces them."""

    JOB = "job"
    JOBSET = "jobset"
    TRAINJOB = "trainjob"


@dataclass(frozen=True)
class Volume:
    """A PersistentVolumeClaim, and where the program finds it."""

    claim: str
    path: str

    @classmethod
    def parse(cls, text: str) -> Volume:
        """Read ``CLAIM:/PATH``.

        Raises:
            ValueError: it is not written so.
        """
        claim, _, path = text.partition(":")
        if (
            not re.fullmatch(rf"{_LABEL}(\.{_LABEL})*", claim)
            or not re.fullmatch(r"/[^:]+", path)
            or path == "/dev/shm"
        ):
            raise ValueError(f"--volume {text}: expected CLAIM:/PATH, a PersistentVolumeClaim and where it is mounted")
        return cls(claim, path)


@dataclass(frozen=True)
class JobManifest:
    """A job for Kubernetes. Sizes are as Kubernetes takes them.

    Raises:
        ValueError: an option makes no sense, or two contradict each other.
    """

    start: StartCommand
    controller: Controller
    image: str
    name: str
    namespace: str | None = None
    cpus_per_rank: int = 1
    gpus_per_rank: int = 0
    #: Memory of each pod, such as ``64Gi``; None: not limited.
    memory: str | None = None
    volumes: tuple[Volume, ...] = ()
    #: Variables of the program, each ``NAME=VALUE``.
    env: tuple[str, ...] = ()
    #: The limit on restarts of all ranks after a failure; None: ten.
    max_restarts: int | None = None
    #: Where the launchers find each other: ``service``, at the first pod, or ``file:FOLDER`` on a volume. None: they
    #: don't, and pods are restarted rather than ranks.
    rdzv: str | None = None

    def __post_init__(self) -> None:
        host = self._host(self.start.machines - 1)
        if not re.fullmatch(r"[a-z](?:|[-a-z0-9]*[a-z0-9])", self.name) or len(host) > _LONGEST:
            raise ValueError(
                f"--name {self.name}: expected small letters, digits and '-', a letter first, and at most "
                f"{_LONGEST - len(host) + len(self.name)} of them, since pods are named {host}"
            )
        if self.namespace is not None and not re.fullmatch(_LABEL, self.namespace):
            raise ValueError(f"--namespace {self.namespace}: expected small letters, digits and '-'")
        if not re.fullmatch(r"[\w./:@-]+", self.image):
            raise ValueError(f"--image {self.image!r}: expected the name of an image, such as registry/train:1")
        if self.memory is not None and not re.fullmatch(r"\d+([KMGTP]i?|k)?", self.memory):
            raise ValueError(f"--mem {self.memory}: expected a size for each pod, such as 64Gi")
        if self.max_restarts is not None and self.controller is Controller.JOB and self.rdzv is None:
            raise ValueError(
                f"--max-restarts {self.max_restarts} with --controller job: a Job recreates single pods, which can't "
                "join the others in the middle of a step; a JobSet recreates all of them (--controller jobset), and "
                "launchers that find each other start their ranks again by themselves (--rdzv service)"
            )
        self._check_rdzv()
        paths = [volume.path for volume in self.volumes]
        if len(set(paths)) < len(paths):
            raise ValueError(f"--volume: two are mounted at the same path ({', '.join(sorted(paths))})")
        for text in self.env:
            name = re.match(r"([A-Za-z_]\w*)=", text)
            if name is None:
                raise ValueError(f"--env {text}: expected NAME=VALUE")
            if name[1].startswith("PET_") or name[1] == "JOB_COMPLETION_INDEX":
                raise ValueError(
                    f"--env {text}: this variable is the controller's, which says with it where a pod belongs"
                )

    def _check_rdzv(self) -> None:
        if self.rdzv is None or self.rdzv == "service":
            return
        kind, _, folder = self.rdzv.partition(":")
        if kind != "file" or not re.fullmatch(r"/[^:]+", folder):
            raise ValueError(f"--rdzv {self.rdzv}: expected 'service', or file:/FOLDER on a volume of all pods")
        if not any(f"{folder}/".startswith(f"{volume.path}/") for volume in self.volumes):
            raise ValueError(f"--rdzv {self.rdzv}: on no --volume, so each pod would have a folder of its own")

    def documents(self) -> list[Yaml]:
        """Return the manifest's documents, in the order in which they are made."""
        match self.controller:
            case Controller.JOB:
                return [self._service(), self._object("batch/v1", "Job", self._job(subdomain=True))]
            case Controller.JOBSET:
                return [self._object("jobset.x-k8s.io/v1alpha2", "JobSet", self._jobset())]
            case Controller.TRAINJOB:
                return [self._runtime(), self._object("trainer.kubeflow.org/v1alpha1", "TrainJob", self._trainjob())]

    def text(self) -> str:
        """Return the manifest as YAML."""
        return "---\n".join(to_yaml(document) for document in self.documents())

    def command(self) -> list[str]:
        """Return what each pod runs, as the program's process sees it."""
        place = []
        if self.rdzv is not None:
            first = f"{self._host(0)}.{self.name}" if self.rdzv == "service" else self.rdzv
            place = ["--nnodes", str(self.start.machines), "--rdzv", first, "--max-restarts", str(self._restarts)]
        elif self.controller is not Controller.TRAINJOB:  # a TrainJob sets PET_NNODES and PET_MASTER_ADDR instead
            place = ["--nnodes", str(self.start.machines), "--master-addr", f"{self._host(0)}.{self.name}"]
        # What ranks print is lost with the pod, except for what kubectl logs shows.
        return ["lockstep", "run", *self.start.options(), *place, "--all-output", *self.start.target()]

    @property
    def _restarts(self) -> int:
        return _RESTARTS if self.max_restarts is None else self.max_restarts

    def _host(self, index: int) -> str:
        return f"{self.name}-{index}" if self.controller is Controller.JOB else f"{self.name}-{_CONTAINER}-0-{index}"

    def _object(self, version: str, kind: str, spec: Yaml) -> dict[str, Yaml]:
        metadata = {"name": self.name, **({} if self.namespace is None else {"namespace": self.namespace})}
        return {"apiVersion": version, "kind": kind, "metadata": metadata, "spec": spec}

    def _service(self) -> Yaml:
        # Names of pods are published before the pods are ready, since these meet by their names to become ready.
        selector = {"batch.kubernetes.io/job-name": self.name}
        return self._object(
            "v1", "Service", {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": selector}
        )

    def _jobset(self) -> dict[str, Yaml]:
        jobs: Yaml = {"name": _CONTAINER, "replicas": 1, "template": {"spec": self._job()}}
        return {
            "failurePolicy": {"maxRestarts": self._restarts if self.rdzv is None else 0},
            "network": {"enableDNSHostnames": True, "subdomain": self.name, "publishNotReadyAddresses": True},
            "replicatedJobs": [jobs],
        }

    def _runtime(self) -> Yaml:
        spec = self._jobset()
        template: Yaml = {
            "metadata": {"labels": {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}},
            "spec": self._job(),
        }
        spec["replicatedJobs"] = [{"name": _CONTAINER, "replicas": 1, "template": template}]
        del spec["network"]  # the TrainJob's name is the sub-domain, as the Trainer has it
        policy: Yaml = {"numNodes": self.start.machines, "torch": {}}
        runtime = {"mlPolicy": policy, "template": {"spec": spec}}
        return self._object("trainer.kubeflow.org/v1alpha1", "TrainingRuntime", runtime)

    def _trainjob(self) -> Yaml:
        runtime = {"apiGroup": "trainer.kubeflow.org", "kind": "TrainingRuntime", "name": self.name}
        trainer: dict[str, Yaml] = {
            "image": self.image,
            "command": [_unexpanded(word) for word in self.command()],
            **({"env": self._env()} if self.env else {}),
            "numNodes": self.start.machines,
            "numProcPerNode": self.start.ranks,
            "resourcesPerNode": self._resources(),
        }
        return {"runtimeRef": runtime, "trainer": trainer}

    def _job(self, *, subdomain: bool = False) -> Yaml:
        """Return the spec of a Job with a pod for each machine; see Note [Pods that are replaced]."""
        rules: list[Yaml] = [
            {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
            {"action": "Ignore", "onExitCodes": {"containerName": _CONTAINER, "operator": "In", "values": [SAVED]}},
        ]
        if self.rdzv is not None:
            codes: Yaml = {"containerName": _CONTAINER, "operator": "NotIn", "values": [SAVED, _KILLED]}
            rules.append({"action": "FailJob", "onExitCodes": codes})
        pod: dict[str, Yaml] = {
            **({"subdomain": self.name} if subdomain else {}),
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": int(self.start.grace) + _MARGIN,
            "containers": [self._container()],
            "volumes": [{"name": "shm", "emptyDir": {"medium": "Memory"}}, *self._claims()],
        }
        return {
            "completionMode": "Indexed",
            "completions": self.start.machines,
            "parallelism": self.start.machines,
            "backoffLimit": 0 if self.rdzv is None else self._restarts,
            "podReplacementPolicy": "Failed",
            "podFailurePolicy": {"rules": rules},
            "template": {"spec": pod},
        }

    def _container(self) -> Yaml:
        mounts: list[Yaml] = [{"name": "shm", "mountPath": "/dev/shm"}]
        mounts += [{"name": f"volume-{n}", "mountPath": volume.path} for n, volume in enumerate(self.volumes)]
        described: dict[str, Yaml] = {"name": _CONTAINER, "image": self.image}
        if self.controller is not Controller.TRAINJOB:  # a TrainJob has these outside of its runtime
            described["command"] = [_unexpanded(word) for word in self.command()]
            described |= {"env": self._env()} if self.env else {}
            port = _PORT if self.rdzv is None else _MEETING_PORT
            described |= {"ports": [{"containerPort": port, "protocol": "TCP"}], "resources": self._resources()}
        return {**described, "volumeMounts": mounts}

    def _claims(self) -> list[Yaml]:
        return [
            {"name": f"volume-{n}", "persistentVolumeClaim": {"claimName": volume.claim}}
            for n, volume in enumerate(self.volumes)
        ]

    def _env(self) -> list[Yaml]:
        pairs = [text.partition("=") for text in self.env]
        return [{"name": name, "value": _unexpanded(value)} for name, _, value in pairs]

    def _resources(self) -> Yaml:
        amounts = {"cpu": str(self.start.ranks * self.cpus_per_rank)}
        amounts |= {} if self.memory is None else {"memory": self.memory}
        amounts |= {"nvidia.com/gpu": str(self.start.ranks * self.gpus_per_rank)} if self.gpus_per_rank else {}
        return {"requests": amounts, "limits": amounts}


def _unexpanded(text: str) -> str:
    """Protect dollar signs: Kubernetes expands ``$(NAME)`` in commands and variables, and takes ``$$`` for one."""
    return text.replace("$", "$$")


def to_yaml(node: Yaml) -> str:
    """Write a document as YAML 1.2 in block style; every string in double quotes unless it is a plain word."""
    return "\n".join(_lines(node)) + "\n"


def _lines(node: Yaml) -> list[str]:
    if isinstance(node, Mapping) and node:
        entries = [(f"{_scalar(key)}:", value) for key, value in node.items()]
    elif isinstance(node, Sequence) and not isinstance(node, str) and node:
        entries = [("-", value) for value in node]
    else:
        return [_scalar(node)]
    lines = []
    for head, value in entries:
        below = _lines(value)
        nested = not isinstance(value, (str, int)) and bool(value)
        if nested and head != "-":
            lines += [head, *(f"  {line}" for line in below)]
        else:
            lines += [f"{head} {below[0]}", *(f"  {line}" for line in below[1:])]
    return lines


def _scalar(node: Yaml) -> str:
    if isinstance(node, bool):
        return "true" if node else "false"
    if isinstance(node, int):
        return str(node)
    if not isinstance(node, str):
        return "{}" if isinstance(node, Mapping) else "[]"
    # Words of two letters and more, joined by these signs alone, are no numbers or dates; all but _WORDS are strings.
    if re.fullmatch(r"[A-Za-z][A-Za-z]+(?:[./-][A-Za-z0-9]+)*", node) and node.lower() not in _WORDS:
        return node
    return f'"{"".join(_escaped(character) for character in node)}"'


#: Words that are not strings in YAML 1.1 or 1.2.
_WORDS = frozenset({"true", "false", "yes", "no", "on", "off", "null"})


def _escaped(character: str) -> str:
    if character in '"\\':
        return f"\\{character}"
    return character if character.isprintable() else f"\\U{ord(character):08x}"
