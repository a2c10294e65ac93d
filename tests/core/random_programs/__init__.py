"""Random training programs, run on ranks under ``fully_shard`` and by one process on the plain module.

program      a program as data: frozen dataclasses that print as the code that makes them
blocks       the modules of a program
training     its training loop, as a stream of events
single       the gradients that one process gets
ranks        the same under fully_shard, and its outcome
strategies   how programs are drawn from a seed
__main__     many programs: ``python -m tests.core.random_programs --count 20000 --seed 1``
"""
