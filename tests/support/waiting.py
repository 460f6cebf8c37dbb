"""python -m waiting PIPE: waits for ever with a child of its own; both hold the named pipe open for writing."""

import signal
import subprocess
import sys
import tempfile

from kvproof.findings.text import PROGRESS

pipe = open(sys.argv[1], "w")  # noqa: SIM115  held until the end
subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"], pass_fds=[pipe.fileno()])
tempfile.mkstemp()
print(PROGRESS + "waiting", flush=True)
signal.pause()
