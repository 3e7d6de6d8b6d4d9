"""The library: built or not, accepted or refused, each with its reason; all instruction sets agree."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from fedkeep.kernels import build, native
from fedkeep.kernels.native import status
from fedkeep.nn import GRU, LSTM, ConvPool, Linear

needs_compiler = pytest.mark.skipif(not status().native, reason=str(status()))


@pytest.fixture
def setting(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Sets FEDKEEP_NATIVE as if it had been set when the process began."""

    def choose(value: str) -> None:
        monkeypatch.setenv("FEDKEEP_NATIVE", value)
        native.load.cache_clear()

    yield choose
    native.load.cache_clear()


def numbers() -> list[Tensor]:
    """Outputs and gradients of all layers: the recurrent ones on ragged inputs."""
    torch.manual_seed(0)
    found: list[Tensor] = []
    for kind in (LSTM, GRU):
        layer = kind(5, 19, bidirectional=True)
        x, lengths = torch.randn(7, 9, 5), torch.tensor([9, 1, 3, 5, 2, 9, 4])
        output, last = layer(x, lengths)
        weights = list(layer.parameters())
        found += [output, last, *torch.autograd.grad(output.cos().sum() + last.sin().sum(), weights)]
    for layer, x in (
        (ConvPool(3, 37, 5, 2), torch.randn(3, 3, 9, 8)),
        (ConvPool(20, 6, 3), torch.randn(3, 20, 9, 8)),
        (Linear(700, 101, relu=True), torch.randn(6, 700)),
    ):
        x.requires_grad_()
        y = layer(x)
        found += [y, *torch.autograd.grad(y.cos().sum(), [x, *layer.parameters()])]
    return found


def test_setting_forces_pure_pytorch(setting) -> None:
    setting("0")
    assert str(status()) == "pure PyTorch: FEDKEEP_NATIVE=0"
    assert not native.available()
    assert len(numbers()) == 2 * (2 + 8) + 3 * 4


@needs_compiler
@pytest.mark.parametrize("level", ["1", "avx512", "avx2", "portable"])
def test_every_instruction_set_gives_the_same(setting, level) -> None:
    setting("0")
    wanted = numbers()
    setting(level)
    allowed = native.LEVEL_NAMES[: native.LEVELS.index(level) + 1] if level != "1" else native.LEVEL_NAMES
    assert str(status()) in [f"native kernels ({name})" for name in allowed]
    for a, b in zip(numbers(), wanted, strict=True):
        assert torch.allclose(a, b, rtol=1e-5, atol=5e-6)


def test_unknown_setting(monkeypatch) -> None:
    monkeypatch.setenv("FEDKEEP_NATIVE", "avx")
    assert native.load.__wrapped__() == native._LoadedKernels(
        None, 0, "FEDKEEP_NATIVE=avx is not one of 0, 1, portable, avx2, avx512"
    )


def test_no_library(tmp_path) -> None:
    library, reason = native._open(tmp_path / "_kernels.so")
    assert library is None
    assert reason == "no native library was built at installation; run 'python -m fedkeep.kernels.build'"


def test_library_of_another_machine_is_refused(tmp_path) -> None:
    path = tmp_path / "_kernels.so"
    path.write_bytes(b"\x7fELF of another machine")
    library, reason = native._open(path)
    assert library is None
    assert reason.startswith("_kernels.so was built for another machine or is not whole (")
    assert reason.endswith("); run 'python -m fedkeep.kernels.build'")


@needs_compiler
def test_library_of_another_version_is_refused(tmp_path) -> None:
    source = tmp_path / "old.cpp"
    source.write_text('extern "C" __attribute__((visibility("default"))) long fk_abi() { return 7; }')
    subprocess.run(
        [*build.compiler(), "-shared", "-fPIC", str(source), "-o", str(tmp_path / "_kernels.so")],
        check=True,
    )
    assert native._open(tmp_path / "_kernels.so") == (
        None,
        "_kernels.so belongs to another version of fedkeep; run 'python -m fedkeep.kernels.build'",
    )


@needs_compiler
def test_struct_of_two_sides_agree() -> None:
    """The library counts the words of its own struct; `_open` compares."""
    assert native._open(native.LIBRARY)[1] == ""
    assert native.RECURRENT.index("output") == len(native.RECURRENT) - 14


COUNT_THREADS = """
import os, torch
from fedkeep.nn import GRU
torch.set_num_threads(2)
layer, x = GRU(8, 8, bidirectional=True), torch.randn(4, 6, 8)  # two directions: two tasks
torch.ones(1 << 20).add(1)  # PyTorch starts its threads
before = len(os.listdir("/proc/self/task"))
layer(x)
print(len(os.listdir("/proc/self/task")) - before, end="")
"""


@needs_compiler
@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the kernels have threads of their own")
def test_computes_on_the_threads_of_pytorch() -> None:
    """Threads of its own would share their cores with PyTorch's, which busily wait for a while after each operation."""
    assert "OpenMP" in torch.__config__.parallel_info()
    assert native.team() is not None
    done = subprocess.run([sys.executable, "-c", COUNT_THREADS], capture_output=True, text=True, check=True)
    assert done.stdout == "0"


@needs_compiler
def test_threads_of_its_own_where_those_of_pytorch_are_unknown(setting, monkeypatch) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        wanted = numbers()
        monkeypatch.setattr(native, "team", lambda: None)
        setting("1")
        assert all(torch.equal(a, b) for a, b in zip(numbers(), wanted, strict=True))
    finally:
        torch.set_num_threads(threads)


def test_no_compiler(monkeypatch, capsys, tmp_path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(build, "LIBRARY", tmp_path / "_kernels.so")
    assert build.main() == 1
    assert capsys.readouterr().err == (
        "fedkeep's native kernels were not built: no C++ compiler (c++, g++, clang++) was found. Install one (for "
        "instance the package g++), or set CXX, then run 'python -m fedkeep.kernels.build'. Without it fedkeep runs "
        "the same layers in pure PyTorch.\n"
    )
    assert list(tmp_path.iterdir()) == []


def test_missing_cxx_is_named(monkeypatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler -O1")
    with pytest.raises(build.BuildError, match="CXX=no-such-compiler -O1 is not on the path"):
        build.compiler()


@needs_compiler
def test_failing_compiler_leaves_the_old_library(tmp_path) -> None:
    library, source = tmp_path / "_kernels.so", tmp_path / "broken.cpp"
    library.write_text("old")
    source.write_text("int broken(")
    with pytest.raises(build.BuildError, match="The compiler failed"):
        build.build(library, source, [])
    assert library.read_text() == "old"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["_kernels.so", "broken.cpp"]
