"""From files and flags to a configuration, and what its options are."""
