"""Functions of a method, and models, that fail on devices: others go on, the run ends in words, and no text leaves."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fedkeep import FederatedData, Method, Phase, methods
from fedkeep.core.errors import ConfigError, MethodError, NonFiniteError, RoundError, RunError
from fedkeep.methods import Finish, Finished, Kept
from fedkeep.remote.policy import LONGEST_PAUSE, MOST_FAILURES, Retries, RoundPolicy
from fedkeep.remote.served_run import serve_run
from tests.remote.federations import Devices, federation
from tests.tiny import Logits, classes

SECRET = "row 3: Anna Smith, /home/anna/notes.csv"
DATA = classes(counts=(5, 9, 3, 7), kind="f4")
LOCAL = Phase(batch_size=4)


def always(given: Finish) -> Finished:
    raise ValueError(SECRET)


def at_the_smallest(given: Finish) -> Finished:
    if sum(len(batch["label"]) for _, batch in given.outputs(lambda net, params, batch: 0)) == 3:
        raise ValueError(SECRET)
    return Finished()


def with_a_draw(given: Finish) -> Finished:
    torch.rand(())
    return Finished()


def never(before: Kept, after: Kept, share: float) -> Kept:
    raise ValueError(SECRET)


def where_it_is_small(before: Kept, after: Kept, share: float) -> Kept:
    if share < 0.2:
        return Kept(params={"user": after.params["user"] / 0})
    return after


class Run:
    """A federation of four clients on two nodes, with a method."""

    def __init__(
        self,
        folder: Path,
        method: Method,
        data: FederatedData = DATA,
        *,
        model: type[Logits] = Logits,
        nodes: int = 2,
    ) -> None:
        def experiment(text: str, encoding: Any) -> Any:
            torch.manual_seed(0)
            return model(), method

        self.folder = folder
        self.devices = Devices("", folder, nodes, data=data, experiment=experiment)
        self.told: list[str] = []
        for node in self.devices.nodes:
            node.tell = self.told.append
        self.federation = federation(
            "furl",
            build=lambda encoding: experiment("", encoding),
            clients=len(data),
            rounds=3,
            cohort=4,
            text="",
        )

    def serve(self) -> list[Any]:
        try:
            return serve_run(self.federation, self.devices.transport, self.folder / "run", progress=False)
        finally:
            self.devices.close()

    def events(self, *kinds: str) -> list[str]:
        lines = map(json.loads, (self.folder / "run" / "events.jsonl").read_text().splitlines())
        return [line["text"] for line in lines if not kinds or line["kind"] in kinds]

    def all_that_the_server_wrote(self) -> str:
        return "".join(
            p.read_bytes().decode("latin-1") for p in (self.folder / "run").rglob("*") if p.is_file()
        )


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({"finish": always}, "ValueError"),
        ({"finish": with_a_draw}, "MethodError"),
        ({"accept": never}, "ValueError"),
    ],
)
def test_a_function_that_always_fails_ends_the_run_in_words(
    changes: dict[str, Any], kind: str, tmp_path: Path
) -> None:
    run = Run(tmp_path, methods.furl("user", local=LOCAL).on_client(**changes))
    with pytest.raises(RunError) as error:
        run.serve()
    text = str(error.value)
    assert f"its device failed with {kind}. Its own log says more." in text
    assert text.endswith(
        f"It was tried {MOST_FAILURES} times. Mend the method or the model on the devices, and start the run again in "
        f"the same way: it goes on at round {1 if 'accept' in changes else 0}."
    )
    assert sum("is tried again" in line for line in run.events("round")) == MOST_FAILURES - 1
    assert "Anna" not in text + run.all_that_the_server_wrote()
    assert any(line.startswith("Client 'user-0': ") for line in run.told) or any(
        "Client '0'" in line for line in run.told
    )


class Breaks(Logits):
    """A model whose loss is no number on mini-batches of three examples."""

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = super().forward(x)
        return logits * torch.nan if self.training and len(x) == 3 else logits


def test_where_a_clients_training_broke_down_its_device_says_alone(tmp_path: Path) -> None:
    run = Run(tmp_path, methods.furl("user", local=Phase(batch_size=16, epochs=2)), model=Breaks)
    with pytest.raises(NonFiniteError) as error:
        run.serve()
    (small,) = [str(c) for k, c in enumerate(DATA.ids) if len(DATA.rows(k, "train")) == 3]
    assert repr(small) in str(error.value)
    (told,) = {line for line in run.told if "loss" in line}
    assert small in told
    assert "loss" not in str(error.value)


class Deaf(Logits):
    """A model in which the user's own vector counts for nothing."""

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + 0 * self.user


def test_a_group_whose_gradients_are_zero_ends_the_run_and_its_devices_say_which(tmp_path: Path) -> None:
    run = Run(tmp_path, methods.furl("user", local=Phase(batch_size=1)), model=Deaf)
    with pytest.raises(RunError, match="its device failed with MethodError"):
        run.serve()
    assert any("the private ['user']" in line for line in run.told)
    assert "user'" not in " ".join(run.events("round"))


class Endless(BaseException):
    """Devices were asked more often than any run that ends needs."""


def at_the_smaller(given: Finish) -> Finished:
    if sum(len(batch["label"]) for _, batch in given.outputs(lambda net, params, batch: 0)) < 7:
        raise ValueError(SECRET)
    return Finished()


