"""Check files of ``skyrl-train launch``: ``sky.yaml`` with SkyPilot, manifests with the schemas of Kubernetes 1.37.

PYTHON tests/validators/check.py FILE ...

PYTHON has the packages of ``requirements.txt``. Ends with an error at the first file that is not accepted. Not checked: names of
accelerators, of which SkyPilot downloads a list, and KubeRay's own fields, whose schema no package has; of a RayJob the templates
of its pods are checked. HOME should be an empty folder: SkyPilot writes there.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import sky
import yaml
from sky.catalog.common import get_catalog_path


def templates(node: Any) -> Iterator[dict[str, Any]]:
    """Yield each pod template in a resource."""
    if isinstance(node, dict):
        for key, value in node.items():
            if key == "template":
                yield value
            else:
                yield from templates(value)
    elif isinstance(node, list):
        for value in node:
            yield from templates(value)


def check_manifest(file: Path) -> None:
    for resource in yaml.safe_load_all(file.read_text()):
        if resource["apiVersion"].partition("/")[0] != "ray.io":
            kubernetes_validate.validate(resource, "1.37", strict=True)
            continue
        pods = list(templates(resource))
        assert pods, f"{file} has no pods"
        for pod in pods:
            named = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": resource["metadata"], "template": pod}
            kubernetes_validate.validate(named, "1.37", strict=True)


def check_task(file: Path) -> None:
    catalog = Path(get_catalog_path("common/accelerators.csv"))
    catalog.parent.mkdir(parents=True, exist_ok=True)
    names = yaml.safe_load(file.read_text())["resources"].get("accelerators", {})
    catalog.write_text("".join(f"{line}\n" for line in ["AcceleratorName,Clouds", *(f"{name},AWS" for name in names)]))
    sky.Task.from_yaml(str(file)).validate()


for name in sys.argv[1:]:
    if Path(name).name == "sky.yaml":
        check_task(Path(name))
    else:
        check_manifest(Path(name))
