"""The judge's core: what is looked up in a subject, what is observed of it, and what becomes of each test.

library claims claims_file trial     the door to a subject, what it claims, its import on trial
clauses surface rows compat          what is asked, and torch's names that it has to cover
outcome tolerances deviations        what a call did, how close is close enough, which side of a row it took
deadlines watchdog errors            how long a test may take, and what ends one
judgement results notes              what became of each test, gathered over all workers
options judging running telling      a suite that runs in a process of its own, and what it says
"""
