from __future__ import annotations
import torch
from fedkeep.core.net import Net
from fedkeep.engines import Job, LocalDevice, Sequential, Order, first_kept
from fedkeep.core.errors import LostError
from fedkeep.engines import Answer
from fedkeep.methods import Kept, newest
from fedkeep.remote.packet import Packet
from fedkeep.remote.wire import *
from fedkeep.remote import wire
from fedkeep.store import Default, MemoryStore

class StubNode:
    def __init__(self, model, method, data, seed):
        net = Net(method.made_for(model))
        self.store = MemoryStore(Default(first_kept(method, net), method.client.keep.value, seed), data.ids)
        self.data = data
        self.job = Job(method, net, data, self.store, seed)
        self.device = LocalDevice(self.job, Sequential(), leaves="clients")
        self.version = {}; self.staged = {}
    def serve(self, packet):
        kind = packet.header["kind"]; run = packet.header["run"]
        if kind == "hello":
            return wire.told(wire.Here(run=run, clients=[str(i) for i in self.data.ids]))
        if kind == "encoding":
            return wire.told(wire.Fits(run=run, clients={str(i): {s: int(self.data.counts(s)[k]) for s in ("train","valid","test")} for k, i in enumerate(self.data.ids)}))
        work = wire.read_work(packet)
        for o in work.orders:
            self.settle(o)
        judged = []
        todo = {}
        for o in work.orders:
            for j in o.judge:
                todo.setdefault((j.split, j.models), []).append(o.order)
        for (split, models), orders in todo.items():
            for one in self.device.judge(orders, split, models):
                judged.append((split, one))
        orders = [o.order for o in work.orders if o.train]
        found = {}
        for o, a in zip([o for o in work.orders if o.train], self.device.train(orders)):
            found[a.client] = a
            i = self.data.index(a.client)
            if a.upload is not None:
                self.staged[a.client] = (o.version + 1, work.attempt, {n: v[0] for n, v in self.store.staged([i]).items()})
        answers = tuple(found.get(o.order.client, Answer(client=o.order.client)) for o in work.orders)
        return wire.answers_packet(wire.Answers(run=work.run, round=work.round, attempt=work.attempt, answers=answers, judged=tuple(judged)))
    def settle(self, o):
        c = o.order.client; i = self.data.index(c)
        have = self.version.get(c, (0, 0))
        if have == (o.version, o.attempt): 
            return
        v, a, after = self.staged.pop(c)
        assert (v, a) == (o.version, o.attempt), (v, a, o)
        rule = self.job.method.client.accept
        before = {n: x[0] for n, x in self.store.read([i]).items()}
        new = after if rule is newest else rule(Kept.of(before), Kept.of(after), o.share).flat
        self.store.write([i], {n: x.unsqueeze(0) for n, x in new.items()})
        self.version[c] = (v, a)
