"""From flags and YAML to frozen settings, checked: one sentence for each error.

settings        the table of all settings; reading: flags and YAML to values of the table
node            settings of `kvstore node`; cluster: the part that reaches beyond one machine
index, router   settings of `kvstore index` and of `kvstore router`
addresses, transports, engine_sources   HOST:PORT; --transport; --engine-events
machine, disk_room   memory and file systems there are; whether --file fits
defaults        defaults in help texts; imports nothing
"""
