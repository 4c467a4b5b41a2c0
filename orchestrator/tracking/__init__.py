"""Where metrics and samples go."""
