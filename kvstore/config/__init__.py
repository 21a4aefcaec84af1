"""From flags and YAML to frozen settings, checked: one sentence for what cannot work.

settings        the table of all that can be set; reading: from flags and YAML to it
node            of `kvstore node`; cluster: what of it reaches beyond one machine
index           of `kvstore index`
addresses, transports, engine_sources   HOST:PORT; --transport; --engine-events
machine, disk_room   memory and file systems there are; whether --file fits
defaults        what help texts name; imports nothing
"""
