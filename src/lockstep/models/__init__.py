"""The models that come with Lockstep, and how other models are found by name."""
