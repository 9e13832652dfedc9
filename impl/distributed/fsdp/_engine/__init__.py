"""The engine of both APIs: units under one root, their phases, order, streams, memory and failed backwards."""
