"""The transcripts that the documents show, replayed: the same commands say the same, but for times, ports and numbers.

A line ``$ command`` runs here; ``link$ command`` runs on a machine of that name, in a network of its own. Of a command
that ends in ``&``, and of one whose log is streamed, a transcript shows some lines: each of them must be said.
"""

import os
import re
import secrets
import shlex
import shutil
import signal
import subprocess
import sys

import pytest

from benchmarks.deployments import DOCUMENT, METHODS, configuration
from fedkeep.experiments.build import run_config
from fedkeep.experiments.config import parse_config
from fedkeep.flower.processes import MARK, marked, program
from tests.commands import call
from tests.documents import ROOT, blocks
from tests.flower.hosts import Hosts, reason

TRANSCRIPTS = sorted((ROOT / "docs" / "transcripts").glob("*.txt"))
ALONE = [path for path in TRANSCRIPTS if path.stem != "machines"]
CLINICS = ["clinic-a", "clinic-b", "clinic-c"]
NAMES = {"link": "link.example.org", **{clinic: f"{clinic}.example.org" for clinic in CLINICS}}
PREDICT = "fedkeep device predict node.toml --published run.published --data new.csv --out predicted.csv"
SEQUENTIAL = {"run.engine": "sequential"}
VARIES = [
    (r"\x1b\[[0-9;]*m", ""),
    (r"127\.0\.0\.1:\d+", "127.0.0.1:PORT"),
    (r"\b\d{15,20}\b", "NUMBER"),
    (r"\b[0-9a-f]{32}\b", "DIGEST"),
    (r"\d+\.\d+ (s|seconds)\b", "TIME"),
    (r"[ \t]+$", ""),
]


def alike(text):
    """Return a text without what may differ from run to run."""
    for pattern, word in VARIES:
        text = re.sub(pattern, word, text, flags=re.MULTILINE)
    return text.strip()


def steps(path):
    """Return the commands of a transcript: the machine, the command, and what it printed."""
    parts = re.split(r"^([a-z-]*)\$ (.*)\n", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return list(zip(parts[1::3], parts[2::3], parts[3::3], strict=True))


def environment(**more):
    """Return the environment of the commands."""
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(sys.path),
        "NO_COLOR": "1",
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
        "PATH": f"{program('flwr').parent}{os.pathsep}{os.environ['PATH']}",
        **more,
    }


def check(command, said, printed):
    """Compare what a command said with what the transcript shows."""
    timed = "flower train" in command or "deploy" in command
    if command.endswith(("&", "--stream")) or timed:  # its lines hang on time
        lines = alike(said).splitlines()
        missing = [line for line in alike(printed).splitlines() if line not in lines]
        assert not missing, said
    else:
        assert alike(said) == alike(printed), command


def test_there_are_transcripts_and_their_commands_stand_in_a_page():
    shown = "\n".join(b.text for page in (ROOT / "docs").rglob("*.md") for b in blocks(page, "sh"))
    shown = shown.replace("\\\n    ", "")
    assert len(TRANSCRIPTS) == 3
    for path in TRANSCRIPTS:
        for _, command, _ in steps(path):
            generic = re.sub(r"clinic-[bc]", "clinic-a", command.removesuffix(" &"))
            assert command in shown or generic in shown, command


@pytest.mark.slow
@pytest.mark.parametrize("path", ALONE, ids=lambda path: path.stem)
def test_a_transcript_is_what_the_commands_say(path, tmp_path):
    mark = secrets.token_hex(8)
    given = environment(FLWR_HOME=str(tmp_path / "flower"), **{MARK: mark})
    try:
        for _, command, printed in steps(path):
            done = subprocess.run(
                shlex.split(command),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                cwd=tmp_path,
                env=given,
                timeout=1200,
                check=False,
            )
            assert done.returncode == 0, done.stdout
            check(command, done.stdout.replace(str(tmp_path), "/srv"), printed)
    finally:
        for process in marked(mark):  # the link of Flower's simulation stays when its command has ended
            os.kill(process, signal.SIGTERM)


@pytest.mark.slow
@pytest.mark.skipif(bool(reason()), reason=reason())
def test_the_transcript_of_four_machines_is_what_they_say(tmp_path):
    files = {
        one.text.split('"')[1]: one.text for one in blocks(ROOT / "docs" / "how-to" / "deploy.md", "toml")
    }
    with Hosts(tmp_path, NAMES, environment(HOME="/srv")) as hosts:
        link = tmp_path / "link"
        (link / "visits.toml").write_text(files["visits"])
        path = ROOT / "docs" / "transcripts" / "machines.txt"
        for machine, command, printed in steps(path):
            if command.endswith("&"):
                last = alike(printed).splitlines()[-1]
                said = hosts.start(
                    machine, command.removesuffix(" &"), lambda text, last=last: last in alike(text)
                )
            else:
                said, code = hosts.run(machine, command)
                assert code == 0, said
            with (tmp_path / "said.txt").open(
                "a"
            ) as file:  # what the transcript is made of where commands change
                file.write(f"{machine}$ {command}\n{said}")
            check(command, said, printed)
            carry(command, link, tmp_path)
        theirs = tmp_path / "clinic-a" / "theirs"
        theirs.mkdir()
        shutil.copy(tmp_path / "clinic-a" / "ca.pem", theirs)
        shutil.copy(link / "visits" / "keys" / "clinic-b.pub", theirs / "stranger.pub")
        said, code = hosts.run("clinic-a", "fedkeep flower register theirs --link link.example.org:8443")
        assert (code, "from its own machine alone" in said) == (2, True), (
            said
        )  # the owner alone says who may join
        assert (tmp_path / "clinic-a" / "predicted.csv").read_text().count("clinic-a-") == 24


