"""The command line: parse, wire, drive, report. Knows core and adapters; nobody knows it."""
