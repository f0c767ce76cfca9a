"""pip install: the checkout becomes one package, bevatron, with the folders inside as they are here.

So `data` and `model` are names in that package and not in the whole environment. bevatron/__init__.py says
how they are found. Everything else that pip wants to know is in pyproject.toml.
"""
from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

FILES = ("train", "start", "phases", "services", "build")  # that lie beside the folders
FOLDERS = (
    "config", "configs", "kernels", "parallel", "model", "data", "optim", "checkpoint", "durable", "runtime",
    "plan", "lab", "scripts",
)
OF_A_CHECKOUT = (  # they work on one, or race others on this machine
    "lab.proof.mutate", "lab.proof.mutate.*", "lab.benchmarks", "lab.benchmarks.*",
)


class BuildPackage(build_py):
    """Adds FILES to the package."""

    def find_package_modules(self, package, package_dir):
        modules = super().find_package_modules(package, package_dir)
        if package == "bevatron":
            modules += [(package, name, f"{name}.py") for name in FILES]
        return modules


def packages():
    """bevatron, and bevatron.X for each of FOLDERS and the packages below it."""
    inner = find_packages(include=[*FOLDERS, *(f"{name}.*" for name in FOLDERS)], exclude=OF_A_CHECKOUT)
    return ["bevatron", *(f"bevatron.{name}" for name in (*inner, "configs", "scripts.scaling"))]


setup(
    packages=packages(),
    package_dir={"bevatron": "bevatron", **{f"bevatron.{name}": name for name in FOLDERS}},
    package_data={
        "bevatron.configs": ["*.yaml", "*/*.yaml", "*/*.jsonl"],
        "bevatron.plan": ["*.csv"],
        "bevatron.scripts": ["compare/*.js"],
    },
    cmdclass={"build_py": BuildPackage},
)
