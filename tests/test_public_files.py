"""The files beside the code say the same as the code: versions of Python, Bevatron's own version, the version
of ruff, and commands.
"""

import pathlib
import re
import subprocess

import pytest
import yaml

from config.version import VERSION

ROOT = pathlib.Path(__file__).parent.parent
PYTHONS = ["3.10", "3.11", "3.12", "3.13", "3.14"]
YAML = [*(ROOT / ".github").rglob("*.yml"), ROOT / ".pre-commit-config.yaml", ROOT / "CITATION.cff"]


def read(name):
    return (ROOT / name).read_text()


@pytest.mark.parametrize("file", YAML, ids=lambda file: file.name)
def test_a_file_of_the_repository_is_yaml(file):
    assert isinstance(yaml.safe_load(file.read_text()), dict)


def test_one_range_of_pythons_everywhere():
    jobs = yaml.safe_load(read(".github/workflows/checks.yml"))["jobs"]
    alone = jobs["tests"]["steps"][1]["with"]["python-version"]
    assert sorted([*jobs["pythons"]["strategy"]["matrix"]["python"], alone], key=PYTHONS.index) == PYTHONS
    assert re.findall(r"Python :: (3\.\d+)", read("pyproject.toml")) == PYTHONS
    assert f'requires-python = ">={PYTHONS[0]}"' in read("pyproject.toml")
    script = read("scripts/setup_venv.sh")
    assert "(3, 10) <= sys.version_info[:2] <= (3, 14)" in script
    assert all(f"python{python}" in script for python in PYTHONS)
    assert f"Python {PYTHONS[0]} to {PYTHONS[-1]}" in read("README.md")


def test_every_job_of_the_workflow_has_an_end_and_runs_what_is_here():
    jobs = yaml.safe_load(read(".github/workflows/checks.yml"))["jobs"]
    for job in jobs.values():
        assert 0 < job["timeout-minutes"] <= 120
        for step in job["steps"]:
            for word in step.get("run", "").split():
                if word.startswith(("tests/", "scripts/")):
                    assert (ROOT / word).exists(), word


def test_the_version_is_said_alike():
    assert yaml.safe_load(read("CITATION.cff"))["version"] == VERSION
    assert f"\n## {VERSION}" in read("CHANGELOG.md")


def test_the_container_takes_what_is_here():
    text = read("Containerfile")
    copied = [words.split() for words in re.findall(r"^COPY (.+)$", text, re.M)]
    assert all((ROOT / source).exists() for *sources, _ in copied for source in sources)
    assert 'ENTRYPOINT ["python", "-m", "bevatron"]' in text
    index = "https://download.pytorch.org/whl/cpu"
    assert index in text and index in read("scripts/setup_venv.sh")


@pytest.mark.parametrize("name", ["slurm-17.out", "slurm-17-3.out", "ladder-17-3.out", "dist/x", "build/x"])
def test_what_is_made_is_ignored(name):
    if not (ROOT / ".git").exists():
        pytest.skip("not a clone")
    assert subprocess.run(["git", "check-ignore", "-q", name], cwd=ROOT).returncode == 0
    assert subprocess.run(["git", "check-ignore", "-q", "build.py"], cwd=ROOT).returncode == 1
