"""What `deploy/` ships for Kubernetes and YARN, as far as it can be tried without such clusters.

Manifests are read by the Kubernetes client that Spark itself brings, which knows every kind and every field. Their
commands are given to `motorcade`; the nodes of `deploy/cluster` are started. The script for YARN is run with another
master in `test_cluster.py`.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from http import HTTPStatus
from pathlib import Path
from typing import Any

import httpx
import pytest
from py4j.protocol import Py4JError  # type: ignore[import-untyped]
from pyspark.sql import SparkSession

from motorcade.pipelines import schema
from tests.support.compose import Composed
from tests.support.dispatch import environment
from tests.support.node import ROOT, Endpoint
from tests.support.ports import free_port
from tests.support.redis import RedisServer, wait_until
from tests.support.wire import Client

pytestmark = pytest.mark.timeout(300)

#: Seconds for a command that starts Java, on a busy machine.
PATIENCE = 180.0

KUBERNETES, YARN, CLUSTER = (ROOT / "deploy" / name for name in ("kubernetes", "yarn", "cluster"))
MANIFESTS = sorted(path for path in KUBERNETES.glob("*.yaml") if path.name != "kustomization.yaml")
#: What the manifests show.
VERBS = {"receipts", "audit", "audience", "ingest"}


def documents(spark: SparkSession, path: Path) -> list[dict[str, Any]]:
    """The objects of a file, each of a kind that Kubernetes has, without fields that it has not."""
    assert spark._jvm is not None
    serialization = spark._jvm.io.fabric8.kubernetes.client.utils.Serialization
    found = []
    for text in re.split(r"^---\n", path.read_text(), flags=re.MULTILINE):
        bean = serialization.unmarshal(text)
        made = json.loads(serialization.asJson(bean))
        known(bean, made, path.name)
        found.append(made)
    return found


def known(bean: Any, made: Any, where: str) -> None:
    """Every field of the object is one of its class."""
    if isinstance(made, list):
        for number, (inner, value) in enumerate(zip(bean, made, strict=True)):
            known(inner, value, f"{where}[{number}]")
    if not isinstance(made, dict) or not bean.getClass().getName().startswith("io.fabric8.kubernetes.api.model."):
        return  # a scalar, or a map whose keys anybody may choose
    for key, value in made.items():
        try:
            inner = getattr(bean, f"get{key[0].upper()}{key[1:]}")()
        except Py4JError:
            raise AssertionError(f"{where} has a field {key!r} that Kubernetes does not know") from None
        known(inner, value, f"{where}.{key}")


def pod_of(made: dict[str, Any]) -> dict[str, Any] | None:
    """The specification of the pod that an object starts."""
    inner = made.get("spec", {})
    template = inner.get("jobTemplate", {}).get("spec", inner).get("template")
    return template["spec"] if template else None


def settings() -> dict[str, str]:
    lines = (KUBERNETES / "spark-defaults.conf").read_text().splitlines()
    return dict(line.split(None, 1) for line in lines if line and not line.startswith("#"))


@pytest.fixture(scope="session")
def manifests(spark_session: SparkSession) -> dict[str, list[dict[str, Any]]]:
    return {path.name: documents(spark_session, path) for path in MANIFESTS}


def named(manifests: dict[str, list[dict[str, Any]]], kind: str) -> set[str]:
    return {made["metadata"]["name"] for some in manifests.values() for made in some if made["kind"] == kind}


def test_a_field_that_kubernetes_does_not_know_is_found(spark: SparkSession, tmp_path: Path) -> None:
    text = (KUBERNETES / "receipts.yaml").read_text()
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text(text.replace("serviceAccountName:", "serviceAcountName:"))
    with pytest.raises(AssertionError, match="serviceAcountName"):
        documents(spark, wrong)


def test_commands_of_the_manifests_exist(manifests: dict[str, list[dict[str, Any]]]) -> None:
    """With --help nothing is started, but all options are read."""
    verbs = set()
    for name, some in manifests.items():
        for made in some:
            for container in (pod_of(made) or {"containers": []})["containers"]:
                words = container["args"]
                done = motorcade(*words, "--help")
                assert 0 == done.returncode, f"{name}: {done.stderr}"
                assert "k8s://https://kubernetes.default.svc" == words[words.index("--master") + 1]
                assert {"pipeline", "run"} == set(words[:2])
                verbs.add(words[2])
    assert verbs == VERBS


def test_drivers_have_what_they_name(manifests: dict[str, list[dict[str, Any]]]) -> None:
    generated = set(re.findall(r"- name: (\S+)", (KUBERNETES / "kustomization.yaml").read_text()))
    claims, accounts = named(manifests, "PersistentVolumeClaim"), named(manifests, "ServiceAccount")
    for name, some in manifests.items():
        for pod in filter(None, map(pod_of, some)):
            assert pod["serviceAccountName"] in accounts, name
            assert pod["securityContext"]["runAsNonRoot"], name
            volumes = {volume["name"]: volume for volume in pod["volumes"]}
            for volume in volumes.values():
                if "persistentVolumeClaim" in volume:
                    assert volume["persistentVolumeClaim"]["claimName"] in claims, name
                if "configMap" in volume:
                    assert volume["configMap"]["name"] in generated, name
            (driver,) = pod["containers"]
            assert {mount["name"] for mount in driver["volumeMounts"]} == set(volumes), name
            words = " ".join(driver["args"])
            for variable in re.findall(r"\$\((\w+)\)", words):
                assert variable in {one["name"] for one in driver["env"]}, name
            mounts = [mount["mountPath"] for mount in driver["volumeMounts"]]
            for place in re.findall(r"(?:^|=|@)(/(?:srv|etc)/\S+)", "\n".join(driver["args"]), re.MULTILINE):
                assert any(place.startswith(f"{mount}/") for mount in mounts), f"{name}: {place}"
                if place.startswith("/etc/"):
                    assert (KUBERNETES / Path(place).name).exists(), f"{name}: {place}"


def test_executors_have_what_drivers_have(manifests: dict[str, list[dict[str, Any]]]) -> None:
    chosen = settings()
    volume = "spark.kubernetes.executor.volumes.persistentVolumeClaim.pipelines"
    assert chosen["spark.kubernetes.authenticate.executor.serviceAccountName"] in named(manifests, "ServiceAccount")
    assert chosen[f"{volume}.options.claimName"] in named(manifests, "PersistentVolumeClaim")
    assert {chosen["spark.kubernetes.namespace"]} == named(manifests, "Namespace")
    (template,) = manifests["executor.yaml"]
    for some in manifests.values():
        for pod in filter(None, map(pod_of, some)):
            (driver,) = pod["containers"]
            assert chosen["spark.kubernetes.container.image"] == driver["image"]
            assert chosen[f"{volume}.mount.path"] in [mount["mountPath"] for mount in driver["volumeMounts"]]
            assert template["spec"]["securityContext"] == pod["securityContext"]


def test_the_kustomization_names_all_files() -> None:
    listed = set(re.findall(r"- (\S+\.\w+)$", (KUBERNETES / "kustomization.yaml").read_text(), re.MULTILINE))
    for name in listed:
        assert (KUBERNETES / name).exists(), name
    assert {path.name for path in MANIFESTS} <= listed


def test_the_schema_and_the_scripts_can_be_read() -> None:
    assert ["position", "heartbeat"] == [one.name for one in schema.read(KUBERNETES / "schema.toml")]
    for script in (KUBERNETES / "entrypoint", YARN / "pack", YARN / "submit"):
        assert os.access(script, os.X_OK), script
        done = run(["bash", "-n", str(script)], {})
        assert 0 == done.returncode, done.stderr


def test_the_image_has_what_it_copies() -> None:
    text = (KUBERNETES / "Dockerfile").read_text()
    for line in re.findall(r"^COPY (.+)$", text, re.MULTILINE):
        for name in line.split()[:-1]:
            assert (ROOT / name).exists(), name
    uid = re.search(r"^USER (\d+)$", text, re.MULTILINE)
    assert uid is not None and f"--uid {uid[1]} " in text
    assert f"runAsUser: {uid[1]}" in (KUBERNETES / "executor.yaml").read_text()


def motorcade(*words: object, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return run([sys.executable, "-m", "motorcade", *map(str, words)], env or {})


def run(words: list[str], env: dict[str, str], stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        words,
        env=environment(env),
        input=stdin,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )


def test_the_entry_point_runs_commands() -> None:
    done = run([str(KUBERNETES / "entrypoint"), "--version"], {"PATH": path()})
    assert 0 == done.returncode and done.stdout.startswith("motorcade "), done.stderr


@pytest.mark.spark
def test_the_entry_point_runs_executors() -> None:
    """As Spark on Kubernetes calls it: it looks for its driver, and there is none."""
    port = free_port()
    told = {
        "PATH": path(),
        "SPARK_EXECUTOR_MEMORY": "512m",
        "SPARK_JAVA_OPT_0": "-Dspark.network.timeout=10s",
        "SPARK_JAVA_OPT_1": "-Dmotorcade.words=two words",
        "SPARK_DRIVER_URL": f"spark://CoarseGrainedScheduler@127.0.0.1:{port}",
        "SPARK_EXECUTOR_ID": "1",
        "SPARK_EXECUTOR_CORES": "1",
        "SPARK_APPLICATION_ID": "app",
        "SPARK_EXECUTOR_POD_IP": "127.0.0.1",
        "SPARK_RESOURCE_PROFILE_ID": "0",
        "SPARK_EXECUTOR_POD_NAME": "pod",
    }
    done = run([str(KUBERNETES / "entrypoint"), "executor"], told)
    assert 0 != done.returncode
    assert f"Failed to connect to /127.0.0.1:{port}" in done.stdout + done.stderr


def path() -> str:
    return f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"


# -- nodes


@pytest.fixture(scope="session")
def cluster(spark_session: SparkSession) -> dict[str, dict[str, Any]]:
    """The objects that `kubectl apply -k deploy/cluster` makes, by kind and name."""
    listed = re.findall(r"- (\S+\.yaml)$", (CLUSTER / "kustomization.yaml").read_text(), re.MULTILINE)
    assert {path.name for path in (CLUSTER / "kubernetes").iterdir()} == {Path(name).name for name in listed}
    found = [made for name in listed for made in documents(spark_session, CLUSTER / name)]
    return {f"{made['kind']} {made['metadata']['name']}": made for made in found}


def test_services_and_the_budget_mean_the_pods_of_the_nodes(cluster: dict[str, dict[str, Any]]) -> None:
    nodes = cluster["StatefulSet hub"]["spec"]
    labels = nodes["template"]["metadata"]["labels"]
    pod = nodes["template"]["spec"]
    (container,) = pod["containers"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    for service in ("Service mqtt", "Service hub"):
        assert labels == cluster[service]["spec"]["selector"]
        assert {port["targetPort"] for port in cluster[service]["spec"]["ports"]} <= set(ports)
    assert labels == nodes["selector"]["matchLabels"]
    assert labels == cluster["PodDisruptionBudget hub"]["spec"]["selector"]["matchLabels"]
    assert f"Service {nodes['serviceName']}" in cluster
    assert f"--uid {pod['securityContext']['runAsUser']} " in (ROOT / "deploy" / "Dockerfile").read_text()
    for probe in ("readinessProbe", "livenessProbe", "startupProbe"):
        assert container[probe]["httpGet"]["port"] in ports, probe
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}


def pods(made: dict[str, Any], store: str) -> dict[str, Any]:
    """The first two pods of the set, as services of a compose file (`Composed`)."""
    spec = made["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    files = re.findall(r"- (\S+\.(?:toml|conf))$", (CLUSTER / "kustomization.yaml").read_text(), re.MULTILINE)
    services: dict[str, Any] = {}
    for number in range(2):
        known = {"metadata.name": f"hub-{number}", "status.podIP": f"10.0.0.2{number}", "url": store}
        variables: dict[str, str] = {}
        for one in container["env"]:
            source = one.get("valueFrom", {})
            name = source.get("fieldRef", {}).get("fieldPath") or source.get("secretKeyRef", {}).get("key")
            value = known[name] if name else one["value"]
            variables[one["name"]] = value.replace("$(POD_IP)", known["status.podIP"])
        services[f"hub-{number}"] = {
            "image": container["image"],
            "command": container["args"],
            "environment": variables,
            "volumes": [
                *(f"./{name}:{mounts['config']}/{name}:ro" for name in files),
                f"secrets:{mounts['secrets']}",
                f"data-{number}:{mounts['data']}",
            ],
            "networks": {"pods": {"ipv4_address": variables["POD_IP"]}},
        }
    return {"services": services, "volumes": ["secrets", "data-0", "data-1"]}


def test_pods_of_the_set_are_one_broker_and_end_in_time(cluster: dict[str, dict[str, Any]]) -> None:
    """Started with what the set gives them; probed as Kubernetes does; stopped one after the other."""
    made = cluster["StatefulSet hub"]
    (container,) = made["spec"]["template"]["spec"]["containers"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    ready = container["readinessProbe"]["httpGet"]
    with RedisServer() as redis:
        composed = Composed(pods(made, redis.url), CLUSTER, "10.0.0.")
        secrets = composed.folder / "volume-secrets"
        assert 0 == run([str(CLUSTER / "make-secrets"), str(secrets)], {}).returncode
        words = [sys.executable, "-m", "motorcade", "passwd", str(secrets / "passwords"), "alice", "--password-stdin"]
        done = run(words, {}, "a long enough password")
        assert 0 == done.returncode, done.stderr
        with composed:
            for name in ("hub-0", "hub-1"):
                url = f"http://{composed[name].address}:{ports[ready['port']]}{ready['path']}"
                wait_until(lambda url=url: is_ready(url), f"{url} says 200")  # type: ignore[misc]
            one, other = (
                Client(Endpoint(composed[name].address, ports["mqtt"]), version=5) for name in ("hub-0", "hub-1")
            )
            for client, client_id in ((one, "one"), (other, "other")):
                said = client.connect(client_id, username="alice", password=b"a long enough password")
                assert 0 == said.reason
            one.subscribe("a/b", 1)
            other.publish("a/b", b"over the link", 1)
            assert b"over the link" == one.receive().payload
            at = f"{composed['hub-0'].address}:{ports['http']}"
            listed = json.loads(composed.exec("hub-0", "motorcade", "node", "list", "--json", "--http", at))
            assert ["hub-0", "hub-1"] == sorted(entry["name"] for entry in listed)
            for name in ("hub-0", "hub-1"):
                composed[name].signal(signal.SIGTERM)
                assert 0 == composed[name].ends(made["spec"]["template"]["spec"]["terminationGracePeriodSeconds"])
            one.close()
            other.close()


def is_ready(url: str) -> bool:
    try:
        return httpx.get(url, trust_env=False, timeout=PATIENCE).status_code == HTTPStatus.OK
    except httpx.TransportError:
        return False


# -- YARN


def test_scripts_for_yarn_say_how_they_are_used() -> None:
    for script in ("pack", "submit"):
        done = run([str(YARN / script)], {})
        assert 2 == done.returncode
        assert f"usage: deploy/yarn/{script} ARCHIVE.tar.gz" in done.stderr
