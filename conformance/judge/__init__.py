"""The judge's core: access to a subject, observation of its behaviour, and the judgement of each test.

library                              access to a subject and to torch
clauses surface catalogue            clauses, torch's names that they cover, and their digest
outcome tolerances comparing         outcome of a call, and its comparison with torch's
deviations                           tests of deviations
errors rank_errors                   errors of a run and of its ranks
judgement results heading            judgement of each test, gathered from all workers into a report
providers                            packages above the judge that serve it, registered by name
sandbox                              protection of the judge from the subject
files                                files that people write: claims, expectations, deviations, limits

It imports nothing else of `conformance`.
"""
