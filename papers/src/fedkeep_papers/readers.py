"""The readers of the papers' data, as configurations name them; `fedkeep.experiments.sources` finds them here."""

from fedkeep.experiments.sources import Reader
from fedkeep_papers.furl import zulip
from fedkeep_papers.kteps import fdu_mtl as fdu
from fedkeep_papers.kteps import tang as ss
from fedkeep_papers.public import pfllib

zulip_channels = Reader(zulip.raw_zulip_channels, "folder", "zulip_channels")
fdu_mtl = Reader(fdu.raw_fdu_mtl, "folder", "fdu_mtl")
tang = Reader(ss.raw_tang, "folder", "tang")
pfllib_fashion = Reader(pfllib.pfllib_fashion, "folder", "fashion_mnist")
