"""Forms that leave a process: datagrams, fingerprints, layouts, records. Pure."""
