"""Of every test."""

import signal

from hypothesis import settings

# What is asserted is behaviour: how long an example takes depends on who else uses the machine.
settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")

# A suite that a shell started in the background would ignore interrupts, and so would every program that it starts.
signal.signal(signal.SIGINT, signal.default_int_handler)
