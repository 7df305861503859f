"""The models included in Lockstep, and functions that build, check and fine-tune any model."""
