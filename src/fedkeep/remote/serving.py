"""A round's message on a device: begin at the named versions, adapt, judge, train, make it durable, answer."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from fedkeep.core.errors import (
    FailedError,
    LostError,
    MethodError,
    NonFiniteError,
    SecureSumError,
    StoreError,
    UploadError,
)
from fedkeep.core.params import Params
from fedkeep.engines import Adaptation, Engine, Job, Judged, LocalDevice, Order
from fedkeep.engines.client_step import FirstMoves
from fedkeep.engines.faults import Fault
from fedkeep.engines.judge import ExamplesOf
from fedkeep.methods import Sent
from fedkeep.methods.hook_checks import UPLOAD
from fedkeep.privacy.secure.secure_messages import WrongShareError
from fedkeep.remote.agreement import kind_of, place_of, raised_here
from fedkeep.remote.device_file import AdaptedRow
from fedkeep.remote.device_store import DeviceStore, MissingError, OnMissing
from fedkeep.remote.masking import Masking
from fedkeep.remote.messages import UNFIT, Answers, ClientAnswer, ClientOrder, Partition, Step, Work
from fedkeep.store import LedgerLines, Line, Named
from fedkeep.tasks.results import Model

Tell = Callable[[str], None]
Results = tuple[tuple[Partition, Judged], ...]


def serve(
    work: Work,
    job: Job,
    store: DeviceStore,
    engine: Engine,
    *,
    on_missing: OnMissing,
    tell: Tell,
    masking: Masking | None = None,
    unfit: Collection[str] = (),
    judges: ExamplesOf = "opted_in",
    admits: Callable[[Partition, Sequence[str]], bool] = lambda split, clients: True,
    note: Callable[[Results, Sequence[ClientAnswer]], None] = lambda judged, answers: None,
    judges_moves: bool = True,
) -> Answers:
    """Do what a message asks of this device's clients.

    Args:
        work: the message, checked.
        job: the run on this device.
        store: the job's store: what clients keep.
        engine: trains.
        on_missing: about a client whose version is not there.
        tell: called with what the device's owner should know.
        masking: takes the steps of secure sums; None: the method has none.
        unfit: clients whose data cannot be used.
        judges: on which examples models are judged.
        admits: tells whether a sum over the examples of some clients may leave.
        note: called with all that was judged and trained here, before anything is masked or durable.
        judges_moves: whether a group that is trained and has no gradient is a failure (``FirstMoves``).

    Returns:
        An answer for each order. Nothing of it is valid on the device that is not durable there.

    Raises:
        UploadError: steps of a secure sum are asked for that are not due; nothing was done.
        FedkeepError: a model failed on the data of all clients that are judged; likewise.
    """
    for one in work.orders:
        _check_asks(one, masking)
    store.clear()
    begun: dict[str, ClientOrder] = {}
    answers: dict[str, ClientAnswer] = {}
    for one in (one for one in work.orders if one.begins):
        client = one.client
        try:
            if client in unfit:
                raise LostError("Client {client!r} takes no part: {unfit}", client=client, unfit=UNFIT)
            _begin(one, work.attempt, job, store, on_missing, tell)
            begun[client] = one
        except Exception as error:  # noqa: BLE001 - also a function of the method; the others are served
            if isinstance(error, LostError | StoreError) and raised_here(error):
                tell(str(error))
                answers[client] = ClientAnswer(client=client, fault=LostError(str(error)))
            else:
                answers[client] = _failed(client, error, tell)
    device = LocalDevice(job, engine, leaves=work.leaves, judges=judges)
    failed = _adapted(work, list(begun.values()), device, store, tell)
    judged, unjudged = _judged([one for one in begun.values() if one.client not in failed], device, tell)
    failed |= unjudged
    answers |= failed
    admitted = _admitted(judged, [one for one in begun.values() if one.client not in failed], admits, tell)
    training = [one for one in begun.values() if one.train and one.client not in failed]
    if masking is not None:
        training = _without_answered(training, masking, work.attempt, answers, tell)
    for answer, kept in _trained(training, device, tell, judges_moves):
        answers[answer.client] = answer
        if kept is not None:
            try:
                store.stage(job.data.index(answer.client), kept, work.attempt, work.round)
            except StoreError as error:
                tell(str(error))
                answers[answer.client] = ClientAnswer(client=answer.client, fault=LostError(str(error)))
    note(judged, list(answers.values()))
    try:
        store.flush()
    except StoreError as error:  # nothing leaves that is not durable here
        tell(str(error))
        answers |= {client: ClientAnswer(client=client, fault=LostError(str(error))) for client in begun}
        admitted = ()
    made = {} if masking is None else _steps(work, training, masking, answers, tell)
    return Answers(
        run=work.run,
        round=work.round,
        attempt=work.attempt,
        judged=admitted,
        made={client: steps for client, steps in made.items() if steps},
        answers=tuple(answers.get(one.client, ClientAnswer(client=one.client)) for one in work.orders),
    )


def _check_asks(one: ClientOrder, masking: Masking | None) -> None:
    if masking is not None:
        masking.check(one)
    elif one.asks:
        raise UploadError("An order asks for steps of a secure sum, and the method has none.")


def _without_answered(
    training: Sequence[ClientOrder],
    masking: Masking,
    attempt: int,
    answers: dict[str, ClientAnswer],
    tell: Tell,
) -> list[ClientOrder]:
    """Return the orders that are to be trained; those that were answered before get that answer."""
    left = []
    for one in training:
        try:
            answer = masking.again(one, attempt)
        except StoreError as error:
            tell(str(error))
            answer = ClientAnswer(client=one.client, fault=LostError(str(error)))
        if answer is None:
            left.append(one)
        else:
            answers[one.client] = answer
    return left


def _steps(
    work: Work, trained: Sequence[ClientOrder], masking: Masking, answers: dict[str, ClientAnswer], tell: Tell
) -> dict[str, dict[Step, Mapping[str, str]]]:
    """Mask the uploads, now that what is kept is durable, and take the other steps; return what these gave.

    Of ``masked`` it is whose shares could not be opened, by their ids: the server can try without them.
    """
    made: dict[str, dict[Step, Mapping[str, str]]] = {}
    uploading = {one.client for one in trained}
    for one in work.orders:
        client = one.client
        if client in answers and answers[client].fault is not None:
            continue
        made[client] = {}
        for masks in (True, False) if client in uploading else (False,):
            try:
                if masks:
                    answers[client] = masking.masked(one, work.attempt, answers[client])
                else:
                    for step, values in masking.made(one, work.attempt):
                        made[client][step] = values
            except (SecureSumError, StoreError) as error:
                tell(str(error))
                if isinstance(error, WrongShareError):
                    made[client]["masked"] = dict.fromkeys(error.dealers, "")
                kind = LostError if isinstance(error, StoreError) else UploadError
                text = "Client {client!r} took no step of the secure sum. Its own log says why."
                answers[client] = ClientAnswer(client=client, fault=kind(text, client=client))
    for text in masking.lost:
        tell(text)
    return made


def _begin(
    one: ClientOrder, attempt: int, job: Job, store: DeviceStore, on_missing: OnMissing, tell: Tell
) -> None:
    """Let a client begin; nobody begins otherwise by a message older than what the client keeps."""
    client, line = one.client, Line(one.version, one.attempt, one.share)
    place = job.data.ids.position(client)
    if place < 0:
        raise LostError("Client {client!r} is not on this device.", client=client)
    try:
        store.begin(LedgerLines.of({place: line}))
    except MissingError as error:
        if on_missing == "refuse" or attempt <= error.late:
            raise
        if on_missing == "anew":
            store.begin_anew(place, line)
            tell(f"{error} It starts from default values.")
        elif (older := store.begin_older(place, line)) is not None:
            tell(f"{error} It starts from version {older.version}.")
        else:
            raise
    now = Named(one.round, one.version, one.attempt)
    earlier = (
        one.best is not None and one.best.round == one.round
    )  # it may be an order to go back to the best round
    if missing := store.name(place, None if earlier else now, one.best, attempt):
        tell(missing)


def _trained(
    orders: Sequence[ClientOrder], device: LocalDevice, tell: Tell, judges_moves: bool
) -> list[tuple[ClientAnswer, Params | None]]:
    """Return the answer of each client, and what it would keep.

    Where one fails, all are trained one by one, so that the others come through: streams are each client's own.
    """
    if not orders:
        return []
    found = []
    try:
        results = list(device.results(orders))
    except Exception as error:  # noqa: BLE001 - a function of the method or the model
        if len(orders) == 1:
            return [(_failed(orders[0].client, error, tell), None)]
        return [each for one in orders for each in _trained([one], device, tell, judges_moves)]
    try:
        if judges_moves:
            FirstMoves().judge(device.job, orders[0].round, [result.moves for _, result in results])
    except MethodError as error:
        return [(_failed(one.client, error, tell), None) for one in orders]
    for one, result in results:
        if result.note:
            tell(result.note)
        fault = None if result.fault is None else _broken(one.client, result.fault, tell)
        answer = ClientAnswer(client=one.client, upload=result.upload, loss=result.loss, fault=fault)
        found.append((answer, result.kept))
    return found


def _broken(client: str, fault: Fault, tell: Tell) -> Fault:
    """Return the fault of a client as a server hears it: its text, which may be made of values, stays on the device."""
    tell(f"{fault}{place_of(fault)}")
    kind = NonFiniteError if isinstance(fault, NonFiniteError) else UploadError
    what = (
        "training broke down to NaN or infinity" if kind is NonFiniteError else "there is no upload that fits"
    )
    return kind("Client {client!r}: {what}. Its own log says more.", client=client, what=what)


def _failed(client: str, error: Exception, tell: Tell) -> ClientAnswer:
    """Return the answer of a client at whom the method or the model failed; the error's text stays on the device."""
    tell(f"Client {client!r}: {type(error).__name__}: {error}{place_of(error)}")
    fault = FailedError(
        "Client {client!r}: its device failed with {kind}. Its own log says more.",
        client=client,
        kind=kind_of(error),
    )
    return ClientAnswer(client=client, fault=fault)


