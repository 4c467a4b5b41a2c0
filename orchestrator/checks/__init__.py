"""Whether a configuration can run, before anything starts: each file looks at one part of it."""
