"""What installed packages add: found by entry points, named where two clash, and said how to install where missing."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path

import pytest
from click.testing import Result

from fedkeep import methods
from fedkeep.core.errors import ConfigError
from fedkeep.data import toy
from fedkeep.experiments.build import build_data, build_method, offered_methods
from fedkeep.experiments.config import Config, MethodConfig
from fedkeep.experiments.plugins import INSTALL_PAPERS, builtin_names, builtin_text
from fedkeep.experiments.reproductions import Request, reproduce, reproductions
from fedkeep.experiments.sources import READERS, Reader, offered_readers
from tests.commands import call, succeeded
from tests.installed import PAPERS, write_package
from tests.refusals import raises

Install = Callable[..., None]
MODULE = """
from fedkeep import methods
from fedkeep.data import toy
from fedkeep.experiments.sources import Reader
from fedkeep.experiments.reproductions import Reproduction

tiny = Reader(lambda users=3: toy(users=users))

def mine(**options):
    return methods.fedavg(**options)

def write(request):
    request.out.mkdir()
    (request.out / "mine.md").write_text("done")
    return request.out / "mine.md"

table = Reproduction(about="a table of mine", run=write)
number = 3
"""


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Install a package of the module ``their_plugin``; nothing else adds anything."""
    (tmp_path / "their_plugin.py").write_text(MODULE, encoding="utf-8")
    found = metadata.entry_points
    known: set[str] = set()
    monkeypatch.setattr(
        "fedkeep.experiments.plugins.entry_points",
        lambda group: [p for p in found(group=group) if p.dist is not None and p.dist.name in known],
    )
    monkeypatch.syspath_prepend(tmp_path)

    def one(name: str, **groups: dict[str, str]) -> None:
        known.add(name)
        points = {f"fedkeep.{group}": entries for group, entries in groups.items()}
        monkeypatch.syspath_prepend(write_package(tmp_path / name, name, points))

    yield one
    for module in ("their_plugin", "their_configs"):
        sys.modules.pop(module, None)


def config(reader: str, **options: object) -> Config:
    return Config.model_validate(
        {
            "data": {"reader": reader, **options},
            "model": {"kind": "linear"},
            "method": {"kind": "fedavg"},
            "run": {"rounds": 1},
        }
    )


def test_a_package_adds_a_reader_a_method_a_configuration_and_a_reproduction(
    install: Install, tmp_path: Path
) -> None:
    install(
        "plugin",
        readers={"tiny": "their_plugin:tiny"},
        methods={"mine": "their_plugin:mine"},
        reproductions={"mine": "their_plugin:table"},
        configurations={"any": "their_configs"},
    )
    (tmp_path / "their_configs" / "group").mkdir(parents=True)
    (tmp_path / "their_configs" / "__init__.py").touch()
    (tmp_path / "their_configs" / "group" / "one.toml").write_text("# Theirs.\n", encoding="utf-8")
    assert list(offered_readers()) == [*READERS, "tiny"]
    assert len(offered_readers()) == len(READERS) + 1
    assert len(build_data(config("tiny", users=4))) == 4
    assert build_method(MethodConfig(kind="mine")) == build_method(MethodConfig(kind="fedavg"))
    assert builtin_text("group/one") == "# Theirs.\n"
    assert reproduce("mine", Request(None, tmp_path / "out")).read_text() == "done"
    shown = " ".join(call("list").stdout.split())
    assert "mine a table of mine" in shown
    assert "group/one Theirs." in shown
    with raises(ConfigError, said="mine cannot be run in pieces; these can: none."):
        reproduce("mine", Request(None, tmp_path / "out", only=("*",)))


@pytest.mark.parametrize(
    ("group", "value", "ask"),
    [
        ("readers", "their_plugin:tiny", offered_readers),
        ("methods", "their_plugin:mine", offered_methods),
        ("reproductions", "their_plugin:table", reproductions),
    ],
)
def test_two_of_one_name_are_both_named(
    group: str, value: str, ask: Callable[[], object], install: Install
) -> None:
    install("one", **{group: {"same": value}})
    ask()
    install("other", **{group: {"same": "elsewhere:it"}})
    with pytest.raises(ConfigError) as error:
        ask()
    first, second = f"the package one ({value})", "the package other (elsewhere:it)"
    assert str(error.value) in {
        f"Two {group} are named 'same': one of {a} and one of {b}. Uninstall one of the packages, or rename its entry "
        f"point."
        for a, b in ((first, second), (second, first))
    }


