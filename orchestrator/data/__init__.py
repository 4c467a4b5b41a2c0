"""Prompts: rows of files and generators, tokenised, in an order that can be continued."""
