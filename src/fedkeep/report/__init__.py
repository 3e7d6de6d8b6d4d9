"""Reports: tables, figures and one self-contained page, made from the files of run directories and nothing else.

    wording.py          how numbers are written
    runs.py             reads a run directory
    groups.py           runs that differ in their seed only
    measured.py         results, curves, users
    stored_analyses.py  maps, cold start, times
    facts.py            traffic, split, data, configuration
    text_tables.py      rows of cells, Markdown
    charts.py           what charts show
    drawing.py          draws them, for the page and as files
    blocks.py           what a page is made of
    page.py             report.html, .md and .json
    page.html.j2        the page's frame and its CSS

Of a run directory these are read: ``run.json``, ``records.jsonl``, ``timings.jsonl`` and ``personalization.jsonl``
(see `fedkeep.core.records`) and, where it exists, ``analyses.json``: an object of any of the following, each optional.
Numbers that are not known are null. Every analysis may carry ``title`` and ``note``, plain text.

``embedding_map``: maps of user vectors, side by side::

    {"title": "User vectors", "note": "t-SNE, perplexity 30, PCA initialisation, seed 0",
     "trait_name": "most used label", "trait_kind": "categorical" or "continuous", "value_name": "accuracy",
     "linear_cka": 0.41,
     "panels": [{"name": "Personalized Server",
                 "numbers": {"knn_agreement": 0.71, "chance_agreement": 0.2, "silhouette": 0.12},
                 "points": [{"client": "u1", "x": 0.3, "y": -1.2, "trait": "nba", "value": 0.61, "n": 120}]}]}

  ``trait`` is text or an integer (categorical) or a number (continuous); ``value`` is the user's own metric,
  named by ``value_name``; ``n`` is the user's number of examples; both may be missing.

``cold_start``: the metric of users held out of federation against their own examples used to personalise::

    {"metric": "accuracy", "k": [0, 1, 2, 5, 10, 20, 50, "all"], "mean": [...], "std": [...], "users": 60}

  Instead of ``mean`` and ``std`` a ``series`` list of ``{"name", "mean", "std"}`` compares several ways. ``changes``
  may give, per k, the first way's change from the k before as ``[mean, low, high]``, or null: paired over users, 95 %.

``aggregation_time``: the server's time to combine one round's uploads::

    {"cohort": [1, 10, 100], "seconds": [0.001, 0.01, 0.1]}

Any other name is a plain table: ``{"title", "note", "columns": [...], "rows": [[...]]}``.
"""
