"""The parts of `benchmarks/compare.py`: systems that train the same model side by side, in turn, in one run.

networks.py   the networks, with batch and precision under one name
systems.py    who shards it           rank.py       one rank process of one system
crew.py       all ranks of a system   run.py        turns of all crews, and their results
meters.py     meters of one rank      ratios.py     from samples to a table
"""
