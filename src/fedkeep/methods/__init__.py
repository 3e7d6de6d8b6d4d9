"""Federated methods as values: one file each, and the table that names them for configurations.

Each method is made by a function. All share two arguments: ``local``, a client's phase of training, whose loss is the
papers' F_k, and ``server``, what happens there, e.g. ``averaging(adam(0.01), by="uniform")``.
"""

from collections.abc import Callable

from fedkeep.methods import terms
from fedkeep.methods.aggregate import Reduced, RunningMean
from fedkeep.methods.apfl import apfl
from fedkeep.methods.asp_mtl import asp_mtl
from fedkeep.methods.base import Adapt, Method, Recall, Recalls, private_part
from fedkeep.methods.client import (
    Client,
    Finish,
    Finished,
    Init,
    Kept,
    Sent,
    Start,
    Started,
    by_share,
    newest,
)
from fedkeep.methods.ditto import ditto
from fedkeep.methods.fedala import fedala
from fedkeep.methods.fedamp import fedamp
from fedkeep.methods.fedavg import fedavg
from fedkeep.methods.fedbabu import fedbabu
from fedkeep.methods.fedbn import batch_norm_names, fedbn
from fedkeep.methods.fedcp import fedcp
from fedkeep.methods.feddbe import feddbe
from fedkeep.methods.feddyn import feddyn
from fedkeep.methods.fedfusion import fedfusion
from fedkeep.methods.fedmmd import fedmmd
from fedkeep.methods.fedpac import fedpac
from fedkeep.methods.fedper import fedper
from fedkeep.methods.fedproto import fedproto
from fedkeep.methods.fedprox import fedprox
from fedkeep.methods.fedrecon import fedrecon
from fedkeep.methods.fedrep import fedrep
from fedkeep.methods.fedrod import fedrod
from fedkeep.methods.fine_tuned import fine_tuned
from fedkeep.methods.furl import furl
from fedkeep.methods.gpfl import gpfl
from fedkeep.methods.hook_declarations import reveals, sends_to
from fedkeep.methods.ifca import ifca
from fedkeep.methods.knn_per import knn_per
from fedkeep.methods.kteps import kteps
from fedkeep.methods.kteps_star import kteps_star
from fedkeep.methods.lg_fedavg import lg_fedavg
from fedkeep.methods.local import local
from fedkeep.methods.mixture import mixture
from fedkeep.methods.moon import moon
from fedkeep.methods.mr_mtl import mr_mtl
from fedkeep.methods.per_fedavg import per_fedavg
from fedkeep.methods.pfedhn import pfedhn
from fedkeep.methods.pfedme import pfedme
from fedkeep.methods.pfl_da import pfl_da
from fedkeep.methods.phase import EarlyStopping, Phase
from fedkeep.methods.private import PrivateMean, differentially_private
from fedkeep.methods.robust import ClippedMean, Krum, Median, TrimmedMean
from fedkeep.methods.scaffold import scaffold
from fedkeep.methods.secure import SecureMean, SecureSums, securely
from fedkeep.methods.server import Global, Optimize, Reduction, Roster, Server, WeightedMean, averaging

METHODS: dict[str, Callable[..., Method]] = {
    build.__name__: build
    for build in (
        fedavg,
        fedbabu,
        furl,
        ifca,
        local,
        apfl,
        asp_mtl,
        ditto,
        fedala,
        fedamp,
        fedbn,
        fedcp,
        feddbe,
        feddyn,
        fedfusion,
        fedmmd,
        fedpac,
        fedper,
        fedproto,
        fedprox,
        fedrecon,
        fedrep,
        fedrod,
        fine_tuned,
        gpfl,
        knn_per,
        kteps,
        kteps_star,
        lg_fedavg,
        mixture,
        moon,
        mr_mtl,
        per_fedavg,
        pfedhn,
        pfedme,
        pfl_da,
        scaffold,
    )
}
"""Functions that make a method, by the name that ``method.kind`` has in a configuration."""

__all__ = [
    "METHODS",
    "Adapt",
    "Client",
    "ClippedMean",
    "EarlyStopping",
    "Finish",
    "Finished",
    "Global",
    "Init",
    "Kept",
    "Krum",
    "Median",
    "Method",
    "Optimize",
    "Phase",
    "PrivateMean",
    "Recall",
    "Recalls",
    "Reduced",
    "Reduction",
    "Roster",
    "RunningMean",
    "SecureMean",
    "SecureSums",
    "Sent",
    "Server",
    "Start",
    "Started",
    "TrimmedMean",
    "WeightedMean",
    "apfl",
    "asp_mtl",
    "averaging",
    "batch_norm_names",
    "by_share",
    "differentially_private",
    "ditto",
    "fedala",
    "fedamp",
    "fedavg",
    "fedbabu",
    "fedbn",
    "fedcp",
    "feddbe",
    "feddyn",
    "fedfusion",
    "fedmmd",
    "fedpac",
    "fedper",
    "fedproto",
    "fedprox",
    "fedrecon",
    "fedrep",
    "fedrod",
    "fine_tuned",
    "furl",
    "gpfl",
    "ifca",
    "knn_per",
    "kteps",
    "kteps_star",
    "lg_fedavg",
    "local",
    "mixture",
    "moon",
    "mr_mtl",
    "newest",
    "per_fedavg",
    "pfedhn",
    "pfedme",
    "pfl_da",
    "private_part",
    "reveals",
    "scaffold",
    "securely",
    "sends_to",
    "terms",
]
