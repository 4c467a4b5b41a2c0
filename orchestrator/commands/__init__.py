"""Commands of `slotwise` that have a file of their own; each has a `main(arguments) -> exit code`."""
