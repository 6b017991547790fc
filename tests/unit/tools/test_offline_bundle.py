"""The offline bundle: downloaded, split, joined and installed without an index.

The requirements are two wheels made here, so no network is needed. Everything that setup_env.sh
installs goes through the same code, and takes minutes (docs/offline.md).
"""

import os
import platform
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tools import offline_bundle

ROOT = Path(__file__).parents[3]


def make_wheel(folder, name, *, version="1.0", needs=(), data=b""):
    """A wheel in `index/` with one module and one shared object."""
    about = f"{name}-{version}.dist-info"
    requires = "".join(f"Requires-Dist: {one}\n" for one in needs)
    files = {
        f"{name}/__init__.py": f"NAME = {name!r}\n",
        f"{name}/lib.so": data,
        f"{about}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{requires}",
        f"{about}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    files[f"{about}/RECORD"] = "".join(f"{one},,\n" for one in [*files, f"{about}/RECORD"])
    (folder / "index").mkdir(exist_ok=True)
    with zipfile.ZipFile(folder / "index" / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        for path, content in files.items():
            wheel.writestr(path, content)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    """A bundle of two wheels, the large one in parts of a MiB."""
    folder = tmp_path_factory.mktemp("bundle")
    make_wheel(folder, "bundled_large", data=os.urandom(5 << 19))
    make_wheel(folder, "bundled_small", needs=["bundled-large==1.0"])
    (folder / "models").mkdir()
    (folder / "models" / "config.json").write_text("{}")
    command = ["bash", "tools/offline_bundle.sh", str(folder / "bundle"), "--kind", "cpu",
               "--max-mib", "1", "--only", "bundled_small",
               "--add", str(folder / "models")]  # fmt: skip
    index = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(folder / "index")}
    program = {"MEGATRON_RL_VENV": str(Path(sys.executable).parents[1])}
    subprocess.run(command, cwd=ROOT, env={**os.environ, **index, **program}, check=True)
    return folder / "bundle"


def set_up(bundle, venv):
    """Run setup_env.sh with the bundle; it fails where a wheel is missing."""
    environment = {**os.environ, "MEGATRON_RL_BUNDLE": str(bundle)}
    environment |= {"MEGATRON_RL_VENV": str(venv), "PIP_CONFIG_FILE": os.devnull}
    environment |= {"PIP_FIND_LINKS": "/nowhere", "PIP_INDEX_URL": "http://127.0.0.1:1/"}
    done = subprocess.run(["bash", "tools/setup_env.sh"], cwd=ROOT, env=environment, text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                          check=False)  # fmt: skip
    return done.returncode, done.stdout


@pytest.mark.slow  # an environment is installed
def test_bundle_installs_without_index_and_names_missing_wheels(bundle, tmp_path):
    assert len(list((bundle / "wheels").glob("bundled_large*.part*"))) == 3
    assert (bundle / "files" / "models" / "config.json").exists()
    venv = tmp_path / "venv"
    status, output = set_up(bundle, venv)
    assert status and f"join them first: bash {bundle}/join.sh" in output

    whole = tmp_path / "carried"
    shutil.copytree(bundle, whole)
    subprocess.run(["bash", str(whole / "join.sh")], check=True)
    assert not list(whole.rglob("*.part*"))
    status, output = set_up(whole, venv)
    assert status and "from the bundle" in output and "No matching distribution" in output
    assert "127.0.0.1" not in (venv / "setup.log").read_text()

    # As setup_env.sh installs, with what this bundle has.
    pip = [str(venv / "bin" / "python"), "-m", "pip", "install", "--quiet", "bundled_small"]
    index = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(whole / "wheels")}
    subprocess.run(pip, env={**os.environ, **index}, check=True)
    program = "import bundled_large, bundled_small; print(bundled_large.NAME)"
    done = subprocess.run([venv / "bin" / "python", "-c", program], check=True, capture_output=True)
    assert done.stdout == b"bundled_large\n"


@pytest.mark.slow
def test_damaged_part_is_found(bundle, tmp_path):
    shutil.copytree(bundle, tmp_path / "carried")
    part = next((tmp_path / "carried").rglob("bundled_large*.part001"))
    content = bytearray(part.read_bytes())
    content[99] ^= 1
    part.write_bytes(content)
    done = subprocess.run(["bash", str(tmp_path / "carried" / "join.sh")], check=False,
                          capture_output=True, text=True)  # fmt: skip
    assert done.returncode and "bundled_large" in done.stdout + done.stderr


def test_bundle_holds_what_set_up_installs():
    wanted = offline_bundle.requirements("cuda", "3.12")
    names = [one.split("=")[0].split(">")[0] for one in wanted]
    assert {"torch", "vllm", "megatron-core", "transformers", "ruff"} <= set(names)
    assert offline_bundle.requirements("cpu", "3.11")[0].endswith("+cpu")


def test_requirements_are_those_of_the_other_python(tmp_path, monkeypatch):
    other = f"{sys.version_info.major}.{sys.version_info.minor + 1}"
    for name in ("later", "earlier", "full_later", "full_earlier"):
        make_wheel(tmp_path, name)
    make_wheel(
        tmp_path, "package",
        needs=[
            f"later; python_version >= '{other}'", f"earlier; python_version < '{other}'",
            f"full-later; python_full_version >= '{other}.0'",
            f"full-earlier; python_full_version < '{other}.0'",
        ],
    )  # fmt: skip
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    here = f"{sys.version_info.major}.{sys.version_info.minor}"
    for python, expected in ((other, {"later", "full_later"}), (here, {"earlier", "full_earlier"})):
        wheels = tmp_path / python
        wheels.mkdir()
        offline_bundle.download(wheels, ["package"], optional=[], kind="cuda", python=python)
        assert {one.name.split("-")[0] for one in wheels.iterdir()} == {"package", *expected}


def test_wheels_of_every_older_c_library_are_accepted():
    names = offline_bundle.platforms()
    assert {"manylinux_2_17_x86_64", "manylinux_2_18_x86_64", "manylinux1_x86_64"} <= set(names)
    newest = int(platform.libc_ver()[1].split(".")[1])
    assert names[0] == f"manylinux_2_{newest}_x86_64"
