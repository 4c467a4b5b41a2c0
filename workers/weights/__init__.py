"""How weights travel from trainers to engines: what is sent, in which buckets, over which transport."""
