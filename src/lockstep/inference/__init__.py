"""What a saved run computes of new samples: by the task, and from the checkpoint alone, without its data."""