def _adapted(
    work: Work, orders: Sequence[ClientOrder], device: LocalDevice, store: DeviceStore, tell: Tell
) -> dict[str, ClientAnswer]:
    """Let clients adapt, each alone, so that the others come through; return the answers of those at whom it failed.

    Afterwards the device holds what these have adapted to, and those who are judged by what they had adapted to before.
    """
    how, known, failed = Adaptation(split=""), dict[str, Params](), dict[str, ClientAnswer]()
    asked = [one for one in orders if one.adapt or any("adapted" in each.models for each in one.judge)]
    plain = {one.client: replace(one, sent=_without_links(one.sent)) for one in asked}
    for one in asked:
        client, place = one.client, device.job.data.index(one.client)
        try:
            values = _adapted_before(work, one, store, place)
            if values is None:
                device.adapt([plain[client]], how)
                values = {n: v[0] for n, v in device.held(how.name).read([place]).items()}
                store.stage_adapted(place, values, work.attempt, work.round)
            if one.judge:
                known[client] = values
        except StoreError as error:
            tell(str(error))
            failed[client] = ClientAnswer(client=client, fault=LostError(str(error)))
        except Exception as error:  # noqa: BLE001 - a function of the method or the model
            failed[client] = _failed(client, error, tell)
    if known:
        device.adapt([plain[client] for client in known], how, known=known)
    return failed


