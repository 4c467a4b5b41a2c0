"""Of every test."""

from hypothesis import settings

# What is asserted is behaviour: how long an example takes depends on who else uses the machine.
settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")
