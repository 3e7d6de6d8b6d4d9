"""A small experiment, as text."""

CONFIG = """name = "small"
seed = 3

[data]
reader = "many_user_text"
users = 6
examples = 12

[model]
kind = "document"
user_dim = 4
embedding_dim = 4
hidden = 8
mlp = 8
pool = "max"

[method]
kind = "furl"
private = "user"
batch_size = 8
private_scale = "fedavg"

[run]
rounds = 3
cohort = 4
evaluate_every = 2
"""

SECURE = CONFIG.replace(
    'private_scale = "fedavg"', 'weighting = "uniform"\n\n[method.secure]\nclip = 10.0'
).replace("cohort = 4", 'cohort = 4\nsampling = "independent"')
