"""The Ray actors that hold weights, and what runs inside them. Imports `state`, never `orchestrator`."""
