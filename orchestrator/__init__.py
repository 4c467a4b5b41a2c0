"""The driver: who does what, and when. The top storey."""
