"""The kernels of `impl` against torch's operators and exact arithmetic; no other subject has them."""