@pytest.mark.slow
@pytest.mark.skipif(bool(reason()), reason=reason())
@pytest.mark.parametrize("name", ["mixture", "fine_tuned", "fedpac"])
def test_clinics_predict_with_other_methods_as_after_a_simulation(name, tmp_path, monkeypatch):
    """The page's commands, ``device adapt`` where the models are made after the rounds, and a file for each clinic where
    the server sends each client something else."""
    apart = name == "fedpac"
    monkeypatch.setitem(METHODS, "fedpac", (f"{DOCUMENT}user_dim = 0\n", 'kind = "fedpac"\nhead = "mlp.3"'))
    text = (
        configuration(name).partition("[data]")[0] + "[model]" + configuration(name).partition("[model]")[2]
    )
    text = text.replace("seed = 3\n", "").replace("cohort = 2", "cohort = 6")
    text += '[preparation]\ntokens = "char"\n[rounds]\nclients = 6\n'  # else devices hash words, and a table counts
    with Hosts(tmp_path, NAMES, environment(HOME="/srv")) as hosts:
        link = tmp_path / "link"
        (link / "visits.toml").write_text(text)
        for machine, command, printed in steps(ROOT / "docs" / "transcripts" / "machines.txt"):
            if command.endswith("&"):
                last = alike(printed).splitlines()[-1]
                hosts.start(machine, command.removesuffix(" &"), lambda said, last=last: last in alike(said))
            elif re.search("flower (init|register|train)", command):
                said, code = hosts.run(machine, command)
                assert code == 0, said
                carry(command, link, tmp_path)
        for clinic in CLINICS:
            whose = f" --client {clinic}-1 --client {clinic}-2 --round last" if apart else ""
            said, code = hosts.run("link", f"fedkeep flower publish visits/run{whose}")
            assert code == 0, said
            shutil.copy(link / "visits" / "run.published", tmp_path / clinic)
            adapt = ["fedkeep device adapt node.toml --published run.published"] * (not apart)
            for words in (*adapt, PREDICT):
                said, code = hosts.run(clinic, words)
                assert code == 0, said
    tables = [(tmp_path / clinic / "visits.csv").read_text().splitlines() for clinic in CLINICS]
    (tmp_path / "all.csv").write_text("\n".join([tables[0][0], *(row for one in tables for row in one[1:])]))
    data = f'[data]\nreader = "table"\npath = "{tmp_path}/all.csv"\n'
    alone = parse_config(
        text.partition("[rounds]")[0].replace("[model]", f"{data}[model]", 1), "", SEQUENTIAL
    )
    run = run_config(alone, out=tmp_path / "simulation")
    (run.last if apart else run).export(tmp_path / "models")  # which round is best hangs on bins of the AUC
    for clinic in CLINICS:
        expected, new = tmp_path / f"{clinic}.csv", tmp_path / clinic / "new.csv"
        assert call("predict", tmp_path / "models", "--data", new, "--out", expected).exit_code == 0
        assert (tmp_path / clinic / "predicted.csv").read_text() == expected.read_text()
        assert expected.read_text().count(clinic) == 24


def carry(command, link, folder):
    """Take to the clinics what the owner has made for them."""
    for clinic in CLINICS:
        if command.startswith("fedkeep flower init"):
            take_there(link / "visits" / clinic, folder / clinic, clinic)
        if command.startswith("fedkeep flower publish"):
            shutil.copy(link / "visits" / "run.published", folder / clinic)


def take_there(party, machine, clinic):
    """Give a clinic its folder, and data of two wards."""
    shutil.copytree(party, machine, dirs_exist_ok=True)
    node = machine / "node.toml"
    node.write_text(node.read_text().replace("data.csv", "visits.csv"))
    words = [
        "pain",
        "fever",
        "cough",
        "rash",
        "fall",
        "burn",
        "check",
        "dizzy",
        "sleep",
        "back",
        "knee",
        "heart",
    ]
    rows = [
        f"{clinic}-{ward},{' '.join(words[(k * step + ward) % 12] for step in (1, 5, 7))},{('routine', 'urgent')[k % 2]}"
        for ward in (1, 2)
        for k in range(40)
    ]
    new = [row.rpartition(",")[0] for row in rows[::2][:12] + rows[-12:]]
    (machine / "new.csv").write_text("\n".join(["user,text", *new]) + "\n")
    (machine / "visits.csv").write_text("\n".join(["user,text,label", *rows]) + "\n")
