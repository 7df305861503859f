"""The models that come with Lockstep, and functions to build, check and fine-tune any model."""
