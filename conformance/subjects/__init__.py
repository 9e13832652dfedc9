"""Published packages that implement part of torch's API themselves, and the few lines that judge each of them.

    pip install --no-deps --no-build-isolation -r conformance/subjects/requirements.txt
    python -m pytest conformance --subject conformance.subjects.torchtitan -n auto
    python -m conformance.subjects            judge all of them, and update the table of docs/judging.md

Each folder is a subject: a claims file with the names that are judged and what is expected to be red, a module where
a signature differs, and `proofs.py`, which shows each expected failure with the package and torch alone.
"""
