"""Host-memory stand-ins for device runtime libraries: C sources, and what builds them for the binaries installed here.

Which symbols a library must export is read off the binaries that import them; which of those do something is what the
C sources define. Every other symbol ends the process with its name, so nothing succeeds in silence.
"""
