"""Other methods that people would pick, in one harness: the same network, data, rounds and attacks (docs/lab.md).

    chance     probabilities that an innocent model has such a statistic, as log10
    gains      signs of projections of norms' gains: FedIPR's mark, FedTracker's fingerprints
    triggers   images that a server retrains the model on: WAFFLE's mark, FedTracker's global one
    methods    each method: its run, its secret, its detector, how it is calibrated and forged
    harness    trains, attacks and records them, one after the other
    table      the section of docs/results.md; `picture` draws accuracy against log10 p

Written anew after the methods' public code and the papers' abstracts, with the code's settings; the section of
docs/results.md says what differs: FedIPR (arXiv 2109.13236), WAFFLE (arXiv 2008.07298), FedTracker (arXiv 2211.07160).
"""
