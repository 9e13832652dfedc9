"""Files that people write, and what they mean.

claims_file claims expectations     a subject's claims file: claimed names, its device, and expected failures
rows                                entries of `deviations.toml` and `reference_limits.toml`
reference_limits                    limits of torch itself, checked when a test fails
compat                              private names that other libraries use, in `compat_names.toml`
"""
