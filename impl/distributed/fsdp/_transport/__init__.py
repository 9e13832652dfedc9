"""What carries the elements of a unit from rank to rank; `transport_for` in `choosing` says which of them does."""
