"""Commands that judge a subject: their options, processes and output.

judging    the suite in a separate process, which ends with a report whatever happens
gate       judging, timing and training, by `ci/gate`
options    options that the commands share
running    execution of a command until it ends, exceeds its deadline or is stopped
terminal   progress, broken clauses and the verdict on the terminal
"""
