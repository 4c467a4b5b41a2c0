"""Where a run continues from, for every slot and the data; and whether that is what was saved."""
