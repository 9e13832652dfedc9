"""Measures of the suite's strength: whether it detects bugs, and passes correct subjects.

faults             correct subjects with one injected bug each
mutation           small changes of source, in the exact copy of torch or in `impl`
false_positives    correct subjects, judged with one seed after another
"""
