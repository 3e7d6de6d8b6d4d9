"""What personalisation was worth, for whom: numbers from paired results of single test examples.

gains.py         Paired -> Worth: mean gain, who gains and who loses, groups, fairness
intervals.py     95 % intervals for users like these and for these users, seeds crossed with clients
signs.py         exact paired tests of single clients, false discoveries, "at least so many"
pooled_gains.py  gains in pooled accuracy, RMSE and AUC, by jackknife
"""
