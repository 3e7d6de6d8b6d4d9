"""The papers' tables and figures, as ``fedkeep reproduce`` names them; entry points lead here."""

from fedkeep.experiments.reproductions import Reproduction
from fedkeep_papers.adapters import table as adapters
from fedkeep_papers.furl import channels, sweep, table3
from fedkeep_papers.furl import table1 as furl_data
from fedkeep_papers.kteps import baselines, figures, readings, tables, variants, vectors
from fedkeep_papers.moe import figure6, methods
from fedkeep_papers.moe import tables as mixture
from fedkeep_papers.natural import table as natural
from fedkeep_papers.public import fashion

KTEPS = ("data", "model", "method", "run", "personalization")

furl_table1 = Reproduction(about="FURL Table 1: statistics of the data", run=furl_data.table1)
kteps_table1 = Reproduction(
    about="KTEPS Table 1: statistics of the data", run=tables.table1, changes=("data",)
)
furl_table3 = Reproduction(
    about="FURL Table 3 and Figures 2-5: four configurations, server and federated, with and without users",
    run=table3.table3,
    in_pieces=True,
)
furl_sweep = Reproduction(
    about="the learning rates of furl-table3 swept, on the validation examples",
    run=sweep.sweep,
    in_pieces=True,
)
furl_channels = Reproduction(
    about="channels of messages, by time and at random: counting, local memory, federated text with private counts",
    run=channels.channels,
    in_pieces=True,
)
channel_adapters = Reproduction(
    about="channels of messages by time: private heads, vectors and adapters beside a pretrained transformer",
    run=adapters.channel_adapters,
    in_pieces=True,
    changes=("run",),
)
kteps_table2 = Reproduction(
    about="KTEPS Table 2: Ag of ten methods on FDU-MTL (and IYY, where its files are)",
    run=tables.table2,
    in_pieces=True,
    changes=KTEPS,
)
kteps_table3 = Reproduction(
    about="KTEPS Table 3: Ap of twelve methods, fairness, bytes; the same runs as kteps-table2",
    run=tables.table3,
    in_pieces=True,
    changes=KTEPS,
)
kteps_table4 = Reproduction(
    about="KTEPS Table 4: weights of diversity and knowledge transfer",
    run=tables.table4,
    in_pieces=True,
    changes=KTEPS,
)
kteps_table5 = Reproduction(
    about="KTEPS Table 5: learning rates of personalisation; the runs of KTEPS in kteps-table3",
    run=tables.table5,
    in_pieces=True,
    changes=KTEPS,
)
kteps_table6 = Reproduction(
    about="KTEPS Table 6: which branch predicts; the runs of KTEPS in kteps-table3",
    run=tables.table6,
    in_pieces=True,
    changes=KTEPS,
)
kteps_table7 = Reproduction(
    about="KTEPS Table 7: components kept of the embedding",
    run=tables.table7,
    in_pieces=True,
    changes=KTEPS,
)
kteps_table8 = Reproduction(
    about="KTEPS Table 8: what is private, without projections and diversity",
    run=tables.table8,
    in_pieces=True,
    changes=KTEPS,
)
kteps_figure4 = Reproduction(
    about="KTEPS Figure 4: Ag by round, accuracy while clients fine-tune; the runs of kteps-table3",
    run=figures.figure4,
    changes=KTEPS,
)
kteps_figure5 = Reproduction(
    about="KTEPS Figure 5: neighbours of words under compression; two runs of kteps-table7",
    run=figures.figure5,
    changes=KTEPS,
)
kteps_readings = Reproduction(
    about="readings of what KTEPS's text leaves open, KTEPS and FedAvg, on held-out reviews and on test reviews",
    run=readings.readings,
    in_pieces=True,
    changes=KTEPS,
)
kteps_variants = Reproduction(
    about="variants of KTEPS that send the same bytes: one is chosen on held-out reviews, then tested",
    run=variants.variants,
    in_pieces=True,
    changes=KTEPS,
)
kteps_vectors = Reproduction(
    about="what the word vectors change: Indiv, FedAvg and KTEPS from longer ones, and from none",
    run=vectors.vectors,
    in_pieces=True,
    changes=KTEPS,
)
kteps_baselines = Reproduction(
    about="PFL-DA, FedFusion, FedProx, Tables 7 and 8, read in other ways than in KTEPS's tables",
    run=baselines.baselines,
    in_pieces=True,
    changes=KTEPS,
)
moe_table2 = Reproduction(
    about="mixture of experts, Table 2: CIFAR-10, 5 clients, p = 0.8 to 1.0",
    run=mixture.table2,
    in_pieces=True,
    changes=("data",),
)
moe_variants = Reproduction(
    about="mixture of experts: variants of the mixture on Table 2's scenes, paired differences",
    run=mixture.variants,
    in_pieces=True,
    changes=("data",),
)
moe_methods = Reproduction(
    about="mixture of experts' scenes, p = 0.8 to 1.0: all personalised methods beside the paper's four",
    run=methods.table,
    in_pieces=True,
    changes=("data",),
)
moe_figure2 = Reproduction(
    about="mixture of experts, Figure 2: CIFAR-100, 50 clients, accuracy against p, two client fractions",
    run=mixture.figure2,
    in_pieces=True,
    changes=("data",),
)
moe_figure3 = Reproduction(
    about="mixture of experts, Figure 3: CIFAR-10, accuracy against p, opt-out factors 0, 0.5, 0.9",
    run=mixture.figure3,
    in_pieces=True,
    changes=("data",),
)
moe_figure4 = Reproduction(
    about="mixture of experts, Figure 4: Fashion-MNIST, accuracy against p, opt-out factors 0, 0.9",
    run=mixture.figure4,
    in_pieces=True,
    changes=("data",),
)
moe_figure5 = Reproduction(
    about="mixture of experts, Figure 5: mixture minus fine-tuned over p and training size",
    run=mixture.figure5,
    in_pieces=True,
    changes=("data",),
)
moe_figure6 = Reproduction(
    about="mixture of experts, beyond the paper: parts of one's data opt out, and local experts of three kinds",
    run=figure6.figure6,
    in_pieces=True,
    changes=("data",),
)
natural_users = Reproduction(
    about="what personalisation is worth on data of natural users: eight methods, three seeds, the worth report",
    run=natural.natural_users,
    in_pieces=True,
)
public_fashion = Reproduction(
    about="PFLlib's Fashion-MNIST, Dirichlet 0.1: eight methods at 100 and 200 rounds, or at 2,000",
    run=fashion.public_fashion,
    in_pieces=True,
)
