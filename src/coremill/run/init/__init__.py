"""`coremill config init`: a run file from a few questions, most of them answered by a look at this machine."""
