"""The native build; all else is declared in pyproject.toml.

Without a C++ compiler the installation goes on and fedkeep runs the same layers in pure PyTorch. With the variable
``FEDKEEP_BUILD=pure`` nothing is compiled, and the wheel is for every platform.
"""

import importlib.util
import os
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

KERNELS = Path("src", "fedkeep", "kernels")
SOURCES = sorted(str(source) for source in KERNELS.glob("*.cpp"))


def _builder():
    spec = importlib.util.spec_from_file_location(
        "fedkeep_kernels_build", Path(__file__).parent / KERNELS / "build.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class BuildNative(build_ext):
    """Builds the library with our own command: it is loaded through ctypes and knows neither Python nor PyTorch."""

    def get_ext_filename(self, name):
        """The name that fedkeep.kernels looks for."""
        return str(Path(*name.split(".")).with_suffix(".so"))

    def build_extension(self, ext):
        """Builds the library, or says why not."""
        builder = _builder()
        try:
            builder.build(Path(self.get_ext_fullpath(ext.name)))
        except (builder.BuildError, OSError) as error:
            print(f"warning: fedkeep's native kernels were not built: {error}", file=sys.stderr)


class PlatformWheel(bdist_wheel):
    """The library belongs to a platform, but to no version of Python."""

    def get_tag(self):
        """The tag in the wheel's name."""
        return "py3", "none", super().get_tag()[2]


if os.environ.get("FEDKEEP_BUILD") == "pure":
    setup()
else:
    setup(
        ext_modules=[Extension("fedkeep.kernels._kernels", SOURCES, optional=True)],
        cmdclass={"build_ext": BuildNative, "bdist_wheel": PlatformWheel},
    )
