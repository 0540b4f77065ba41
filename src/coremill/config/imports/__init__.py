"""Settings of other tools, read from their files and command lines: `coremill config import`."""
