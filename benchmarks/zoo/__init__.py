"""Public bug reports of distributed training, restated as small programs and run against several frameworks."""