def _adapted_before(work: Work, one: ClientOrder, store: DeviceStore, place: int) -> Params | None:
    """Return what a client has adapted to already, if the order is a repetition, or does not ask it to adapt.

    Raises:
        StoreError: it has adapted by a later order, or has not adapted to what is to be judged; or that is damaged.
    """
    client, found = one.client, store.adapted(place)
    if one.adapt and (found is None or found.attempt < work.attempt):
        return None
    attempt = work.attempt if one.adapt or found is None else found.attempt
    if found != AdaptedRow(client, one.version, attempt, one.attempt, work.round):
        raise StoreError(
            "Client {client!r} has not adapted from version {version} in round {round}, or has adapted by a "
            "later order. Let it adapt first.",
            client=client,
            version=one.version,
            round=work.round,
        )
    assert found is not None
    return store.adapted_values(found)


def _judged(
    orders: Sequence[ClientOrder], device: LocalDevice, tell: Tell
) -> tuple[Results, dict[str, ClientAnswer]]:
    """Return what comes of judging, and the answers of clients at whom it failed, so that the others come through.

    Raises:
        FedkeepError: it fails at all of them.
    """
    try:
        return _judged_together(orders, device), {}
    except Exception:  # whose it was is found below, and told; an error that is no single client's goes on
        failed = dict[str, ClientAnswer]()
        for one in orders:
            try:
                _judged_together([one], device)
            except Exception as own:  # noqa: BLE001 - likewise
                failed[one.client] = _failed(one.client, own, tell)
        left = [one for one in orders if one.client not in failed]
        if not left or not failed:
            raise
        return _judged_together(left, device), failed


def _admitted(
    judged: Results,
    orders: Sequence[ClientOrder],
    admits: Callable[[Partition, Sequence[str]], bool],
    tell: Tell,
) -> Results:
    """Return the results that may leave: of enough examples, as the device's owner says."""
    fine: dict[tuple[Partition, tuple[Model, ...]], bool] = {}
    for split, found in judged:
        key = split, found.models
        if key not in fine:
            clients = [
                one.client for one in orders if any((each.split, each.models) == key for each in one.judge)
            ]
            fine[key] = admits(split, clients)
            if not fine[key]:
                tell(
                    f"A sum over {split!r} examples of {len(clients)} clients does not leave: by it, or by what it "
                    f"differs from an earlier one, fewer examples than device.least_examples could be told apart."
                )
    return tuple((split, found) for split, found in judged if fine[split, found.models])


def _judged_together(orders: Iterable[ClientOrder], device: LocalDevice) -> Results:
    """Return what comes of judging; clients with the same partition and models are judged together."""
    together: dict[tuple[Partition, tuple[Model, ...]], list[Order]] = {}
    sent: dict[int, Sent] = {}
    for one in orders:
        for judging in one.judge:
            given = sent.setdefault(id(one.sent), _without_links(one.sent))
            order = Order(round=one.round, client=one.client, sent=given)
            together.setdefault((judging.split, judging.models), []).append(order)
    return tuple(
        (split, judged)
        for (split, models), some in together.items()
        for judged in device.judge(some, split, models)
    )


def _without_links(sent: Sent) -> Sent:
    """Return what was sent without what is for the upload chain."""
    return Sent(params=sent.params, state={n: v for n, v in sent.state.items() if not n.startswith(UPLOAD)})
