"""What every room may use: words of messages, files, locks, the code of the user, who a process is."""
