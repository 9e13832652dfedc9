"""The names of a bundle's files."""

REPORT, SUMMARY, JUNIT, LOG = "report.json", "summary.md", "junit.xml", "log.txt"
BENCHMARKS = "asv-benchmarks.json"  # asv's description, written by the phase `speed`
