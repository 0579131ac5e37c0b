"""What a run tells: events as types, as lines between programs, and as text for people."""
