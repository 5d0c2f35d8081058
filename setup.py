"""Wheels with compiled CPU kernels: `FXOPT_PREBUILT=1 pip wheel --no-deps --no-build-isolation .`.

Without that variable, fxopt is Python and sources, and compiles kernels where it runs.
"""

import os
import sys
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.build_py import build_py

HERE = Path(__file__).resolve().parent
WITH_KERNELS = os.environ.get("FXOPT_PREBUILT", "") not in ("", "0")


class BuildWithKernels(build_py):
    def run(self) -> None:
        super().run()
        sys.path.insert(0, str(HERE))
        from fxopt.cli import prebuilt  # needs torch, which the kernels are compiled for

        self.announce("fxopt: compiling the CPU kernels", 2)
        prebuilt.write(Path(self.build_lib, "fxopt"))


class ForThisMachine(Distribution):
    def has_ext_modules(self) -> bool:
        """So the wheel is for this Python and this platform, as the kernels are."""
        return True


setup(**({"cmdclass": {"build_py": BuildWithKernels}, "distclass": ForThisMachine} if WITH_KERNELS else {}))
