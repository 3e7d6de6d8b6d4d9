"""Builds the native kernels in place: ``python -m fedkeep.kernels.build``.

The installation runs the same build (see setup.py). It needs a C++17 compiler (g++ or clang++; the variable
``CXX`` names another) and nothing else; without one fedkeep works too, in pure PyTorch. Nothing is ever built
at import. The module imports only the standard library, so that setup.py can load it by its path.
"""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ENTRY = Path(__file__).with_name("entry.cpp")
KERNELS = tuple(sorted(source for source in ENTRY.parent.glob("*.cpp") if source != ENTRY))
LIBRARY = Path(__file__).with_name("_kernels.so")

FLAGS = (
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-fvisibility=hidden",
    "-ffp-contract=fast",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-pthread",
)
X86_LEVELS = {
    "AVX512": ("-mavx512f", "-mavx512vl", "-mavx512bw", "-mavx512dq", "-mavx2", "-mfma"),
    "AVX2": ("-mavx2", "-mfma"),
}


class BuildError(RuntimeError):
    """No compiler, or a compiler that fails; the message says what to do."""


def compiler() -> list[str]:
    """The command of the C++ compiler: ``CXX`` if set, else the first of c++, g++, clang++ on the path.

    Raises:
        BuildError: there is none.
    """
    wanted = shlex.split(os.environ.get("CXX", ""))
    for command in [wanted] if wanted else [["c++"], ["g++"], ["clang++"]]:
        if shutil.which(command[0]):
            return command
    what = f"CXX={shlex.join(wanted)} is not on the path"
    if not wanted:
        what = "no C++ compiler (c++, g++, clang++) was found"
    raise BuildError(
        f"{what}. Install one (for instance the package g++), or set CXX, then run "
        "'python -m fedkeep.kernels.build'. Without it fedkeep runs the same layers in pure PyTorch."
    )


def build(library: Path = LIBRARY, entry: Path = ENTRY, kernels: Sequence[Path] = KERNELS) -> Path:
    """Compiles ``kernels`` once per instruction set and links ``library``, which replaces an old one in one step.

    Returns:
        The path of the library.

    Raises:
        BuildError: there is no compiler, or it failed.
    """
    cxx = compiler()
    x86 = platform.machine().lower() in ("x86_64", "amd64")
    levels: dict[str, tuple[str, ...]] = {"PORTABLE": (), **(X86_LEVELS if x86 else {})}
    parts: dict[str, tuple[Path, list[str]]] = {"entry": (entry, ["-DFK_X86"] if x86 else [])}
    for kernel in kernels:
        for level, flags in levels.items():
            parts[f"{kernel.stem}-{level}"] = (kernel, [f"-DFK_LEVEL_{level}", *flags])
    library.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".build-", dir=library.parent) as folder:
        objects = {name: Path(folder, f"{name}.o") for name in parts}
        compiling = [
            [*cxx, *FLAGS, *flags, "-c", str(source), "-o", str(objects[name])]
            for name, (source, flags) in parts.items()
        ]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(_run, compiling))
        fresh = Path(folder, library.name)
        _run([*cxx, "-shared", "-pthread", *map(str, objects.values()), "-o", str(fresh)])
        os.replace(fresh, library)
    return library


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise BuildError(f"Could not run {command[0]}: {error}") from error
    if done.returncode != 0:
        raise BuildError(f"The compiler failed:\n{shlex.join(command)}\n{done.stderr.strip()}")


def main() -> int:
    """Builds in place. Returns the exit code: 0 if built, 1 if not, with the reason on standard error."""
    try:
        library = build()
    except (BuildError, OSError) as error:
        print(f"fedkeep's native kernels were not built: {error}", file=sys.stderr)
        return 1
    print(f"built {library}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