def test_fedkeeps_own_names_are_taken(install: Install) -> None:
    install("plugin", readers={"toy": "their_plugin:tiny"})
    with raises(ConfigError, group="readers", point="toy", first="fedkeep itself"):
        build_data(config("toy"))


def test_two_configurations_of_one_name_are_both_named(install: Install, tmp_path: Path) -> None:
    install("plugin", configurations={"theirs": "their_configs"})
    (tmp_path / "their_configs" / "demo").mkdir(parents=True)
    (tmp_path / "their_configs" / "demo" / "global-fl.toml").touch()
    with raises(ConfigError, owner="fedkeep itself", whose="the package plugin (their_configs)"):
        builtin_names()
    install("gone", configurations={"gone": "no_such_module"})
    with pytest.raises(ConfigError, match=r"^The configurations 'gone' of.*no_such_module"):
        builtin_names()


def test_an_entry_point_that_leads_nowhere_or_to_something_else(install: Install) -> None:
    install(
        "plugin",
        readers={"gone": "their_plugin:gone", "none": "no_such_module:x", "wrong": "their_plugin:number"},
    )
    for name, fault in {
        "gone": "'gone' of the package plugin (their_plugin:gone) cannot be imported: module 'their_plugin' has no "
        "attribute 'gone'.",
        "none": "'none' of the package plugin (no_such_module:x) cannot be imported: No module named 'no_such_module'.",
        "wrong": "'wrong' of the package plugin (their_plugin:number): wanted Reader; got int.",
    }.items():
        with raises(ConfigError, said=fault):
            build_data(config(name))
    with pytest.raises(KeyError):
        offered_readers()["unheard"]


@pytest.fixture
def bare(install: Install, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """The command where the papers' package is not installed."""

    def absent(name: str) -> metadata.Distribution:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr("fedkeep.experiments.plugins.distribution", absent)
    return call


def test_without_the_papers_commands_say_what_to_install(bare: Callable[..., Result]) -> None:
    asked = bare("reproduce", "furl-table3")
    assert asked.exit_code == 2
    assert (
        asked.stderr
        == f"Error: There is no reproduction 'furl-table3': none is installed. {INSTALL_PAPERS}\n"
    )
    asked = bare("run", "furl/personalized-fl")
    assert asked.exit_code == 2
    assert asked.stderr.rstrip().endswith(INSTALL_PAPERS)
    listed = succeeded(bare("list"))
    assert INSTALL_PAPERS in listed.stdout
    assert "furl-table3" not in listed.stdout
    with raises(ConfigError, name="zulip_channels", place="data.reader", what="reader"):
        build_data(config("zulip_channels"))
    with pytest.raises(ConfigError, match=r"^There is no built-in.*'furl/x'"):
        builtin_text("furl/x")


def test_without_the_papers_the_demo_has_its_configurations(bare: Callable[..., Result]) -> None:
    assert builtin_names() == [
        "demo/global-fl",
        "demo/personalized-fl",
        "demo/personalized-server",
        "matrix-factorization",
        "mixture",
    ]


def test_a_generator_reads_no_folder() -> None:
    assert READERS["toy"] == Reader(toy)
    assert methods.METHODS.keys() == dict(offered_methods().items()).keys()


def test_every_entry_point_of_the_papers_leads_somewhere() -> None:
    text = (PAPERS / "pyproject.toml").read_text(encoding="utf-8")
    named = [line.split(" = ")[0] for line in text.splitlines() if '= "fedkeep_papers.re' in line]
    offered = {**offered_readers(), **reproductions()}
    assert set(named) <= set(offered)
    assert len(named) == 4 + 29
    assert {"furl/personalized-fl", "kteps/kteps-star"} <= set(builtin_names())
