"""Builds every package's wheel and tries it where nothing else is installed: import it, run its README's examples.

Each wheel gets a virtual environment with the wheel, its declared siblings and its declared dependencies. Only torch
and its requirements are shared with the interpreter that runs this, by links, as installing them takes minutes;
everything else comes from the package index. On other Pythons that the classifiers name, and that are there, the wheels
are installed without their dependencies and compiled. Run with ``hatch run wheels``.
"""

import re
import shutil
import subprocess
import sys
import tempfile
import venv
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from scripts.page_blocks import blocks  # noqa: E402
from scripts.page_blocks import run as run_block  # noqa: E402
from scripts.workspace import Package, packages  # noqa: E402

_NAME = re.compile(r"[A-Za-z0-9._-]+")
# Imports every module, so that one which needs an undeclared distribution is found even if no example reaches it.
_IMPORT_ALL = """
import importlib, pkgutil, sys
package = importlib.import_module(sys.argv[1])
names = [info.name for info in pkgutil.walk_packages(package.__path__, package.__name__ + ".")]
for name in names:
    if not name.endswith("__main__"):
        importlib.import_module(name)
print(f"imported {package.__name__} and {len(names)} modules below it from {package.__path__[0]}")
"""


def run(*command: str | Path, cwd: Path | None = None) -> None:
    subprocess.run([str(part) for part in command], check=True, cwd=cwd)


def build_wheel(package: Package, wheels: Path, sdists: Path) -> None:
    """Build the source distribution, and the wheel from it alone, so that a missing file is noticed."""
    run(sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", sdists, cwd=package.path)
    (sdist,) = sdists.glob(f"{package.distribution.replace('-', '_')}-*.tar.gz")
    run(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", wheels, sdist)


def torch_closure() -> list[Distribution]:
    """Torch and the distributions that it requires, directly or not."""
    found: dict[str, Distribution] = {}
    wanted = ["torch"]
    while wanted:
        name = wanted.pop()
        if name in found:
            continue
        try:
            found[name] = distribution(name)
        except PackageNotFoundError:  # required under a marker that does not hold here
            continue
        requirements = (line for line in found[name].requires or [] if "extra ==" not in line)
        wanted += [match[0].lower() for line in requirements if (match := _NAME.match(line))]
    return list(found.values())


def share_torch(environment: Path) -> None:
    """Link torch's closure into a virtual environment, metadata included, so that pip counts it as installed."""
    (site_packages,) = environment.glob("lib/python*/site-packages")
    for dist in torch_closure():
        tops = {path.parts[0] for path in dist.files or [] if path.parts[0] not in {"..", "__pycache__"}}
        for top in tops:
            link = site_packages / top
            if not link.exists():
                link.symlink_to(Path(str(dist.locate_file(top))))


def try_wheel(package: Package, wheels: Path, directory: Path) -> None:
    """Install one wheel into an environment of its own, import all of it and run its README's examples."""
    environment = directory / "environment"
    venv.create(environment, with_pip=False)
    share_torch(environment)
    python = environment / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", python]
    run(*pip, "install", "-q", "--find-links", wheels, f"{package.distribution}=={built_version(package, wheels)}")
    run(*pip, "check")
    run(python, "-I", "-c", _IMPORT_ALL, package.import_name, cwd=directory)
    for block in blocks(package.readme):
        if not block.runs or block.language != "python":
            continue
        result = run_block(block, directory, python=str(python))
        print(result.stdout, end="")
        if result.returncode != 0:
            raise SystemExit(f"{block}: the example failed with {result.returncode}")


def other_pythons() -> list[str]:
    """Commands of the other Pythons that the packages support, as far as they run here."""
    versions = re.findall(r"Python :: (3\.\d+)", "\n".join(packages()[0].project["classifiers"]))
    own = "{}.{}".format(*sys.version_info)
    commands = [f"python{version}" for version in versions if version != own]
    found = {one: _runs(one) for one in commands}
    for missing in (one for one, runs in found.items() if not runs):
        print(f"{missing} does not run here: no wheel was tried on it")
    return [one for one, runs in found.items() if runs]


def _runs(command: str) -> bool:
    """Whether a command is there and works: a version manager's stand-in for another version is there, and fails."""
    return (
        shutil.which(command) is not None
        and subprocess.run([command, "-c", ""], check=False, capture_output=True).returncode == 0
    )


def try_python(python: str, wheels: Path, directory: Path) -> None:
    """Install all wheels on another Python, which must be one that they allow, and compile every file of them."""
    environment = directory / python
    run(python, "-m", "venv", environment)
    run(environment / "bin" / "pip", "install", "-q", "--no-deps", *sorted(wheels.glob("shardkit_*.whl")))
    (site_packages,) = environment.glob("lib/python*/site-packages")
    run(environment / "bin" / "python", "-W", "error", "-m", "compileall", "-q", "-f", site_packages / "shardkit")
    print(f"{python}: all wheels install and compile")


def built_version(package: Package, wheels: Path) -> str:
    (wheel,) = wheels.glob(f"{package.distribution.replace('-', '_')}-*.whl")
    return wheel.name.split("-")[1]


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="shardkit-wheels-") as name:
        directory = Path(name)
        for package in packages():
            build_wheel(package, directory / "wheels", directory / "sdists")
        for package in packages():
            place = directory / package.distribution
            place.mkdir()
            try_wheel(package, directory / "wheels", place)
            print(f"{package.distribution}: its wheel installs, imports and runs its examples on its own")
        for python in other_pythons():
            try_python(python, directory / "wheels", directory)


if __name__ == "__main__":
    main()
