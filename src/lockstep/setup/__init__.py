"""From a configuration to what is computed: its checks, data, model and optimizer."""
