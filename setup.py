"""Of the scripts beside it, a package holds those of the project alone; pyproject.toml cannot say this."""

from setuptools import setup
from setuptools.command.build_py import build_py

TRAINERS = ("a3c_data", "a3c_grad", "apex", "impala", "population", "ray", "task")
SCRIPTS = {"play", "plot", *(f"train_{name}" for name in TRAINERS)}


class BuildScripts(build_py):
    """Leaves out a user's own environments and chapters, which may lie in the same folder."""

    def find_package_modules(self, package: str, package_dir: str) -> list[tuple[str, str, str]]:
        found = super().find_package_modules(package, package_dir)
        return [module for module in found if package != "a3c_mp.chapters" or module[1] in SCRIPTS]


setup(cmdclass={"build_py": BuildScripts})
