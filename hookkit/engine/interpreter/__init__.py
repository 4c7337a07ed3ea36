"""Around thunder's interpreter: attempts that can be undone, guards, the log of calls, what a call's code reaches."""
