"""The wheel's one addition to pyproject.toml: the folder `examples`, as files that `troupe examples
copy` copies, at `troupe/examples`."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

EXAMPLES = Path("examples")
IGNORED = shutil.ignore_patterns("__pycache__", "*.pyc")


class BuildWithExamples(build_py):
    """`build_py` that also copies the examples; an editable installation has them."""

    def run(self) -> None:
        """Build the packages, then copy."""
        super().run()
        if not self.editable_mode:
            target = Path(self.build_lib, "troupe", EXAMPLES)
            shutil.copytree(EXAMPLES, target, ignore=IGNORED, dirs_exist_ok=True)


setup(cmdclass={"build_py": BuildWithExamples})
