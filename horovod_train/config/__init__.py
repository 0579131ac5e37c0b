"""The job description: its models, rules and loader."""
