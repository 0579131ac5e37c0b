"""Strategy ``deepspeed``: DeepSpeed's ZeRO."""
