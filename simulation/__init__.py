"""Whole fleets in one process on simulated time: the real router core, schedulers, workers, handoff and detokenizer. Only the
rims are replaced: mail, clocks, engines and what moves pages."""
