"""What all tests start from."""

import signal

# A shell ignores SIGINT in its background jobs, and what they start inherits that: tests that
# interrupt a run would wait for ever.
signal.signal(signal.SIGINT, signal.default_int_handler)
