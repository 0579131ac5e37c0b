"""The job description: models, rules, loading."""