@pytest.mark.parametrize(("finish", "buffer", "there"), [(always, 2, 0), (at_the_smaller, 3, 2)])
def test_buffered_rounds_that_no_upload_can_fill_end_in_words(
    finish: Any, buffer: int, there: int, tmp_path: Path
) -> None:
    run = Run(tmp_path, methods.fedavg(local=LOCAL).on_client(finish=finish))
    run.federation = replace(run.federation, policy=RoundPolicy(mode="buffered", buffer=buffer))

    def tell(text: str) -> None:
        run.told.append(text)
        if len(run.told) > 100:
            raise Endless

    for node in run.devices.nodes:
        node.tell = tell
    with pytest.raises(RunError) as error:
        run.serve()
    said = str(error.value)
    assert said.startswith(
        f"Round 0 does not count: {there} of {buffer} uploads are there, and no client is left to be asked. "
        f"Nothing was lost: the last finished round is kept. The first fault: Client 'user-"
    )
    assert f"It was tried {MOST_FAILURES} times." in said
    assert "Anna" not in said + run.all_that_the_server_wrote()


def test_buffered_rounds_go_on_without_clients_that_fail(tmp_path: Path) -> None:
    run = Run(tmp_path, methods.fedavg(local=LOCAL).on_client(finish=at_the_smaller))
    run.federation = replace(run.federation, policy=RoundPolicy(mode="buffered", buffer=2))
    assert max(record.round for record in run.serve()) == 3


@pytest.mark.parametrize("changes", [{"finish": at_the_smallest}, {"accept": where_it_is_small}])
def test_a_function_that_fails_at_one_client_takes_no_other_out(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    run = Run(tmp_path, methods.furl("user", local=LOCAL).on_client(**changes))
    records = run.serve()
    took_part = {r.round: r.n for r in records if r.metric == "upload_bytes"}
    assert took_part[3] == 3, "the other client of its node, too"
    assert "Anna" not in run.all_that_the_server_wrote()


class Picky(Logits):
    """Fails at one example."""

    def forward(self, x: Tensor) -> Tensor:
        if not x.is_meta and bool((x[..., 0] == ODD).any()):
            raise ValueError(SECRET)
        return super().forward(x)


ODD = 99.0


@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize("split", ["valid", "test"])
def test_a_model_that_fails_where_one_client_is_judged_takes_no_other_out(
    split: str, nodes: int, tmp_path: Path
) -> None:
    data = classes(counts=(5, 9, 3, 7), kind="f4")
    x: Any = data.columns["x"]
    x[data.rows(0, split)[0], 0] = ODD
    run = Run(tmp_path, methods.furl("user", local=LOCAL), data, model=Picky, nodes=nodes)
    records = run.serve()
    assert {r.n for r in records if r.round == 3 and r.metric == "upload_bytes"} == {3}
    judged = {r.n for r in records if r.client is None and r.split == "test" and r.metric == "accuracy"}
    assert judged == {9}
    assert run.events("refused", "lost")[-1] == (
        "Client 'user-0' was not judged: Client 'user-0': its device failed with MethodError. Its own log says more."
    )
    assert "Anna" not in run.all_that_the_server_wrote()
    assert {line.partition(":")[0] for line in run.told} == {"Client 'user-0'"}


def test_the_owner_is_told_whose_function_failed_and_where(tmp_path: Path) -> None:
    run = Run(tmp_path, methods.furl("user", local=LOCAL).on_client(finish=at_the_smallest))
    run.serve()
    said = next(line for line in run.told if SECRET in line)
    assert said.startswith(f"Client '{DATA.ids[2]}': ValueError: {SECRET} (test_failing.py, line ")
    assert said.endswith(", in at_the_smallest)")


@pytest.mark.parametrize("kind", [ValueError, ConfigError, MethodError])
def test_what_a_model_says_while_it_is_made_stays_on_the_device(
    kind: type[Exception], tmp_path: Path
) -> None:
    def experiment(text: str, encoding: Any) -> Any:
        raise kind(SECRET)

    run = Run(tmp_path, methods.furl("user", local=LOCAL))
    for node in run.devices.nodes:
        node.experiment = experiment
    with pytest.raises(ConfigError) as error:
        run.serve()
    assert kind.__name__ in str(error.value)
    assert "Its own log says more." in str(error.value)
    assert "Anna" not in str(error.value)
    assert any(SECRET in line for line in run.told)


def test_what_fails_is_tried_three_times_and_what_is_away_for_ever_less_and_less_often() -> None:
    away, failed = RoundError("away"), RoundError("failed", failed=True)
    retries = Retries(10.0)
    assert [retries.after(away, 4) for _ in range(5)] == [10, 20, 40, LONGEST_PAUSE, LONGEST_PAUSE]
    assert [retries.after(failed, 5) for _ in range(2)] == [10, 20]
    assert retries.after(away, 5) == 40, "a device that is away may come back"
    assert [retries.after(failed, 5) for _ in range(2)] == [LONGEST_PAUSE] * 2
    with pytest.raises(RunError, match=r"^failed It was tried 3 times\. .* it goes on at round 5\.$"):
        retries.after(failed, 5)
    assert Retries(300.0).after(away, 0) == 300
