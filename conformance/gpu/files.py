"""The names of a bundle's files."""

REPORT, SUMMARY, JUNIT, LOG = "report.json", "summary.md", "junit.xml", "log.txt"
# As asv would write them, but that the results lack their commit and its date, which `merge` adds.
RESULTS, MACHINE, BENCHMARKS = "asv-results.json", "asv-machine.json", "asv-benchmarks.json"
