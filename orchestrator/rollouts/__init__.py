"""From prompts to judged groups of samples, and the rollouts that training takes. Runs inside the rollout manager."""
