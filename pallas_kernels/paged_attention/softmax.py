"""Numbers of the online softmax.

MASKED is the score of a token that a row does not see, and NO_PEAK the peak of a row that has seen none: both finite,
so that their differences are not NaN, and so far apart that the weight of the former is 0 below the latter.
"""

MASKED = -1e30
NO_PEAK = -1e20
