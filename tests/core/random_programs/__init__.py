"""Random training programs, run on ranks under ``fully_shard`` and by one process on the plain module.

program      what a program is: frozen dataclasses that print as the code that makes them
blocks       the modules of a program
training     what its training loop does, as a stream of events
single       the gradients that one process gets
ranks        the same under fully_shard; what became of it
strategies   how hypothesis draws programs
reduction    smaller programs with the same outcome
campaign     many programs; ``python -m tests.core.random_programs --count 20000 --seed 1``
"""
