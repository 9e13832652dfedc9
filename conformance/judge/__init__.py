"""The judge's core: access to a subject, observation of its behaviour, and the judgement of each test.

library claims claims_file trial     access to a subject, its claims, and its import in a separate process
clauses surface rows compat          clauses, and torch's names that they cover
outcome tolerances deviations        outcome of a call, tolerances, and tests of deviations
deadlines watchdog errors            deadlines of tests, and the end of tests that exceed them
judgement results notes              judgement of each test, gathered from all workers
options judging running terminal     the suite in a separate process, its options and its output
"""
