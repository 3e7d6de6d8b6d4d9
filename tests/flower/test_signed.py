import json
import zipfile
from io import BytesIO

import pytest
from flwr.cli.build import build_fab_from_disk

from fedkeep.core.errors import ConfigError, RunError
from fedkeep.core.sealed import FORMAT, sealed_bytes
from fedkeep.flower.keys import make_keys
from fedkeep.flower.project import new_project
from fedkeep.flower.signed import LARGEST, SIGNATURE, check_signed, sign_project


@pytest.fixture
def signed(tmp_path):
    make_keys(tmp_path / "keys", hosts=["localhost"], nodes=["a"])
    new_project(tmp_path / "project", "seed = 3\n")
    sign_project(tmp_path / "project", tmp_path / "keys" / "signer.key")
    return tmp_path


def bundle(folder):
    return build_fab_from_disk(folder / "project")


def changed(content, **files):
    """Return a bundle with files changed, added or (None) left out."""
    made = BytesIO()
    with zipfile.ZipFile(BytesIO(content)) as old, zipfile.ZipFile(made, "w") as new:
        for name in old.namelist():
            if name not in files:
                new.writestr(name, old.read(name))
        for name, text in files.items():
            if text is not None:
                new.writestr(name, text)
    return made.getvalue()


def test_a_signed_project_is_taken_by_a_device_that_trusts_the_key(signed):
    content = changed(bundle(signed), **{".info/config.toml": "seed = 4"})  # Flower's own, which nobody signs
    files = check_signed(content, [signed / "keys" / "signer.pub"])
    assert set(files) == {"README.md", "config.toml", "nodes.json", "publisher.json", "pyproject.toml"}
    assert files["config.toml"] == b"seed = 3\n"


def test_signing_again_after_a_change_is_enough(signed):
    (signed / "project" / "config.toml").write_text("seed = 4\n")
    sign_project(signed / "project", signed / "keys" / "signer.key")
    check_signed(bundle(signed), [signed / "keys" / "signer.pub"])


def run_in(folder):
    folder.mkdir(parents=True)
    (folder / "run.json").write_bytes(sealed_bytes({"format": FORMAT, "run": "r", "cohort_seed": 1}))


def test_the_signature_still_fits_after_a_training(signed):
    run_in(signed / "project" / "run")
    check_signed(bundle(signed), [signed / "keys" / "signer.pub"])
    sign_project(signed / "project", signed / "keys" / "signer.key")


@pytest.mark.parametrize("place", ["run", "runs/two", "."])
def test_a_project_that_would_send_a_run_to_devices_is_not_signed(place, signed):
    project = signed / "project"
    if place == "run":
        (project / ".gitignore").unlink()
    before = (project / SIGNATURE).read_bytes()
    if place == ".":
        (project / "run.json").write_bytes(sealed_bytes({"format": FORMAT, "run": "r"}))
    else:
        run_in(project / place)
    with pytest.raises(ConfigError, match="every device would get the run's secrets") as error:
        sign_project(project, signed / "keys" / "signer.key")
    assert f"holds the run {place!r}" in str(error.value)
    assert (project / SIGNATURE).read_bytes() == before


def test_other_files_of_that_name_are_signed(signed):
    for name, text in (("run.json", '{"speed": 3}'), ("notes.json", "[]"), ("more/run.json", "no JSON")):
        (signed / "project" / name).parent.mkdir(exist_ok=True)
        (signed / "project" / name).write_text(text)
    sign_project(signed / "project", signed / "keys" / "signer.key")
    check_signed(bundle(signed), [signed / "keys" / "signer.pub"])


@pytest.mark.parametrize(
    "files", [{"config.toml": "seed = 4\n"}, {"fedkeep.py": "print()"}, {"config.toml": None}]
)
def test_a_file_that_was_changed_added_or_removed_is_refused(files, signed):
    with pytest.raises(RunError, match="no key that it trusts has signed these files"):
        check_signed(changed(bundle(signed), **files), [signed / "keys" / "signer.pub"])


def test_a_project_without_a_signature_is_refused(signed):
    with pytest.raises(RunError, match="refuses a project that nobody has signed"):
        check_signed(changed(bundle(signed), **{SIGNATURE: None}), [signed / "keys" / "signer.pub"])


def test_another_key_is_not_enough_and_one_of_several_is(signed, tmp_path):
    make_keys(tmp_path / "others", hosts=["localhost"], nodes=[])
    other, ours = tmp_path / "others" / "signer.pub", signed / "keys" / "signer.pub"
    check_signed(bundle(signed), [other, ours])
    for trusted in ([other], []):
        with pytest.raises(RunError, match="no key that it trusts"):
            check_signed(bundle(signed), trusted)


@pytest.mark.parametrize(
    "content", [b"", b"hello", b"PK\x05\x06" + b"\0" * 18 + b"x", changed.__name__.encode() * 100]
)
def test_what_is_no_bundle_is_refused(content, signed):
    with pytest.raises(RunError):
        check_signed(content, [signed / "keys" / "signer.pub"])


@pytest.mark.parametrize("text", ["{", "[]", json.dumps({"ed25519": 3}), json.dumps({"ed25519": "ä"})])
def test_a_malformed_signature_is_refused(text, signed):
    with pytest.raises(RunError, match="The bundle cannot be read"):
        check_signed(changed(bundle(signed), **{SIGNATURE: text}), [signed / "keys" / "signer.pub"])


def test_a_key_that_is_none_is_named(signed):
    with pytest.raises(ConfigError, match="There is no key .*none"):
        sign_project(signed / "project", signed / "none")
    with pytest.raises(ConfigError, match="a.key is no Ed25519 key"):
        sign_project(signed / "project", signed / "keys" / "a.key")
    with pytest.raises(ConfigError, match="a.pub is no Ed25519 key"):
        check_signed(bundle(signed), [signed / "keys" / "a.pub"])
    with pytest.raises(ConfigError, match="ca.pem is no public key"):
        check_signed(bundle(signed), [signed / "keys" / "ca.pem"])


def test_a_bundle_that_would_unpack_to_more_than_fits_is_refused_unread(signed, monkeypatch):
    packed = BytesIO(bundle(signed))
    with zipfile.ZipFile(packed, "a", zipfile.ZIP_DEFLATED) as files:
        files.writestr("big.txt", b"\0" * (LARGEST + 1))
    read, real = [], zipfile.ZipFile.read
    monkeypatch.setattr(
        zipfile.ZipFile, "read", lambda self, name, *more: read.append(name) or real(self, name, *more)
    )
    with pytest.raises(RunError, match="its files take more than"):
        check_signed(packed.getvalue(), [signed / "keys" / "signer.pub"])
    assert len(packed.getvalue()) < 1 << 20
    assert "big.txt" not in read


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_a_bundle_with_a_file_twice_is_refused(signed):
    twice = BytesIO(bundle(signed))
    with zipfile.ZipFile(twice, "a") as files:
        files.writestr("config.toml", files.read("config.toml"))
    with pytest.raises(RunError, match="it holds a file twice"):
        check_signed(twice.getvalue(), [signed / "keys" / "signer.pub"])


@pytest.mark.parametrize("name", [".env", ".more/config.toml"])
def test_a_hidden_file_that_was_added_is_noticed(name, signed):
    with pytest.raises(RunError, match="no key that it trusts has signed these files"):
        check_signed(changed(bundle(signed), **{name: "x"}), [signed / "keys" / "signer.pub"])
